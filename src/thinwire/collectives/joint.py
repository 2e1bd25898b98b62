"""joint: averages of small matrices, for compressors that all ranks find together.

1. See every tensor's x + r as a matrix, as the compressor says; what it does not see as one travels
   as it is, in the first sum.
2. As often as the compressor asks: meet, then all-reduce what it wants averaged, of all tensors in
   one piece.
3. Tensor <- weight * size * the approximated mean; residual <- what this rank has not given to it.

The compressor's share of the tensors, and the backend's all-reduce of it: 2 (P - 1) / P times the
values that it asks for leave each rank, however many there are.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.talk import Talk
from thinwire.collectives.work import Part, Work
from thinwire.compressors.joint import JointCompressor, Seen


def joint(talk: Talk, work: Work) -> None:
    compressor = work.compressor
    assert isinstance(compressor, JointCompressor)
    size = talk.members.size
    with talk.preparing():
        views = [_view(part, compressor, recall) for part, recall in work.recalled()]
        seen = [view for view in views if isinstance(view, Seen)]
        plain = [view for view in views if isinstance(view, Tensor)]
        search = compressor.find(seen)
        wanted = [*next(search), *plain]
        # Not to be seen in the products: a library may skip what is multiplied by zero.
        sound = all(part.finite for part in work.parts)
    said = talk.meet([not sound])
    if any(one.numbers[0] for one in said):
        talk.account.finite = False
        for part in work.parts:
            part.x.fill_(torch.nan)
        return
    means = _averages(talk, wanted, size)
    plain = means[len(seen) :]
    for _ in range(compressor.num_sums - 1):
        if not _all_finite(means):
            break
        with talk.preparing():
            wanted = search.send(means[: len(seen)])
        talk.meet()
        means = _averages(talk, wanted, size)
    if not _all_finite(means):  # too large to be multiplied; all ranks see the same
        talk.account.finite = False
        for part in work.parts:
            part.x.fill_(torch.nan)
        return
    with talk.clock("decode"):
        try:
            search.send(means[: len(seen)])
        except StopIteration as end:
            results: list[Tensor] = end.value
        else:
            raise AssertionError(f"{compressor} asks for more sums than it said")
        _write(work, views, results, plain, work.weight * size)


def _view(part: Part, compressor: JointCompressor, recall: dict[str, Tensor]) -> Seen | Tensor:
    """A copy of x + r: as a matrix, filled up with zeros, or flat."""
    n = part.x.numel()
    shape = compressor.matrix(part.shape)
    rows, columns = (n, 1) if shape is None else shape
    values = part.x.new_empty(rows * columns, dtype=part.real)
    values[n:].zero_()
    if part.r is None:
        values[:n].copy_(part.x)
    else:
        torch.add(part.x, part.r, out=values[:n])
    return values if shape is None else Seen(values.view(rows, columns), part.key, dict(recall))


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _averages(talk: Talk, tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    """The means over ranks, those of one type summed in one piece."""
    totals = {
        dtype: talk.reduce(
            torch.cat([t.reshape(-1) for t in tensors if t.dtype == dtype]), dist.ReduceOp.SUM
        ).div_(size)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
    }
    means = []
    for tensor in tensors:
        mean, totals[tensor.dtype] = totals[tensor.dtype].tensor_split([tensor.numel()])
        means.append(mean.view(tensor.shape))
    return means


def _write(
    work: Work,
    views: Sequence[Seen | Tensor],
    results: Sequence[Tensor],
    plain: Sequence[Tensor],
    weight: float,
) -> None:
    found, exact = iter(results), iter(plain)
    for (part, recall), view in zip(work.recalled(), views, strict=True):
        n = part.x.numel()
        if isinstance(view, Seen):
            result, left = next(found).reshape(-1)[:n], view.matrix.reshape(-1)[:n]
            recall.update(view.recall)
            if part.r is not None:
                part.r.copy_(left)
        else:
            result = next(exact)
            if part.r is not None:
                part.r.zero_()
        part.x.copy_(result.mul_(weight) if weight != 1 else result)
