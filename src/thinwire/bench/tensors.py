"""The tensors that are measured on: generated ones, and those of a user's file.

Generated ones are always the same numbers, and never from torch's global generator.

All float tensors of a file (.npy or .safetensors) are laid end to end as one, in the order of their
names, as gradients lie in a bucket. Where their types differ, the result has the widest of them.
Other tensors (integers, booleans, 8-bit floats) are left out.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.bench.settings import BenchSettingError
from thinwire.compressors.base import FLOATS
from thinwire.errors import MissingExtraError
from thinwire.formatting import one_line

SEED = 1


class TensorSource(NamedTuple):  # plain values: another process makes the same tensor
    """A generated tensor (`kind` and `numel`), or that of a file."""

    kind: str
    numel: int
    path: str | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name if self.path else self.kind

    def make(self) -> Tensor:
        return load(Path(self.path)) if self.path else generate(self.kind, self.numel)


def generate(kind: str, numel: int) -> Tensor:
    """A flat float32 tensor of one of the kinds in `settings.DATA`."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(numel, generator=generator)
    return x if kind == "normal" else _student(x, generator)


def _student(x: Tensor, generator: torch.Generator, degrees: int = 3) -> Tensor:
    """Student's t: a normal number over the root of the mean of `degrees` squared ones."""
    squares = torch.zeros_like(x)
    draw = torch.empty_like(x)
    for _ in range(degrees):
        draw.normal_(generator=generator)
        squares.addcmul_(draw, draw)
    return x.div_(squares.div_(degrees).sqrt_())


def load(path: Path) -> Tensor:
    """The float tensors of a file as one flat tensor.

    Raises BenchSettingError and MissingExtraError.
    """
    readers = {".npy": _npy, ".safetensors": _safetensors}
    if path.suffix not in readers:
        raise BenchSettingError(f"{path}: expected a file named .npy or .safetensors")
    if not path.is_file():
        raise BenchSettingError(f"{path}: no such file")
    tensors = readers[path.suffix](path)
    floats = [t.reshape(-1) for t in tensors.values() if t.dtype in FLOATS and t.numel()]
    if not floats:
        held = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
        raise BenchSettingError(
            f"{path}: no tensor of float16, bfloat16, float32 or float64 with elements in it "
            f"(types found: {', '.join(held) or 'none'})"
        )
    dtype = floats[0].dtype
    for each in floats[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    joined = torch.cat([each.to(dtype) for each in floats])
    if not bool(torch.isfinite(joined).all()):
        raise BenchSettingError(
            f"{path}: holds NaN or infinity, of which there is nothing to measure"
        )
    return joined


def _npy(path: Path) -> dict[str, Tensor]:
    try:
        array = np.load(path, allow_pickle=False)
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return {path.stem: torch.from_numpy(native)}
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise BenchSettingError(f"{path}: not a plain NumPy array: {one_line(error)}") from error


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise MissingExtraError("safetensors", "io", f"reading {path}") from None
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BenchSettingError(f"{path}: not a safetensors file: {one_line(error)}") from error
    return dict(sorted(tensors.items()))
