"""Ascending positions as bits: Golomb-Rice coded gaps, or a bitmap.

The unary quotients and the fixed-width remainders of the gaps lie in two streams, one after the
other. That costs not one bit more than the usual interleaving, and both streams can be read without
following a chain of codewords.
"""

import numpy as np
import torch
from numba.cpython.unsafe.numbers import trailing_zeros

from thinwire.kernels.cpu.jit import jit
from thinwire.kernels.cpu.sparse import index_dtype

u64 = np.uint64


@jit
def _quotients(positions, parameter):
    total, before = 0, -1
    for i in range(positions.size):
        at = np.int64(positions[i])
        total += (at - before - 1) >> parameter
        before = at
    return total


def rice_quotients(positions: torch.Tensor, parameter: int) -> int:
    """The sum of all gaps' quotients: what decides the length of the unary stream."""
    return int(_quotients(positions.numpy(), parameter))


@jit
def _rice_encode(positions, parameter, unary, low):
    before, at, bit = np.int64(-1), np.int64(0), np.int64(0)
    mask = (np.int64(1) << parameter) - 1
    for i in range(positions.size):
        here = np.int64(positions[i])
        gap = here - before - 1
        before = here
        at += gap >> parameter
        unary[at >> 6] |= u64(1) << u64(at & 63)
        at += 1
        if parameter:
            rest = u64(gap & mask)
            word, shift = bit >> 6, bit & 63
            low[word] |= rest << u64(shift)
            if shift + parameter > 64:
                low[word + 1] |= rest >> u64(64 - shift)
            bit += parameter


def rice_encode(positions: torch.Tensor, parameter: int, unary_words: int) -> torch.Tensor:
    """The unary stream (its length known from `rice_quotients`), then the remainders."""
    count = positions.numel()
    out = np.zeros(unary_words + -(-count * parameter // 64), u64)
    _rice_encode(positions.numpy(), parameter, out[:unary_words], out[unary_words:])
    return torch.from_numpy(out.view(np.int64))


@jit
def _rice_decode(unary, low, parameter, n, out):
    done, before = 0, np.int64(-1)
    last, bit = np.int64(-1), np.int64(0)
    mask = (u64(1) << u64(parameter)) - u64(1)
    for w in range(unary.size):
        word = unary[w]
        while word:
            if done == out.size:
                return -1
            at = np.int64(w * 64) + np.int64(trailing_zeros(word))
            word &= word - u64(1)
            quotient = at - last - 1
            last = at
            rest = u64(0)
            if parameter:
                k, shift = bit >> 6, bit & 63
                rest = low[k] >> u64(shift)
                if shift + parameter > 64:
                    rest |= low[k + 1] << u64(64 - shift)
                bit += parameter
            before += 1 + ((quotient << parameter) | np.int64(rest & mask))
            if before >= n or before < 0:
                return -1
            out[done] = before
            done += 1
    return done


def rice_decode(words: torch.Tensor, count: int, parameter: int, unary_words: int, n: int):
    """The positions, or None if the streams do not hold exactly `count` of them below n."""
    stream = words.numpy().view(u64)
    out = np.empty(count, index_dtype(n))
    done = _rice_decode(stream[:unary_words], stream[unary_words:], parameter, n, out)
    return torch.from_numpy(out) if done == count else None


@jit
def _bitmap_encode(positions, out):
    for i in range(positions.size):
        at = np.int64(positions[i])
        out[at >> 6] |= u64(1) << u64(at & 63)


def bitmap_encode(positions: torch.Tensor, n: int) -> torch.Tensor:
    """One bit an element of the tensor, in 64-bit words."""
    out = np.zeros(-(-n // 64), u64)
    _bitmap_encode(positions.numpy(), out)
    return torch.from_numpy(out.view(np.int64))


@jit
def _bitmap_decode(words, n, out):
    done = 0
    for w in range(words.size):
        word = words[w]
        while word:
            at = np.int64(w * 64) + np.int64(trailing_zeros(word))
            word &= word - u64(1)
            if done == out.size or at >= n:
                return -1
            out[done] = at
            done += 1
    return done


def bitmap_decode(words: torch.Tensor, count: int, n: int):
    """The positions, or None if the bitmap does not hold exactly `count` of them below n."""
    out = np.empty(count, index_dtype(n))
    done = _bitmap_decode(words.numpy().view(u64), n, out)
    return torch.from_numpy(out) if done == count else None
