"""Ascending positions as bits: Golomb-Rice coded gaps, or a bitmap.

The unary quotients and the fixed-width remainders of the gaps lie in two streams, one after the
other. That costs not one bit more than the usual interleaving, and both streams can be read without
following a chain of codewords.
"""

import itertools

import numpy as np
import torch
from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros

from thinwire.kernels import threads
from thinwire.kernels.cpu.jit import jit
from thinwire.kernels.cpu.sparse import index_dtype

u64 = np.uint64
LEAST = 1 << 12  # words of a unary stream for each thread, or for one alone


@jit
def _quotients(positions, parameter):
    total, before = 0, -1
    for i in range(positions.size):
        at = np.int64(positions[i])
        total += (at - before - 1) >> parameter
        before = at
    return total


@jit
def _rice_parameter(positions, parameter):
    bits = _quotients(positions, parameter) + positions.size * parameter
    for step in (-1, 1):
        while parameter + step >= 0:
            other = _quotients(positions, parameter + step) + positions.size * (parameter + step)
            if other >= bits:
                break
            parameter, bits = parameter + step, other
    return parameter, bits - positions.size * parameter


def rice_parameter(positions: torch.Tensor, guess: int) -> tuple[int, int]:
    """The parameter with the fewest bits, downhill from a guess, and the sum of its quotients."""
    parameter, quotients = _rice_parameter(positions.numpy(), guess)
    return int(parameter), int(quotients)


@jit
def _rice_encode(positions, parameter, unary, low):
    """Words are put together in registers: each is written once, to memory that holds zeros."""
    before, at, word = np.int64(-1), np.int64(0), np.int64(0)
    ones, rests, fill, done = u64(0), u64(0), 0, 0
    mask = (np.int64(1) << parameter) - 1
    for i in range(positions.size):
        here = np.int64(positions[i])
        gap = here - before - 1
        before = here
        at += gap >> parameter
        if at >> 6 != word:
            unary[word] = ones
            word, ones = at >> 6, u64(0)
        ones |= u64(1) << u64(at & 63)
        at += 1
        rest = u64(gap & mask)
        rests |= rest << u64(fill)
        fill += parameter
        if fill >= 64:
            low[done] = rests
            done += 1
            fill -= 64
            rests = rest >> u64(parameter - fill)
    if positions.size:
        unary[word] = ones
    if fill:
        low[done] = rests


def rice_encode(positions: torch.Tensor, parameter: int, unary_words: int) -> torch.Tensor:
    """The unary stream (its length known from `rice_parameter`), then the remainders."""
    count = positions.numel()
    out = np.zeros(unary_words + -(-count * parameter // 64), u64)
    _rice_encode(positions.numpy(), parameter, out[:unary_words], out[unary_words:])
    return torch.from_numpy(out.view(np.int64))


@jit
def _ones(words):
    """How many bits are set, and the place of the last one (-1 if none)."""
    count, last = 0, np.int64(-1)
    for w in range(words.size):
        v = words[w]
        if v:
            last = 64 * w + 63 - np.int64(leading_zeros(v))
        v = v - ((v >> u64(1)) & u64(0x5555555555555555))
        v = (v & u64(0x3333333333333333)) + ((v >> u64(2)) & u64(0x3333333333333333))
        v = (v + (v >> u64(4))) & u64(0x0F0F0F0F0F0F0F0F)
        count += np.int64((v * u64(0x0101010101010101)) >> u64(56))
    return count, last


@jit
def _rice_decode(unary, last, low, bit, parameter, n, out):
    """Positions of one range of the unary stream, counted from the position before it.

    `last` is the place of the last set bit before the range, from the range's begin (negative);
    `bit` is where its remainders begin.
    """
    done, before = 0, np.int64(-1)
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
                # Unsigned, as in `sparse`: no index counts from the end.
                k, shift = u64(bit >> 6), bit & 63
                rest = low[k] >> u64(shift)
                if shift + parameter > 64:
                    rest |= low[k + u64(1)] << u64(64 - shift)
                bit += parameter
            before += 1 + ((quotient << parameter) | np.int64(rest & mask))
            if before >= n or before < 0:
                return -1
            out[u64(done)] = before
            done += 1
    return done


def rice_decode(words: torch.Tensor, count: int, parameter: int, unary_words: int, n: int):
    """The positions, or None if the streams do not hold exactly `count` of them below n."""
    stream = words.numpy().view(u64)
    unary, low = stream[:unary_words], stream[unary_words:]
    parts = threads.ranges(unary_words, least=LEAST)
    found = [_ones(unary[lo:hi]) for lo, hi in parts]  # takes no longer than to hand it over
    if sum(ones for ones, _ in found) != count:
        return None
    firsts = list(itertools.accumulate((ones for ones, _ in found), initial=0))
    lasts, last = {}, -1
    for (lo, _), (ones, place) in zip(parts, found, strict=True):
        lasts[lo] = last - 64 * lo
        last = 64 * lo + place if ones else last
    out = np.empty(count, index_dtype(n))
    ends = itertools.pairwise(firsts)
    pieces = {lo: (out[a:b], a) for (lo, _), (a, b) in zip(parts, ends, strict=True)}

    def work(lo, hi):
        piece, first = pieces[lo]
        return _rice_decode(unary[lo:hi], lasts[lo], low, first * parameter, parameter, n, piece)

    if any(done < 0 for done in threads.run(work, parts)):
        return None
    end = -1
    for piece, _ in pieces.values():
        if piece.size:
            if end + 1 + int(piece[-1]) >= n:
                return None
            if end >= 0:
                piece += end + 1
            end = int(piece[-1])
    return torch.from_numpy(out)


@jit
def _bitmap_encode(positions, out):
    for i in range(positions.size):
        at = np.int64(positions[i])
        out[at >> 6] |= u64(1) << u64(at & 63)


def bitmap_encode(positions: torch.Tensor, n: int) -> torch.Tensor:
    """One bit per element of the tensor, in 64-bit words."""
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
