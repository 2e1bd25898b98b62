"""Uniform quantisation around zero: value = (level - limit) * scale, one scale a block.

Blocks of up to 4096 elements: one pass, several blocks to a program, which finds the scale, rounds
and packs what it holds in registers. Longer ones get their scales from the reference, in a pass of
their own.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.sum import blocks, total
from thinwire.kernels.reference.uniform import TINY, highest_scale
from thinwire.kernels.reference.uniform import scales_of as reference_scales
from thinwire.kernels.triton.launch import (
    MOST,
    TILE,
    double,
    flag,
    launch,
    rows_of,
    tiles,
    warps,
)
from thinwire.kernels.triton.levels import digit, level_at, store_levels
from thinwire.kernels.triton.numbers import (
    ADD,
    KEEP,
    ZERO,
    combine,
    divide,
    from_bits,
    load_sum,
    note_odd,
    power_above,
    rint,
)
from thinwire.kernels.triton.random import group_keys, word_at

PEAK, NORM, POWER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RULES = {"max": 0, "l2": 1, "power": 2}
TRITS = 0


@triton.jit
def _levels(p, inverse, limit, keys_ptr, i, mask, HAS_KEY: tl.constexpr):
    """Levels from zero, as int32; zero outside the mask."""
    edge = tl.full((1,), limit, tl.int32).to(p.dtype)
    v = tl.minimum(tl.maximum(p * inverse, -edge), edge)
    if HAS_KEY:
        u = (word_at(keys_ptr, i, mask) >> 8).to(tl.int32).to(p.dtype) * 5.9604644775390625e-08
        down = tl.floor(v)
        level = down.to(tl.int32) + (u < v - down).to(tl.int32)
    else:
        level = rint(v).to(tl.int32)
    return tl.where(mask, level + limit, 0)


@triton.jit
def _scale(p, limit, tiny, highest, ceiling, RULE: tl.constexpr):
    """The scale of each row and what to multiply by to get levels, zero for tiny rows."""
    peak = tl.max(tl.abs(p), 1)
    small = peak < from_bits(tiny, peak)
    one = tl.full((1,), 1, tl.int32).to(peak.dtype)
    edge = tl.full((1,), limit, tl.int32).to(peak.dtype) + tl.zeros_like(peak)
    peak = tl.where(small, one, peak)
    if RULE == PEAK:
        scale = tl.minimum(divide(peak, edge), from_bits(ceiling, peak))
        inverse = divide(edge, peak)
    elif RULE == POWER:
        scale = tl.minimum(power_above(divide(peak, edge)), from_bits(ceiling, peak))
        inverse = divide(one + tl.zeros_like(scale), scale)
    else:
        wide = peak.to(tl.float64)
        v = p.to(tl.float64)
        if p.dtype == tl.float64:  # whose squares may leave the range
            v = v * (1.0 / wide)[:, None]
            norm = wide * tl.sqrt(tl.sum(v * v, 1))
        else:
            norm = tl.sqrt(tl.sum(v * v, 1))
        norm = tl.minimum(norm, from_bits(highest, norm))
        norm = tl.where(small, 1.0, norm)
        scale = tl.minimum((norm / edge.to(tl.float64)).to(peak.dtype), from_bits(ceiling, peak))
        inverse = (edge.to(tl.float64) / norm).to(peak.dtype)
    return tl.where(small, 0.0, scale), tl.where(small, 0.0, inverse)


@triton.jit(do_not_specialize=["block", "n", "limit", "tiny", "highest", "ceiling"])
def _encode_blocks(
    x_ptr, r_ptr, keys_ptr, scales_ptr, packed_ptr, flag_ptr, n, block, limit, tiny: tl.int64,
    highest: tl.int64, ceiling: tl.int64, HAS_R: tl.constexpr, HAS_KEY: tl.constexpr,
    RULE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    i = row * block + lane
    mask = (lane < block) & (i < n)
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    note_odd(flag_ptr, p)
    scale, inverse = _scale(p, limit, tiny, highest, ceiling, RULE)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(scales_ptr + rows, scale, mask=rows * block < n)
    levels = _levels(p, inverse[:, None], limit, keys_ptr, i, mask, HAS_KEY)
    store_levels(packed_ptr, levels, row, block, n, WIDTH)


@triton.jit(do_not_specialize=["block", "n", "limit"])
def _encode_flat(
    x_ptr, r_ptr, keys_ptr, inverses_ptr, packed_ptr, n, block, limit,
    HAS_R: tl.constexpr, HAS_KEY: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    i = row * TILE + tl.arange(0, TILE)[None, :]
    mask = i < n
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    inverse = tl.load(inverses_ptr + i // block, mask=mask, other=0.0)
    levels = _levels(p, inverse, limit, keys_ptr, i, mask, HAS_KEY)
    store_levels(packed_ptr, levels, row, TILE, n, WIDTH)


@triton.jit(do_not_specialize=["n"])
def _encode_trits(
    x_ptr, r_ptr, keys_ptr, inverse_ptr, packed_ptr, n,
    HAS_R: tl.constexpr, HAS_KEY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, 8)[None, :]
    i = byte[:, None] * 5 + place
    mask = (place < 5) & (i < n)
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    levels = _levels(p, tl.load(inverse_ptr), 1, keys_ptr, i, mask, HAS_KEY)
    packed = tl.sum(levels * digit(place), 1)
    tl.store(packed_ptr + byte, packed.to(tl.uint8), mask=byte * 5 < n)


def packed_bytes(n: int, width: int) -> int:
    """Of n levels; width 0 is five to a byte."""
    return -(-n // 5) if width == TRITS else -(-n * width // 8)


def encode_uniform(
    x: Tensor,
    r: Tensor | None,
    *,
    limit: int,
    width: int,
    block: int | None,
    rule: str,
    scale: float = 0.0,
    key: Key | None = None,
) -> tuple[Tensor, Tensor] | None:
    """(scales, packed levels), or None if not all finite."""
    n, dtype = x.numel(), x.dtype
    other = x if r is None else r
    packed = torch.empty(packed_bytes(n, width), dtype=torch.uint8, device=x.device)
    keys = group_keys(n, key, x)
    flags = {"HAS_R": r is not None, "HAS_KEY": key is not None}
    if rule != "given" and block is not None and block <= MOST:
        ceiling = highest_scale(dtype, limit)
        if rule == "power":
            ceiling = 2.0 ** (math.frexp(ceiling)[1] - 1)
        bounds = map(double, (TINY[dtype], torch.finfo(dtype).max, ceiling))
        scales = torch.empty(-(-n // block), dtype=dtype, device=x.device)
        odd = flag(x)
        rows, lanes = rows_of(block)
        launch(
            _encode_blocks, tiles(scales.numel(), rows), x, other, keys, scales, packed, odd, n,
            block, limit, *bounds, **flags, RULE=RULES[rule], WIDTH=width, ROWS=rows, LANES=lanes,
            num_warps=warps(rows * lanes),
        )  # fmt: skip
        return None if bool(odd) else (scales, packed)
    if rule == "given":
        scale = min(scale, highest_scale(dtype, limit))
        scales = torch.full((1,), scale, dtype=dtype, device=x.device)
        inverses, each = torch.where(scales > 0, 1 / scales, 0), n
    else:
        p = total(x, r)
        if not bool(torch.isfinite(p).all()):
            return None
        each = block or n
        scales, inverses = reference_scales(blocks(p, each), limit, rule)
    if width == TRITS:
        launch(
            _encode_trits, tiles(packed.numel(), 256), x, other, keys, inverses, packed, n, **flags,
            TILE=256,
        )  # fmt: skip
    else:
        launch(
            _encode_flat, tiles(n), x, other, keys, inverses, packed, n, each, limit, **flags,
            WIDTH=width, TILE=TILE,
        )  # fmt: skip
    return scales, packed


@triton.jit(do_not_specialize=["block", "n", "limit", "weight"])
def _add(
    out_ptr, plus_ptr, packed_ptr, scales_ptr, n, block, limit, weight: tl.int64,
    WIDTH: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    scale = tl.load(scales_ptr + i // block, mask=mask, other=0.0)
    level = level_at(packed_ptr, i, mask, WIDTH) - limit
    combine(out_ptr, plus_ptr, i, mask, level.to(scale.dtype) * scale, weight, MODE)


def mode_of(fresh: bool, plus: Tensor | None) -> int:
    """What an add kernel does to its output first."""
    mode: int = (ZERO if fresh else KEEP if plus is None else ADD).value
    return mode


def add_uniform(
    out: Tensor,
    packed: Tensor,
    scales: Tensor,
    *,
    limit: int,
    width: int,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    n = out.numel()
    launch(
        _add, tiles(n), out, out if plus is None else plus, packed, scales, n, block or n, limit,
        double(weight), WIDTH=width, MODE=mode_of(fresh, plus), TILE=TILE,
    )  # fmt: skip
