"""Rounding to bfloat16 at random, so that the mean is exact; the CPU kernel tells the method."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.triton.launch import TILE, launch, tiles
from thinwire.kernels.triton.random import group_keys, word_at


@triton.jit(do_not_specialize=["n"])
def _round(x_ptr, keys_ptr, out_ptr, n, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < n
    bits = tl.load(x_ptr + i, mask=mask, other=0)  # of float32
    size = bits & 0x7FFFFFFF
    # 0x7F7F0000 is the largest finite bfloat16, 0x7F800000 infinity, what lies above is NaN.
    clamped = (bits - size) + tl.minimum(size, 0x7F7F0000)
    clamped = tl.where(size > 0x7F800000, 0x7FC00000, clamped)
    noise = (word_at(keys_ptr, i, mask) >> 16).to(tl.int32)
    # The sign is the highest bit, which no carry reaches.
    tl.store(out_ptr + i, ((clamped + noise) >> 16).to(tl.int16), mask=mask)


def round_to_bfloat16(x: Tensor, out: Tensor, key: Key) -> None:
    """out = x, float32, rounded up or down to bfloat16; NaN stays.

    What is too large becomes the largest finite number.
    """
    n = x.numel()
    bits, halves = x.view(torch.int32), out.view(torch.int16)
    launch(_round, tiles(n), bits, group_keys(n, key, bits), halves, n, TILE=TILE)
