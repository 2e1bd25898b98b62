"""Rounding to powers of two: sign and a 7-bit exponent below the tensor's largest, a byte each.

Code 0 is zero, code c in 1..127 the magnitude 2^(top + c - 127). Between two powers the upper one
is taken with the probability that makes the mean exact.
"""

import math

import numpy as np
import torch

from thinwire.kernels.cpu.jit import ADD, KEEP, ZERO, combine, jit, load
from thinwire.kernels.cpu.random import fill, key_words
from thinwire.kernels.cpu.source import Source
from thinwire.kernels.key import Key

SPAN = 4096
MANTISSA = np.int64((1 << 52) - 1)


@jit
def _encode(x, r, first, out, top, ceiling, key):
    buffer = np.empty(min(SPAN, x.size), x.dtype)
    words = np.empty(SPAN + 1024, np.uint32)
    lift = 2.0 ** (126 - top) * 4294967296.0
    for lo in range(0, x.size, SPAN):
        count = min(SPAN, x.size - lo)
        load(x[lo : lo + count], r[lo : lo + count], buffer[:count])
        at = fill(first + lo, count, key, words)
        for i in range(count):
            p = np.float64(buffer[i])
            bits = p.view(np.int64)
            fraction = bits & MANTISSA
            code = ((bits >> np.int64(52)) & np.int64(0x7FF)) - np.int64(1023) - top + np.int64(127)
            word = np.int64(words[at + i])
            up = word < (fraction >> np.int64(20))
            if code < 1:
                # Below the smallest power: that power, or zero.
                code = np.int64(word < np.int64(abs(p) * lift))
            elif up and code < ceiling:
                code += 1
            out[lo + i] = np.uint8(code | (np.int64(p < 0) << np.int64(7)))


def encode_powers(x: torch.Tensor, r: torch.Tensor | None, *, top: int, key: Key):
    """The codes; all finite and 0 < max |x + r| < 2^top by what the caller found out."""
    source = Source(x, r)
    out = np.empty(source.size, np.uint8)
    words = key_words(key)
    ceiling = np.int64(127 if top <= math.frexp(np.finfo(source.dtype).max)[1] - 1 else 126)

    def work(lo, hi, xs, rs):
        _encode(xs, rs, lo, out[lo:hi], np.int64(top), ceiling, words)

    source.scan(work, SPAN)
    return torch.from_numpy(out)


@jit
def _add(out, mode, x, codes, table, weight):
    values = np.empty(min(SPAN, out.size), table.dtype)
    for lo in range(0, out.size, SPAN):
        hi = min(lo + SPAN, out.size)
        own = codes[lo:hi]
        for i in range(hi - lo):
            values[i] = table[own[i]]
        combine(out[lo:hi], mode, x[lo:hi], values[: hi - lo], weight)


def add_powers(
    out: torch.Tensor,
    codes: torch.Tensor,
    table: torch.Tensor,
    *,
    weight: float,
    fresh: bool = False,
    plus: torch.Tensor | None = None,
) -> None:
    """out += weight * table[code], after zeroing out (`fresh`) or adding a tensor (`plus`)."""
    o, c, values = out.numpy(), codes.numpy(), table.numpy()
    mode = ZERO if fresh else KEEP if plus is None else ADD
    w = o.dtype.type(weight)
    Source(out if plus is None else plus).scan(
        lambda lo, hi, other, _: _add(o[lo:hi], mode, other, c[lo:hi], values, w), SPAN
    )
