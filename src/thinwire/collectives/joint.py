"""joint: averages of small matrices, for compressors that all ranks find together.

1. See every tensor's x + r as a matrix, as its compressor says; what it does not see as one goes
   uncompressed into the first sum, and so do tensors that are sent uncompressed.
2. As often as a compressor asks: meet, then all-reduce what all of them want averaged, of all
   tensors in one piece.
3. Tensor <- weight * size * the approximated mean; residual <- what this rank has not given to it.

The compressor's share of the tensors, and the backend's all-reduce of it: 2 (P - 1) / P times the
values that it asks for leave each rank, however many there are.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.collectives.algorithm import Algorithm
from thinwire.collectives.reduction import Part
from thinwire.collectives.summable import pooled
from thinwire.collectives.transport import Transport
from thinwire.compressors.joint import JointCompressor, Seen


class _Search:
    """What one compressor finds of its tensors, sum by sum.

    Args:
        seen: its tensors, by their places among the parts.
    """

    def __init__(self, compressor: JointCompressor, seen: dict[int, Seen]) -> None:
        self.compressor, self.places = compressor, list(seen)
        self.means: list[Tensor] = []  # of what it wanted last
        self._search = compressor.find(list(seen.values()))
        self.wanted = next(self._search)

    def go_on(self) -> None:
        """Have it want more, now that the means are known."""
        self.wanted = self._search.send(self.means)

    def results(self) -> dict[int, Tensor]:
        """What it has found of each tensor, after its last sum."""
        try:
            self._search.send(self.means)
        except StopIteration as end:
            return dict(zip(self.places, end.value, strict=True))
        raise AssertionError(f"{self.compressor} asks for more sums than it said")


class JointSearch(Algorithm):
    def prepare(self) -> None:
        parts, recalled = self.reduction.parts, self.reduction.recalled
        # Nothing is found again if nobody keeps it.
        self._recalled = [{} for _ in parts] if recalled is None else recalled
        self._views = [
            _view(part, recall) for part, recall in zip(parts, self._recalled, strict=True)
        ]
        by_compressor: dict[JointCompressor, dict[int, Seen]] = {}
        for place, (part, view) in enumerate(zip(parts, self._views, strict=True)):
            if isinstance(view, Seen):
                assert isinstance(part.compressor, JointCompressor)
                by_compressor.setdefault(part.compressor, {})[place] = view
        self._searches = [_Search(compressor, seen) for compressor, seen in by_compressor.items()]
        self._exact = {i: view for i, view in enumerate(self._views) if isinstance(view, Tensor)}
        # Not to be seen in the products: a library may skip what is multiplied by zero.
        self.finite = all(part.finite for part in parts)

    def exchange(self, transport: Transport) -> None:
        wanted = self._counted(self._wanted(self._searches) | self._exact)
        pools = pooled(list(wanted.values()))
        along = transport.summands(pools) if self.finite else None
        records = transport.meet([not self.finite], along=along)
        self.finite = not any(record.numbers[0] for record in records)
        if not self.finite:
            return
        means = self._means(transport.sum(pools, records), wanted)
        self._exact = {place: means[place] for place in self._exact}
        most = max((each.compressor.num_sums for each in self._searches), default=1)
        for number in range(1, most):
            self.finite = _all_finite(means.values())
            if not self.finite:
                return
            searches = [each for each in self._searches if each.compressor.num_sums > number]
            with transport.preparing():
                for each in searches:
                    each.go_on()
                wanted = self._counted(self._wanted(searches))
                pools = pooled(list(wanted.values()))
            records = transport.meet(along=transport.summands(pools))
            means = self._means(transport.sum(pools, records), wanted)
        # Or too large to be multiplied; all ranks see the same.
        self.finite = _all_finite(means.values())
        if self.finite:
            with transport.clock("decode"):
                self._results = {
                    place: found
                    for each in self._searches
                    for place, found in each.results().items()
                }

    def _wanted(self, searches: Sequence[_Search]) -> dict[int, Tensor]:
        """What is to be averaged of each part that they see."""
        return {
            place: tensor
            for each in searches
            for place, tensor in zip(each.places, each.wanted, strict=True)
        }

    def _counted(self, wanted: dict[int, Tensor]) -> dict[int, Tensor]:
        for place, tensor in wanted.items():
            self.reduction.sent[place] += tensor.nbytes
        return wanted

    def _means(
        self, totals: dict[torch.dtype, Tensor], wanted: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """The sums of pooled tensors as means of each, which searches get to know too."""
        totals = {dtype: total.div_(self.size) for dtype, total in totals.items()}
        means = {}
        for place, tensor in wanted.items():
            mean, totals[tensor.dtype] = totals[tensor.dtype].tensor_split([tensor.numel()])
            means[place] = mean.view(tensor.shape)
        for each in self._searches:
            if all(place in means for place in each.places):
                each.means = [means[place] for place in each.places]
        return means

    def finish(self) -> None:
        if not self.finite:
            self.fill_with_nan()
            return
        weight = self.weight * self.size
        parts = self.reduction.parts
        for place, (part, recall, view) in enumerate(
            zip(parts, self._recalled, self._views, strict=True)
        ):
            n = part.x.numel()
            if isinstance(view, Seen):
                result = self._results[place].reshape(-1)[:n]
                left = view.matrix.reshape(-1)[:n]
                recall.update(view.recall)
                if part.r is not None:
                    part.r.copy_(left)
            else:
                result = self._exact[place]
                if part.r is not None:
                    part.r.zero_()
            part.x.copy_(result.mul_(weight) if weight != 1 else result)


def _view(part: Part, recall: dict[str, Tensor]) -> Seen | Tensor:
    """A copy of x + r: as a matrix, filled up with zeros, or flat."""
    n, compressor = part.x.numel(), part.compressor
    shape = compressor.matrix(part.shape) if isinstance(compressor, JointCompressor) else None
    rows, columns = (n, 1) if shape is None else shape
    values = part.x.new_empty(rows * columns, dtype=part.real)
    values[n:].zero_()
    if part.r is None:
        values[:n].copy_(part.x)
    else:
        torch.add(part.x, part.r, out=values[:n])
    return values if shape is None else Seen(values.view(rows, columns), part.key, dict(recall))


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
