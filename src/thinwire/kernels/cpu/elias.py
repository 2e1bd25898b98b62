"""Elias-gamma code of quantised levels, as QSGD is specified with.

Levels are numbered 0, +1, -1, +2, -2, ... from 1 on, and a number is written as its gamma code. As
with indices, the unary parts lie in one stream and the binary ones (the bits below the leading one)
in a second, so that both can be read in parallel.
"""

import numpy as np
import torch
from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros

from thinwire.kernels.cpu.jit import jit

u8, u32, u64 = np.uint8, np.uint32, np.uint64


@jit
def _number(level, limit):
    """1 for a level of zero, 2 for +1, 3 for -1, 4 for +2, ..."""
    q = np.int64(level) - limit
    return 2 * q if q > 0 else 1 - 2 * q


@jit
def _lengths(levels, limit):
    binary = 0
    for i in range(levels.size):
        binary += 31 - np.int64(leading_zeros(u32(_number(levels[i], limit))))
    return binary + levels.size, binary


@jit
def _encode(levels, limit, unary, binary):
    at, bit = np.int64(0), np.int64(0)
    for i in range(levels.size):
        number = _number(levels[i], limit)
        extra = 31 - np.int64(leading_zeros(u32(number)))
        at += extra
        unary[at >> 6] |= u64(1) << u64(at & 63)
        at += 1
        if extra:
            rest = u64(number - (1 << extra))
            word, shift = bit >> 6, bit & 63
            binary[word] |= rest << u64(shift)
            if shift + extra > 64:
                binary[word + 1] |= rest >> u64(64 - shift)
            bit += extra


def elias_encode(levels: torch.Tensor, limit: int):
    """(unary words, all words) for levels stored from zero, zero at `limit`."""
    q = levels.numpy()
    unary, binary = (-(-int(bits) // 64) for bits in _lengths(q, limit))
    out = np.zeros(unary + binary, u64)
    _encode(q, limit, out[:unary], out[unary:])
    return unary, torch.from_numpy(out.view(np.int64))


@jit
def _decode(unary, binary, limit, out):
    done, last, bit = 0, np.int64(-1), np.int64(0)
    for w in range(unary.size):
        word = unary[w]
        while word:
            if done == out.size:
                return -1
            at = np.int64(w * 64) + np.int64(trailing_zeros(word))
            word &= word - u64(1)
            extra = at - last - 1
            last = at
            number = np.int64(1)
            if extra:
                if extra > 7 or bit + extra > 64 * binary.size:
                    return -1
                k, shift = bit >> 6, bit & 63
                rest = binary[k] >> u64(shift)
                if shift + extra > 64:
                    rest |= binary[k + 1] << u64(64 - shift)
                bit += extra
                number = np.int64(rest & ((u64(1) << u64(extra)) - u64(1))) + (np.int64(1) << extra)
                if number > 2 * limit + 1:
                    return -1
            out[done] = u8(limit - number // 2 if number & 1 else limit + number // 2)
            done += 1
    return done


def elias_decode(words: torch.Tensor, unary_words: int, count: int, limit: int):
    """The levels, or None if the streams do not hold exactly `count` of them within the limit."""
    stream = words.numpy().view(u64)
    out = np.empty(count, u8)
    done = _decode(stream[:unary_words], stream[unary_words:], limit, out)
    return torch.from_numpy(out) if done == count else None
