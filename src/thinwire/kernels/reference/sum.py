"""x + r in plain PyTorch: the sum, its statistics, how values are added to a tensor, and blocks."""

import torch
from torch import Tensor


def total(x: Tensor, r: Tensor | None) -> Tensor:
    """x + r, or x itself, in float32 or float64; callers do not write to it."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide if r is None else wide + r


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


def begin(out: Tensor, fresh: bool, plus: Tensor | None) -> None:
    """Zero out, or add another tensor to it, or neither."""
    if fresh:
        out.zero_()
    elif plus is not None:
        out += plus


def add(
    out: Tensor, values: Tensor, weight: float, fresh: bool = False, plus: Tensor | None = None
) -> None:
    """out += weight * values, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    product = (values * weight).to(out.dtype)
    if fresh:
        out.copy_(product)
        return
    begin(out, fresh, plus)
    out += product


def blocks(p: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """p as rows of `block` elements, the last one filled up."""
    short = -p.numel() % block
    if short:
        p = torch.nn.functional.pad(p, (0, short), value=fill)
    return p.view(-1, block)
