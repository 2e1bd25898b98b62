"""Choosing positions and moving values to and from them.

Top-K, exact, without sorting: a sample brackets the k-th magnitude from below, one pass over the
tensor collects all candidates above the bracket (and sees every NaN and infinity, which are larger
than any bracket), and a radix selection among the candidates is exact. When the sample misleads
(too few candidates, or more than the buffer holds: constant tensors, mostly zero ones), the same
radix selection runs over the whole tensor.
"""

import numpy as np
import torch
from numba.cpython.unsafe.numbers import trailing_zeros

from thinwire.kernels import threads
from thinwire.kernels.cpu.jit import ADD, INFINITY_BITS, INTEGER, ZERO, jit, magnitude
from thinwire.kernels.cpu.radix import exact_top_k, few_top_k, keep, select

u32, u64 = np.uint32, np.uint64
SAMPLE = 1 << 15
SMALL = 1 << 16
BLOCK = 512
NEAR = 1 << 14  # elements whose memory stays in the second-level cache
REGION = 1 << 20  # elements; 4 MB of float32 stay in the last-level cache
COUNTED = 1 << 17  # elements; 1 MB of float32 and counts stay in the second-level cache


def index_dtype(n: int):
    """The smallest integer type that numbers n elements."""
    return np.int32 if n < 1 << 31 else np.int64


def arrays(x: torch.Tensor, r: torch.Tensor | None):
    """The tensors as NumPy arrays over the same memory; without a residual an empty one."""
    xs = x.numpy()
    return xs, np.empty(0, xs.dtype) if r is None else r.numpy()


@jit
def _sample(x, r, out):
    stride = x.size // out.size
    for j in range(out.size):
        # A hashed offset within each stride, so that no period of the data can hide from it.
        h = u64(j + 1) * u64(0x9E3779B97F4A7C15)
        i = j * stride + np.int64((h >> u64(33)) % u64(stride))
        p = x[i] + r[i] if r.size else x[i]
        out[j] = magnitude(p)


@jit
def _collect(x, r, bound, first, positions, values):
    """Positions and values of all |x + r| with bits >= bound; -1 as count when they do not fit.

    The buffers must have room for a block more.
    """
    flags = np.zeros(BLOCK, np.uint8)
    words = flags.view(u64)
    found = 0
    top = bound
    for lo in range(0, x.size, BLOCK):
        hi = min(lo + BLOCK, x.size)
        own, other = x[lo:hi], r[lo:hi]
        for i in range(hi - lo):
            p = own[i] + other[i] if r.size else own[i]
            flags[i] = np.uint8(magnitude(p) >= bound)
        if hi - lo < BLOCK:
            flags[hi - lo :] = 0
        if found + BLOCK > positions.size:
            return -1, top
        for w in range(words.size):
            word = words[w]
            while word:
                i = 8 * w + np.int64(trailing_zeros(word) >> u64(3))
                word &= word - u64(1)
                p = own[i] + other[i] if r.size else own[i]
                top = max(top, magnitude(p))
                positions[found] = first + lo + i
                values[found] = p
                found += 1
    return found, top


@jit
def _rank(size, k, n):
    """Which of `size` samples surely lies below the k-th magnitude: four standard deviations."""
    expected = size * k / n
    return np.int64(expected + 4 * np.sqrt(expected) + 8)


def _bracket(x, r, k: int):
    """A bound that k elements surely reach, and the share of elements expected to."""
    sample = np.empty(SAMPLE, INTEGER[x.dtype])
    _sample(x, r, sample)
    rank = _rank(SAMPLE, k, x.size)
    if rank >= SAMPLE:
        return None
    return np.partition(sample, SAMPLE - rank)[SAMPLE - rank], rank / SAMPLE


def _candidates(x, r, k: int):
    """(positions, values, top magnitude) of a superset of the top k, or None if misled."""
    bracket = _bracket(x, r, k)
    if bracket is None:
        return None
    bound, share = bracket

    parts = threads.ranges(x.size)
    # Large values may all lie in one range, so each has room for all of them. Allocated here: the
    # C library gives memory of other threads back to the system, at a page fault a page.
    room = min(x.size, int(x.size * share * 1.5)) + 1024
    buffers = {
        lo: (np.empty(room, index_dtype(x.size)), np.empty(room, x.dtype)) for lo, _ in parts
    }

    def work(lo, hi):
        positions, values = buffers[lo]
        found, top = _collect(x[lo:hi], r[lo:hi], bound, lo, positions, values)
        return found, top, positions[:found], values[:found]

    results = threads.run(work, parts)
    if any(found < 0 for found, *_ in results) or sum(found for found, *_ in results) < k:
        return None
    top = max(top for _, top, *_ in results)
    if len(results) == 1:
        return results[0][2], results[0][3], top
    _, _, positions, values = zip(*results, strict=True)
    return np.concatenate(positions), np.concatenate(values), top


@jit
def _small_top_k(x, r, k, sample, positions, values):
    """All steps in one call, for tensors so small that calls count; -1 as count if misled.

    Without a sample every element is a candidate.
    """
    bound = magnitude(x.dtype.type(0))
    if sample.size:
        _sample(x, r, sample)
        rank = _rank(sample.size, k, x.size)
        if rank >= sample.size:
            return -1, bound
        bound = select(sample, sample.size - rank)
    found, top = _collect(x, r, bound, np.int64(0), positions, values)
    if found < k:
        return -1, bound
    if found > k:
        bits = np.empty(found, sample.dtype)
        for i in range(found):
            bits[i] = magnitude(values[i])
        edge = select(bits, found - k)
        ties = k
        for i in range(found):
            ties -= bits[i] > edge
        chosen = np.empty(k, np.int64)
        keep(values[:found], values[:0], np.int64(edge), ties, np.int64(0), chosen)
        for i in range(k):
            positions[i] = positions[chosen[i]]
            values[i] = values[chosen[i]]
    return k, top


def _try_small(x, r, k: int):
    """(positions, values, top magnitude) of the top k, or None if misled."""
    sample = np.empty(max(1024, x.size // 64) if x.size >= 4096 else 0, INTEGER[x.dtype])
    positions = np.empty(x.size + BLOCK, index_dtype(x.size))
    values = np.empty(x.size + BLOCK, x.dtype)
    found, top = _small_top_k(x, r, k, sample, positions, values)
    return None if found < 0 else (positions[:k].copy(), values[:k].copy(), top)


def top_k(x: torch.Tensor, r: torch.Tensor | None, k: int):
    """(positions, values) of the k largest |x + r|, ascending positions, ties to the lower one."""
    xs, rs = arrays(x, r)
    found = _try_small(xs, rs, k) if xs.size <= SMALL else _candidates(xs, rs, k)
    if found is None:
        chosen = exact_top_k(xs, rs, k)
        if chosen is None:
            return None
        at = torch.from_numpy(chosen.astype(index_dtype(xs.size), copy=False))
        return at, take(x, r, at)
    positions, values, top = found
    if top >= INFINITY_BITS[xs.dtype]:
        return None
    if positions.size > k:
        positions, values = few_top_k(positions, values, k)
    return torch.from_numpy(positions), torch.from_numpy(values)


@jit
def _count(x, r, bound):
    found = 0
    top = bound - bound
    for i in range(x.size):
        m = magnitude(x[i] + r[i] if r.size else x[i])
        found += m >= bound
        top = max(top, m)
    return found, top


def above(x: torch.Tensor, r: torch.Tensor | None, value: float):
    """(positions, values) of all |x + r| >= value, ascending positions."""
    xs, rs = arrays(x, r)
    bound = np.abs(np.array(value, xs.dtype)).view(INTEGER[xs.dtype])[()]
    parts = threads.ranges(xs.size)
    counts = threads.run(lambda lo, hi: _count(xs[lo:hi], rs[lo:hi], bound), parts)
    if max(top for _, top in counts) >= INFINITY_BITS[xs.dtype]:
        return None

    def work(lo, hi):
        room = counts[[p[0] for p in parts].index(lo)][0] + BLOCK
        positions = np.empty(room, index_dtype(xs.size))
        values = np.empty(room, xs.dtype)
        found, _ = _collect(xs[lo:hi], rs[lo:hi], bound, lo, positions, values)
        return positions[:found], values[:found]

    positions, values = zip(*threads.run(work, parts), strict=True)
    return torch.from_numpy(np.concatenate(positions)), torch.from_numpy(np.concatenate(values))


@jit
def _finite(x, r):
    odd = u32(0)
    for i in range(x.size):
        p = x[i] + r[i] if r.size else x[i]
        odd |= u32(not (abs(p) < np.inf))
    return odd == 0


def all_finite(x: torch.Tensor, r: torch.Tensor | None) -> bool:
    """Whether every x + r is finite."""
    xs, rs = arrays(x, r)
    return all(threads.run(lambda lo, hi: _finite(xs[lo:hi], rs[lo:hi]), threads.ranges(xs.size)))


@jit
def _take(x, r, first, positions, out):
    """Gather, and look for odd values, block by block; positions count from before x's begin."""
    odd = u32(0)
    done = 0
    for lo in range(0, x.size, NEAR):
        hi = min(lo + NEAR, x.size)
        own, other = x[lo:hi], r[lo:hi]
        for i in range(hi - lo):
            p = own[i] + other[i] if r.size else own[i]
            odd |= u32(not (abs(p) < np.inf))
        base = first + lo
        while done < positions.size and positions[done] < first + hi:
            i = positions[done] - base
            out[done] = own[i] + other[i] if r.size else own[i]
            done += 1
    return odd != 0


def take(x: torch.Tensor, r: torch.Tensor | None, positions: torch.Tensor):
    """(x + r)[positions], ascending positions; None if not all of x + r is finite."""
    (xs, rs), at = arrays(x, r), positions.numpy()
    out = np.empty(at.size, xs.dtype)

    def work(lo, hi):
        a, b = (0, at.size) if hi - lo == xs.size else np.searchsorted(at, (lo, hi))
        return _take(xs[lo:hi], rs[lo:hi], lo, at[a:b], out[a:b])

    return None if any(threads.run(work, threads.ranges(xs.size))) else torch.from_numpy(out)


@jit
def _scatter_add(out, mode, x, first, positions, values, weight):
    """Start out and add to it, block by block; positions count from `first` before out's begin."""
    done = 0
    for lo in range(0, out.size, NEAR):
        hi = min(lo + NEAR, out.size)
        here, other = out[lo:hi], x[lo:hi]
        if mode == ZERO:
            here[:] = 0
        elif mode == ADD:
            for i in range(hi - lo):
                here[i] += other[i]
        base = first + lo
        while done < positions.size and positions[done] < first + hi:
            here[positions[done] - base] += weight * values[done]
            done += 1


def scatter_add(
    out: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    *,
    weight: float,
    fresh: bool = False,
    plus: torch.Tensor | None = None,
) -> None:
    """out[positions] += weight * values, after zeroing out or adding a tensor to it.

    Positions are ascending and distinct.
    """
    o, at, v = out.numpy(), positions.numpy(), values.numpy()
    w = o.dtype.type(weight)
    if not fresh and plus is None:
        _scatter(o, at, v, w)
        return
    other, mode = (o, ZERO) if plus is None else (plus.numpy(), ADD)

    def work(lo, hi):
        a, b = (0, at.size) if hi - lo == o.size else np.searchsorted(at, (lo, hi))
        _scatter_add(o[lo:hi], mode, other[lo:hi], lo, at[a:b], v[a:b], w)

    threads.run(work, threads.ranges(o.size))


@jit
def _scatter(out, positions, values, weight):
    for i in range(positions.size):
        out[positions[i]] += weight * values[i]


def scatter_add_many(out, items, weight: float) -> None:
    """`scatter_add` of several (positions, values), in their order, to the same bits.

    Region by region, so that a cache line of `out` is fetched once and not once an item: eight
    items of 1 % density take 1.5x the time of ``r += g`` instead of 2.6x.
    """
    o = out.numpy()
    w = o.dtype.type(weight)
    edges = np.arange(0, o.size + REGION, REGION)
    cut = [(at.numpy(), v.numpy(), np.searchsorted(at.numpy(), edges).tolist()) for at, v in items]

    def work(lo, hi):
        for region in range(lo, hi):
            for at, v, ends in cut:
                a, b = ends[region], ends[region + 1]
                _scatter(o, at[a:b], v[a:b], w)

    threads.run(work, threads.ranges(len(edges) - 1, least=1))


@jit
def _count_holders(counts, first, positions):
    for i in range(positions.size):
        counts[positions[i] - first] += np.int32(1)


@jit
def _scatter_shares(out, counts, first, positions, values):
    for i in range(positions.size):
        at = positions[i] - first
        out[at] += values[i] / out.dtype.type(counts[at])


def scatter_mean(out, items) -> None:
    """out <- at each position the mean over the (positions, values) that hold it, added up in their
    order; zero where none does.

    Region by region, so that the counts take no memory to speak of.
    """
    o = out.numpy()
    edges = np.arange(0, o.size + COUNTED, COUNTED)
    cut = [(at.numpy(), v.numpy(), np.searchsorted(at.numpy(), edges).tolist()) for at, v in items]

    def work(lo, hi):
        room = np.empty(min(o.size, COUNTED), np.int32)
        for region in range(lo, hi):
            first = region * COUNTED
            here = o[first : first + COUNTED]
            counts = room[: here.size]
            here[:] = counts[:] = 0
            for at, _, ends in cut:
                _count_holders(counts, first, at[ends[region] : ends[region + 1]])
            for at, v, ends in cut:
                a, b = ends[region], ends[region + 1]
                _scatter_shares(here, counts, first, at[a:b], v[a:b])

    threads.run(work, threads.ranges(len(edges) - 1, least=1))


def scatter_mean_bytes(n: int) -> int:
    """What `scatter_mean` takes for its counts."""
    return 4 * min(n, COUNTED * torch.get_num_threads())
