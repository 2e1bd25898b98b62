from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import check
from thinwire.compressors.joint import JointCompressor, Search, Seen, normal

TINY = 1e-300  # what is smaller is nothing


@dataclass(frozen=True)
class PowerSGD(JointCompressor):
    """The best low rank of the mean gradient, found by one step of power iteration.

    A tensor is a matrix M of its first dimension and the rest. P = mean(M Q) over ranks, columns
    made orthonormal; Q = mean(M^T P); the result is P Q^T. Q is kept for the next step (warm
    start), so the iteration goes on from step to step. Both means are sums of small matrices: all
    tensors of a call go in two all-reduces, and ranks end with the same result. A mean of rank
    `rank` or less comes out exactly. With a residual, what a rank adds to the next call is its own
    M less the result.

    Args:
        rank: of the result, at most the smaller side of the matrix.
        iterations: power iterations per call; each takes two all-reduces.
        worth: tensors of which it would not send that many times fewer values go uncompressed,
            in the first all-reduce; so do tensors with one dimension.

    Example:
        >>> import thinwire as tw
        >>> tw.parse("powersgd:4")
        PowerSGD(rank=4, iterations=1, worth=2.0)

    Reference: Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization, 2019.
    """

    rank: int = 2
    iterations: int = 1
    worth: float = 2.0
    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        check.whole("PowerSGD", "rank", self.rank, 1)
        check.whole("PowerSGD", "iterations", self.iterations, 1)
        check.at_least("PowerSGD", "worth", self.worth, 0)

    def matrix(self, shape: torch.Size) -> tuple[int, int] | None:
        if len(shape) < 2 or not prod(shape):
            return None
        rows, columns = shape[0], prod(shape[1:])
        sent = (rows + columns) * self.rank_of(rows, columns)
        return (rows, columns) if sent * self.worth <= rows * columns else None

    def rank_of(self, rows: int, columns: int) -> int:
        return min(rows, columns, self.rank)

    @property
    def num_sums(self) -> int:
        return 2 * self.iterations

    def find(self, seen: Sequence[Seen]) -> Search:
        right = [self._start(each) for each in seen]
        left: list[Tensor] = []
        for i in range(self.iterations):
            if i:
                right = [orthonormal(q) for q in right]  # only the span matters
            sums = yield [s.matrix @ q for s, q in zip(seen, right, strict=True)]
            left = [orthonormal(p) for p in sums]
            right = yield [s.matrix.T @ p for s, p in zip(seen, left, strict=True)]
        results = []
        for each, p, q in zip(seen, left, right, strict=True):
            each.recall["q"] = orthonormal(q)
            results.append(p @ q.T)
            each.matrix.sub_(results[-1])
        return results

    def _start(self, seen: Seen) -> Tensor:
        """Where the last call ended, or anywhere."""
        rows, columns = seen.matrix.shape
        shape = (columns, self.rank_of(rows, columns))
        kept = seen.recall.get("q")
        if kept is not None and kept.shape == shape and bool(kept.any()):
            return kept.to(seen.matrix)
        return normal(*shape, seen.key, seen.matrix.dtype).to(seen.matrix.device)

    def recalls(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        seen = self.matrix(shape)
        return {} if seen is None else {"q": (seen[1], self.rank_of(*seen))}

    def sent(self, shape: torch.Size) -> int:
        seen = self.matrix(shape)
        if seen is None:
            return prod(shape)
        return self.iterations * sum(seen) * self.rank_of(*seen)


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span those of a tall matrix, whatever its rank and scale.

    By Householder reflections, which give orthonormal columns also for columns that are zero or
    depend on each other (where Gram-Schmidt divides by nothing), in float64: all ranks get the same
    bits as long as they run the same library. Rows lie together, as they do in what a checkpoint
    gives back: products of the same matrix in another layout round differently.
    """
    wide = matrix.double()
    q: Tensor = torch.linalg.qr(wide / wide.abs().amax().clamp_min(TINY))[0]
    return q.to(matrix.dtype).contiguous()
