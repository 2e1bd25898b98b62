"""Two bits per element: its sign, and which of two magnitudes; a pair of those for a block or the
tensor.

An element is large if it exceeds the mean magnitude; the pair are the means of the small and of the
large. A block is summed once for the limit and once for the means, the second time in the cache.
"""

import numpy as np
import torch

from thinwire.kernels.cpu.jit import ADD, KEEP, ZERO, combine, jit, sum_jit
from thinwire.kernels.cpu.levels import pack, packed_bytes, unpack
from thinwire.kernels.cpu.source import Source

u8 = np.uint8
RUN = 1 << 12  # elements a partial sum covers when the pair is for the whole tensor
WIDTH = 2
NEGATIVE, LARGE = 1, 2  # bits of a level


@sum_jit
def _magnitudes(x, r, unit):
    """The sum of all |x + r| in the given unit."""
    total = 0.0
    for i in range(x.size):
        p = x[i] + r[i] if r.size else x[i]
        total += abs(np.float64(p) * unit)
    return total


@sum_jit
def _kinds(x, r, limit, unit, levels):
    """The sums of the small and of the large magnitudes in the given unit, and the levels."""
    small, large = 0.0, 0.0
    for i in range(levels.size):
        p = x[i] + r[i] if r.size else x[i]
        size = abs(p)
        v = np.float64(size) * unit
        above = size > limit
        small += 0.0 if above else v
        large += v if above else 0.0
        levels[i] = u8(u8(p < 0) | u8(u8(above) << u8(1)))
    return small, large


@jit
def _count_large(levels):
    count = 0
    for i in range(levels.size):
        count += np.int64(levels[i] >> u8(1))
    return count


@jit
def _sums(x, r, out, unit):
    """The sum of each run."""
    for j in range(out.size):
        lo, hi = j * RUN, min((j + 1) * RUN, x.size)
        out[j] = _magnitudes(x[lo:hi], r[lo:hi], unit)


@jit
def _encode(x, r, packed, sums, counts, limits, block, unit):
    """Levels, sums and counts of one range; whether something is not finite.

    The limit is the mean of each block, unless there is one for all.
    """
    levels = np.empty(min(block, x.size), u8)
    odd = False
    for lo in range(0, x.size, block):
        j, hi = lo // block, min(lo + block, x.size)
        own, other, here = x[lo:hi], r[lo:hi], levels[: hi - lo]
        if limits.size:
            limit = limits[0]
        else:
            total = _magnitudes(own, other, unit)
            odd |= not np.isfinite(total)
            limit = x.dtype.type(total / (hi - lo) / unit)
        sums[j, 0], sums[j, 1] = _kinds(own, other, limit, unit, here)
        counts[j] = _count_large(here)
        pack(here, WIDTH, packed[packed_bytes(lo, WIDTH) : packed_bytes(hi, WIDTH)])
    return odd


def encode_signed_pairs(x: torch.Tensor, r: torch.Tensor | None, *, block: int | None):
    """(pairs, packed levels), or None if not all finite.

    Row j of the pairs is block j's (small, large): the means of the magnitudes up to their mean,
    and of those above it; 0 where there are none. One row for block None.
    """
    source = Source(x, r)
    n, dtype = source.size, source.dtype
    each = RUN if block is None else block
    rows = -(-n // each)
    sums, counts = np.empty((rows, 2)), np.empty(rows, np.int64)
    packed = np.empty(packed_bytes(n, WIDTH), u8)
    limits = np.empty(0, dtype)

    # Sums of float32 in float64 cannot overflow; those of float64 are taken in a small exact unit.
    unit = 1.0 if dtype == np.float32 else 2.0 ** -n.bit_length()

    # A mean of the largest numbers may be rounded beyond them; whoever encodes cuts it back.
    with np.errstate(over="ignore"):
        if block is None:
            runs = np.empty(rows)

            def add_up(lo, hi, xs, rs):
                _sums(xs, rs, runs[lo // RUN : -(-hi // RUN)], unit)

            source.scan(add_up, RUN)
            total = runs.sum()
            if not np.isfinite(total):
                return None
            limits = np.array([total / n / unit]).astype(dtype)

        def work(lo, hi, xs, rs):
            j = lo // each
            out = packed[packed_bytes(lo, WIDTH) :], sums[j:], counts[j:]
            return _encode(xs, rs, *out, limits, each, unit)

        if any(source.scan(work, each)):
            return None
        lengths = np.full(rows, each)
        lengths[-1] = n - each * (rows - 1)
        if block is None:
            sums = sums.sum(0, keepdims=True)
            counts, lengths = counts.sum(keepdims=True), np.array([n])
        sums[:, 0] /= np.maximum(lengths - counts, 1)
        sums[:, 1] /= np.maximum(counts, 1)
        sums /= unit
        return torch.from_numpy(sums.astype(dtype)), torch.from_numpy(packed)


@jit
def _values(levels, small, large, out):
    for i in range(out.size):
        size = large if levels[i] & u8(LARGE) else small
        out[i] = -size if levels[i] & u8(NEGATIVE) else size


@jit
def _add(out, mode, x, packed, pairs, weight, block):
    one = pairs.shape[0] == 1
    levels = np.empty(min(block, RUN), u8)
    values = np.empty(min(block, RUN), pairs.dtype)
    for b in range(0, out.size, block):
        j = 0 if one else b // block
        end = min(b + block, out.size)
        for lo in range(b, end, RUN):
            hi = min(lo + RUN, end)
            here, own = levels[: hi - lo], values[: hi - lo]
            unpack(packed[packed_bytes(lo, WIDTH) : packed_bytes(hi, WIDTH)], WIDTH, here)
            _values(here, pairs[j, 0], pairs[j, 1], own)
            combine(out[lo:hi], mode, x[lo:hi], own, weight)


def add_signed_pairs(
    out: torch.Tensor,
    packed: torch.Tensor,
    pairs: torch.Tensor,
    *,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: torch.Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    o, levels, p = out.numpy(), packed.numpy(), pairs.numpy()
    mode = ZERO if fresh else KEEP if plus is None else ADD
    each = RUN if block is None else block
    w = o.dtype.type(weight)

    def work(lo, hi, other, _):
        own = p if len(p) == 1 else p[lo // each : -(-hi // each)]
        begin = packed_bytes(lo, WIDTH)
        _add(o[lo:hi], mode, other, levels[begin:], own, w, each)

    Source(out if plus is None else plus).scan(work, each)
