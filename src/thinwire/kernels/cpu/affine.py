"""Affine quantisation: value = level * scale + low, both of a block or of the whole tensor.

All arithmetic is float64 on halved numbers, so that max - min cannot overflow and a small range far
from zero keeps its digits.
"""

import numpy as np
import torch

from thinwire.kernels.cpu.jit import ADD, KEEP, ZERO, combine, from_ordered, jit, ordered
from thinwire.kernels.cpu.levels import pack, packed_bytes, unpack
from thinwire.kernels.cpu.random import fill, key_words
from thinwire.kernels.cpu.source import Source
from thinwire.kernels.cpu.uniform import RUN, SPAN, TINY, span_of
from thinwire.kernels.key import Key

# With random words as few elements at once: then words, sums and levels all stay in the first-level
# cache.
NEAR = 512


@jit
def _load_extent(x, r, buffer):
    """buffer = x + r; return its minimum, its maximum and whether it is not all finite."""
    low = high = ordered(x[0] + r[0] if r.size else x[0])
    for i in range(buffer.size):
        p = x[i] + r[i] if r.size else x[i]
        buffer[i] = p
        low = min(low, ordered(p))
        high = max(high, ordered(p))
    # NaN lies beyond the infinities in this order.
    least, most = from_ordered(low, x[0]), from_ordered(high, x[0])
    return least, most, not (np.isfinite(least) and np.isfinite(most))


@jit
def _levels(buffer, base, inverse, top, words, levels):
    """Nearest levels, or stochastic ones where there are random words."""
    for i in range(buffer.size):
        v = min(max((0.5 * np.float64(buffer[i]) - base) * inverse, 0.0), top)
        if words.size:
            down = np.floor(v)
            u = np.float64(np.int32(words[i] >> np.uint32(8))) * 2.0**-24
            levels[i] = np.uint8(np.int32(down) + np.int32(u < v - down))
        else:
            levels[i] = np.uint8(np.int32(np.rint(v)))


@jit
def _scale(low, high, top, tiny, highest, shrink):
    """low + top * scale is at most high, and finite also when rounding goes up."""
    half = min(0.5 * high - 0.5 * low, (0.5 * highest - 0.5 * low) * shrink)
    return 2 * (half / top) if half >= tiny else 0.0


@jit
def _encode(x, r, first, lows, scales, packed, block, span, width, given, bounds, key):
    tiny, highest, shrink = bounds
    top = np.float64((1 << width) - 1)
    buffer = np.empty(min(block, x.size), x.dtype)
    levels = np.empty(min(span, x.size), np.uint8)
    words = np.empty(span + 1024 if key.size else 0, np.uint32)
    odd = False
    for lo in range(0, x.size, span):
        count = min(span, x.size - lo)
        at = 0
        if key.size:
            at = fill(first + lo, count, key, words)
        for b in range(0, count, block):
            e = min(b + block, count)
            own = buffer[: e - b]
            low, high, bad = _load_extent(x[lo + b : lo + e], r[lo + b : lo + e], own)
            odd |= bad
            j = 0 if given else (lo + b) // block
            if not given:
                lows[j] = low
                scales[j] = _scale(np.float64(low), np.float64(high), top, tiny, highest, shrink)
            base = 0.5 * np.float64(lows[j])
            unit = 0.5 * np.float64(scales[j])
            inverse = 1 / unit if unit > 0 else 0.0
            _levels(own, base, inverse, top, words[at + b : at + e], levels[b:e])
        begin = packed_bytes(lo, width)
        pack(levels[:count], width, packed[begin : begin + packed_bytes(count, width)])
    return odd


def encode_affine(
    x: torch.Tensor,
    r: torch.Tensor | None,
    *,
    width: int,
    block: int | None,
    extent: tuple[float, float] | None = None,
    key: Key | None = None,
):
    """(lows, scales, packed levels), or None if not all finite.

    With block None the (min, max) of the whole tensor come as `extent`.
    """
    source = Source(x, r)
    n, dtype = source.size, source.dtype
    info = np.finfo(dtype)
    bounds = TINY[dtype], float(info.max), 1 - 4 * float(info.eps)
    each = RUN if block is None else block
    given = extent is not None
    lows = np.empty(1 if given else -(-n // each), dtype)
    scales = np.empty_like(lows)
    if extent is not None:
        lows[0] = extent[0]
        scales[0] = _scale(*extent, float((1 << width) - 1), *bounds)
    packed = np.empty(packed_bytes(n, width), np.uint8)
    words, span = key_words(key), span_of(each, SPAN if key is None else NEAR)

    def work(lo, hi, xs, rs):
        skip = 0 if given else lo // each
        out = lows[skip:], scales[skip:], packed[packed_bytes(lo, width) :]
        return _encode(xs, rs, lo, *out, each, span, width, given, bounds, words)

    if any(source.scan(work, block or SPAN)):
        return None
    return torch.from_numpy(lows), torch.from_numpy(scales), torch.from_numpy(packed)


@jit
def _values(levels, base, unit, out):
    for i in range(out.size):
        out[i] = 2 * (np.float64(np.int32(levels[i])) * unit + base)


@jit
def _add(out, mode, x, packed, lows, scales, block, span, width, weight):
    one = scales.size == 1
    levels = np.empty(min(span, out.size), np.uint8)
    values = np.empty(min(span, out.size), scales.dtype)
    for lo in range(0, out.size, span):
        count = min(span, out.size - lo)
        begin = packed_bytes(lo, width)
        unpack(packed[begin : begin + packed_bytes(count, width)], width, levels[:count])
        for b in range(0, count, block):
            e = min(b + block, count)
            j = 0 if one else (lo + b) // block
            unit = 0.5 * np.float64(scales[j])
            _values(levels[b:e], 0.5 * np.float64(lows[j]), unit, values[b:e])
        combine(out[lo : lo + count], mode, x[lo : lo + count], values[:count], weight)


def add_affine(
    out: torch.Tensor,
    packed: torch.Tensor,
    lows: torch.Tensor,
    scales: torch.Tensor,
    *,
    width: int,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: torch.Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    o, levels, low, scale = out.numpy(), packed.numpy(), lows.numpy(), scales.numpy()
    mode = ZERO if fresh else KEEP if plus is None else ADD
    each = RUN if block is None else block
    w, span = o.dtype.type(weight), span_of(each)

    def work(lo, hi, other, _):
        cut = slice(None) if scale.size == 1 else slice(lo // each, -(-hi // each))
        own = levels[packed_bytes(lo, width) :]
        _add(o[lo:hi], mode, other, own, low[cut], scale[cut], each, span, width, w)

    Source(out if plus is None else plus).scan(work, block or SPAN)
