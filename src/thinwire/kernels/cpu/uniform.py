"""Uniform quantisation around zero: value = (level - limit) * scale, one scale a block.

Serves Quantize (nearest or stochastic, scale from the largest magnitude), QSGD (stochastic, scale
from the norm) and TernGrad (stochastic, scale given, limit 1).
"""

import numpy as np
import torch

from thinwire.kernels.cpu import threads
from thinwire.kernels.cpu.jit import (
    ADD,
    INFINITY_BITS,
    KEEP,
    ZERO,
    from_magnitude,
    jit,
    load,
    magnitude,
    start,
    sum_jit,
)
from thinwire.kernels.cpu.levels import bytes_before, pack, packed_bytes, unpack
from thinwire.kernels.cpu.random import fill, key_words
from thinwire.kernels.cpu.sparse import arrays, part
from thinwire.kernels.key import Key

SPAN = 5120  # elements handled at once, in the cache; a multiple of 5, 8 and 512
TINY = {np.dtype(np.float32): 2.0**-118, np.dtype(np.float64): 2.0**-800}
PEAK, NORM, GIVEN = 0, 1, 2
RULES = {"max": PEAK, "l2": NORM, "given": GIVEN}


@jit
def _peak(buffer, lo, hi):
    top = magnitude(buffer[lo])
    for i in range(lo, hi):
        top = max(top, magnitude(buffer[i]))
    return top


@sum_jit
def _squares(buffer, lo, hi, unit):
    total = 0.0
    for i in range(lo, hi):
        v = np.float64(buffer[i]) * unit
        total += v * v
    return total


@jit
def _norm(buffer, lo, hi, peak, highest):
    """The L2 norm, at most the largest finite number (any bound of all |v| is a valid scale)."""
    wide = np.float64(peak)
    return min(wide * np.sqrt(_squares(buffer, lo, hi, 1.0 / wide)), highest)


@jit
def _nearest(buffer, lo, hi, inverse, limit, levels):
    edge = buffer.dtype.type(limit)
    for i in range(lo, hi):
        v = min(max(buffer[i] * inverse, -edge), edge)
        levels[i] = np.uint8(np.int32(np.rint(v)) + limit)


@jit
def _stochastic(buffer, lo, hi, inverse, limit, words, at, levels):
    edge = buffer.dtype.type(limit)
    unit = buffer.dtype.type(2.0**-24)
    for i in range(lo, hi):
        v = min(max(buffer[i] * inverse, -edge), edge)
        down = np.floor(v)
        u = buffer.dtype.type(words[at + i] >> np.uint32(8)) * unit
        levels[i] = np.uint8(np.int32(down) + np.int32(u < v - down) + limit)


@jit
def _encode(x, r, first, scales, packed, block, limit, width, rule, tiny, highest, key):
    """Quantise one range; return the largest magnitude's bits."""
    span = block * max(1, SPAN // block)
    buffer = np.empty(min(span, x.size), x.dtype)
    levels = np.empty(span, np.uint8)
    words = np.empty(0 if key is None else span + 1024, np.uint32)
    real = x.dtype.type
    top = magnitude(real(0))
    for lo in range(0, x.size, span):
        count = min(span, x.size - lo)
        load(x, r, lo, count, buffer)
        at = 0
        if key is not None:
            at = fill(first + lo, count, key, words)
        for b in range(0, count, block):
            e = min(b + block, count)
            if rule == GIVEN:
                scale = scales[0]
                inverse = real(1) / scale if scale > 0 else real(0)
            else:
                bits = _peak(buffer, b, e)
                top = max(top, bits)
                peak = from_magnitude(bits, real(0))
                scale, inverse = real(0), real(0)
                if peak >= tiny:
                    if rule == PEAK:
                        scale = peak / real(limit)
                        inverse = real(limit) / peak
                    else:
                        norm = _norm(buffer, b, e, peak, highest)
                        scale = real(norm / limit)
                        inverse = real(limit / norm)
                scales[(lo + b) // block] = scale
            if key is None:
                _nearest(buffer, b, e, inverse, limit, levels)
            else:
                _stochastic(buffer, b, e, inverse, limit, words, at, levels)
        pack(levels, count, width, packed, bytes_before(lo, width))
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
    for the whole tensor with rule 'given' and its `scale`. Stochastic with a `key`, else nearest.
    """
    xs, rs = arrays(x, r)
    n = xs.size
    given = rule == "given"
    each = SPAN if block is None else block
    scales = np.full(1, scale, xs.dtype) if given else np.empty(-(-n // each), xs.dtype)
    packed = np.empty(packed_bytes(n, width), np.uint8)
    words = None if key is None else key_words(key)
    tiny, highest = xs.dtype.type(TINY[xs.dtype]), float(np.finfo(xs.dtype).max)

    def work(lo, hi):
        own = scales if given else scales[lo // each :]
        out = packed[packed_bytes(lo, width) :]
        return _encode(
            xs[lo:hi], part(rs, lo, hi), lo, own, out, each, limit, width, RULES[rule], tiny,
            highest, words,
        )  # fmt: skip

    tops = threads.run(work, threads.ranges(n, each))
    if not given and max(tops) >= INFINITY_BITS[xs.dtype]:
        return None
    return torch.from_numpy(scales), torch.from_numpy(packed)


@jit
def _add(out, mode, x, packed, scales, block, limit, width, weight):
    one = scales.size == 1
    span = block * max(1, SPAN // block)
    levels = np.empty(span, np.uint8)
    real = scales.dtype.type
    for lo in range(0, out.size, span):
        count = min(span, out.size - lo)
        start(out, lo, count, mode, x)
        unpack(packed, bytes_before(lo, width), count, width, levels)
        for b in range(0, count, block):
            scale = scales[0] if one else scales[(lo + b) // block]
            for i in range(b, min(b + block, count)):
                v = real(np.int32(levels[i]) - limit) * scale
                out[lo + i] += weight * v


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
    other = o if plus is None else plus.numpy()
    mode = ZERO if fresh else KEEP if plus is None else ADD
    each = SPAN if block is None else block
    w = o.dtype.type(weight)

    def work(lo, hi):
        own = s if s.size == 1 else s[lo // each : -(-hi // each)]
        _add(
            o[lo:hi],
            mode,
            other[lo:hi],
            levels[packed_bytes(lo, width) :],
            own,
            each,
            limit,
            width,
            w,
        )

    threads.run(work, threads.ranges(o.size, each))
