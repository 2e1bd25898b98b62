"""One bit per element and a pair of values per block.

One pass writes the bits and, for each tile of a block, the sums of both halves; the pairs follow
from these few numbers by the same code as in the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference.pairs import lengths_of, pairs_of
from thinwire.kernels.triton.launch import TILE, double, flag, launch, rows_of, tiles, warps
from thinwire.kernels.triton.levels import level_at
from thinwire.kernels.triton.numbers import combine, from_bits, load_sum, note_odd
from thinwire.kernels.triton.uniform import mode_of


@triton.jit(do_not_specialize=["n", "block", "parts", "unit"])
def _encode(
    x_ptr, r_ptr, sums_ptr, counts_ptr, packed_ptr, flag_ptr, n, block, parts, unit: tl.int64,
    HAS_R: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    begin = (program % parts) * LANES
    rows = (program // parts) * ROWS + tl.arange(0, ROWS)
    row = rows[:, None]
    lane = begin + tl.arange(0, LANES)[None, :]
    i = row * block + lane
    mask = (lane < block) & (i < n)
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    note_odd(flag_ptr, p)
    v = p.to(tl.float64) * from_bits(unit, tl.zeros((1,), tl.float64))
    upper = ((p >= 0) & mask).to(tl.int32)
    at = rows * parts + program % parts
    some = rows * block < n
    tl.store(sums_ptr + 2 * at, tl.sum(tl.maximum(v, 0.0), 1), mask=some)
    tl.store(sums_ptr + 2 * at + 1, tl.sum(tl.minimum(v, 0.0), 1), mask=some)
    tl.store(counts_ptr + at, tl.sum(upper, 1).to(tl.int64), mask=some)
    bits = tl.reshape(upper, (ROWS, LANES // 8, 8)) << tl.arange(0, 8)[None, None, :]
    lane = begin // 8 + tl.arange(0, LANES // 8)[None, :]
    byte = row * (block // 8) + lane
    mask = (lane < (block + 7) // 8) & (byte < (n + 7) // 8) & some[:, None]
    tl.store(packed_ptr + byte, tl.sum(bits, 2).to(tl.uint8), mask=mask)


def split(block: int) -> tuple[int, int, int]:
    """(rows, lanes, parts) of tiles for blocks of any length: several blocks to a tile, or several
    tiles (parts) to a block."""
    if block <= TILE:
        return *rows_of(block), 1
    return 1, TILE, tiles(block)


def unit_of(x: Tensor) -> float:
    """Sums of float32 in float64 cannot overflow; those of float64 have a small exact unit."""
    return 1.0 if x.dtype == torch.float32 else 2.0 ** -x.numel().bit_length()


def encode_pairs(
    x: Tensor, r: Tensor | None, *, block: int | None, scaled: bool
) -> tuple[Tensor, Tensor] | None:
    """(pairs, packed signs), or None if not all finite."""
    n, each = x.numel(), block or x.numel()
    rows, lanes, parts = split(each)
    count = -(-n // each)
    unit = unit_of(x)
    sums = torch.empty((count, parts, 2), dtype=torch.float64, device=x.device)
    counts = torch.empty((count, parts), dtype=torch.int64, device=x.device)
    packed = torch.empty(-(-n // 8), dtype=torch.uint8, device=x.device)
    odd = flag(x)
    launch(
        _encode, tiles(count, rows) * parts, x, x if r is None else r, sums, counts, packed, odd, n,
        each, parts, double(unit), HAS_R=r is not None, ROWS=rows, LANES=lanes,
        num_warps=warps(rows * lanes),
    )  # fmt: skip
    if bool(odd):
        return None
    above, below = sums.sum(1).unbind(1)
    pairs = pairs_of(above, below, counts.sum(1), lengths_of(n, each, x.device), unit, scaled)
    return pairs.to(x.dtype), packed


@triton.jit(do_not_specialize=["n", "block", "weight"])
def _add(
    out_ptr, plus_ptr, packed_ptr, pairs_ptr, n, block, weight: tl.int64,
    MODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    bit = level_at(packed_ptr, i, mask, 1)
    value = tl.load(pairs_ptr + 2 * (i // block) + bit, mask=mask, other=0.0)
    combine(out_ptr, plus_ptr, i, mask, value, weight, MODE)


def add_pairs(
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
