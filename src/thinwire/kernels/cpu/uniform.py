"""Uniform quantisation around zero: value = (level - limit) * scale, one scale a block.

Serves Quantize (nearest or stochastic, scale from the largest magnitude), QSGD (stochastic, scale
from the norm), TernGrad (stochastic, scale given, limit 1) and feedback state (stochastic, scales
that are powers of two).
"""

import math

import numpy as np
import torch

from thinwire.kernels.cpu.jit import (
    ADD,
    INFINITY_BITS,
    KEEP,
    ZERO,
    combine,
    from_magnitude,
    jit,
    load_peak,
    magnitude,
    power_above,
    sum_jit,
)
from thinwire.kernels.cpu.levels import TRITS, pack, packed_bytes, unpack
from thinwire.kernels.cpu.random import fill, key_words
from thinwire.kernels.cpu.source import Source
from thinwire.kernels.key import Key

RUN = 512  # elements handled at once when one scale serves the whole tensor
SPAN = 5120  # elements handled at once, in the cache; a multiple of 5, 8 and 512
# With random words as few as those come in: then words, sums and levels all stay in the first-level
# cache, and QSGD takes a quarter less.
NEAR = 512
TINY = {np.dtype(np.float32): 2.0**-118, np.dtype(np.float64): 2.0**-800}
PEAK, NORM, GIVEN, POWER = 0, 1, 2, 3
RULES = {"max": PEAK, "l2": NORM, "given": GIVEN, "power": POWER}


def span_of(block: int, width: int, random: bool = False) -> int:
    """Elements handled at once: whole blocks, whole bytes."""
    return block * max(1, (NEAR if random and width != TRITS else SPAN) // block)


@sum_jit
def _squares(buffer, unit):
    total = 0.0
    for i in range(buffer.size):
        v = np.float64(buffer[i]) * unit
        total += v * v
    return total


@jit
def _norm(buffer, peak, highest):
    """The L2 norm, at most the largest finite number (any bound of all |v| is a valid scale)."""
    wide = np.float64(peak)
    return min(wide * np.sqrt(_squares(buffer, 1.0 / wide)), highest)


@jit
def _clamp(v, edge):
    v = edge if v > edge else v
    return -edge if v < -edge else v


@jit
def _nearest(buffer, inverse, limit, levels):
    edge = buffer.dtype.type(limit)
    for i in range(buffer.size):
        v = _clamp(buffer[i] * inverse, edge)
        levels[i] = np.uint8(np.int32(np.int32(np.rint(v)) + np.int32(limit)))


@jit
def _stochastic(buffer, inverse, limit, words, levels):
    edge = buffer.dtype.type(limit)
    unit = buffer.dtype.type(2.0**-24)
    for i in range(buffer.size):
        v = _clamp(buffer[i] * inverse, edge)
        down = np.floor(v)
        u = buffer.dtype.type(np.int32(words[i] >> np.uint32(8))) * unit
        level = np.int32(np.int32(down) + np.int32(limit))
        levels[i] = np.uint8(np.int32(level + np.int32(u < v - down)))


@jit
def _scale(buffer, bits, limit, rule, tiny, highest, ceiling):
    """(scale, what to multiply by for levels) of a block with this top magnitude."""
    real = buffer.dtype.type
    peak = from_magnitude(bits, real(0))
    if not peak >= tiny:  # NaN is not
        return real(0), real(0)
    if rule == PEAK:
        return min(peak / real(limit), ceiling), real(limit) / peak
    if rule == POWER:
        scale = min(power_above(peak / real(limit)), ceiling)
        return scale, real(1) / scale
    norm = _norm(buffer, peak, highest)
    return min(real(norm / limit), ceiling), real(limit / norm)


@jit
def _encode(x, r, first, scales, packed, block, span, limit, width, rule, bounds, key):
    """Quantise one range; return the largest magnitude's bits."""
    buffer = np.empty(min(block, x.size), x.dtype)
    levels = np.empty(min(span, x.size), np.uint8)
    words = np.empty(span + 1024 if key.size else 0, np.uint32)
    real = x.dtype.type
    tiny, highest, ceiling = real(bounds[0]), bounds[1], real(bounds[2])
    top = magnitude(real(0))
    for lo in range(0, x.size, span):
        count = min(span, x.size - lo)
        at = 0
        if key.size:
            at = fill(first + lo, count, key, words)
        for b in range(0, count, block):
            e = min(b + block, count)
            own = buffer[: e - b]
            bits = load_peak(x[lo + b : lo + e], r[lo + b : lo + e], own)
            top = max(top, bits)
            if rule == GIVEN:
                scale = scales[0]
                inverse = real(1) / scale if scale > 0 else real(0)
            else:
                scale, inverse = _scale(own, bits, limit, rule, tiny, highest, ceiling)
                scales[(lo + b) // block] = scale
            if key.size:
                _stochastic(own, inverse, limit, words[at + b : at + e], levels[b:e])
            else:
                _nearest(own, inverse, limit, levels[b:e])
        begin = packed_bytes(lo, width)
        pack(levels[:count], width, packed[begin : begin + packed_bytes(count, width)])
    return top


def encode_uniform(
    x: torch.Tensor,
    r: torch.Tensor | None,
    *,
    limit: int,
    width: int,
    block: int | None,
    rule: str,
    scale: float = 0.0,
    key: Key | None = None,
):
    """(scales, packed levels), or None if not all finite.

    Levels are -limit..limit stored from zero in `width` bits; `block` elements share a scale, None
    for the whole tensor with rule 'given' and its `scale`. With rule 'power' a scale is the least
    power of two that the levels suffice for: then what was decoded is encoded without any error.
    Stochastic with a `key`, else nearest.
    """
    source = Source(x, r)
    n, dtype = source.size, source.dtype
    given = rule == "given"
    each = RUN if block is None else block
    info = np.finfo(dtype)
    # The largest scale whose product with the limit is finite, also when rounding goes up.
    ceiling = float(info.max) / limit * (1 - 4 * float(info.eps))
    if rule == "power":
        ceiling = 2.0 ** (math.frexp(ceiling)[1] - 1)
    bounds = TINY[dtype], float(info.max), ceiling
    scales = np.full(1, min(scale, ceiling), dtype) if given else np.empty(-(-n // each), dtype)
    packed = np.empty(packed_bytes(n, width), np.uint8)
    words, span = key_words(key), span_of(each, width, key is not None)

    def work(lo, hi, xs, rs):
        own = scales if given else scales[lo // each :]
        out = packed[packed_bytes(lo, width) :]
        return _encode(xs, rs, lo, own, out, each, span, limit, width, RULES[rule], bounds, words)

    tops = source.scan(work, block or SPAN)
    if not given and max(tops) >= INFINITY_BITS[dtype]:
        return None
    return torch.from_numpy(scales), torch.from_numpy(packed)


@jit
def _values(levels, limit, scale, out):
    for i in range(out.size):
        out[i] = type(scale)(np.int32(np.int32(levels[i]) - np.int32(limit))) * scale


@jit
def _add(out, mode, x, packed, scales, block, span, limit, width, weight):
    one = scales.size == 1
    levels = np.empty(min(span, out.size), np.uint8)
    values = np.empty(min(span, out.size), scales.dtype)
    for lo in range(0, out.size, span):
        count = min(span, out.size - lo)
        begin = packed_bytes(lo, width)
        unpack(packed[begin : begin + packed_bytes(count, width)], width, levels[:count])
        for b in range(0, count, block):
            e = min(b + block, count)
            scale = scales[0] if one else scales[(lo + b) // block]
            _values(levels[b:e], limit, scale, values[b:e])
        # Not for each block: to begin a loop costs as much as 200 elements of it.
        combine(out[lo : lo + count], mode, x[lo : lo + count], values[:count], weight)


def add_uniform(
    out: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    *,
    limit: int,
    width: int,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: torch.Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    o, levels, s = out.numpy(), packed.numpy(), scales.numpy()
    mode = ZERO if fresh else KEEP if plus is None else ADD
    each = RUN if block is None else block
    w, span = o.dtype.type(weight), span_of(each, width)

    def work(lo, hi, other, _):
        own = s if s.size == 1 else s[lo // each : -(-hi // each)]
        begin = packed_bytes(lo, width)
        _add(o[lo:hi], mode, other, levels[begin:], own, each, span, limit, width, w)

    Source(out if plus is None else plus).scan(work, block or SPAN)
