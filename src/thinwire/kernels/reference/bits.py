"""Coded positions and levels, and the checksum of frames, in plain PyTorch."""

import torch
from torch import Tensor

from thinwire.kernels.reference.levels import bits_to_bytes, bytes_to_bits
from thinwire.kernels.reference.sparse import index_dtype


def _words(bits: Tensor, count: int) -> Tensor:
    """Bits as int64 words, filled up with zeros to `count` words."""
    filled = torch.nn.functional.pad(bits.to(torch.uint8), (0, count * 64 - bits.numel()))
    return bits_to_bytes(filled).view(torch.int64)


def _bits(words: Tensor) -> Tensor:
    # An empty tensor counts as contiguous whatever its stride says.
    return bytes_to_bits(words.contiguous().as_strided(words.shape, (1,)).view(torch.uint8))


def _marks(at: Tensor, words: int) -> Tensor:
    """Words whose bits are set at the given places."""
    bits = torch.zeros(words * 64, dtype=torch.uint8, device=at.device)
    bits[at] = 1
    return _words(bits, words)


def _gaps(positions: Tensor) -> Tensor:
    before = torch.full((1,), -1, dtype=torch.int64, device=positions.device)
    return torch.diff(positions.long(), prepend=before) - 1


def rice_parameter(positions: Tensor, guess: int) -> tuple[int, int]:
    """The parameter with the fewest bits, downhill from a guess, and the sum of its quotients."""
    gaps, count = _gaps(positions), positions.numel()

    def bits(parameter: int) -> int:
        return int((gaps >> parameter).sum()) + count * parameter

    best, size = guess, bits(guess)
    for step in (-1, 1):
        while best + step >= 0 and (other := bits(best + step)) < size:
            best, size = best + step, other
    return best, size - count * best


def rice_encode(positions: Tensor, parameter: int, unary_words: int) -> Tensor:
    """The unary stream, then the remainders; see the CPU kernel."""
    gaps = _gaps(positions)
    unary = _marks(torch.cumsum((gaps >> parameter) + 1, 0) - 1, unary_words)
    shifts = torch.arange(parameter, device=positions.device)
    low = ((gaps.unsqueeze(1) >> shifts) & 1).flatten()
    return torch.cat([unary, _words(low, -(-low.numel() // 64))])


def rice_decode(
    words: Tensor, count: int, parameter: int, unary_words: int, n: int
) -> Tensor | None:
    """The positions, or None if the streams do not hold exactly `count` of them below n."""
    at = torch.nonzero(_bits(words[:unary_words])).squeeze(1)
    if at.numel() != count:
        return None
    low = _bits(words[unary_words:])[: count * parameter].long().view(count, parameter)
    shifts = torch.arange(parameter, device=words.device)
    rests = (low << shifts).sum(1) if parameter else torch.zeros_like(at)
    quotients = _gaps(at)
    # Beyond these bounds the shift below would leave 64 bits.
    if count and (int(quotients.max()) >= 1 << 62 - parameter):
        return None
    positions = torch.cumsum((quotients << parameter) + rests + 1, 0) - 1
    if count and (int(positions.min()) < 0 or int(positions[-1]) >= n):
        return None
    return positions.to(index_dtype(n))


def bitmap_encode(positions: Tensor, n: int) -> Tensor:
    """One bit per element of the tensor, in 64-bit words."""
    return _marks(positions.long(), -(-n // 64))


def bitmap_decode(words: Tensor, count: int, n: int) -> Tensor | None:
    """The positions, or None if the bitmap does not hold exactly `count` of them below n."""
    at = torch.nonzero(_bits(words)).squeeze(1)
    if at.numel() != count or (count and int(at[-1]) >= n):
        return None
    return at.to(index_dtype(n))


def elias_encode(levels: Tensor, limit: int) -> tuple[int, Tensor]:
    """(unary words, all words) for levels stored from zero, zero at `limit`."""
    q = levels.long() - limit
    number = torch.where(q > 0, 2 * q, 1 - 2 * q)
    extra = torch.log2(number.double()).long()
    ends = torch.cumsum(extra + 1, 0)
    unary_words = -(-int(ends[-1]) // 64) if levels.numel() else 0
    owner = torch.repeat_interleave(torch.arange(extra.numel(), device=levels.device), extra)
    shift = torch.arange(owner.numel(), device=levels.device)
    shift = shift - (torch.cumsum(extra, 0) - extra)[owner]
    binary = ((number - (1 << extra))[owner] >> shift) & 1
    return unary_words, torch.cat(
        [_marks(ends - 1, unary_words), _words(binary, -(-binary.numel() // 64))]
    )


def elias_decode(words: Tensor, unary_words: int, count: int, limit: int) -> Tensor | None:
    """The levels, or None if the streams do not hold exactly `count` of them within the limit."""
    at = torch.nonzero(_bits(words[:unary_words])).squeeze(1)
    if at.numel() != count:
        return None
    extra = _gaps(at)
    binary = _bits(words[unary_words:]).long()
    if count and (int(extra.max()) > 7 or int(extra.sum()) > binary.numel()):
        return None
    begin = torch.cumsum(extra, 0) - extra
    number = 1 << extra
    for i in range(7):
        some = extra > i
        number[some] |= binary[begin[some] + i] << i
    if count and int(number.max()) > 2 * limit + 1:
        return None
    half = number // 2
    return (limit + torch.where(number % 2 == 1, -half, half)).to(torch.uint8)


def _shift_right(z: Tensor, by: int) -> Tensor:
    """A logical shift of 64-bit words that torch knows as signed."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def checksum(data: Tensor) -> int:
    """The checksum of a uint8 tensor, as an unsigned 64-bit integer; see the CPU kernel."""
    filled = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    w = filled.view(torch.int64)
    z = w + torch.arange(1, w.numel() + 1, device=w.device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return int((z ^ _shift_right(z, 31)).sum()) & 0xFFFFFFFFFFFFFFFF
