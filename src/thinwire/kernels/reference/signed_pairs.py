"""A sign and one of two magnitudes for each element, in plain PyTorch."""

import torch
from torch import Tensor

from thinwire.kernels.reference.levels import pack, unpack
from thinwire.kernels.reference.pairs import lengths_of
from thinwire.kernels.reference.sum import add, blocks, total


def encode_signed_pairs(
    x: Tensor, r: Tensor | None, *, block: int | None
) -> tuple[Tensor, Tensor] | None:
    """(pairs, packed levels), or None if not all finite; see the CPU kernel."""
    p = total(x, r)
    if not bool(torch.isfinite(p).all()):
        return None
    n = p.numel()
    each = block or n
    unit = 1.0 if p.dtype == torch.float32 else 2.0 ** -n.bit_length()
    sizes = blocks(p.abs(), each)
    wide = sizes.double() * unit
    lengths = lengths_of(n, each, p.device)
    limits = (wide.sum(1) / lengths / unit).to(p.dtype)
    large = sizes > limits.unsqueeze(1)
    counts = large.sum(1)
    low = wide.masked_fill(large, 0).sum(1) / (lengths - counts).clamp_min(1) / unit
    high = wide.masked_fill(~large, 0).sum(1) / counts.clamp_min(1) / unit
    levels = (p < 0).to(torch.uint8) | (large.flatten()[:n].to(torch.uint8) << 1)
    return torch.stack([low, high], 1).to(p.dtype), pack(levels, 2)


def add_signed_pairs(
    out: Tensor,
    packed: Tensor,
    pairs: Tensor,
    *,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    n = out.numel()
    levels = blocks(unpack(packed, 2, n), block or n)
    sizes = torch.where(levels & 2 != 0, pairs[:, 1:], pairs[:, :1])
    add(out, torch.where(levels & 1 != 0, -sizes, sizes).flatten()[:n], weight, fresh, plus)
