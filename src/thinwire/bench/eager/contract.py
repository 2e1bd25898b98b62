"""What every eager version looks like."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]


class Eager(NamedTuple):
    encode: Callable[[Tensor, Tensor], Parts]  # (x, residual) -> what is sent; updates the residual
    decode: Callable[[Parts, int], Tensor]  # (what was sent, number of elements) -> tensor


def generator() -> torch.Generator:
    """Random numbers of our own: a benchmark leaves the global generator alone."""
    return torch.Generator().manual_seed(0)
