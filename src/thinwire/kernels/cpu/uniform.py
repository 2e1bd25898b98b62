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
    magnitude,
    power_above,
)
from thinwire.kernels.cpu.levels import pack, packed_bytes, unpack
from thinwire.kernels.cpu.random import GROUP, group_keys, key_words, word_of
from thinwire.kernels.cpu.source import Source
from thinwire.kernels.cpu.vectors import (
    WORD,
    load_peak,
    load_sum_peak,
    nearest,
    squares,
    stochastic,
)
from thinwire.kernels.key import Key

RUN = 512  # elements handled at once when one scale serves the whole tensor
SPAN = 5120  # elements handled at once, in the cache; a multiple of 5, 8 and 512
TINY = {np.dtype(np.float32): 2.0**-118, np.dtype(np.float64): 2.0**-800}
PEAK, NORM, GIVEN, POWER = 0, 1, 2, 3
RULES = {"max": PEAK, "l2": NORM, "given": GIVEN, "power": POWER}


def span_of(block: int, most: int = SPAN) -> int:
    """Elements handled at once: whole blocks, whole bytes."""
    return block * max(1, most // block)


@jit
def _load(x, r, lo, buffer, begin, end, to):
    """buffer[to + i] = x + r of element lo + i, for i from begin to end; return the bits of the
    largest magnitude."""
    top, at = magnitude(x.dtype.type(0)), begin
    while at + WORD <= end:
        if r.size:
            top = max(top, load_sum_peak(x, r, lo + at, buffer, to + at))
        else:
            top = max(top, load_peak(x, lo + at, buffer, to + at))
        at += WORD
    own, other = x[lo + at : lo + end], r[lo + at : lo + end]
    out = buffer[to + at : to + end]
    for i in range(own.size):
        p = own[i] + other[i] if r.size else own[i]
        out[i] = p
        top = max(top, magnitude(p))
    return top


@jit
def _square(buffer, begin, end, peak):
    """The sum of squares in units of the largest magnitude, so that none overflows; always added in
    the same order."""
    if not peak > 0:
        return 0.0
    unit, total, at = 1.0 / np.float64(peak), 0.0, begin
    while at + WORD <= end:
        total += squares(buffer, at, unit)
        at += WORD
    for p in buffer[at:end]:
        total += (np.float64(p) * unit) ** 2
    return total


@jit
def _clamp(v, edge):
    v = edge if v > edge else v
    return -edge if v < -edge else v


@jit
def _nearest(buffer, inverse, limit, levels):
    edge = buffer.dtype.type(limit)
    for i in range(buffer.size):
        v = _clamp(buffer[i] * inverse, edge)
        levels[i] = np.uint8(np.int32(np.int32(np.rint(v)) + limit))


@jit
def _stochastic(buffer, inverse, limit, index, keys, levels):
    edge = buffer.dtype.type(limit)
    unit = buffer.dtype.type(2.0**-24)
    for i in range(buffer.size):
        v = _clamp(buffer[i] * inverse, edge)
        down = np.floor(v)
        word = word_of(np.int32(index + i), keys)
        u = buffer.dtype.type(np.int32(word >> np.uint32(8))) * unit
        level = np.int32(np.int32(down) + limit)
        levels[i] = np.uint8(np.int32(level + np.int32(u < v - down)))


@jit
def _scale(peak, square, limit, rule, tiny, highest, ceiling):
    """(scale, what to multiply by for levels) of a block with this largest magnitude, and with this
    sum of squares in units of it."""
    real = type(peak)
    if not peak >= tiny:  # NaN is not
        return real(0), real(0)
    if rule == PEAK:
        return min(peak / real(limit), ceiling), real(limit) / peak
    if rule == POWER:
        scale = min(power_above(peak / real(limit)), ceiling)
        return scale, real(1) / scale
    # Any bound of all magnitudes is a valid norm, so one that overflows is cut.
    norm = min(np.float64(peak) * np.sqrt(square), highest)
    return min(real(norm / limit), ceiling), real(limit / norm)


@jit
def _encode(x, r, first, scales, packed, block, span, limit, width, rule, bounds, key):
    """Quantise one range; return the largest magnitude's bits.

    While a block is rounded the next one is loaded, so that arithmetic hides behind memory. Measure
    before you shorten it: with the loads in a function of their own it took half as long again.
    """
    size = min(block, x.size)
    buffer = np.empty(2 * size, x.dtype)
    levels = np.empty(min(span, x.size), np.uint8)
    real, edge = x.dtype.type, np.int32(limit)
    tiny, highest, ceiling = real(bounds[0]), bounds[1], real(bounds[2])
    group, keys = -1, (np.uint32(0), np.uint32(0), np.uint32(0))
    own, other = 0, size  # where in the buffer this block begins, and the next
    bits = _load(x, r, 0, buffer, 0, size, own)
    top = bits
    for lo in range(0, x.size, span):
        count = min(span, x.size - lo)
        for b in range(0, count, block):
            n = min(block, count - b)
            if rule == GIVEN:
                scale = scales[0]
                inverse = real(1) / scale if scale > 0 else real(0)
            else:
                peak = from_magnitude(bits, real(0))
                square = _square(buffer, own, own + n, peak) if rule == NORM else 0.0
                scale, inverse = _scale(peak, square, limit, rule, tiny, highest, ceiling)
                scales[(lo + b) // block] = scale
            following = lo + b + n
            left, loaded = min(size, x.size - following), 0
            bits = magnitude(real(0))
            i = 0
            while i < n:
                index, stop = 0, n
                if key.size:  # as far as the group goes
                    number = first + lo + b + i
                    index = number % GROUP
                    stop = min(n, i + GROUP - index)
                    if number // GROUP != group:
                        group = number // GROUP
                        keys = group_keys(group, key)
                begin = i
                while i + WORD <= stop:
                    if key.size:
                        at = index + i - begin
                        stochastic(buffer, own + i, inverse, edge, at, keys, levels, b + i)
                    else:
                        nearest(buffer, own + i, inverse, edge, levels, b + i)
                    i += WORD
                    if loaded + WORD <= left:
                        at, to = following + loaded, other + loaded
                        if r.size:
                            bits = max(bits, load_sum_peak(x, r, at, buffer, to))
                        else:
                            bits = max(bits, load_peak(x, at, buffer, to))
                        loaded += WORD
                if i < stop:
                    rest, out = buffer[own + i : own + stop], levels[b + i : b + stop]
                    if key.size:
                        _stochastic(rest, inverse, edge, index + i - begin, keys, out)
                    else:
                        _nearest(rest, inverse, edge, out)
                i = stop
            if loaded < left:
                bits = max(bits, _load(x, r, following, buffer, loaded, left, other))
            top = max(top, bits)
            own, other = other, own
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
    words, span = key_words(key), span_of(each)

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
    w, span = o.dtype.type(weight), span_of(each)

    def work(lo, hi, other, _):
        own = s if s.size == 1 else s[lo // each : -(-hi // each)]
        begin = packed_bytes(lo, width)
        _add(o[lo:hi], mode, other, levels[begin:], own, each, span, limit, width, w)

    Source(out if plus is None else plus).scan(work, block or SPAN)
