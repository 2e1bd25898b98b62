"""How kernels are compiled, and the small functions that all of them inline.

Compiled code is kept on disk (see `thinwire.kernels.cache`). Sums may be reassociated so that they
vectorise; nothing else of IEEE arithmetic is given up, since NaN and infinity must be seen.

Two things decide whether a loop becomes vector instructions (5 to 10 times faster):

- Inner loops run from 0 to the size of a slice. An index that Numba cannot prove to be non-negative
  costs a test for Python's negative indices.
- Integers are narrowed after every operation: ``np.int32(a + b)``. Numba widens int32 + int32 to 64
  bits, and AVX2 has no conversion between 64-bit integers and floats.

And one decides how long compiling takes: how many types a function is compiled for. So a residual
or key that is not there is an empty array, not None. LLVM moves the question out of the loop.
"""

import functools
import threading
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from thinwire.kernels import cache as kernel_cache

_lock = threading.Lock()


def jit(function=None, /, *, cache=True, **options):
    """Compile a function when it is first called; `numba.njit` with our settings and our cache."""
    if function is None:
        return functools.partial(jit, cache=cache, **options)
    if not cache:
        return numba.njit(function, nogil=True, **options)
    # Numba reads this setting while it decorates: functions of others do not see ours.
    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(kernel_cache.directory())
        try:
            return numba.njit(function, nogil=True, cache=True, **options)
        finally:
            numba.config.CACHE_DIR = before


# Inlined, or there would be two copies of a sum, compiled apart and in another order: a process
# that compiles the kernels would call the one, a process that loads them from disk the other.
sum_jit = functools.partial(jit, fastmath={"reassoc", "nsz"}, forceinline=True)

KEEP, ZERO, ADD = 0, 1, 2  # what an add kernel does to its output first; ADD adds another tensor

INFINITY_BITS: dict[Any, Any] = {
    np.dtype(np.float32): np.int32(0x7F800000),
    np.dtype(np.float64): np.int64(0x7FF0000000000000),
}
INTEGER: dict[Any, Any] = {
    np.dtype(np.float32): np.dtype(np.int32),
    np.dtype(np.float64): np.dtype(np.int64),
}


# The functions below choose their body by the type of their arguments: Numba through the overload,
# the interpreter through the same choice.


def magnitude(p):
    """The bits of |p| as a signed integer: ordered like |p|, infinity and NaN at the top."""
    return _magnitude(numba.typeof(p))(p)


@overload(magnitude, inline="always")
def _magnitude(p):
    if p == numba.float32:
        # Numba widens int32 & int32 to 64 bits; narrowing it again keeps 8 lanes a vector.
        return lambda p: np.int32(np.float32(p).view(np.int32) & np.int32(0x7FFFFFFF))
    return lambda p: np.float64(p).view(np.int64) & np.int64(0x7FFFFFFFFFFFFFFF)


def ordered(p):
    """An integer ordered like p: LLVM vectorises the minimum of integers, not that of floats."""
    return _ordered(numba.typeof(p))(p)


@overload(ordered, inline="always")
def _ordered(p):
    if p == numba.float32:

        def narrow(p):
            bits = np.float32(p).view(np.int32)
            return np.int32(bits ^ np.int32((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))

        return narrow

    def wide(p):
        bits = np.float64(p).view(np.int64)
        return bits ^ ((bits >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF))

    return wide


def from_ordered(bits, like):
    """The inverse of `ordered`, in the type of `like`."""
    return _from_ordered(numba.typeof(bits), numba.typeof(like))(bits, like)


@overload(from_ordered, inline="always")
def _from_ordered(bits, like):
    if like == numba.float32:

        def narrow(bits, like):
            flip = np.int32((np.int32(bits) >> np.int32(31)) & np.int32(0x7FFFFFFF))
            return np.int32(np.int32(bits) ^ flip).view(np.float32)

        return narrow

    def wide(bits, like):
        flip = (np.int64(bits) >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF)
        return np.int64(np.int64(bits) ^ flip).view(np.float64)

    return wide


def from_magnitude(bits, like):
    """The inverse of `magnitude` for numbers >= 0, in the type of `like`."""
    return _from_magnitude(numba.typeof(bits), numba.typeof(like))(bits, like)


@overload(from_magnitude, inline="always")
def _from_magnitude(bits, like):
    if like == numba.float32:
        return lambda bits, like: np.int32(bits).view(np.float32)
    return lambda bits, like: np.int64(bits).view(np.float64)


def power_above(p):
    """The least power of two that is at least p, a normal number above zero."""
    return _power_above(numba.typeof(p))(p)


@overload(power_above, inline="always")
def _power_above(p):
    if p == numba.float32:

        def narrow(p):
            bits = np.int32(np.float32(p).view(np.int32) + np.int32(0x7FFFFF))
            return np.int32(bits & np.int32(0x7F800000)).view(np.float32)

        return narrow

    def wide(p):
        bits = np.float64(p).view(np.int64) + np.int64((1 << 52) - 1)
        return np.int64(bits & np.int64(0x7FF0000000000000)).view(np.float64)

    return wide


@jit
def load(x, r, buffer):
    """buffer = x + r."""
    for i in range(buffer.size):
        buffer[i] = x[i] + r[i] if r.size else x[i]


@jit
def combine(out, mode, x, values, weight):
    """out += weight * values, after keeping out, zeroing it or adding x to it.

    One pass: the memory of out and x is touched once, `values` lie in the cache.
    """
    if mode == ZERO:
        for i in range(out.size):
            out[i] = weight * values[i]
    elif mode == ADD:
        for i in range(out.size):
            out[i] = (out[i] + x[i]) + weight * values[i]
    else:
        for i in range(out.size):
            out[i] += weight * values[i]
