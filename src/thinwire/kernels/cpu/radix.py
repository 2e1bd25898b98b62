"""Exact selection of the k largest magnitudes, ties to the lower position.

Of a whole tensor by counting digits, most significant first, which takes no memory; of candidates
above a bound, most of which are chosen, by counting once how far above it they lie.
"""

import numpy as np

from thinwire.kernels import threads
from thinwire.kernels.cpu.jit import INFINITY_BITS, INTEGER, jit, magnitude
from thinwire.kernels.cpu.source import Source

DIGIT = 11  # bits a pass: 2048 counters stay in the first-level cache
WIDTH = {np.dtype(np.float32): 31, np.dtype(np.float64): 63}
PLACES = 4096  # at which candidates are counted: up to 16 times the bound, the rest at the last
SPREAD = {np.dtype(np.float32): 13, np.dtype(np.float64): 42}  # bits of a magnitude: a 1024th of 2


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
    """Positions and values of all above `bound` and of the first `ties` equal to it, if there is
    room for them."""
    found = 0
    for i in range(values.size):
        if found == out.size:
            break
        # Without a branch, as what comes next cannot be predicted.
        m = np.int64(magnitude(values[i]))
        tie = np.int64(m == bound)
        out[found] = positions[i]
        picked[found] = values[i]
        found += np.int64(m > bound) | (tie & np.int64(ties > 0))
        ties -= tie


@jit
def _tally(values, bound, shift, counts):
    """Count how far the magnitudes lie above a bound, the farthest together."""
    last = np.int64(counts.size - 1)
    for i in range(values.size):
        counts[min((np.int64(magnitude(values[i])) - bound) >> shift, last)] += 1


@jit
def _members(values, bound, shift, digit, last, out):
    """The magnitudes that `_tally` counted at one place."""
    found = 0
    for i in range(values.size):
        if found == out.size:
            break
        m = np.int64(magnitude(values[i]))
        out[found] = m
        found += np.int64(min((m - bound) >> shift, last) == digit)


class Candidates:
    """What one range has above a bound, all finite unless `top` says otherwise."""

    def __init__(self, positions, values, bound, top) -> None:
        self.positions, self.values, self.top = positions, values, top
        self.bound, self.shift = np.int64(bound), SPREAD[values.dtype]
        self.counts = np.zeros(PLACES, np.int64)
        _tally(values, self.bound, self.shift, self.counts)

    def members(self, place):
        """Magnitudes at one place of `counts`."""
        out = np.empty(self.counts[place], INTEGER[self.values.dtype])
        _members(self.values, self.bound, self.shift, place, PLACES - 1, out)
        return out


def best_candidates(found: list[Candidates], k: int):
    """(positions, values) of the k largest of all ranges, ties to the lower position.

    How far above the bound they lie has been counted; the place where the k-th lies is looked at.
    """
    parts = [(i, i + 1) for i in range(len(found))]
    place, need = _place(np.sum([each.counts for each in found], axis=0), k)
    members = threads.run(lambda i, _: found[i].members(place), parts)
    there = np.concatenate(members)
    edge = np.int64(select(there, there.size - need))
    ties = need - int(np.count_nonzero(there > edge))
    out = np.empty(k, found[0].positions.dtype), np.empty(k, found[0].values.dtype)
    shares, done = [], 0
    for each, own in zip(found, members, strict=True):
        equal = min(ties, int(np.count_nonzero(own == edge)))
        ties -= equal
        above = int(each.counts[place + 1 :].sum()) + int(np.count_nonzero(own > edge))
        shares.append((equal, slice(done, done + above + equal)))
        done += above + equal

    def work(i, _):
        each, (equal, here) = found[i], shares[i]
        pick(each.positions, each.values, edge, equal, out[0][here], out[1][here])

    threads.run(work, parts)
    return out


def _place(counts, need: int):
    """The highest place that `need` are at or above, and how many of those there are needed."""
    above = np.cumsum(counts[::-1])[::-1]
    digit = int(np.searchsorted(-above, -need, side="right")) - 1
    return digit, need - int(above[digit] - counts[digit])


def exact_top_k(source: Source, k: int):
    """Ascending positions of the k largest |x + r|, ties to the lower; None if not all finite."""

    def count(prefix, shift, width):
        def work(lo, hi, x, r):
            counts = np.zeros(1 << width, np.int64)
            _histogram(x, r, prefix, shift, width, counts)
            return lo, counts

        return source.scan(work)

    left = WIDTH[source.dtype]
    prefix, need = 0, k
    while left:
        width = min(DIGIT, left)
        first = left == WIDTH[source.dtype]
        left -= width
        tables = count(prefix, left, width)
        total = np.sum([table for _, table in tables], axis=0)
        if first and total[int(INFINITY_BITS[source.dtype]) >> left :].any():
            return None
        digit, need = _place(total, need)
        prefix = (prefix << width) | digit
    # `need` ties at the bound are kept, the lowest positions first: shared out range by range.
    quota = {}
    for lo, table in tables:
        quota[lo] = min(need, int(table[digit]))
        need -= quota[lo]

    def work(lo, hi, x, r):
        out = np.empty(min(hi - lo, k), np.int64)
        return out[: keep(x, r, prefix, quota[lo], lo, out)]

    return np.concatenate(source.scan(work))
