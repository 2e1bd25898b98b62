"""Choosing positions and moving values to and from them.

Top-K, exact, without sorting: a sample brackets the k-th magnitude from below, one pass over the
tensor collects all candidates above the bracket (and sees every NaN and infinity, which are larger
than any bracket), and a selection among the candidates is exact. When the sample misleads (too few
candidates, or more than the buffer holds: constant tensors, mostly zero ones), a radix selection
runs over the whole tensor.

Of each chunk of a tensor: neighbours are alike, so the bracket of one chunk, moved a little up or
down, serves the next. It decides how long that takes and nothing else: the choice among the
candidates is exact, and where they are too few a sample of the chunk is taken, or all of it.
"""

from typing import Any

import numpy as np
import torch
from numba.cpython.unsafe.numbers import trailing_zeros

from thinwire.kernels import threads
from thinwire.kernels.cpu.jit import ADD, INFINITY_BITS, INTEGER, ZERO, jit, magnitude
from thinwire.kernels.cpu.radix import Candidates, best_candidates, exact_top_k, pick, select
from thinwire.kernels.cpu.source import PIECE, Source
from thinwire.kernels.cpu.vectors import WORD, reaching, sum_reaching

u32, u64 = np.uint32, np.uint64
GOLDEN = 0x9E3779B97F4A7C15
SAMPLE = 1 << 15
SMALL = PIECE  # elements; up to here all is done at once, in one piece
NEAR = 1 << 11  # elements whose memory stays in the first-level cache
REGION = 1 << 19  # elements; 2 MB of float32 stay in the last-level cache
COUNTED = 1 << 17  # elements; 1 MB of float32 and counts stay in the second-level cache
FEW = 256  # samples of a chunk
# A 32nd of a power of two, in the bits of a magnitude: by how much a bound moves.
STEP = {np.dtype(np.float32): 1 << 18, np.dtype(np.float64): 1 << 47}


def index_dtype(n: int):
    """The smallest integer type that numbers n elements."""
    return np.int32 if n < 1 << 31 else np.int64


@jit
def _sample(x, r, first, stride, out):
    """Magnitudes of one element in each stride, from the stride numbered `first` on."""
    for j in range(out.size):
        # A hashed offset within each stride, so that no period of the data can hide from it.
        h = u64(first + j + 1) * u64(GOLDEN)
        i = (first + j) * stride + np.int64(((h >> u64(33)) * u64(stride)) >> u64(31))
        p = x[i] + r[i] if r.size else x[i]
        out[j] = magnitude(p)


@jit
def _collect(x, r, bound, first, positions, values):
    """Positions and values of all |x + r| with bits >= bound; -1 as count when they do not fit.

    The buffers must have room for a word more.
    """
    found = 0
    top = bound
    whole = x.size // WORD * WORD
    for lo in range(0, whole, WORD):
        word = sum_reaching(x, r, lo, bound) if r.size else reaching(x, lo, bound)
        if word and found + WORD > positions.size:
            return -1, top
        while word:
            i = lo + np.int64(trailing_zeros(word))
            word &= word - u64(1)
            positions[found] = first + i
            values[found] = x[i] + r[i] if r.size else x[i]
            found += 1
    if found + WORD > positions.size:
        return -1, top
    for i in range(whole, x.size):
        p = x[i] + r[i] if r.size else x[i]
        positions[found] = first + i
        values[found] = p
        found += np.int64(magnitude(p) >= bound)
    # Not above: with it, collecting takes a third longer.
    for i in range(found):
        top = max(top, magnitude(values[i]))
    return found, top


@jit
def _rank(size, k, n):
    """Which of `size` samples surely lies below the k-th magnitude: four standard deviations."""
    expected = size * k / n
    return np.int64(expected + 4 * np.sqrt(expected) + 8)


def _bracket(source: Source, k: int):
    """A bound that k elements surely reach, and the share of elements expected to."""
    rank = int(_rank(SAMPLE, k, source.size))
    if rank >= SAMPLE:
        return None
    sample, stride = np.empty(SAMPLE, INTEGER[source.dtype]), source.size // SAMPLE
    if source.narrow:
        numbers = np.arange(SAMPLE, dtype=u64)
        hashes = (numbers + u64(1)) * u64(GOLDEN)
        places = numbers * u64(stride) + ((hashes >> u64(33)) * u64(stride) >> u64(31))
        x, r = source.at(places.astype(np.int64))
        sample[:] = np.abs(x + r if r.size else x).view(sample.dtype)
    else:
        x, r = source.whole
        threads.run(
            lambda lo, hi: _sample(x, r, lo, stride, sample[lo:hi]),
            threads.ranges(SAMPLE, least=SAMPLE // 4),
        )
    sample.partition(SAMPLE - rank)
    return sample[SAMPLE - rank], rank / SAMPLE


def _candidates(source: Source, k: int):
    """A superset of the top k, range by range; None if misled."""
    bracket = _bracket(source, k)
    if bracket is None:
        return None
    bound, share = bracket

    n, kinds = source.size, (np.dtype(index_dtype(source.size)), source.dtype)
    parts = threads.ranges(n)
    # Large values may all lie in one range, so each has room for all of them.
    room = (min(n, int(n * share * 1.5)) + 1024) // WORD * WORD  # so that all are aligned
    memory = threads.scratch(len(parts) * room * sum(kind.itemsize for kind in kinds))
    buffers: dict[int, list[Any]] = {lo: [] for lo, _ in parts}
    for lo, _ in parts:
        for kind in kinds:
            taken, memory = np.split(memory, [room * kind.itemsize])
            buffers[lo].append(taken.view(kind))

    def work(lo, hi):
        positions, values = buffers[lo]
        found, top = 0, bound
        for begin, _, x, r in source.pieces(lo, hi):
            more, highest = _collect(x, r, bound, begin, positions[found:], values[found:])
            if more < 0:
                return None
            found, top = found + more, max(top, highest)
        return Candidates(positions[:found], values[:found], bound, top)

    found = threads.run(work, parts)
    if any(one is None for one in found) or sum(one.values.size for one in found) < k:
        return None
    return found


@jit
def _reaching(sizes, bound):
    found = np.int32(0)
    for i in range(sizes.size):
        found = np.int32(found + np.int32(sizes[i] >= bound))
    return np.int64(found)


@jit
def _divide(sizes, k, low, high):
    """A bound that exactly k sizes reach, and 0; if there is none, the least that fewer reach, and
    how many are missing.

    At least k reach `low`, fewer reach `high`. By halving: counting is one vector instruction for
    eight sizes, and ends long before two neighbours are found.
    """
    fewer = 0
    while high - low > 1:
        middle = sizes.dtype.type(low + (high - low) // 2)
        found = _reaching(sizes, middle)
        if found == k:
            return middle, 0
        if found > k:
            low = np.int64(middle)
        else:
            high, fewer = np.int64(middle), found
    return sizes.dtype.type(high), k - fewer


@jit
def _small_top_k(x, r, k, sample, positions, values):
    """All steps in one call, for tensors so small that calls count; -1 as count if misled.

    Without a sample every element is a candidate.
    """
    bound = magnitude(x.dtype.type(0))
    if sample.size:
        _sample(x, r, np.int64(0), x.size // sample.size, sample)
        rank = _rank(sample.size, k, x.size)
        if rank >= sample.size:
            return -1, bound
        top = bound
        for i in range(sample.size):
            top = max(top, sample[i])
        bound, ties = _divide(sample, rank, np.int64(0), np.int64(top) + 1)
        if ties:
            bound = sample.dtype.type(bound - 1)
    found, top = _collect(x, r, bound, np.int64(0), positions, values)
    if found < k:
        return -1, bound
    if found > k:
        sizes = np.empty(found, sample.dtype)
        for i in range(found):
            sizes[i] = magnitude(values[i])
        edge, ties = _divide(sizes, k, np.int64(bound), np.int64(top) + 1)
        pick(positions[:found], values[:found], np.int64(edge) - 1, ties, positions[:k], values[:k])
    return k, top


def _try_small(source: Source, k: int):
    """(positions, values, top magnitude) of the top k, or None if misled."""
    n = source.size
    ((_, _, x, r),) = source.pieces(0, n)
    sample = np.empty(max(512, n // 64) if n >= 4096 else 0, INTEGER[source.dtype])
    positions = np.empty(n + WORD, index_dtype(n))
    values = np.empty(n + WORD, source.dtype)
    found, top = _small_top_k(x, r, k, sample, positions, values)
    return None if found < 0 else (positions[:k].copy(), values[:k].copy(), top)


def top_k(x: torch.Tensor, r: torch.Tensor | None, k: int):
    """(positions, values) of the k largest |x + r|, ascending positions, ties to the lower one."""
    source = Source(x, r)
    infinity = INFINITY_BITS[source.dtype]
    if source.size <= SMALL:
        chosen = _try_small(source, k)
        if chosen is not None:
            positions, values, top = chosen
            if top >= infinity:
                return None
            return torch.from_numpy(positions), torch.from_numpy(values)
    else:
        candidates = _candidates(source, k)
        if candidates is not None:
            if max(each.top for each in candidates) >= infinity:
                return None
            positions, values = best_candidates(candidates, k)
            return torch.from_numpy(positions), torch.from_numpy(values)
    at = exact_top_k(source, k)
    if at is None:
        return None
    at = torch.from_numpy(at.astype(index_dtype(source.size), copy=False))
    return at, take(x, r, at)


@jit
def _collect_of_chunk(x, r, bound, first, positions, values):
    """The number of positions and values of all |x + r| with bits >= bound; there is room."""
    if x.size >= WORD:
        return _collect(x, r, bound, first, positions, values)[0]
    found = 0
    for i in range(x.size):  # without a branch, as what comes next cannot be predicted
        p = x[i] + r[i] if r.size else x[i]
        positions[found] = first + i
        values[found] = p
        found += np.int64(magnitude(p) >= bound)
    return found


@jit
def _collect_enough(x, r, k, aim, bound, first, sample, positions, values):
    """(how many, bound): those that reach this bound, or a lower one that at least k do."""
    if bound > 0:
        found = _collect_of_chunk(x, r, bound, first, positions, values)
        if found >= k:
            return found, bound
    if aim < x.size and x.size >= 4 * sample.size:
        _sample(x, r, np.int64(0), x.size // sample.size, sample)
        rank = _rank(sample.size, k, x.size)
        if rank < sample.size:
            lower = select(sample, sample.size - rank)
            found = _collect_of_chunk(x, r, lower, first, positions, values)
            if found >= k:
                return found, lower
    none = magnitude(x.dtype.type(0))
    return _collect_of_chunk(x, r, none, first, positions, values), none


@jit
def _chunk_top_k(x, r, first, chunk, k, last, step, bits, places, found, positions, values):
    """Fill positions and values; return the bits of the largest magnitude.

    `bits`, `places` and `found` are memory to work in, for a chunk and a word more.
    """
    whole = bits.dtype.type
    bound = whole(0)
    highest = bound
    done = 0
    for lo in range(0, x.size, chunk):
        hi = min(lo + chunk, x.size)
        few = k if hi - lo == chunk else last
        aim = np.int64(few + 4 * np.sqrt(few) + 8)  # candidates, so that too few are seldom
        count, bound = _collect_enough(
            x[lo:hi], r[lo:hi], few, aim, bound, first + lo, bits[:FEW], places, found
        )
        sizes, top = bits[:count], whole(0)
        for i in range(count):
            sizes[i] = magnitude(found[i])
            top = max(top, sizes[i])
        highest = max(highest, top)
        edge, ties = _divide(sizes, few, np.int64(bound), np.int64(top) + 1)
        if ties:
            pick(places[:count], found[:count], np.int64(edge) - 1, ties, places, found)
        else:
            chosen = 0
            for i in range(count):  # without a branch, as it could not be predicted
                places[chosen] = places[i]
                found[chosen] = found[i]
                chosen += np.int64(sizes[i] >= edge)
        end = done + few
        # For an assignment of slices Numba compiles the text of its error: 2.7 s.
        at, sent = positions[done:end], values[done:end]
        for i in range(few):
            at[i] = places[i]
            sent[i] = found[i]
        done = end
        if count > 2 * aim:
            bound = _divide(sizes, aim, np.int64(bound), np.int64(top) + 1)[0]
        elif count < aim:
            bound = whole(max(np.int64(bound) - step, 0))
        elif 2 * count > 3 * aim:
            bound = whole(np.int64(bound) + step)
    return highest


def chunk_top_k(x: torch.Tensor, r: torch.Tensor | None, chunk: int, k: int, last: int):
    """(positions, values) of the k largest |x + r| of each chunk, ascending positions.

    `last` is the k of what is left over behind the chunks, if there is something. Ties go to the
    lower position.
    """
    if chunk > SMALL:
        return _long_chunk_top_k(x, r, chunk, k, last)
    source = Source(x, r)
    n, step = source.size, STEP[source.dtype]
    count = n // chunk * k + last
    positions, values = np.empty(count, index_dtype(n)), np.empty(count, source.dtype)
    parts = threads.ranges(n, chunk)
    room = max(chunk, FEW) + WORD
    # Allocated here: the C library gives memory of other threads back to the system.
    scratch = {
        lo: (
            np.empty(room, INTEGER[source.dtype]),
            np.empty(room, positions.dtype),
            np.empty(room, source.dtype),
        )
        for lo, _ in parts
    }

    def work(lo, hi):
        top = 0
        for begin, end, xs, rs in source.pieces(lo, hi, chunk):
            a, b = begin // chunk * k, count if end == n else end // chunk * k
            out = positions[a:b], values[a:b]
            found = _chunk_top_k(xs, rs, begin, chunk, k, last, step, *scratch[lo], *out)
            top = max(top, found)
        return top

    if max(threads.run(work, parts)) >= INFINITY_BITS[source.dtype]:
        return None
    return torch.from_numpy(positions), torch.from_numpy(values)


def _long_chunk_top_k(x: torch.Tensor, r: torch.Tensor | None, chunk: int, k: int, last: int):
    """One chunk after the other, each as a tensor of its own."""
    n = x.numel()
    dtype = torch.int32 if n < 1 << 31 else torch.int64
    pieces = []
    for lo in range(0, n, chunk):
        here = slice(lo, lo + chunk)
        few = k if lo + chunk <= n else last
        found = top_k(x[here], None if r is None else r[here], few)
        if found is None:
            return None
        pieces.append((found[0].to(dtype).add_(lo), found[1]))
    positions, values = zip(*pieces, strict=True)
    return torch.cat(positions), torch.cat(values)


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
    source = Source(x, r)
    bound = np.abs(np.array(value, source.dtype)).view(INTEGER[source.dtype])[()]
    counts = source.scan(lambda lo, hi, xs, rs: (lo, *_count(xs, rs, bound)))
    if max(top for *_, top in counts) >= INFINITY_BITS[source.dtype]:
        return None
    rooms = {lo: count + WORD for lo, count, _ in counts}

    def work(lo, hi, xs, rs):
        positions = np.empty(rooms[lo], index_dtype(source.size))
        values = np.empty(rooms[lo], source.dtype)
        found, _ = _collect(xs, rs, bound, lo, positions, values)
        return positions[:found], values[:found]

    positions, values = zip(*source.scan(work), strict=True)
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
    return all(Source(x, r).scan(lambda lo, hi, xs, rs: _finite(xs, rs)))


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
    source, at = Source(x, r), positions.numpy()
    out = np.empty(at.size, source.dtype)

    def work(lo, hi, xs, rs):
        a, b = _between(at, lo, hi, source.size)
        return _take(xs, rs, lo, at[a:b], out[a:b])

    return None if any(source.scan(work)) else torch.from_numpy(out)


def _between(positions, lo: int, hi: int, n: int):
    """Which of ascending positions below n lie in a range."""
    return (0, positions.size) if hi - lo == n else _places(positions, (lo, hi))


def _places(positions, edges):
    """Where edges lie among ascending positions; looked for in their own type, as NumPy would
    otherwise widen all of them first."""
    return np.searchsorted(positions, np.asarray(edges, positions.dtype)).tolist()


def _cut(items, n: int, region: int):
    """(positions, values, where each region begins among them) of each item, and how many regions
    there are."""
    edges = np.minimum(np.arange(0, n + region, region), n)
    pairs = [(at.numpy(), v.numpy()) for at, v in items]
    return [(at, v, _places(at, edges)) for at, v in pairs], len(edges) - 1


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
            here[u64(positions[done] - base)] += weight * values[done]
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
    mode = ZERO if plus is None else ADD

    def work(lo, hi, other, _):
        a, b = _between(at, lo, hi, o.size)
        _scatter_add(o[lo:hi], mode, other, lo, at[a:b], v[a:b], w)

    Source(out if plus is None else plus).scan(work)


@jit
def _scatter(out, positions, values, weight):
    for i in range(positions.size):
        # Unsigned: of a signed number Numba asks whether it counts from the end, which takes long.
        out[u64(positions[i])] += weight * values[i]


def scatter_add_many(out, items, weight: float) -> None:
    """`scatter_add` of several (positions, values), in their order, to the same bits.

    Region by region, so that a cache line of `out` is fetched once and not once an item.
    """
    o = out.numpy()
    w = o.dtype.type(weight)
    cut, regions = _cut(items, o.size, REGION)

    def work(lo, hi):
        for region in range(lo, hi):
            for at, v, ends in cut:
                a, b = ends[region], ends[region + 1]
                _scatter(o, at[a:b], v[a:b], w)

    threads.run(work, threads.ranges(regions, least=1))


@jit
def _count_holders(counts, first, positions):
    for i in range(positions.size):
        counts[u64(positions[i] - first)] += np.int32(1)


@jit
def _scatter_shares(out, counts, first, positions, values):
    for i in range(positions.size):
        at = u64(positions[i] - first)
        out[at] += values[i] / out.dtype.type(counts[at])


def scatter_mean(out, items) -> None:
    """out <- at each position the mean over the (positions, values) that hold it, added up in their
    order; zero where none does.

    Region by region, so that the counts take no memory to speak of.
    """
    o = out.numpy()
    cut, regions = _cut(items, o.size, COUNTED)

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

    threads.run(work, threads.ranges(regions, least=1))


def scatter_mean_bytes(n: int) -> int:
    """What `scatter_mean` takes for its counts."""
    return 4 * min(n, COUNTED * torch.get_num_threads())
