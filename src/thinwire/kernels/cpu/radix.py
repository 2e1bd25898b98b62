"""Exact selection of the k largest magnitudes, ties to the lower position.

Of a whole tensor by counting digits, most significant first, which takes no memory; of a few
candidates by partitioning a copy, which is twice as fast.
"""

import numpy as np

from thinwire.kernels import threads
from thinwire.kernels.cpu.jit import INFINITY_BITS, INTEGER, jit, magnitude

DIGIT = 11  # bits a pass: 2048 counters stay in the first-level cache
WIDTH = {np.dtype(np.float32): 31, np.dtype(np.float64): 63}


@jit
def _histogram(x, r, prefix, shift, width, counts):
    """Count the next digit of every magnitude whose bits above it equal `prefix`."""
    mask = (1 << width) - 1
    for i in range(x.size):
        m = np.int64(magnitude(x[i] + r[i] if r.size else x[i]))
        if (m >> (shift + width)) == prefix:
            counts[(m >> shift) & mask] += 1


@jit
def keep(x, r, bound, ties, first, out):
    """Positions of all magnitudes above `bound` and of the first `ties` equal to it."""
    found = 0
    for i in range(x.size):
        m = np.int64(magnitude(x[i] + r[i] if r.size else x[i]))
        if m > bound:
            out[found] = first + i
            found += 1
        elif m == bound and ties > 0:
            out[found] = first + i
            found += 1
            ties -= 1
    return found


@jit
def select(a, k):
    """np.partition(a, k)[k], which Numba takes five seconds to compile. Reorders a.

    Hoare's selection: everything before `lo` is at most, everything after `hi` at least the k-th.
    """
    lo, hi = 0, a.size - 1
    while lo < hi:
        first, middle, last = a[lo], a[(lo + hi) // 2], a[hi]
        pivot = max(min(first, middle), min(max(first, middle), last))
        i, j = lo, hi
        while i <= j:
            while a[i] < pivot:
                i += 1
            while a[j] > pivot:
                j -= 1
            if i <= j:
                a[i], a[j] = a[j], a[i]
                i += 1
                j -= 1
        if k <= j:
            hi = j
        elif k >= i:
            lo = i
        else:
            break
    return a[k]


@jit
def pick(positions, values, bound, ties, out, picked):
    """Positions and values of all above `bound` and of the first `ties` equal to it."""
    found = 0
    for i in range(values.size):
        m = np.int64(magnitude(values[i]))
        if m > bound or (m == bound and ties > 0):
            ties -= m == bound
            out[found] = positions[i]
            picked[found] = values[i]
            found += 1


def few_top_k(positions, values, k: int):
    """(positions, values) of the k largest |values|, all finite, positions ascending."""
    bits = np.abs(values).view(INTEGER[values.dtype])
    bound = np.partition(bits, bits.size - k)[bits.size - k]
    ties = k - np.count_nonzero(bits > bound)
    out, picked = np.empty(k, positions.dtype), np.empty(k, values.dtype)
    pick(positions, values, np.int64(bound), ties, out, picked)
    return out, picked


def exact_top_k(x, r, k: int):
    """Ascending positions of the k largest |x + r|, ties to the lower; None if not all finite."""
    parts = threads.ranges(x.size)

    def count(prefix, shift, width):
        def work(lo, hi):
            counts = np.zeros(1 << width, np.int64)
            _histogram(x[lo:hi], r[lo:hi], prefix, shift, width, counts)
            return counts

        return threads.run(work, parts)

    left = WIDTH[x.dtype]
    prefix, need = 0, k
    while left:
        width = min(DIGIT, left)
        left -= width
        tables = count(prefix, left, width)
        total = np.sum(tables, axis=0)
        if left == WIDTH[x.dtype] - width and total[int(INFINITY_BITS[x.dtype]) >> left :].any():
            return None
        above = np.cumsum(total[::-1])[::-1]
        digit = int(np.searchsorted(-above, -need, side="right")) - 1
        need -= int(above[digit] - total[digit])
        prefix = (prefix << width) | digit
    # `need` ties at the bound are kept, the lowest positions first: shared out range by range.
    quotas, rest = [], need
    for table in tables:
        quotas.append(min(rest, int(table[digit])))
        rest -= quotas[-1]
    quota = {lo: share for (lo, _), share in zip(parts, quotas, strict=True)}

    def work(lo, hi):
        out = np.empty(min(hi - lo, k), np.int64)
        return out[: keep(x[lo:hi], r[lo:hi], prefix, quota[lo], lo, out)]

    return np.concatenate(threads.run(work, parts))
