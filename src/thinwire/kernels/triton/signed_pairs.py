"""A sign and one of two magnitudes for each element.

The limit between the magnitudes is their mean. A program that holds whole blocks finds it itself,
in one pass; for longer blocks the sums come first, in a pass of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference.pairs import lengths_of
from thinwire.kernels.triton.launch import TILE, double, flag, launch, tiles, warps
from thinwire.kernels.triton.levels import level_at
from thinwire.kernels.triton.numbers import combine, from_bits, load_sum, note_odd
from thinwire.kernels.triton.pairs import split, unit_of
from thinwire.kernels.triton.uniform import mode_of


@triton.jit(do_not_specialize=["n", "unit"])
def _sum_sizes(
    x_ptr, r_ptr, sums_ptr, flag_ptr, n, block, parts, unit: tl.int64,
    HAS_R: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    lane = (program % parts) * LANES + tl.arange(0, LANES)
    i = (program // parts) * block + lane
    p = load_sum(x_ptr, r_ptr, i, (lane < block) & (i < n), HAS_R)
    note_odd(flag_ptr, p)
    v = tl.abs(p).to(tl.float64) * from_bits(unit, tl.zeros((1,), tl.float64))
    tl.store(sums_ptr + program, tl.sum(v))


@triton.jit(do_not_specialize=["n", "block", "parts", "unit"])
def _encode(
    x_ptr, r_ptr, limits_ptr, sums_ptr, counts_ptr, packed_ptr, flag_ptr, n, block, parts,
    unit: tl.int64, HAS_R: tl.constexpr, GIVEN: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    begin = (program % parts) * LANES
    rows = (program // parts) * ROWS + tl.arange(0, ROWS)
    row = rows[:, None]
    lane = begin + tl.arange(0, LANES)[None, :]
    i = row * block + lane
    mask = (lane < block) & (i < n)
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    size = tl.abs(p)
    one = from_bits(unit, tl.zeros((1,), tl.float64))
    v = size.to(tl.float64) * one
    some = rows * block < n
    if GIVEN:
        limit = tl.load(limits_ptr + rows, mask=some, other=0.0)
    else:
        note_odd(flag_ptr, p)
        length = tl.maximum(tl.minimum(n - rows * block, block), 1).to(tl.float64)
        limit = (tl.sum(v, 1) / length / one).to(p.dtype)
    large = (size > limit[:, None]) & mask
    at = rows * parts + program % parts
    tl.store(sums_ptr + 2 * at, tl.sum(tl.where(large, 0.0, v), 1), mask=some)
    tl.store(sums_ptr + 2 * at + 1, tl.sum(tl.where(large, v, 0.0), 1), mask=some)
    tl.store(counts_ptr + at, tl.sum(large.to(tl.int64), 1), mask=some)
    level = ((p < 0) & mask).to(tl.int32) | (large.to(tl.int32) << 1)
    bits = tl.reshape(level, (ROWS, LANES // 4, 4)) << (2 * tl.arange(0, 4))[None, None, :]
    lane = begin // 4 + tl.arange(0, LANES // 4)[None, :]
    byte = row * (block // 4) + lane
    mask = (lane < (block + 3) // 4) & (byte < (n + 3) // 4) & some[:, None]
    tl.store(packed_ptr + byte, tl.sum(bits, 2).to(tl.uint8), mask=mask)


def encode_signed_pairs(
    x: Tensor, r: Tensor | None, *, block: int | None
) -> tuple[Tensor, Tensor] | None:
    """(pairs, packed levels), or None if not all finite."""
    n, each = x.numel(), block or x.numel()
    other, has_r = x if r is None else r, r is not None
    rows, lanes, parts = split(each)
    count = -(-n // each)
    unit = unit_of(x)
    lengths = lengths_of(n, each, x.device)
    sums = torch.empty((count, parts, 2), dtype=torch.float64, device=x.device)
    counts = torch.empty((count, parts), dtype=torch.int64, device=x.device)
    packed = torch.empty(-(-n // 4), dtype=torch.uint8, device=x.device)
    odd, limits = flag(x), x
    if parts > 1:
        launch(
            _sum_sizes, count * parts, x, other, sums, odd, n, each, parts, double(unit),
            HAS_R=has_r, LANES=lanes,
        )  # fmt: skip
        totals = sums.flatten()[: count * parts].view(count, parts).sum(1)
        limits = (totals / lengths / unit).to(x.dtype)
    launch(
        _encode, tiles(count, rows) * parts, x, other, limits, sums, counts, packed, odd, n, each,
        parts, double(unit), HAS_R=has_r, GIVEN=parts > 1, ROWS=rows, LANES=lanes,
        num_warps=warps(rows * lanes),
    )  # fmt: skip
    if bool(odd):
        return None
    below, above = sums.sum(1).unbind(1)
    large = counts.sum(1)
    low = below / (lengths - large).clamp_min(1) / unit
    high = above / large.clamp_min(1) / unit
    return torch.stack([low, high], 1).to(x.dtype), packed


@triton.jit(do_not_specialize=["n", "block", "weight"])
def _add(
    out_ptr, plus_ptr, packed_ptr, pairs_ptr, n, block, weight: tl.int64,
    MODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    level = level_at(packed_ptr, i, mask, 2)
    size = tl.load(pairs_ptr + 2 * (i // block) + (level >> 1), mask=mask, other=0.0)
    combine(out_ptr, plus_ptr, i, mask, tl.where((level & 1) != 0, -size, size), weight, MODE)


def add_signed_pairs(
    out: Tensor,
    packed: Tensor,
    pairs: Tensor,
    *,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    n = out.numel()
    launch(
        _add, tiles(n), out, out if plus is None else plus, packed, pairs.contiguous(), n,
        block or n, double(weight), MODE=mode_of(fresh, plus), TILE=TILE,
    )  # fmt: skip
