"""Passes over x + r for the scale of a whole tensor, in plain PyTorch."""

import torch
from torch import Tensor

from thinwire.kernels.reference.sum import total


def extent(x: Tensor, r: Tensor | None) -> tuple[float, float] | None:
    """(min, max) of x + r, or None if not all are finite."""
    p = total(x, r)
    if not bool(torch.isfinite(p).all()):
        return None
    low, high = torch.aminmax(p)
    return low.item(), high.item()


def moments(x: Tensor, r: Tensor | None, unit: float) -> tuple[float, float]:
    """The means of v and of v^2 with v = (x + r) * unit; `unit` keeps them from overflowing."""
    v = total(x, r).double() * unit
    return v.mean().item(), v.square().mean().item()
