"""Coded positions and levels: Golomb-Rice, bitmaps, Elias, in parallel.

The format keeps unary and fixed-width parts in two streams (docs/decisions/0003), so both ways are
running sums and independent elements. Bits are written as bytes of 0 or 1 first, each by whom it
belongs to, and then packed, eight to a byte: no two programs write to one byte, and there are about
two such bytes for each position.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference.sparse import index_dtype
from thinwire.kernels.triton.compact import write_found
from thinwire.kernels.triton.launch import TILE, launch, tiles

WINDOW = 16  # Rice parameters that one pass looks at


@triton.jit
def _gap(positions_ptr, i, mask):
    """How many elements lie between a position and the one before it."""
    here = tl.load(positions_ptr + i, mask=mask, other=0).to(tl.int64)
    before = tl.load(positions_ptr + i - 1, mask=mask & (i > 0), other=-1).to(tl.int64)
    return here - before - 1


@triton.jit(do_not_specialize=["count", "first"])
def _quotients(positions_ptr, sums_ptr, count, first, TILE: tl.constexpr, WINDOW: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    mask = i < count
    gap = tl.where(mask, _gap(positions_ptr, i, mask), 0)
    parameter = tl.arange(0, WINDOW)
    sums = tl.sum(gap[:, None] >> (first + parameter).to(tl.int64)[None, :], 0)
    tl.store(sums_ptr + program * WINDOW + parameter, sums)


def _bits(positions: Tensor, first: int) -> dict[int, int]:
    """The bits of both streams for each parameter of a window."""
    count = positions.numel()
    sums = torch.empty((tiles(count, 256), WINDOW), dtype=torch.int64, device=positions.device)
    launch(_quotients, tiles(count, 256), positions, sums, count, first, TILE=256, WINDOW=WINDOW)
    found = sums.sum(0).tolist()
    return {first + j: found[j] + count * (first + j) for j in range(WINDOW)}


def rice_parameter(positions: Tensor, guess: int) -> tuple[int, int]:
    """The parameter with the fewest bits, downhill from a guess, and the sum of its quotients."""
    bits = _bits(positions, max(0, guess - WINDOW // 2))
    best = guess
    for step in (-1, 1):
        while best + step >= 0:
            if best + step not in bits:
                bits |= _bits(positions, max(0, best + (1 if step > 0 else -WINDOW)))
            if bits[best + step] >= bits[best]:
                break
            best += step
    return best, bits[best] - positions.numel() * best


@triton.jit(do_not_specialize=["count", "parameter"])
def _unary_lengths(positions_ptr, out_ptr, count, parameter, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < count
    tl.store(out_ptr + i, (_gap(positions_ptr, i, mask) >> parameter) + 1, mask=mask)


@triton.jit(do_not_specialize=["count", "offset"])
def _mark(flags_ptr, at_ptr, count, offset, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < count
    at = tl.load(at_ptr + i, mask=mask, other=0) + offset
    tl.store(flags_ptr + at, tl.full((TILE,), 1, tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _pack_flags(flags_ptr, out_ptr, count, TILE: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bit = tl.arange(0, 8)[None, :]
    mask = (byte < count)[:, None]
    flags = tl.load(flags_ptr + byte[:, None] * 8 + bit, mask=mask, other=0).to(tl.int32)
    tl.store(out_ptr + byte, tl.sum(flags << bit, 1).to(tl.uint8), mask=byte < count)


def _no_flags(words: int, device: torch.device) -> Tensor:
    return torch.zeros(words * 64, dtype=torch.uint8, device=device)


def _pack(flags: Tensor, out: Tensor) -> None:
    """Bytes of 0 or 1 as the bits of 64-bit words."""
    count = 8 * out.numel()
    launch(_pack_flags, tiles(count, 256), flags, out.view(torch.uint8), count, TILE=256)


def _pack_marks(at: Tensor, offset: int, out: Tensor) -> None:
    """Words whose bits are set at the given places, each with an offset."""
    flags = _no_flags(out.numel(), out.device)
    launch(_mark, tiles(at.numel()), flags, at, at.numel(), offset, TILE=TILE)
    _pack(flags, out)


@triton.jit(do_not_specialize=["count", "parameter", "words"])
def _remainders(positions_ptr, out_ptr, count, parameter, words, TILE: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    ones = (tl.full((1,), 1, tl.int64) << parameter) - 1
    first = word * 64 // parameter
    found = tl.zeros((TILE,), tl.uint64)
    # All codewords that have a bit in this word.
    for step in range(64 // parameter + 2):
        i = first + step
        at = i * parameter - word * 64
        mask = (i < count) & (at < 64) & (word < words)
        rest = (_gap(positions_ptr, i, mask) & ones).to(tl.uint64)
        left = tl.minimum(tl.maximum(at, 0), 63).to(tl.uint64)
        right = tl.minimum(tl.maximum(-at, 0), 63).to(tl.uint64)
        found = found | tl.where(mask, (rest << left) >> right, 0)
    tl.store(out_ptr + word, found.to(tl.int64, bitcast=True), mask=word < words)


def rice_encode(positions: Tensor, parameter: int, unary_words: int) -> Tensor:
    """The unary stream (its length known from `rice_parameter`), then the remainders."""
    count = positions.numel()
    low = -(-count * parameter // 64)
    out = torch.empty(unary_words + low, dtype=torch.int64, device=positions.device)
    lengths = torch.empty(count, dtype=torch.int64, device=positions.device)
    launch(_unary_lengths, tiles(count), positions, lengths, count, parameter, TILE=TILE)
    _pack_marks(lengths.cumsum(0), -1, out[:unary_words])
    launch(
        _remainders, tiles(low, 256), positions, out[unary_words:], count, parameter, low, TILE=256
    )
    return out


@triton.jit
def _bit_at(words_ptr, i, mask):
    word = tl.load(words_ptr + i // 64, mask=mask, other=0)
    return (((word >> (i % 64)) & 1) != 0) & mask


@triton.jit(do_not_specialize=["n"])
def _count_ones(words_ptr, counts_ptr, n, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    tl.store(counts_ptr + program, tl.sum(_bit_at(words_ptr, i, i < n).to(tl.int64)))


@triton.jit(do_not_specialize=["n", "room"])
def _write_ones(words_ptr, ends_ptr, out_ptr, n, room, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)
    # What would not fit is not written: the caller finds out that there is too much.
    fits = tl.load(ends_ptr + program + tl.zeros_like(i)) <= room
    write_found(ends_ptr, program, out_ptr, i, _bit_at(words_ptr, i, i < n) & fits)


def _ones(words: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(places of the first `count` ones, at least, if there are just so many; how many there are,
    on the device)."""
    n = 64 * words.numel()
    counts = torch.empty(tiles(n), dtype=torch.int64, device=words.device)
    launch(_count_ones, tiles(n), words, counts, n, TILE=TILE)
    ends = counts.cumsum(0)
    at = torch.zeros(count, dtype=dtype, device=words.device)
    launch(_write_ones, tiles(n), words, ends, at, n, count, TILE=TILE)
    return at, counts.sum()


@triton.jit
def _field(words_ptr, bit, width, words, mask):
    """`width` bits, at most 63, from a place in a stream."""
    shift = (bit % 64).to(tl.uint64)
    at = words_ptr + bit // 64
    low = tl.load(at, mask=mask & (bit // 64 < words), other=0).to(tl.uint64, bitcast=True)
    more = mask & (bit % 64 + width > 64) & (bit // 64 + 1 < words)
    high = tl.load(at + 1, mask=more, other=0).to(tl.uint64, bitcast=True)
    # Two shifts, as one by 64 has no meaning.
    found = (low >> shift) | tl.where(more, (high << 1) << (63 - shift), 0)
    ones = (tl.full((1,), 1, tl.int64) << width) - 1
    return found.to(tl.int64, bitcast=True) & ones


@triton.jit(do_not_specialize=["count", "parameter", "words"])
def _steps(at_ptr, low_ptr, quotients_ptr, steps_ptr, count, parameter, words, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < count
    quotient = _gap(at_ptr, i, mask)
    width = tl.zeros((TILE,), tl.int64) + parameter
    rest = _field(low_ptr, i * parameter, width, words, mask & (width > 0))
    tl.store(quotients_ptr + i, quotient, mask=mask)
    tl.store(steps_ptr + i, (quotient << parameter) + rest + 1, mask=mask)


def rice_decode(
    words: Tensor, count: int, parameter: int, unary_words: int, n: int
) -> Tensor | None:
    """The positions, or None if the streams do not hold exactly `count` of them below n."""
    at, found = _ones(words[:unary_words], count, torch.int64)
    if not count:
        return None if int(found) else at.to(index_dtype(n))
    quotients, steps = torch.empty_like(at), torch.empty_like(at)
    low = words[unary_words:]
    launch(
        _steps, tiles(count), at, low, quotients, steps, count, parameter, low.numel(), TILE=TILE
    )
    positions = steps.cumsum(0) - 1
    # One transfer to the host for all that is checked.
    checks = [found, quotients.amax(), positions.amin(), positions[-1]]
    total, quotient, first, last = torch.stack(checks).tolist()
    # Beyond these bounds the shift would leave 64 bits.
    if total != count or quotient >= 1 << 62 - parameter or first < 0 or last >= n:
        return None
    return positions.to(index_dtype(n))


def bitmap_encode(positions: Tensor, n: int) -> Tensor:
    """One bit per element of the tensor, in 64-bit words."""
    out = torch.empty(-(-n // 64), dtype=torch.int64, device=positions.device)
    _pack_marks(positions, 0, out)
    return out


def bitmap_decode(words: Tensor, count: int, n: int) -> Tensor | None:
    """The positions, or None if the bitmap does not hold exactly `count` of them below n."""
    at, found = _ones(words, count, index_dtype(64 * words.numel()))
    if not count:
        return None if int(found) else at.to(index_dtype(n))
    total, last = torch.stack([found, at[-1].long()]).tolist()
    return None if total != count or last >= n else at.to(index_dtype(n))


@triton.jit
def _numbered(levels_ptr, i, mask, limit):
    """Levels 0, +1, -1, +2, ... as numbers 1, 2, 3, 4, ..., and the bits behind their first."""
    q = tl.load(levels_ptr + i, mask=mask, other=0).to(tl.int32) - limit
    number = tl.where(q > 0, 2 * q, 1 - 2 * q)
    extra = tl.zeros_like(number)
    for place in range(1, 8):
        extra += (number >= (1 << place)).to(tl.int32)
    return number, extra


@triton.jit(do_not_specialize=["count", "limit"])
def _elias_lengths(levels_ptr, extras_ptr, count, limit, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < count
    _, extra = _numbered(levels_ptr, i, mask, limit)
    tl.store(extras_ptr + i, extra.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["count", "limit"])
def _elias_flags(levels_ptr, ends_ptr, flags_ptr, count, limit, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < count
    number, extra = _numbered(levels_ptr, i, mask, limit)
    begin = tl.load(ends_ptr + i, mask=mask, other=0) - extra
    for place in range(7):
        bit = ((number >> place) & 1).to(tl.uint8)
        tl.store(flags_ptr + begin + place, bit, mask=mask & (place < extra))


def elias_encode(levels: Tensor, limit: int) -> tuple[int, Tensor]:
    """(unary words, all words) for levels stored from zero, zero at `limit`."""
    count, device = levels.numel(), levels.device
    if not count:
        return 0, torch.empty(0, dtype=torch.int64, device=device)
    extras = torch.empty(count, dtype=torch.int64, device=device)
    launch(_elias_lengths, tiles(count), levels, extras, count, limit, TILE=TILE)
    ends = extras.cumsum(0)
    bits = int(ends[-1])
    unary, binary = -(-(bits + count) // 64), -(-bits // 64)
    out = torch.empty(unary + binary, dtype=torch.int64, device=device)
    _pack_marks(ends + torch.arange(count, device=device), 0, out[:unary])
    flags = _no_flags(binary, device)
    launch(_elias_flags, tiles(count), levels, ends, flags, count, limit, TILE=TILE)
    _pack(flags, out[unary:])
    return unary, out


@triton.jit(do_not_specialize=["count"])
def _extras(at_ptr, out_ptr, count, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + i, _gap(at_ptr, i, i < count), mask=i < count)


@triton.jit(do_not_specialize=["count", "limit", "words"])
def _elias_levels(
    extras_ptr, ends_ptr, binary_ptr, out_ptr, numbers_ptr, count, limit, words, TILE: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < count
    extra = tl.load(extras_ptr + i, mask=mask, other=0)
    width = tl.minimum(tl.maximum(extra, 0), 7)
    begin = tl.maximum(tl.load(ends_ptr + i, mask=mask, other=0) - extra, 0)
    number = _field(binary_ptr, begin, width, words, mask & (width > 0)) * (width > 0)
    number = number + (tl.full((1,), 1, tl.int64) << width)
    level = limit + tl.where(number % 2 == 1, -(number // 2), number // 2)
    tl.store(out_ptr + i, level.to(tl.uint8), mask=mask)
    tl.store(numbers_ptr + i, number, mask=mask)


def elias_decode(words: Tensor, unary_words: int, count: int, limit: int) -> Tensor | None:
    """The levels, or None if the streams do not hold exactly `count` of them within the limit."""
    at, found = _ones(words[:unary_words], count, torch.int64)
    levels = torch.empty(count, dtype=torch.uint8, device=words.device)
    if not count:
        return None if int(found) else levels
    extras, numbers = torch.empty_like(at), torch.empty_like(at)
    launch(_extras, tiles(count), at, extras, count, TILE=TILE)
    ends = extras.cumsum(0)
    binary = words[unary_words:]
    launch(
        _elias_levels, tiles(count), extras, ends, binary, levels, numbers, count, limit,
        binary.numel(), TILE=TILE,
    )  # fmt: skip
    # One transfer to the host for all that is checked.
    total, extra, bits, most = torch.stack(
        [found, extras.amax(), ends[-1], numbers.amax()]
    ).tolist()
    if total != count or extra > 7 or bits > 64 * binary.numel() or most > 2 * limit + 1:
        return None
    return levels
