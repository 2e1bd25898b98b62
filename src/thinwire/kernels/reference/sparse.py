"""Choosing positions and moving values to and from them, in plain PyTorch."""

import torch
from torch import Tensor

from thinwire.kernels.reference.sum import begin, total

Chosen = tuple[Tensor, Tensor]


def index_dtype(n: int) -> torch.dtype:
    """The smallest integer type that numbers n elements."""
    return torch.int32 if n < 1 << 31 else torch.int64


def all_finite(x: Tensor, r: Tensor | None) -> bool:
    """Whether every x + r is finite."""
    return bool(torch.isfinite(total(x, r)).all())


def top_k(x: Tensor, r: Tensor | None, k: int) -> Chosen | None:
    """(positions, values) of the k largest |x + r|, ascending positions, ties to the lower one."""
    p = total(x, r)
    size = p.abs()
    if not bool(torch.isfinite(size).all()):
        return None
    bound = torch.topk(size, k, sorted=False).values.min()
    keep = size > bound
    ties = torch.nonzero(size == bound).squeeze(1)[: k - int(keep.sum())]
    keep[ties] = True
    positions = torch.nonzero(keep).squeeze(1)
    return positions.to(index_dtype(p.numel())), p[positions]


def chunk_top_k(x: Tensor, r: Tensor | None, chunk: int, k: int, last: int) -> Chosen | None:
    """(positions, values) of the k largest |x + r| of each chunk, ascending positions.

    `last` is the k of what is left over behind the chunks, if there is something. Ties go to the
    lower position.
    """
    p = total(x, r)
    if not bool(torch.isfinite(p).all()):
        return None
    whole = p.numel() // chunk * chunk
    rows = p[:whole].abs().view(-1, chunk)
    bound = torch.topk(rows, k, dim=1, sorted=False).values.amin(1, keepdim=True)
    keep, ties = rows > bound, rows == bound
    keep |= ties & (ties.cumsum(1) <= k - keep.sum(1, keepdim=True))
    positions = torch.nonzero(keep.flatten()).squeeze(1)
    if last:
        rest = top_k(p[whole:], None, last)
        assert rest is not None
        positions = torch.cat([positions, rest[0].long() + whole])
    return positions.to(index_dtype(p.numel())), p[positions]


def above(x: Tensor, r: Tensor | None, value: float) -> Chosen | None:
    """(positions, values) of all |x + r| >= value, ascending positions."""
    p = total(x, r)
    if not bool(torch.isfinite(p).all()):
        return None
    positions = torch.nonzero(p.abs() >= value).squeeze(1)
    return positions.to(index_dtype(p.numel())), p[positions]


def take(x: Tensor, r: Tensor | None, positions: Tensor) -> Tensor | None:
    """(x + r)[positions], ascending positions; None if not all of x + r is finite."""
    p = total(x, r)
    return p[positions.long()] if bool(torch.isfinite(p).all()) else None


def scatter_add(
    out: Tensor,
    positions: Tensor,
    values: Tensor,
    *,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out[positions] += weight * values, after zeroing out or adding a tensor to it."""
    begin(out, fresh, plus)
    out[positions.long()] += (values * weight).to(out.dtype)


def scatter_add_many(out: Tensor, items: list[Chosen], weight: float) -> None:
    """`scatter_add` of several (positions, values), in their order."""
    for positions, values in items:
        scatter_add(out, positions, values, weight=weight)


def scatter_mean(out: Tensor, items: list[Chosen]) -> None:
    """out <- at each position the mean over the (positions, values) that hold it, added up in their
    order; zero where none does."""
    counts = torch.zeros_like(out, dtype=torch.int32)
    for positions, _ in items:
        counts[positions.long()] += 1
    out.zero_()
    for positions, values in items:
        at = positions.long()
        out[at] += values / counts[at]  # before they are added: a mean fits where a sum may not


def scatter_mean_bytes(n: int) -> int:
    """What `scatter_mean` takes for its counts."""
    return 4 * n
