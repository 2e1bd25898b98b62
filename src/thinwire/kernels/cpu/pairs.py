"""One bit an element: value = high where x + r >= 0, else low; a pair for a block or the tensor.

The bits do not depend on the pair, so one pass writes them and sums both halves.
"""

import math

import numpy as np
import torch

from thinwire.kernels.cpu import threads
from thinwire.kernels.cpu.jit import (
    ADD,
    INFINITY_BITS,
    KEEP,
    ZERO,
    jit,
    load,
    magnitude,
    start,
    sum_jit,
)
from thinwire.kernels.cpu.sparse import arrays, part

u8, u32 = np.uint8, np.uint32
RUN = 1 << 13  # elements a partial sum covers when the pair is for the whole tensor


@sum_jit
def _halves(buffer, lo, hi, unit):
    """Sums of both halves in the given unit, the count of the upper one, the top magnitude."""
    above, below, count = 0.0, 0.0, 0
    top = magnitude(buffer[lo])
    for i in range(lo, hi):
        p = buffer[i]
        v = np.float64(p) * unit
        above += v if p >= 0 else 0.0
        below += v if p < 0 else 0.0
        count += p >= 0
        top = max(top, magnitude(p))
    return above, below, count, top


@jit
def _signs(buffer, count, packed, at):
    zero = buffer.dtype.type(0)
    whole = count // 32
    for g in range(whole):
        word = u32(0)
        for i in range(32):
            word |= u32(buffer[32 * g + i] + zero >= zero) << u32(i)
        for b in range(4):
            packed[at + 4 * g + b] = u8(word >> u32(8 * b))
    for g in range(4 * whole, (count + 7) // 8):
        byte = u32(0)
        for i in range(8 * g, min(8 * g + 8, count)):
            byte |= u32(buffer[i] >= zero) << u32(i - 8 * g)
        packed[at + g] = u8(byte)


@jit
def _encode(x, r, packed, sums, counts, block):
    span = block * max(1, 4096 // block)
    buffer = np.empty(min(span, x.size), x.dtype)
    top = magnitude(x.dtype.type(0))
    unit = 1.0 / block
    for lo in range(0, x.size, span):
        count = min(span, x.size - lo)
        load(x, r, lo, count, buffer)
        _signs(buffer, count, packed, lo // 8)
        for b in range(0, count, block):
            j = (lo + b) // block
            sums[j, 0], sums[j, 1], counts[j], peak = _halves(
                buffer, b, min(b + block, count), unit
            )
            top = max(top, peak)
    return top


def encode_pairs(x: torch.Tensor, r: torch.Tensor | None, *, block: int | None):
    """(sums, counts, packed signs), or None if not all finite.

    sums[j] holds block j's sum of what is >= 0 and of what is < 0, float64, divided by the block's
    length so that it cannot overflow; counts[j] how many are >= 0. One row for block None.
    """
    xs, rs = arrays(x, r)
    n = xs.size
    each = RUN if block is None else block
    rows = -(-n // each)
    sums, counts = np.empty((rows, 2)), np.empty(rows, np.int64)
    packed = np.empty(-(-n // 8), u8)

    def work(lo, hi):
        j = lo // each
        return _encode(xs[lo:hi], part(rs, lo, hi), packed[lo // 8 :], sums[j:], counts[j:], each)

    if max(threads.run(work, threads.ranges(n, each))) >= INFINITY_BITS[xs.dtype]:
        return None
    if block is None:
        whole = [[math.fsum(sums[:, 0]) * (each / n), math.fsum(sums[:, 1]) * (each / n)]]
        sums, counts = np.array(whole), counts.sum(keepdims=True)
    return torch.from_numpy(sums), torch.from_numpy(counts), torch.from_numpy(packed)


@jit
def _add(out, mode, x, packed, pairs, block, weight):
    one = pairs.shape[0] == 1
    for lo in range(0, out.size, block):
        count = min(block, out.size - lo)
        start(out, lo, count, mode, x)
        j = 0 if one else lo // block
        low, high = weight * pairs[j, 0], weight * pairs[j, 1]
        whole = count // 8
        for g in range(whole):
            byte = packed[lo // 8 + g]
            for i in range(8):
                out[lo + 8 * g + i] += high if (byte >> u8(i)) & u8(1) else low
        for i in range(8 * whole, count):
            byte = packed[lo // 8 + whole]
            out[lo + i] += high if (byte >> u8(i - 8 * whole)) & u8(1) else low


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
    other = o if plus is None else plus.numpy()
    mode = ZERO if fresh else KEEP if plus is None else ADD
    each = RUN if block is None else block
    w = o.dtype.type(weight)

    def work(lo, hi):
        own = p if len(p) == 1 else p[lo // each : -(-hi // each)]
        _add(o[lo:hi], mode, other[lo:hi], bits[lo // 8 :], own, each, w)

    threads.run(work, threads.ranges(o.size, each))
