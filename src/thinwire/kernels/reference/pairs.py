"""One bit per element and a pair of values per block, in plain PyTorch."""

import torch
from torch import Tensor

from thinwire.kernels.reference.levels import bits_to_bytes, bytes_to_bits
from thinwire.kernels.reference.sum import add, blocks, total


def encode_pairs(
    x: Tensor, r: Tensor | None, *, block: int | None, scaled: bool
) -> tuple[Tensor, Tensor] | None:
    """(pairs, packed signs), or None if not all finite; see the CPU kernel."""
    p = total(x, r)
    if not bool(torch.isfinite(p).all()):
        return None
    each = block or p.numel()
    upper = p >= 0
    unit = 1.0 if p.dtype == torch.float32 else 2.0 ** -p.numel().bit_length()
    rows = blocks(p, each).double() * unit
    above, below = rows.clamp_min(0).sum(1), rows.clamp_max(0).sum(1)
    counts = blocks(upper, each, fill=False).sum(1)
    pairs = pairs_of(above, below, counts, lengths_of(p.numel(), each, p.device), unit, scaled)
    return pairs.to(p.dtype), bits_to_bytes(upper)


def lengths_of(n: int, block: int, device: torch.device) -> Tensor:
    """How many elements each block has."""
    lengths = torch.full((-(-n // block),), block, device=device)
    lengths[-1] = n - block * (len(lengths) - 1)
    return lengths


def pairs_of(
    above: Tensor, below: Tensor, counts: Tensor, lengths: Tensor, unit: float, scaled: bool
) -> Tensor:
    """The two values of each block, from the sums of both halves and how many are in the upper."""
    if scaled:
        high = (above - below) / lengths / unit
        return torch.stack([-high, high], 1)
    low = below / (lengths - counts).clamp_min(1) / unit
    return torch.stack([low, above / counts.clamp_min(1) / unit], 1)


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
