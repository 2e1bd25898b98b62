"""Rounding to powers of two: a sign and a 7-bit exponent, a byte each."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.triton.launch import TILE, double, launch, tiles
from thinwire.kernels.triton.numbers import combine, from_bits, load_sum
from thinwire.kernels.triton.random import group_keys, word_at
from thinwire.kernels.triton.uniform import mode_of


@triton.jit(do_not_specialize=["n", "top", "ceiling", "lift"])
def _encode(
    x_ptr, r_ptr, keys_ptr, out_ptr, n, top, ceiling, lift: tl.int64,
    HAS_R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    p = load_sum(x_ptr, r_ptr, i, mask, HAS_R).to(tl.float64)
    word = word_at(keys_ptr, i, mask).to(tl.int64)
    bits = p.to(tl.int64, bitcast=True)
    fraction = (bits & 0xFFFFFFFFFFFFF) >> 20
    code = ((bits >> 52) & 0x7FF) - 1023 - top + 127
    up = (word < fraction) & (code < ceiling)
    # Below the smallest power: that power, or zero.
    small = word < tl.minimum(tl.abs(p) * from_bits(lift, p), 4611686018427387904.0).to(tl.int64)
    code = tl.where(code < 1, small.to(tl.int64), code + up.to(tl.int64))
    tl.store(out_ptr + i, (code | ((p < 0).to(tl.int64) << 7)).to(tl.uint8), mask=mask)


def encode_powers(x: Tensor, r: Tensor | None, *, top: int, key: Key) -> Tensor:
    """The codes; all finite and 0 < max |x + r| < 2^top by what the caller found out."""
    n = x.numel()
    ceiling = 127 if top <= math.frexp(torch.finfo(x.dtype).max)[1] - 1 else 126
    out = torch.empty(n, dtype=torch.uint8, device=x.device)
    launch(
        _encode, tiles(n), x, x if r is None else r, group_keys(n, key, x), out, n, top, ceiling,
        double(2.0 ** (126 - top) * 2.0**32), HAS_R=r is not None, TILE=TILE,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n", "weight"])
def _add(
    out_ptr, plus_ptr, codes_ptr, table_ptr, n, weight: tl.int64,
    MODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    code = tl.load(codes_ptr + i, mask=mask, other=0).to(tl.int32)
    value = tl.load(table_ptr + code, mask=mask, other=0.0)
    combine(out_ptr, plus_ptr, i, mask, value, weight, MODE)


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
    n = out.numel()
    launch(
        _add, tiles(n), out, out if plus is None else plus, codes, table, n, double(weight),
        MODE=mode_of(fresh, plus), TILE=TILE,
    )  # fmt: skip
