"""Random 32-bit words as a function of an element's number; the method is told by the CPU kernels.

Philox runs once for each group of 512 elements, in a kernel of its own that writes the three words
of every group: 12 bytes for 512 elements, which the loops then read from the cache. In the loops a
word takes eight operations of 32 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.sparse import index_dtype
from thinwire.kernels.triton.compact import write_found
from thinwire.kernels.triton.launch import TILE, launch, tiles

GROUP = tl.constexpr(512)
ROUNDS = 8
MASK = 0xFFFFFFFF


@triton.jit
def _u32(value):
    return tl.full((1,), value, tl.int64).to(tl.uint32)


@triton.jit(do_not_specialize=["count", "step", "tensor", "low", "high", "stream"])
def _group_keys(
    keys_ptr, count, step: tl.int64, tensor: tl.int64, low: tl.int64, high: tl.int64,
    stream: tl.int64, TILE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    c0 = (group & 0xFFFFFFFF).to(tl.uint32)
    c1 = (group >> 32).to(tl.uint32) ^ _u32(stream)
    c2 = tl.zeros_like(c0) + _u32(step)
    c3 = tl.zeros_like(c0) + _u32(tensor)
    k0, k1 = _u32(low), _u32(high)
    a, b = _u32(0xD2511F53), _u32(0xCD9E8D57)
    for _ in range(10):
        a_high, a_low = tl.umulhi(c0, a + tl.zeros_like(c0)), c0 * a
        b_high, b_low = tl.umulhi(c2, b + tl.zeros_like(c2)), c2 * b
        c0, c1, c2, c3 = b_high ^ c1 ^ k0, b_low, a_high ^ c3 ^ k1, a_low
        k0 = k0 + _u32(0x9E3779B9)
        k1 = k1 + _u32(0xBB67AE85)
    mask = group < count
    tl.store(keys_ptr + 3 * group, c0.to(tl.int32, bitcast=True), mask=mask)
    tl.store(keys_ptr + 3 * group + 1, c1.to(tl.int32, bitcast=True), mask=mask)
    tl.store(keys_ptr + 3 * group + 2, c2.to(tl.int32, bitcast=True), mask=mask)


def group_keys(count: int, key: Key | None, like: Tensor) -> Tensor:
    """What `word_at` reads for elements [0, count); without a key a tensor that nobody reads."""
    if key is None:
        return like
    groups = -(-count // 512)
    keys = torch.empty(3 * groups, dtype=torch.int32, device=like.device)
    words = key.step, key.tensor, key.seed & MASK, key.seed >> 32, key.stream << 24
    launch(_group_keys, tiles(groups, 256), keys, groups, *words, TILE=256)
    return keys


@triton.jit
def word_at(keys_ptr, i, mask):
    """The random words of these elements, as uint32."""
    at = keys_ptr + (i // GROUP) * 3
    k0 = tl.load(at, mask=mask, other=0).to(tl.uint32, bitcast=True)
    k1 = tl.load(at + 1, mask=mask, other=0).to(tl.uint32, bitcast=True)
    k2 = tl.load(at + 2, mask=mask, other=0).to(tl.uint32, bitcast=True)
    v = (i % GROUP).to(tl.uint32) * _u32(0x9E3779B1) + k0
    v = v ^ (v >> 17)
    v = (v * _u32(0xED5AD4BB)) ^ k1
    v = v ^ (v >> 11)
    v = v * _u32(0xAC4C1B51)
    v = v ^ (v >> 15)
    v = v * _u32(0x31848BAB)
    return v ^ (v >> 14) ^ k2


@triton.jit(do_not_specialize=["count"])
def _words(keys_ptr, out_ptr, count, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < count
    tl.store(out_ptr + i, word_at(keys_ptr, i, mask).to(tl.int64), mask=mask)


def random_words(count: int, key: Key, device: torch.device | None = None) -> Tensor:
    """32-bit words of elements [0, count), as int64 in [0, 2^32)."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    launch(_words, tiles(count), group_keys(count, key, out), out, count, TILE=TILE)
    return out


@triton.jit
def _kept(keys_ptr, i, mask, limit):
    return (word_at(keys_ptr, i, mask).to(tl.int64) < limit) & mask


@triton.jit(do_not_specialize=["n", "limit"])
def _count_kept(keys_ptr, counts_ptr, n, limit: tl.int64, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    kept = _kept(keys_ptr, i, i < n, limit)
    tl.store(counts_ptr + program, tl.sum(kept.to(tl.int64)))


@triton.jit(do_not_specialize=["n", "limit"])
def _write_kept(keys_ptr, ends_ptr, out_ptr, n, limit: tl.int64, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    write_found(ends_ptr, program, out_ptr, i, _kept(keys_ptr, i, i < n, limit))


def bernoulli_positions(n: int, p: float, key: Key, device: torch.device | None = None) -> Tensor:
    """Positions below n that are kept with probability p each (to 2^-32), ascending."""
    counts = torch.zeros(tiles(n), dtype=torch.int64, device=device)
    keys, limit = group_keys(n, key, counts), round(p * 2**32)
    launch(_count_kept, tiles(n), keys, counts, n, limit, TILE=TILE)
    ends = counts.cumsum(0)
    out = torch.empty(int(ends[-1]) if n else 0, dtype=index_dtype(n), device=device)
    launch(_write_kept, tiles(n), keys, ends, out, n, limit, TILE=TILE)
    return out


@triton.jit
def _mix(v):
    v = v * _u32(0x9E3779B1)
    v = v ^ (v >> 15)
    v = v * _u32(0x85EBCA77)
    return v ^ (v >> 13)


@triton.jit
def _permuted(keys_ptr, v, left, right):
    """The images of 64-bit numbers under a Feistel permutation of left + right bits."""
    left_mask = ((tl.full((1,), 1, tl.int64) << left) - 1).to(tl.uint32)
    right_mask = ((tl.full((1,), 1, tl.int64) << right) - 1).to(tl.uint32)
    high = (v >> right).to(tl.uint32)
    low = v.to(tl.uint32) & right_mask
    for pair in range(4):
        even = tl.load(keys_ptr + 2 * pair).to(tl.uint32)
        odd = tl.load(keys_ptr + 2 * pair + 1).to(tl.uint32)
        high = high ^ (_mix(low ^ even) & left_mask)
        low = low ^ (_mix(high ^ odd) & right_mask)
    return (high.to(tl.int64) << right) | low.to(tl.int64)


@triton.jit(do_not_specialize=["first", "count", "n", "left", "right"])
def _count_below(
    keys_ptr, counts_ptr, first: tl.int64, count, n: tl.int64, left, right, TILE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    v = _permuted(keys_ptr, first + i, left, right)
    tl.store(counts_ptr + program, tl.sum(((v < n) & (i < count)).to(tl.int64)))


@triton.jit(do_not_specialize=["first", "count", "n", "left", "right"])
def _write_below(
    keys_ptr, ends_ptr, out_ptr, first: tl.int64, count, n: tl.int64, left, right,
    TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    v = _permuted(keys_ptr, first + i, left, right)
    write_found(ends_ptr, program, out_ptr, v, (v < n) & (i < count))


def random_positions(n: int, k: int, key: Key, device: torch.device | None = None) -> Tensor:
    """k distinct positions below n, ascending: the first such values of a keyed permutation."""
    width = max(8, (n - 1).bit_length())
    left = width // 2
    right = width - left
    dtype = index_dtype(n)
    keys = random_words(ROUNDS, key, device)
    pieces: list[Tensor] = []
    found = tried = 0
    while found < k:
        more = min((1 << width) - tried, int((k - found) * (1 << width) / n * 1.01) + 256)
        counts = torch.empty(tiles(more), dtype=torch.int64, device=device)
        numbers = tried, more, n, left, right
        launch(_count_below, tiles(more), keys, counts, *numbers, TILE=TILE)
        ends = counts.cumsum(0)
        piece = torch.empty(int(ends[-1]), dtype=dtype, device=device)
        launch(_write_below, tiles(more), keys, ends, piece, *numbers, TILE=TILE)
        pieces.append(piece)
        found, tried = found + piece.numel(), tried + more
    if not pieces:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat(pieces)[:k].sort().values
