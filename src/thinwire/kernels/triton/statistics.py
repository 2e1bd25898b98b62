"""Passes over x + r for numbers of a whole tensor: extent, moments, checksum.

Each program leaves its part in an array; torch adds these up, in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.triton.launch import TILE, double, flag, launch, tiles
from thinwire.kernels.triton.numbers import from_bits, load_sum, note_odd


@triton.jit(do_not_specialize=["n"])
def _extent(x_ptr, r_ptr, ends_ptr, flag_ptr, n, HAS_R: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    mask = i < n
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R)
    note_odd(flag_ptr, p)
    tl.store(ends_ptr + 2 * program, tl.min(tl.where(mask, p, float("inf"))))
    tl.store(ends_ptr + 2 * program + 1, tl.max(tl.where(mask, p, float("-inf"))))


def extent(x: Tensor, r: Tensor | None) -> tuple[float, float] | None:
    """(min, max) of x + r, or None if not all are finite."""
    n = x.numel()
    ends = torch.empty((tiles(n), 2), dtype=x.dtype, device=x.device)
    odd = flag(x)
    other = x if r is None else r
    launch(_extent, tiles(n), x, other, ends, odd, n, HAS_R=r is not None, TILE=TILE)
    low, high = ends[:, 0].amin(), ends[:, 1].amax()
    # One transfer to the host for all three.
    found = torch.stack([low, high, odd[0].to(x.dtype)]).tolist()
    return None if found[2] else (found[0], found[1])


@triton.jit(do_not_specialize=["n"])
def _finite(x_ptr, r_ptr, flag_ptr, n, HAS_R: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    note_odd(flag_ptr, load_sum(x_ptr, r_ptr, i, i < n, HAS_R))


def odd_flag(x: Tensor, r: Tensor | None) -> Tensor:
    """A number that is 1 if some x + r is not finite, on the device."""
    odd, n = flag(x), x.numel()
    launch(_finite, tiles(n), x, x if r is None else r, odd, n, HAS_R=r is not None, TILE=TILE)
    return odd


def all_finite(x: Tensor, r: Tensor | None) -> bool:
    """Whether every x + r is finite."""
    return not bool(odd_flag(x, r))


@triton.jit(do_not_specialize=["n", "unit"])
def _moments(x_ptr, r_ptr, sums_ptr, n, unit: tl.int64, HAS_R: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    v = load_sum(x_ptr, r_ptr, i, i < n, HAS_R).to(tl.float64)
    v = v * from_bits(unit, v)
    tl.store(sums_ptr + 2 * program, tl.sum(v))
    tl.store(sums_ptr + 2 * program + 1, tl.sum(v * v))


def moments(x: Tensor, r: Tensor | None, unit: float) -> tuple[float, float]:
    """The means of v and of v^2 with v = (x + r) * unit; `unit` keeps them from overflowing."""
    n = x.numel()
    sums = torch.empty((tiles(n), 2), dtype=torch.float64, device=x.device)
    other = x if r is None else r
    launch(_moments, tiles(n), x, other, sums, n, double(unit), HAS_R=r is not None, TILE=TILE)
    first, second = sums.sum(0).tolist()
    return first / n, second / n


@triton.jit
def _u64(high, low):
    """A constant of 64 bits from two of 32."""
    upper = tl.full((1,), high, tl.int64).to(tl.uint64) << 32
    return upper | tl.full((1,), low, tl.int64).to(tl.uint64)


@triton.jit(do_not_specialize=["n"])
def _checksum(words_ptr, sums_ptr, n, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    word = tl.load(words_ptr + i, mask=i < n, other=0).to(tl.uint64, bitcast=True)
    z = word + (i + 1).to(tl.uint64) * _u64(0x9E3779B9, 0x7F4A7C15)
    z = (z ^ (z >> 30)) * _u64(0xBF58476D, 0x1CE4E5B9)
    z = (z ^ (z >> 27)) * _u64(0x94D049BB, 0x133111EB)
    z = z ^ (z >> 31)
    found = tl.where(i < n, z.to(tl.int64, bitcast=True), 0)
    tl.store(sums_ptr + program, tl.sum(found))


def checksum(data: Tensor) -> int:
    """The checksum of a uint8 tensor, as an unsigned 64-bit integer; see the CPU kernel."""
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    words = data.view(torch.int64)
    sums = torch.empty(tiles(words.numel()), dtype=torch.int64, device=data.device)
    launch(_checksum, sums.numel(), words, sums, words.numel(), TILE=TILE)
    return int(sums.sum()) & 0xFFFFFFFFFFFFFFFF
