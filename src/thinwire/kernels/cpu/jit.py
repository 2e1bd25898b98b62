"""How kernels are compiled, and the small functions that all of them inline.

Compiled code is cached on disk beside the sources (or in Numba's user cache directory). Sums may
be reassociated so that they vectorise; nothing else of IEEE arithmetic is given up, since NaN
and infinity must be seen.
"""

import functools
from typing import Any

import numba
import numpy as np
from numba.extending import overload

jit = functools.partial(numba.njit, nogil=True, cache=True)
sum_jit = functools.partial(numba.njit, nogil=True, cache=True, fastmath={"reassoc", "nsz"})

KEEP, ZERO, ADD = 0, 1, 2  # what an add kernel does to its output first; ADD adds another tensor

INFINITY_BITS: dict[Any, Any] = {
    np.dtype(np.float32): np.int32(0x7F800000),
    np.dtype(np.float64): np.int64(0x7FF0000000000000),
}
INTEGER: dict[Any, Any] = {
    np.dtype(np.float32): np.dtype(np.int32),
    np.dtype(np.float64): np.dtype(np.int64),
}


def magnitude(p):
    """The bits of |p| as a signed integer: ordered like |p|, infinity and NaN at the top."""
    raise NotImplementedError("compiled code only")


@overload(magnitude, inline="always")
def _magnitude(p):
    if p == numba.float32:
        # Numba widens int32 & int32 to 64 bits; narrowing it again keeps 8 lanes a vector.
        return lambda p: np.int32(np.float32(p).view(np.int32) & np.int32(0x7FFFFFFF))
    return lambda p: np.float64(p).view(np.int64) & np.int64(0x7FFFFFFFFFFFFFFF)


def from_magnitude(bits, like):
    """The inverse of `magnitude` for numbers >= 0, in the type of `like`."""
    raise NotImplementedError("compiled code only")


@overload(from_magnitude, inline="always")
def _from_magnitude(bits, like):
    if like == numba.float32:
        return lambda bits, like: np.int32(bits).view(np.float32)
    return lambda bits, like: np.int64(bits).view(np.float64)


@jit
def load(x, r, lo, count, buffer):
    """buffer[:count] = x[lo:lo+count] + r[lo:lo+count]; r may be None."""
    if r is None:
        for i in range(count):
            buffer[i] = x[lo + i]
    else:
        for i in range(count):
            buffer[i] = x[lo + i] + r[lo + i]


@jit
def start(out, lo, count, mode, x):
    """Prepare out[lo:lo+count] for adding to it: keep it, zero it, or add x to it."""
    if mode == ZERO:
        for i in range(lo, lo + count):
            out[i] = 0
    elif mode == ADD:
        for i in range(lo, lo + count):
            out[i] += x[i]
