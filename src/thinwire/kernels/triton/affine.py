"""Affine quantisation: value = level * scale + low; float64 on halved numbers, as the reference.

Blocks of up to 4096 elements take one pass. For longer ones, and for a whole tensor, extent and
scales come first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.affine import scales_between
from thinwire.kernels.reference.sum import blocks, total
from thinwire.kernels.reference.uniform import TINY
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
from thinwire.kernels.triton.levels import level_at, store_levels
from thinwire.kernels.triton.numbers import combine, from_bits, load_sum, note_odd, rint
from thinwire.kernels.triton.random import group_keys, word_at
from thinwire.kernels.triton.uniform import mode_of, packed_bytes


@triton.jit
def _levels(p, low, inverse, keys_ptr, i, mask, TOP: tl.constexpr, HAS_KEY: tl.constexpr):
    """Levels as int32; zero outside the mask."""
    v = (0.5 * p.to(tl.float64) - 0.5 * low.to(tl.float64)) * inverse
    v = tl.minimum(tl.maximum(v, 0.0), TOP)
    if HAS_KEY:
        u = (word_at(keys_ptr, i, mask) >> 8).to(tl.int32).to(tl.float64) * 5.9604644775390625e-08
        down = tl.floor(v)
        level = down.to(tl.int32) + (u < v - down).to(tl.int32)
    else:
        level = rint(v).to(tl.int32)
    return tl.where(mask, level, 0)


@triton.jit(do_not_specialize=["block", "n", "tiny", "largest", "margin"])
def _encode_blocks(
    x_ptr, r_ptr, keys_ptr, lows_ptr, scales_ptr, packed_ptr, flag_ptr, n, block, tiny: tl.int64,
    largest: tl.int64, margin: tl.int64, HAS_R: tl.constexpr, HAS_KEY: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = (1 << WIDTH) - 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    i = row * block + lane
    mask = (lane < block) & (i < n)
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    note_odd(flag_ptr, p)
    here = mask | (i >= n) & (lane == 0)  # rows behind the last have a number to compute with
    low = tl.min(tl.where(here, p, float("inf")), 1)
    high = tl.max(tl.where(here, p, float("-inf")), 1)
    half = 0.5 * high.to(tl.float64) - 0.5 * low.to(tl.float64)
    room = 0.5 * from_bits(largest, half) - 0.5 * low.to(tl.float64)
    half = tl.minimum(half, room * from_bits(margin, half))
    scale = 2.0 * (half / (tl.zeros_like(half) + TOP))
    scale = tl.where(half >= from_bits(tiny, half), scale, 0.0).to(low.dtype)
    unit = 0.5 * scale.to(tl.float64)
    some = unit > 0
    inverse = tl.where(some, 1.0 / tl.where(some, unit, 1.0), 0.0)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(lows_ptr + rows, low, mask=rows * block < n)
    tl.store(scales_ptr + rows, scale, mask=rows * block < n)
    levels = _levels(p, low[:, None], inverse[:, None], keys_ptr, i, mask, TOP, HAS_KEY)
    store_levels(packed_ptr, levels, row, block, n, WIDTH)


@triton.jit(do_not_specialize=["block", "n"])
def _encode_flat(
    x_ptr, r_ptr, keys_ptr, lows_ptr, inverses_ptr, packed_ptr, n, block,
    HAS_R: tl.constexpr, HAS_KEY: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = (1 << WIDTH) - 1
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    i = row * TILE + tl.arange(0, TILE)[None, :]
    mask = i < n
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    low = tl.load(lows_ptr + i // block, mask=mask, other=0.0)
    inverse = tl.load(inverses_ptr + i // block, mask=mask, other=0.0)
    levels = _levels(p, low, inverse, keys_ptr, i, mask, TOP, HAS_KEY)
    store_levels(packed_ptr, levels, row, TILE, n, WIDTH)


def encode_affine(
    x: Tensor,
    r: Tensor | None,
    *,
    width: int,
    block: int | None,
    extent: tuple[float, float] | None = None,
    key: Key | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(lows, scales, packed levels), or None if not all finite."""
    n, dtype = x.numel(), x.dtype
    other = x if r is None else r
    packed = torch.empty(packed_bytes(n, width), dtype=torch.uint8, device=x.device)
    keys = group_keys(n, key, x)
    flags = {"HAS_R": r is not None, "HAS_KEY": key is not None, "WIDTH": width}
    if extent is None and block is not None and block <= MOST:
        info = torch.finfo(dtype)
        bounds = map(double, (TINY[dtype], info.max, 1 - 4 * info.eps))
        count = -(-n // block)
        lows = torch.empty(count, dtype=dtype, device=x.device)
        scales = torch.empty_like(lows)
        odd = flag(x)
        rows, lanes = rows_of(block)
        launch(
            _encode_blocks, tiles(count, rows), x, other, keys, lows, scales, packed, odd, n, block,
            *bounds, **flags, ROWS=rows, LANES=lanes, num_warps=warps(rows * lanes),
        )  # fmt: skip
        return None if bool(odd) else (lows, scales, packed)
    if extent is None:
        p = total(x, r)
        if not bool(torch.isfinite(p).all()):
            return None
        each = block or n
        lows, highs = torch.aminmax(blocks(p, each, fill=p[-1].item()), dim=1)
    else:
        each = n
        lows, highs = (torch.full((1,), end, dtype=dtype, device=x.device) for end in extent)
    scales, inverses = scales_between(lows, highs, (1 << width) - 1)
    launch(
        _encode_flat, tiles(n), x, other, keys, lows, inverses, packed, n, each, **flags, TILE=TILE
    )
    return lows, scales, packed


@triton.jit(do_not_specialize=["block", "n", "weight"])
def _add(
    out_ptr, plus_ptr, packed_ptr, lows_ptr, scales_ptr, n, block, weight: tl.int64,
    WIDTH: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    scale = tl.load(scales_ptr + i // block, mask=mask, other=0.0)
    low = tl.load(lows_ptr + i // block, mask=mask, other=0.0)
    level = level_at(packed_ptr, i, mask, WIDTH).to(tl.float64)
    v = level * (0.5 * scale.to(tl.float64)) + 0.5 * low.to(tl.float64)
    combine(out_ptr, plus_ptr, i, mask, (2.0 * v).to(scale.dtype), weight, MODE)


def add_affine(
    out: Tensor,
    packed: Tensor,
    lows: Tensor,
    scales: Tensor,
    *,
    width: int,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    n = out.numel()
    launch(
        _add, tiles(n), out, out if plus is None else plus, packed, lows, scales, n, block or n,
        double(weight), WIDTH=width, MODE=mode_of(fresh, plus), TILE=TILE,
    )  # fmt: skip
