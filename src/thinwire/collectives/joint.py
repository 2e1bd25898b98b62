"""joint: averages of small matrices, for compressors that all ranks find together.

1. See every tensor's x + r as a matrix, as the compressor says; what it does not see as one goes
   uncompressed into the first sum.
2. As often as the compressor asks: meet, then all-reduce what it wants averaged, of all tensors in
   one piece.
3. Tensor <- weight * size * the approximated mean; residual <- what this rank has not given to it.

The compressor's share of the tensors, and the backend's all-reduce of it: 2 (P - 1) / P times the
values that it asks for leave each rank, however many there are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.collectives.algorithm import Algorithm
from thinwire.collectives.reduction import Part
from thinwire.collectives.summable import pooled
from thinwire.collectives.transport import Transport
from thinwire.compressors.joint import JointCompressor, Seen


class JointSearch(Algorithm):
    def prepare(self) -> None:
        compressor, parts = self.reduction.compressor, self.reduction.parts
        assert isinstance(compressor, JointCompressor)
        recalled = self.reduction.recalled
        # Nothing is found again if nobody keeps it.
        self._recalled = [{} for _ in parts] if recalled is None else recalled
        self._views = [
            _view(part, compressor, recall)
            for part, recall in zip(parts, self._recalled, strict=True)
        ]
        self._seen = [view for view in self._views if isinstance(view, Seen)]
        self._num_sums = compressor.num_sums
        self._search = compressor.find(self._seen)
        uncompressed = [view for view in self._views if isinstance(view, Tensor)]
        self._wanted = [*next(self._search), *uncompressed]
        # Not to be seen in the products: a library may skip what is multiplied by zero.
        self.finite = all(part.finite for part in parts)

    def exchange(self, transport: Transport) -> None:
        pools = pooled(self._wanted)
        along = transport.summands(pools) if self.finite else None
        records = transport.meet([not self.finite], along=along)
        self.finite = not any(record.numbers[0] for record in records)
        if not self.finite:
            return
        count = len(self._seen)
        means = self._means(transport.sum(pools, records), self._wanted)
        self._exact = means[count:]
        for _ in range(self._num_sums - 1):
            if not _all_finite(means):
                break
            with transport.preparing():
                wanted = self._search.send(means[:count])
                pools = pooled(wanted)
            records = transport.meet(along=transport.summands(pools))
            means = self._means(transport.sum(pools, records), wanted)
        self.finite = _all_finite(means)  # or too large to be multiplied; all ranks see the same
        if self.finite:
            with transport.clock("decode"):
                self._results = self._last(means[:count])

    def _means(self, totals: dict[torch.dtype, Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of pooled tensors as means of each."""
        totals = {dtype: total.div_(self.size) for dtype, total in totals.items()}
        means = []
        for tensor in tensors:
            mean, totals[tensor.dtype] = totals[tensor.dtype].tensor_split([tensor.numel()])
            means.append(mean.view(tensor.shape))
        return means

    def _last(self, means: list[Tensor]) -> list[Tensor]:
        try:
            self._search.send(means)
        except StopIteration as end:
            results: list[Tensor] = end.value
            return results
        raise AssertionError(f"{self.reduction.compressor} asks for more sums than it said")

    def finish(self) -> None:
        if not self.finite:
            self.fill_with_nan()
            return
        weight = self.weight * self.size
        found, exact = iter(self._results), iter(self._exact)
        parts = self.reduction.parts
        for part, recall, view in zip(parts, self._recalled, self._views, strict=True):
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
