"""One compressor on one tensor, and what is measured of it."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.bench.eager import eager_for
from thinwire.bench.family import family_of
from thinwire.bench.fidelity import Fidelity, compare
from thinwire.bench.result import Row, Timing
from thinwire.bench.settings import SettingError
from thinwire.compressors import LocalCompressor
from thinwire.frames import Payload
from thinwire.kernels import Key

T = TypeVar("T")
WARM_UP = 1 << 16  # elements a thread: from there on the kernels use all threads


class Subject:
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
        """Have everything compiled and loaded. Raises SettingError if the compressor refuses.

        On a part of the tensor only: a buffer kept for later calls must not escape `weigh`.
        """
        part = self.x[: WARM_UP * torch.get_num_threads()]
        try:
            payload = self.compressor.encode(part, residual=residual_of(part), key=Key())
            self.compressor.encode(part, key=Key())
        except (TypeError, ValueError) as error:
            raise SettingError(f"{self.compressor}: {error}") from error
        self.compressor.decode(_received(payload))
        if self.eager:
            self.eager.decode(self.eager.encode(part, residual_of(part)), part.numel())

    def encode(self, step: int) -> Payload:
        return self.compressor.encode(self.x, residual=self.residual, key=Key(step=step))

    def judge(self, out: Tensor) -> None:
        """Size and error, without a residual; `out` is overwritten."""
        payload = self.compressor.encode(self.x, key=Key())
        self.fidelity = compare(self.x, self.compressor.decode(_received(payload), out))
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

    def row(self) -> Row | None:
        """All that has been measured so far; None before `judge`."""
        if not self.num_bytes:
            return None
        return Row(
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


def residual_of(x: Tensor) -> Tensor:
    """An empty residual for a tensor."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Written to, not only promised by the system: the first pass over it is not to be measured.
    return torch.empty_like(x, dtype=wide).fill_(0)


def _received(payload: Payload) -> Payload:
    """The payload as another rank has it: without what encoding happened to know already."""
    return dataclasses.replace(payload, known=None)
