"""Elias-gamma code of quantised levels, as QSGD is specified with.

A level q is written as the gamma code of |q| + 1, then its sign unless it is zero. As with indices,
the unary parts lie in one stream and the binary ones (the bits below the leading one, then the
sign) in a second, so that both can be read in parallel.
"""

import numpy as np
import torch
from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros

from thinwire.kernels.cpu.jit import jit

u8, u32, u64 = np.uint8, np.uint32, np.uint64


@jit
def _lengths(levels, limit):
    unary, binary = 0, 0
    for i in range(levels.size):
        q = abs(np.int32(levels[i]) - limit)
        extra = 31 - np.int64(leading_zeros(u32(q + 1)))
        unary += extra + 1
        binary += extra + (q > 0)
    return unary, binary


@jit
def _encode(levels, limit, unary, binary):
    at, bit = np.int64(0), np.int64(0)
    for i in range(levels.size):
        signed = np.int32(levels[i]) - limit
        q = abs(signed)
        extra = 31 - np.int64(leading_zeros(u32(q + 1)))
        at += extra
        unary[at >> 6] |= u64(1) << u64(at & 63)
        at += 1
        if q:
            width = extra + 1
            rest = u64(q + 1 - (1 << extra)) | (u64(signed < 0) << u64(extra))
            word, shift = bit >> 6, bit & 63
            binary[word] |= rest << u64(shift)
            if shift + width > 64:
                binary[word + 1] |= rest >> u64(64 - shift)
            bit += width


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
            q = np.int64(0)
            if extra:
                if extra > 7 or bit + extra + 1 > 64 * binary.size:
                    return -1
                k, shift = bit >> 6, bit & 63
                rest = binary[k] >> u64(shift)
                if shift + extra + 1 > 64:
                    rest |= binary[k + 1] << u64(64 - shift)
                bit += extra + 1
                q = np.int64(rest & ((u64(1) << u64(extra)) - u64(1))) + (np.int64(1) << extra) - 1
                if q > limit:
                    return -1
                if (rest >> u64(extra)) & u64(1):
                    q = -q
            out[done] = u8(q + limit)
            done += 1
    return done


def elias_decode(words: torch.Tensor, unary_words: int, count: int, limit: int):
    """The levels, or None if the streams do not hold exactly `count` of them within the limit."""
    stream = words.numpy().view(u64)
    out = np.empty(count, u8)
    done = _decode(stream[:unary_words], stream[unary_words:], limit, out)
    return torch.from_numpy(out) if done == count else None
