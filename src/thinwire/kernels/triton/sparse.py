"""Choosing positions and moving values to and from them.

Top-K, exact, without sorting the tensor: a sample brackets the k-th magnitude from below; one pass
collects all candidates above the bracket, each program into slots of its own; the slots are closed
up; and among the candidates, a little more than k, the choice is exact. When the sample misleads
(too few candidates, or more than there are slots: constant tensors, mostly zero ones), and for
small tensors, the reference chooses.

Of each chunk of a tensor: a program holds whole chunks and finds the k-th magnitude bit by bit,
from the highest, by counting how many reach it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import sparse as reference
from thinwire.kernels.reference.sparse import Chosen, index_dtype
from thinwire.kernels.reference.sum import begin
from thinwire.kernels.triton.compact import write_found
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
from thinwire.kernels.triton.numbers import (
    divide,
    from_bits,
    is_odd,
    load_sum,
    magnitude,
    note_odd,
)
from thinwire.kernels.triton.statistics import odd_flag

SMALL = 1 << 13  # elements: below, the reference takes fewer launches
FEW, MANY = 1 << 10, 1 << 15  # samples, of tensors of less and of at least so many elements:
LARGE = 1 << 18
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@triton.jit(do_not_specialize=["stride", "count"])
def _sample(x_ptr, r_ptr, out_ptr, stride, count, HAS_R: tl.constexpr, TILE: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    # A hashed offset within each stride, so that no period of the data can hide from it.
    h = ((j + 1) * 0x9E3779B1) & 0xFFFFFFFF
    i = j * stride + ((h ^ (h >> 15)) * 0x7FEB352D & 0x7FFFFFFF) % stride
    mask = j < count
    tl.store(out_ptr + j, magnitude(load_sum(x_ptr, r_ptr, i, mask, HAS_R)), mask=mask)


@triton.jit(do_not_specialize=["n"])
def _collect(
    x_ptr, r_ptr, bound_ptr, positions_ptr, values_ptr, counts_ptr, flag_ptr, n,
    HAS_R: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    mask = i < n
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    note_odd(flag_ptr, p)
    found = (magnitude(p) >= tl.load(bound_ptr)) & mask
    place = tl.cumsum(found.to(tl.int32), 0) - 1
    at = program * SLOTS + place
    keep = found & (place < SLOTS)
    tl.store(positions_ptr + at, i.to(positions_ptr.dtype.element_ty), mask=keep)
    tl.store(values_ptr + at, p, mask=keep)
    tl.store(counts_ptr + program, tl.sum(found.to(tl.int64)))


@triton.jit
def _close_up(
    positions_ptr, values_ptr, counts_ptr, ends_ptr, out_positions_ptr, out_values_ptr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + program)
    first = tl.load(ends_ptr + program) - count
    slot = tl.arange(0, SLOTS)
    mask = slot < count
    at = program * SLOTS + slot
    tl.store(out_positions_ptr + first + slot, tl.load(positions_ptr + at, mask=mask), mask=mask)
    tl.store(out_values_ptr + first + slot, tl.load(values_ptr + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["n"])
def _write_chosen(
    keep_ptr, places_ptr, positions_ptr, values_ptr, out_positions_ptr, out_values_ptr, n,
    TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    keep = tl.load(keep_ptr + i, mask=i < n, other=0) != 0
    at = tl.load(places_ptr + i, mask=keep, other=1) - 1
    tl.store(out_positions_ptr + at, tl.load(positions_ptr + i, mask=keep), mask=keep)
    tl.store(out_values_ptr + at, tl.load(values_ptr + i, mask=keep), mask=keep)


def _candidates(x: Tensor, r: Tensor | None, k: int) -> tuple[Chosen | None, bool]:
    """(positions and values of a superset of the top k, whether all is finite); None if misled."""
    n = x.numel()
    other, has_r = x if r is None else r, r is not None
    size = MANY if n >= LARGE else FEW
    # Which of the samples surely lies below the k-th magnitude: four standard deviations.
    expected = size * k / n
    rank = int(expected + 4 * math.sqrt(expected) + 8)
    if rank >= size // 2:
        return None, True
    sample = torch.empty(size, dtype=BITS[x.dtype], device=x.device)
    launch(_sample, tiles(size), x, other, sample, n // size, size, HAS_R=has_r, TILE=TILE)
    bound = torch.topk(sample, rank, sorted=False).values.amin()
    share = TILE * rank / size
    slots = min(TILE, triton.next_power_of_2(int(2 * share + 8 * math.sqrt(share) + 32)))
    programs = tiles(n)
    positions = torch.empty(programs * slots, dtype=index_dtype(n), device=x.device)
    values = torch.empty(programs * slots, dtype=x.dtype, device=x.device)
    counts = torch.empty(programs, dtype=torch.int64, device=x.device)
    odd = flag(x)
    launch(
        _collect, programs, x, other, bound, positions, values, counts, odd, n,
        HAS_R=has_r, TILE=TILE, SLOTS=slots,
    )  # fmt: skip
    ends = counts.cumsum(0)
    count, most, bad = torch.stack([ends[-1], counts.amax(), odd[0].long()]).tolist()
    if bad:
        return None, False
    if count < k or most > slots:
        return None, True
    found = positions.new_empty(count), values.new_empty(count)
    launch(_close_up, programs, positions, values, counts, ends, *found, SLOTS=slots)
    return found, True


def top_k(x: Tensor, r: Tensor | None, k: int) -> Chosen | None:
    """(positions, values) of the k largest |x + r|, ascending positions, ties to the lower one."""
    if x.numel() < SMALL:
        return reference.top_k(x, r, k)
    found, finite = _candidates(x, r, k)
    if not finite:
        return None
    if found is None:
        return reference.top_k(x, r, k)
    positions, values = found
    if positions.numel() == k:
        return found
    sizes = values.abs().view(BITS[x.dtype])
    bound = torch.topk(sizes, k, sorted=False).values.amin()
    keep, ties = sizes > bound, sizes == bound
    keep |= ties & (ties.cumsum(0) <= k - keep.sum())
    chosen = positions.new_empty(k), values.new_empty(k)
    n = positions.numel()
    launch(
        _write_chosen, tiles(n), keep.view(torch.uint8), keep.cumsum(0), positions, values, *chosen,
        n, TILE=TILE,
    )  # fmt: skip
    return chosen


@triton.jit(do_not_specialize=["n", "chunk", "k", "last"])
def _chunk_top_k(
    x_ptr, r_ptr, positions_ptr, values_ptr, flag_ptr, n, chunk, k, last,
    HAS_R: tl.constexpr, DIGITS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    i = rows[:, None] * chunk + lane
    mask = (lane < chunk) & (i < n)
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    note_odd(flag_ptr, p)
    few = tl.where((rows + 1) * chunk <= n, k, last)
    few = tl.where(rows * chunk < n, few, 0)
    size = magnitude(p)
    size = tl.where(mask, size, -1)
    # The few-th largest magnitude: the largest number that so many reach.
    edge = tl.zeros((ROWS,), size.dtype)
    for step in range(DIGITS):
        higher = edge | (tl.full((ROWS,), 1, size.dtype) << (DIGITS - 1 - step))
        reach = tl.sum((size >= higher[:, None]).to(tl.int32), 1)
        edge = tl.where(reach >= few, higher, edge)
    above = size > edge[:, None]
    ties = (size == edge[:, None]) & mask
    missing = few - tl.sum(above.to(tl.int32), 1)
    keep = above | (ties & (tl.cumsum(ties.to(tl.int32), 1) <= missing[:, None]))
    keep = keep & mask & (few > 0)[:, None]
    at = (rows * k)[:, None] + tl.cumsum(keep.to(tl.int32), 1) - 1
    tl.store(positions_ptr + at, i.to(positions_ptr.dtype.element_ty), mask=keep)
    tl.store(values_ptr + at, p, mask=keep)


def chunk_top_k(x: Tensor, r: Tensor | None, chunk: int, k: int, last: int) -> Chosen | None:
    """(positions, values) of the k largest |x + r| of each chunk, ascending positions.

    `last` is the k of what is left over behind the chunks, if there is something. Ties go to the
    lower position.
    """
    if chunk > MOST:
        return reference.chunk_top_k(x, r, chunk, k, last)
    n = x.numel()
    count = n // chunk * k + last
    positions = torch.empty(count, dtype=index_dtype(n), device=x.device)
    values = torch.empty(count, dtype=x.dtype, device=x.device)
    odd = flag(x)
    rows, lanes = rows_of(chunk)
    launch(
        _chunk_top_k, tiles(tiles(n, chunk), rows), x, x if r is None else r, positions, values,
        odd, n, chunk, k, last, HAS_R=r is not None, DIGITS=8 * x.itemsize - 1, ROWS=rows,
        LANES=lanes, num_warps=warps(rows * lanes),
    )  # fmt: skip
    return None if bool(odd) else (positions, values)


@triton.jit(do_not_specialize=["n", "bound"])
def _count_above(
    x_ptr, r_ptr, counts_ptr, n, bound: tl.int64, HAS_R: tl.constexpr, TILE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    mask = i < n
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    found = (tl.abs(p) >= from_bits(bound, p)) & mask
    tl.store(counts_ptr + 2 * program, tl.sum(found.to(tl.int64)))
    tl.store(counts_ptr + 2 * program + 1, tl.sum(is_odd(p).to(tl.int64)))


@triton.jit(do_not_specialize=["n", "bound"])
def _write_above(
    x_ptr, r_ptr, ends_ptr, positions_ptr, values_ptr, n, bound: tl.int64,
    HAS_R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    mask = i < n
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    found = (tl.abs(p) >= from_bits(bound, p)) & mask
    write_found(ends_ptr, program, positions_ptr, i, found)
    write_found(ends_ptr, program, values_ptr, p, found)


def above(x: Tensor, r: Tensor | None, value: float) -> Chosen | None:
    """(positions, values) of all |x + r| >= value, ascending positions."""
    n = x.numel()
    other, settings = x if r is None else r, {"HAS_R": r is not None, "TILE": TILE}
    counts = torch.empty((tiles(n), 2), dtype=torch.int64, device=x.device)
    launch(_count_above, tiles(n), x, other, counts, n, double(value), **settings)
    ends = counts[:, 0].cumsum(0)
    count, odd = torch.stack([ends[-1], counts[:, 1].sum()]).tolist()
    if odd:
        return None
    positions = torch.empty(count, dtype=index_dtype(n), device=x.device)
    values = torch.empty(count, dtype=x.dtype, device=x.device)
    launch(_write_above, tiles(n), x, other, ends, positions, values, n, double(value), **settings)
    return positions, values


@triton.jit(do_not_specialize=["count"])
def _take(x_ptr, r_ptr, positions_ptr, out_ptr, count, HAS_R: tl.constexpr, TILE: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = j < count
    at = tl.load(positions_ptr + j, mask=mask, other=0)
    tl.store(out_ptr + j, load_sum(x_ptr, r_ptr, at, mask, HAS_R), mask=mask)


def take(x: Tensor, r: Tensor | None, positions: Tensor) -> Tensor | None:
    """(x + r)[positions], ascending positions; None if not all of x + r is finite."""
    odd, count = odd_flag(x, r), positions.numel()
    out = torch.empty(count, dtype=x.dtype, device=x.device)
    launch(
        _take, tiles(count), x, x if r is None else r, positions, out, count,
        HAS_R=r is not None, TILE=TILE,
    )  # fmt: skip
    return None if bool(odd) else out


@triton.jit(do_not_specialize=["count", "weight"])
def _scatter_add(out_ptr, positions_ptr, values_ptr, count, weight: tl.int64, TILE: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = j < count
    at = tl.load(positions_ptr + j, mask=mask, other=0)
    value = tl.load(values_ptr + j, mask=mask, other=0.0)
    product = (value * from_bits(weight, value)).to(out_ptr.dtype.element_ty)
    # Positions are distinct: nobody else touches these elements in this launch.
    tl.store(out_ptr + at, tl.load(out_ptr + at, mask=mask, other=0.0) + product, mask=mask)


def scatter_add(
    out: Tensor,
    positions: Tensor,
    values: Tensor,
    *,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out[positions] += weight * values, after zeroing out or adding a tensor to it.

    Positions are ascending and distinct.
    """
    begin(out, fresh, plus)
    count = positions.numel()
    launch(_scatter_add, tiles(count), out, positions, values, count, double(weight), TILE=TILE)


def scatter_add_many(out: Tensor, items: list[Chosen], weight: float) -> None:
    """`scatter_add` of several (positions, values), in their order: one launch for each, which a
    stream carries out one after the other."""
    for positions, values in items:
        scatter_add(out, positions, values, weight=weight)


@triton.jit(do_not_specialize=["count"])
def _count_holders(counts_ptr, positions_ptr, count, TILE: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = j < count
    at = counts_ptr + tl.load(positions_ptr + j, mask=mask, other=0)
    tl.store(at, tl.load(at, mask=mask, other=0) + 1, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _scatter_shares(out_ptr, counts_ptr, positions_ptr, values_ptr, count, TILE: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = j < count
    at = tl.load(positions_ptr + j, mask=mask, other=0)
    value = tl.load(values_ptr + j, mask=mask, other=0.0)
    holders = tl.load(counts_ptr + at, mask=mask, other=1).to(value.dtype)
    share = divide(value, holders).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, tl.load(out_ptr + at, mask=mask, other=0.0) + share, mask=mask)


def scatter_mean(out: Tensor, items: list[Chosen]) -> None:
    """out <- at each position the mean over the (positions, values) that hold it, added up in their
    order; zero where none does."""
    counts = torch.zeros(out.numel(), dtype=torch.int32, device=out.device)
    for positions, _ in items:
        count = positions.numel()
        launch(_count_holders, tiles(count), counts, positions, count, TILE=TILE)
    out.zero_()
    for positions, values in items:
        count = positions.numel()
        launch(_scatter_shares, tiles(count), out, counts, positions, values, count, TILE=TILE)


def scatter_mean_bytes(n: int) -> int:
    """What `scatter_mean` takes for its counts."""
    return 4 * n
