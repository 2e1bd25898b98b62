"""One bit an element and a pair of values a block, in plain PyTorch."""

import torch
from torch import Tensor

from thinwire.kernels.reference.levels import bits_to_bytes, bytes_to_bits
from thinwire.kernels.reference.sum import add, blocks, total


def encode_pairs(
    x: Tensor, r: Tensor | None, *, block: int | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(sums, counts, packed signs), or None if not all finite; see the CPU kernel."""
    p = total(x, r)
    if not bool(torch.isfinite(p).all()):
        return None
    each = block or p.numel()
    upper = p >= 0
    rows = blocks(p, each).double() / each
    above = rows.clamp_min(0).sum(1)
    below = rows.clamp_max(0).sum(1)
    counts = blocks(upper, each, fill=False).sum(1)
    return torch.stack([above, below], 1), counts, bits_to_bytes(upper)


def add_pairs(
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
    upper = blocks(bytes_to_bits(packed)[:n].bool(), block or n)
    low, high = pairs[:, :1], pairs[:, 1:]
    add(out, torch.where(upper, high, low).flatten()[:n], weight, fresh, plus)
