"""What must be compiled for a compressor: everything that its two ways run, once."""

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import FLOATS, Compressor, LocalCompressor
from thinwire.compressors.registry import parse
from thinwire.compressors.sparsifiers import SparseCompressor, TopK
from thinwire.frames import pack, unpack
from thinwire.frames.payload import average_held
from thinwire.kernels import Key
from thinwire.kernels.compiling import KernelUse

SMALL, LARGE = 3000, 70_000  # elements: Top-K goes other ways for large tensors than for small ones
CPU = torch.device("cpu")
WORKING = (torch.float32, torch.float64)  # the types that kernels are compiled for

# Together these run every kernel.
SPECS = (
    *("quantize:8", "topk:0.01", "quantize:8,symmetric=false", "quantize:8,none,symmetric=false"),
    *("scaledsign:l2", "randomk:0.01", "natural", "qsgd:7,none", "qsgd:7,entropy=true"),
    *("terngrad", "onebit", "bernoulli:0.01", "threshold:0.5", "tiered:0.05", "cast:fp8"),
    *("none", "lossless", "topk:0.01,chunk=1024", "twobit", "twobit:none"),
)


@dataclass(frozen=True)
class CompressorUse(KernelUse):
    """A compressor on tensors of one type.

    Args:
        shape: its spec without numbers, which compiled code does not depend on.
        spec: of a compressor of this shape.
        dtype: float32, which half types are read as, or float64.
    """

    shape: str
    dtype: torch.dtype
    spec: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.spec} ({str(self.dtype).removeprefix('torch.')})"

    @property
    def name(self) -> str:
        return f"{self.shape} ({str(self.dtype).removeprefix('torch.')})"

    def rehearse(self) -> None:
        compressor = parse(self.spec)
        assert isinstance(compressor, LocalCompressor)
        for each in (compressor, *_chunkings(compressor)):
            for size in (SMALL, LARGE):
                x = torch.randn(
                    size, generator=torch.Generator().manual_seed(0), dtype=self.dtype, device=CPU
                )
                _send(each, x)
            if self.dtype == torch.float32:
                for half in (torch.float16, torch.bfloat16):
                    _send(each, x[:SMALL].to(half))
            # Where most elements are alike, Top-K takes yet another way.
            _send(each, torch.zeros(LARGE, dtype=self.dtype, device=CPU))
        if isinstance(compressor, SparseCompressor):
            _write_positions()


def _chunkings(compressor: Compressor) -> list[LocalCompressor]:
    """Top-K in chunks goes other ways for tensors shorter than a chunk than for longer ones."""
    parts = [compressor, *_parts(compressor)]
    chunked = [each for each in parts if isinstance(each, TopK) and each.chunk is not None]
    return [replace(each, chunk=chunk) for each in chunked for chunk in (None, SMALL // 3)]


def _send(compressor: LocalCompressor, x: Tensor) -> None:
    """All that is done to a tensor on its way."""
    key = Key()
    with contextlib.suppress(ValueError):  # some take no residual
        compressor.encode(x, residual=torch.zeros_like(x, dtype=working_dtype(x.dtype)), key=key)
    received = unpack(pack(compressor.encode(x, key=key)))
    out = torch.zeros_like(x)
    compressor.accumulate([received, received], out)
    compressor.accumulate(received, out)
    compressor.decode(received)
    if compressor.leaves_out and out.dtype in WORKING:
        average_held([received, received], out)
    kernels.on(x.device).all_finite(x, None)


def _write_positions() -> None:
    """In both forms: which is smaller depends on the number of positions."""
    kernel, positions = kernels.on(CPU), torch.arange(0, SMALL, 7, dtype=torch.int32, device=CPU)
    count = positions.numel()
    kernel.bitmap_decode(kernel.bitmap_encode(positions, SMALL), count, SMALL)
    parameter, quotients = kernel.rice_parameter(positions, 2)
    unary = -(-(quotients + count) // 64)
    kernel.rice_decode(
        kernel.rice_encode(positions, parameter, unary), count, parameter, unary, SMALL
    )


def uses_of(
    compressors: Sequence[Compressor], dtypes: Iterable[torch.dtype], device: torch.device = CPU
) -> list[KernelUse]:
    """What has to be compiled for these compressors on tensors of these types."""
    if not kernels.are_compiled(device):
        return []
    working = {working_dtype(dtype) for dtype in dtypes if dtype in FLOATS}
    found = [_use_of(each, dtype) for dtype in WORKING if dtype in working for each in compressors]
    return [use for use in found if use is not None]


def _use_of(compressor: Compressor, dtype: torch.dtype) -> KernelUse | None:
    if not type(compressor).__module__.startswith("thinwire."):
        return None
    try:
        return _remembered_use(compressor, dtype)
    except TypeError:  # holds something of the user's that cannot be hashed
        return None


@functools.lru_cache(maxsize=1024)
def _remembered_use(compressor: Compressor, dtype: torch.dtype) -> KernelUse | None:
    spec = str(compressor)
    return CompressorUse(_shape(spec), dtype, spec) if _is_ours(compressor) else None


def every_use(dtypes: Iterable[torch.dtype] = WORKING) -> list[KernelUse]:
    """All that there is to compile for compressors."""
    return uses_of([parse(spec) for spec in SPECS], dtypes)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels work in: half types are widened as they are read."""
    return dtype if dtype == torch.float64 else torch.float32


def _shape(spec: str) -> str:
    return re.sub(r"(?<=[:,=(])\d[\d.e+-]*", "#", spec)


def _is_ours(compressor: Compressor) -> bool:
    """Nobody else's code is run before its time. Joint compressors have no kernels."""
    if not isinstance(compressor, LocalCompressor):
        return False
    inside = [compressor, *_parts(compressor)]
    return all(type(each).__module__.startswith("thinwire.") for each in inside)


def _parts(compressor: Compressor) -> Iterator[Compressor]:
    """The compressors that one consists of, at any depth."""
    values = [getattr(compressor, each.name) for each in fields(compressor)]
    for part in [
        one for value in values for one in (value if isinstance(value, tuple) else [value])
    ]:
        if isinstance(part, Compressor):
            yield part
            yield from _parts(part)
