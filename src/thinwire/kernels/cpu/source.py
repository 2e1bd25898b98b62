"""What kernels read: x + r, with x in any of four types.

Half types are widened to float32 piece by piece, into a buffer that stays in the cache. A piece
then goes through the same compiled loops as a range of a float32 tensor does. Kernels are written
so that the cut into ranges never shows in the result; so neither does this one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from thinwire.kernels import threads
from thinwire.kernels.cpu.jit import jit

u32, FLOAT32 = np.uint32, np.dtype(np.float32)
PIECE = 1 << 16  # elements; 256 kB of float32 and what is read beside them stay in the cache


@jit
def _widen_bfloat16(halves, out):
    for i in range(out.size):
        out[i] = u32(u32(halves[i]) << u32(16)).view(np.float32)


@jit
def _widen_float16(halves, out):
    """By bits and one subtraction: exact, also where the processor flushes subnormal numbers."""
    least = np.float32(2.0**-14)  # below it, a half has no leading one
    for i in range(out.size):
        h = u32(halves[i])
        exponent = u32(h & u32(0x7C00))
        bits = u32(u32(u32(h & u32(0x7FFF)) << u32(13)) + u32(112 << 23))
        small = np.float32(u32(bits + u32(1 << 23)).view(np.float32) - least).view(u32)
        huge = u32(bits + u32(112 << 23))  # infinity, NaN
        bits = huge if exponent == u32(0x7C00) else small if exponent == u32(0) else bits
        out[i] = u32(bits | u32(u32(h & u32(0x8000)) << u32(16))).view(np.float32)


_WIDEN = {torch.bfloat16: _widen_bfloat16, torch.float16: _widen_float16}


class Source:
    """x + r of flat tensors; without r its array is empty."""

    def __init__(self, x: torch.Tensor, r: torch.Tensor | None = None) -> None:
        self._widen = _WIDEN.get(x.dtype)
        self._x: Any
        self.dtype: np.dtype[Any]
        if self._widen is None:
            self._x = x.numpy()
            self.dtype = self._x.dtype
        else:
            self._x = x.view(torch.int16).numpy().view(np.uint16)
            self.dtype = FLOAT32
        self._r = np.empty(0, self.dtype) if r is None else r.numpy()

    @property
    def size(self) -> int:
        return int(self._x.size)

    @property
    def narrow(self) -> bool:
        """Whether x must be widened."""
        return self._widen is not None

    @property
    def whole(self) -> tuple[Any, Any]:
        """x and r, of sources that are not narrow."""
        assert self._widen is None
        return self._x, self._r

    def pieces(self, lo: int, hi: int, quantum: int = 1) -> Iterator[tuple[int, int, Any, Any]]:
        """(begin, end, x, r) of each piece of a range, in float32 or float64.

        Pieces begin at multiples of `quantum`, if the range does. The next one overwrites x.
        """
        if self._widen is None:
            yield lo, hi, self._x[lo:hi], self._r[lo:hi]
            return
        step = quantum * max(1, PIECE // quantum)
        buffer = np.empty(min(step, hi - lo), np.float32)
        for begin in range(lo, hi, step):
            end = min(begin + step, hi)
            own = buffer[: end - begin]
            self._widen(self._x[begin:end], own)
            yield begin, end, own, self._r[begin:end]

    def scan(self, work: Callable[[int, int, Any, Any], Any], quantum: int = 1) -> list[Any]:
        """`work(begin, end, x, r)` for all pieces, in parallel; results in the order of pieces."""
        parts = threads.ranges(self.size, quantum)
        if self._widen is None and len(parts) == 1:
            return [work(0, self.size, self._x, self._r)]
        if self._widen is None:
            return threads.run(lambda lo, hi: work(lo, hi, self._x[lo:hi], self._r[lo:hi]), parts)
        found = threads.run(
            lambda lo, hi: [work(*piece) for piece in self.pieces(lo, hi, quantum)], parts
        )
        return [one for some in found for one in some]

    def at(self, places: Any) -> tuple[Any, Any]:
        """x and r at these places."""
        x = self._x[places]
        if self._widen is not None:
            halves, x = x, np.empty(x.size, np.float32)
            self._widen(halves, x)
        return x, self._r[places] if self._r.size else self._r
