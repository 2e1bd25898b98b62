"""Rounding to powers of two, in plain PyTorch: a sign and a 7-bit exponent, a byte each."""

import math

import torch
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.random import random_words
from thinwire.kernels.reference.sum import add, total


def encode_powers(x: Tensor, r: Tensor | None, *, top: int, key: Key) -> Tensor:
    """The codes; all finite and 0 < max |x + r| < 2^top by what the caller found out."""
    p = total(x, r)
    ceiling = 127 if top <= math.frexp(torch.finfo(p.dtype).max)[1] - 1 else 126
    p = p.double()
    words = random_words(p.numel(), key, p.device)
    bits = p.view(torch.int64)
    fraction = (bits & ((1 << 52) - 1)) >> 20
    code = ((bits >> 52) & 0x7FF) - 1023 - top + 127
    up = (words < fraction) & (code < ceiling)
    small = words < (p.abs() * (2.0 ** (126 - top) * 2.0**32)).clamp_max(2.0**62).long()
    code = torch.where(code < 1, small.long(), code + up)
    return (code | ((p < 0).long() << 7)).to(torch.uint8)


def add_powers(
    out: Tensor,
    codes: Tensor,
    table: Tensor,
    *,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out += weight * table[code], after zeroing out (`fresh`) or adding a tensor (`plus`)."""
    add(out, table[codes.long()], weight, fresh, plus)
