from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import check
from thinwire.compressors.joint import JointCompressor, Search, Seen, normal
from thinwire.compressors.sparsifiers import kept

FLAT_ROW = 64  # elements of a row where a tensor has none of its own


@dataclass(frozen=True)
class ARCTopK(JointCompressor):
    """The rows that are largest in the mean over ranks, chosen by a random sketch of them.

    A tensor is a matrix G of rows. All ranks draw the same V with `width` columns of independent
    normal numbers and average the sketches P = G V / sqrt(width). The norm of a row of P estimates
    that of the mean gradient's row, so all ranks choose the same K = ceil(ratio * rows) rows, and
    average only those: no position travels, and both steps are all-reduces. Where ranks' own
    largest elements differ or cancel out, this still finds what is large in the mean, and Top-K
    does not.

    Args:
        ratio: of the rows that are sent.
        width: columns of the sketch; more estimate better and cost as many values for each row. 4
            in the paper.
        exact: choose by the true norms of the mean's rows, at the cost of a dense all-reduce: what
            the sketch approximates, for studies.
        row: elements of a row, wherever these lie in the tensor. Longer rows cost fewer values of
            the sketch, but then large elements come with more small ones. 0, as in the paper, for
            rows of the tensor's own: the last dimension of a matrix, two times the square of the
            last dimension for tensors with more, 64 for tensors with one.
        least: tensors with fewer elements go uncompressed, in the first all-reduce.

    Example:
        >>> import thinwire as tw
        >>> tw.parse("arc:0.2")
        ARCTopK(ratio=0.2, width=2, exact=False, row=128, least=1024)

    Reference: Chen et al., An All-Reduce Compatible Top-K Compressor for Communication-Efficient
    Distributed Learning, 2025.
    """

    ratio: float = 0.2
    width: int = 2
    exact: bool = False
    row: int = 128
    least: int = 1024
    name: ClassVar[str] = "arc"

    def __post_init__(self) -> None:
        check.fraction("ARCTopK", "ratio", self.ratio)
        object.__setattr__(self, "ratio", float(self.ratio))
        check.whole("ARCTopK", "width", self.width, 1)
        check.whole("ARCTopK", "row", self.row, 0)
        check.whole("ARCTopK", "least", self.least, 0)
        check.flag("ARCTopK", "exact", self.exact)

    def matrix(self, shape: torch.Size) -> tuple[int, int] | None:
        count = prod(shape)
        if count < max(2, self.least):
            return None
        length = self._row_of(shape)
        rows = ceil(count / length)
        if not self.exact and self._values(rows, length) >= count:
            return None  # rows hardly longer than their sketches
        return (rows, length) if rows > 1 else None

    def _values(self, rows: int, length: int) -> int:
        return rows * (length if self.exact else self.width) + kept(rows, self.ratio) * length

    def _row_of(self, shape: torch.Size) -> int:
        if self.row:
            return self.row
        if len(shape) < 2:
            return FLAT_ROW
        if len(shape) == 2:
            return shape[1]
        return 2 * shape[-1] ** 2

    @property
    def num_sums(self) -> int:
        return 2

    def find(self, seen: Sequence[Seen]) -> Search:
        sketches = yield [self._sketch(each) for each in seen]
        chosen = [strongest(sketch, kept(len(sketch), self.ratio)) for sketch in sketches]
        rows = yield [s.matrix[places] for s, places in zip(seen, chosen, strict=True)]
        results = []
        for each, places, means in zip(seen, chosen, rows, strict=True):
            results.append(torch.zeros_like(each.matrix).index_copy_(0, places, means))
            each.matrix.index_fill_(0, places, 0.0)
        return results

    def _sketch(self, seen: Seen) -> Tensor:
        """G V / sqrt(width), or G itself."""
        if self.exact:
            return seen.matrix
        columns = seen.matrix.shape[1]
        v = normal(columns, self.width, seen.key, seen.matrix.dtype).to(seen.matrix.device)
        return seen.matrix @ v.div_(sqrt(self.width))

    def sent(self, shape: torch.Size) -> int:
        seen = self.matrix(shape)
        if seen is None:
            return prod(shape)
        return self._values(*seen)


def strongest(rows: Tensor, count: int) -> Tensor:
    """The rows of largest norm, in ascending order; of equal ones the first."""
    scores = rows.double().square().sum(1)
    return scores.argsort(descending=True, stable=True)[:count].sort().values
