"""One compressor on one tensor, and what is measured of it: size, error, time."""

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.bench.eager import eager_for
from thinwire.bench.results import CompressorResult, Timing
from thinwire.bench.settings import BenchSettingError
from thinwire.compressors import Chain, Compressor, LocalCompressor, Tiered
from thinwire.compressors.sparsifiers import Sparsifier
from thinwire.frames import Payload
from thinwire.frames.code import wide_type
from thinwire.kernels import Key

T = TypeVar("T")
WARM_UP = 1 << 16  # elements per thread: from there on the kernels use all threads
CHUNK = 1 << 20  # elements turned into float64 at a time

# Compressors by what they send, for the legend of the picture.
FAMILIES = ("every bit", "shorter floats", "some elements", "few levels", "signs", "combined")

_BY_NAME = {
    "none": "every bit",
    "lossless": "every bit",
    "cast": "shorter floats",
    "onebit": "signs",
    "scaledsign": "signs",
    "terngrad": "signs",
}


class Measurement:
    """Holds a residual of its own through all rounds, shared with the eager version.

    Both leave there what was not sent, so it stays what it would be in training.
    """

    def __init__(self, compressor: LocalCompressor, x: Tensor, eager: bool = False) -> None:
        self.compressor = compressor
        self.x = x
        self.residual = residual_of(x)
        self.eager = eager_for(compressor, x.dtype) if eager else None
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.num_bytes = 0
        self.fidelity = Fidelity(None, None)

    def warm_up(self) -> None:
        """Have everything compiled and loaded. Raises BenchSettingError if the compressor refuses.

        On a part of the tensor only: a buffer kept for later calls must not escape the
        measurement of memory.
        """
        part = self.x[: WARM_UP * torch.get_num_threads()]
        try:
            payload = self.compressor.encode(part, residual=residual_of(part), key=Key())
            self.compressor.encode(part, key=Key())
        except (TypeError, ValueError) as error:
            raise BenchSettingError(f"{self.compressor}: {error}") from error
        self.compressor.decode(_received(payload))
        if self.eager:
            self.eager.decode(self.eager.encode(part, residual_of(part)), part.numel())

    def encode(self, step: int) -> Payload:
        return self.compressor.encode(self.x, residual=self.residual, key=Key(step=step))

    def judge(self, out: Tensor) -> None:
        """Size and error, without a residual; `out` is overwritten."""
        payload = self.compressor.encode(self.x, key=Key())
        self.fidelity = fidelity(self.x, self.compressor.decode(_received(payload), out))
        self.num_bytes = payload.num_bytes

    def time(self, step: int, out: Tensor) -> None:
        """One encode and one decode into `out`."""
        payload = self._timed("encode", lambda: self.encode(step))
        arrived = _received(payload)
        self._timed("decode", lambda: self.compressor.decode(arrived, out))

    def time_eager(self) -> None:
        """The same with plain PyTorch."""
        if self.eager:
            encode, decode = self.eager
            parts = self._timed("eager_encode", lambda: encode(self.x, self.residual))
            self._timed("eager_decode", lambda: decode(parts, self.x.numel()))

    def row(self) -> CompressorResult | None:
        """All that has been measured so far; None before `judge`."""
        if not self.num_bytes:
            return None
        return CompressorResult(
            compressor=str(self.compressor),
            family=family_of(self.compressor),
            num_bytes=self.num_bytes,
            compression_ratio=self.x.numel() * self.x.dtype.itemsize / self.num_bytes,
            bits_per_element=8 * self.num_bytes / self.x.numel(),
            relative_error=self.fidelity.relative_error,
            cosine=self.fidelity.cosine,
            encode=Timing.of(self.seconds["encode"]),
            decode=Timing.of(self.seconds["decode"]),
            eager_encode=Timing.of(self.seconds["eager_encode"]),
            eager_decode=Timing.of(self.seconds["eager_decode"]),
        )

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = work()
        self.seconds[name].append(time.perf_counter() - begin)
        return result


def family_of(compressor: Compressor) -> str:
    """One of `FAMILIES`; a quantiser is what nothing else claims."""
    if isinstance(compressor, Chain | Tiered):
        return "combined"
    if isinstance(compressor, Sparsifier):
        return "some elements"
    return _BY_NAME.get(compressor.name, "few levels")


class Fidelity(NamedTuple):
    relative_error: float | None  # ||x - y|| / ||x||; None for x = 0, and where y is not finite
    cosine: float | None  # <x, y> / (||x|| ||y||); None where one of them is zero or not finite


def fidelity(x: Tensor, y: Tensor) -> Fidelity:
    """Compare two flat tensors; sums are float64, in chunks so that memory stays small."""
    low, high = torch.aminmax(x)
    peak = max(-float(low), float(high)) or 1.0  # divided by it, no square leaves the range
    xx = yy = xy = dd = 0.0
    for begin in range(0, x.numel(), CHUNK):
        a, b = (t[begin : begin + CHUNK].double() / peak for t in (x, y))
        d = a - b
        xx += float(a.dot(a))
        yy += float(b.dot(b))
        xy += float(a.dot(b))
        dd += float(d.dot(d))
    if not dd:
        return Fidelity(0.0, 1.0 if xx else None)
    if not xx or not math.isfinite(dd):
        return Fidelity(None, None)
    return Fidelity(math.sqrt(dd / xx), xy / math.sqrt(xx) / math.sqrt(yy) if yy else None)


def residual_of(x: Tensor) -> Tensor:
    """An empty residual for a tensor."""
    wide = wide_type(x.dtype)
    # Written to, not only promised by the system: the first pass over it is not to be measured.
    return torch.empty_like(x, dtype=wide).fill_(0)


def _received(payload: Payload) -> Payload:
    """The payload as another rank has it: without what encoding happened to know already."""
    return dataclasses.replace(payload, known=None)
