"""reduce_scatter: every rank gets the sum of one shard of the tensor, and only of that.

1. Draft a payload for every other rank's shard; meet (lengths); all-to-all.
2. Sum the own shard: x + r of this rank uncompressed, plus the decoded shards of the others.
3. Residual <- (x + r) - payload for the shards of others, zero for the own shard. Own shard of the
   tensor <- the sum; the others' shards stay as they were.

It is the first half of two-shot. (P - 1) / P payloads leave each rank.
"""

from torch import Tensor

from thinwire.collectives.algorithm import Algorithm
from thinwire.collectives.reduction import Reduction
from thinwire.collectives.transport import Transport
from thinwire.collectives.twoshot import Shards, ShardSwap, narrowed

SCATTER = "reduce_scatter"  # as a collective; no all-reduce goes through it


class Scatter(Algorithm):
    """Args:
        shards: for each owner, its stretch of each tensor; equal parts unless given.

    Attributes:
        sums: the weighted sum of the own stretch of each tensor, known after `exchange`.
    """

    def __init__(
        self, reduction: Reduction, rank: int, size: int, shards: Shards | None = None
    ) -> None:
        super().__init__(reduction, rank, size)
        parts = reduction.parts
        self._shards = shards or [[part.shard(j, size) for part in parts] for j in range(size)]
        self.sums: list[Tensor] = []

    def prepare(self) -> None:
        self._swap = ShardSwap(self.reduction, self._shards, self.rank, SCATTER)
        self._swap.prepare()
        # What stays here was not looked at by an encoder.
        if not all(part.finite for part in self._shards[self.rank]):
            self._swap.finite = False

    def exchange(self, transport: Transport) -> None:
        self._swap.exchange(transport)
        self.finite = self._swap.finite
        own = self._shards[self.rank]
        with transport.clock("decode"):
            totals = self._swap.sums()
            self.sums = [
                narrowed(total, self.weight, part) for total, part in zip(totals, own, strict=True)
            ]

    def finish(self) -> None:
        self.settle()
        for part, total in zip(self._shards[self.rank], self.sums, strict=True):
            part.x.copy_(total)

    def settle(self) -> None:
        """Bring the residuals up to date, if all is finite."""
        if self.finite:
            self._swap.settle()
            for part in self._shards[self.rank]:
                if part.r is not None:
                    part.r.zero_()
