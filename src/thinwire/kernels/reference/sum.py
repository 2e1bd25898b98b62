"""What the reference kernels share: x + r, the start of an add, and tensors cut into blocks."""

import torch
from torch import Tensor


def total(x: Tensor, r: Tensor | None) -> Tensor:
    """x + r, or x itself; callers do not write to it."""
    return x if r is None else x + r


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
