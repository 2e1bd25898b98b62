"""One bit per element: value = high where x + r >= 0, else low; a pair for a block or the tensor.

The bits do not depend on the pair, so one pass writes them and sums both halves.
"""

import numpy as np
import torch

from thinwire.kernels.cpu.jit import ADD, KEEP, ZERO, jit, sum_jit
from thinwire.kernels.cpu.source import Source

u8, u32, u64 = np.uint8, np.uint32, np.uint64
RUN = 1 << 12  # elements a partial sum covers when the pair is for the whole tensor


@sum_jit
def _halves(x, r, unit, signs):
    """Sums of both halves in the given unit (NaN falls into the lower), and 1 for the upper."""
    above, below = 0.0, 0.0
    for i in range(signs.size):
        p = x[i] + r[i] if r.size else x[i]
        v = np.float64(p) * unit
        upper = v if v >= 0 else 0.0
        above += upper
        below += v - upper
        signs[i] = u8(p >= 0)
    return above, below


@jit
def _pack_signs(signs, packed):
    """Eight bytes of 0 or 1 to a byte, by one multiplication; return how many are 1."""
    words = signs.view(u64)
    count = 0
    for g in range(packed.size):
        packed[g] = u8((words[g] * u64(0x0102040810204080)) >> u64(56))
        count += np.int64((words[g] * u64(0x0101010101010101)) >> u64(56))
    return count


@jit
def _encode(x, r, packed, sums, counts, block, unit):
    signs = np.zeros(block, u8)
    odd = False
    for lo in range(0, x.size, block):
        j = lo // block
        hi = min(lo + block, x.size)
        if hi - lo < block:
            signs[hi - lo :] = 0
        above, below = _halves(x[lo:hi], r[lo:hi], unit, signs[: hi - lo])
        odd |= not np.isfinite(above - below)
        sums[j, 0], sums[j, 1] = above, below
        counts[j] = _pack_signs(signs, packed[lo // 8 : (hi + 7) // 8])
    return odd


def encode_pairs(x: torch.Tensor, r: torch.Tensor | None, *, block: int | None, scaled: bool):
    """(pairs, packed signs), or None if not all finite.

    Row j of the pairs is block j's (low, high): the means of what is < 0 and of what is >= 0, or,
    `scaled`, minus and plus the mean magnitude. One row for block None.
    """
    source = Source(x, r)
    n = source.size
    each = RUN if block is None else block
    rows = -(-n // each)
    sums, counts = np.empty((rows, 2)), np.empty(rows, np.int64)
    packed = np.empty(-(-n // 8), u8)

    # Sums of float32 in float64 cannot overflow; those of float64 are taken in a small exact unit.
    unit = 1.0 if source.dtype == np.float32 else 2.0 ** -n.bit_length()

    def work(lo, hi, xs, rs):
        j = lo // each
        return _encode(xs, rs, packed[lo // 8 :], sums[j:], counts[j:], each, unit)

    if any(source.scan(work, each)):
        return None
    lengths = np.full(rows, each)
    lengths[-1] = n - each * (rows - 1)
    if block is None:
        sums = sums.sum(0, keepdims=True)
        counts, lengths = counts.sum(keepdims=True), np.array([n])
    # A mean of the largest numbers may be rounded beyond them; whoever encodes cuts it back.
    with np.errstate(over="ignore"):
        if scaled:
            high = (sums[:, 0] - sums[:, 1]) / lengths / unit
            pairs = np.stack([-high, high], 1)
        else:
            pairs = sums[:, ::-1]
            pairs[:, 0] /= np.maximum(lengths - counts, 1)
            pairs[:, 1] /= np.maximum(counts, 1)
            pairs /= unit
        return torch.from_numpy(pairs.astype(source.dtype)), torch.from_numpy(packed)


@jit
def _add_bits(out, mode, x, bits, low, high):
    """What `combine` does, in one loop without a buffer of values."""
    whole = out.size // 8
    for g in range(whole):
        byte = u32(bits[g])
        if mode == ADD:
            for i in range(8):
                v = high if (byte >> u32(i)) & u32(1) else low
                out[8 * g + i] = (out[8 * g + i] + x[8 * g + i]) + v
        elif mode == ZERO:
            for i in range(8):
                out[8 * g + i] = high if (byte >> u32(i)) & u32(1) else low
        else:
            for i in range(8):
                out[8 * g + i] += high if (byte >> u32(i)) & u32(1) else low
    for i in range(8 * whole, out.size):
        v = high if (bits[whole] >> u8(i - 8 * whole)) & u8(1) else low
        if mode == ZERO:
            out[i] = v
        else:
            out[i] = (out[i] + x[i]) + v if mode == ADD else out[i] + v


@jit
def _add(out, mode, x, packed, pairs, block, weight):
    one = pairs.shape[0] == 1
    for lo in range(0, out.size, block):
        hi = min(lo + block, out.size)
        j = 0 if one else lo // block
        low, high = weight * pairs[j, 0], weight * pairs[j, 1]
        _add_bits(out[lo:hi], mode, x[lo:hi], packed[lo // 8 : (hi + 7) // 8], low, high)


def add_pairs(
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
    o, bits, p = out.numpy(), packed.numpy(), pairs.numpy()
    mode = ZERO if fresh else KEEP if plus is None else ADD
    each = RUN if block is None else block
    w = o.dtype.type(weight)

    def work(lo, hi, other, _):
        own = p if len(p) == 1 else p[lo // each : -(-hi // each)]
        _add(o[lo:hi], mode, other, bits[lo // 8 :], own, each, w)

    Source(out if plus is None else plus).scan(work, each)
