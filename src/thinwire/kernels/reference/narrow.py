"""Rounding to bfloat16 at random, in plain PyTorch; the CPU kernel tells the method."""

import torch
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.random import random_words


def round_to_bfloat16(x: Tensor, out: Tensor, key: Key) -> None:
    """out = x, float32, rounded up or down to bfloat16; NaN stays.

    What is too large becomes the largest finite number.
    """
    top = torch.finfo(torch.bfloat16).max
    bits = x.clamp(-top, top).masked_fill(x.isnan(), torch.nan).view(torch.int32)
    noise = (random_words(x.numel(), key, x.device) >> 16).to(torch.int32)
    # The sign is the highest bit, which no carry reaches.
    out.view(torch.int16).copy_((bits + noise) >> 16)
