"""reduce_scatter: every rank gets the sum of one shard of the tensor, and only of that.

1. Draft a payload for every other rank's shard; meet (lengths); all-to-all.
2. Sum the own shard: x + r of this rank uncompressed, plus the decoded shards of the others.
3. Residual <- (x + r) - payload for the shards of others, zero for the own shard. Own shard of the
   tensor <- the sum; the others' shards stay as they were.

It is the first half of two-shot. (P - 1) / P payloads leave each rank.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from thinwire.collectives.algorithm import StreamAlgorithm, ToEach
from thinwire.collectives.reduction import Part, Reduction, cut
from thinwire.collectives.transport import Transport
from thinwire.collectives.twoshot import Shards, ShardSwap, narrowed

SCATTER = "reduce_scatter"  # as a collective; no all-reduce goes through it


class Scatter(StreamAlgorithm, ToEach):
    """Args:
    shards: for each owner, its stretch of each tensor; equal parts unless given.
    into: where the sums of the own shard are written, a flat tensor for each of its parts;
        those themselves unless given.
    """

    def __init__(
        self,
        reduction: Reduction,
        rank: int,
        size: int,
        shards: Shards | None = None,
        into: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(reduction, rank, size)
        parts = reduction.parts
        self._shards = shards or [[part.shard(j, size) for part in parts] for j in range(size)]
        self._swap = ShardSwap(reduction, self._shards, rank, SCATTER)
        self._into = [part.x for part in self._shards[rank]] if into is None else into

    def sliced(self, count: int) -> "list[Scatter]":
        """The same for each of so many slices of all shards, or for fewer."""
        grain = self.compressor.grain or 1
        columns = zip(*(cut(shard, grain, count) for shard in self._shards), strict=True)
        own = self._shards[self.rank]
        targets = [Part(x, None, part.key) for x, part in zip(self._into, own, strict=True)]
        return [
            Scatter(
                replace(self.reduction, parts=[part for shard in shards for part in shard]),
                self.rank,
                self.size,
                list(shards),
                [part.x for part in into],
            )
            for shards, into in zip(columns, cut(targets, grain, count), strict=True)
            if any(shards)
        ]

    to_all = None

    @property
    def to_each(self) -> ToEach:
        return self

    def prepare(self) -> None:
        self._swap.prepare()
        # What stays here was not looked at by an encoder.
        if not all(part.finite for part in self._shards[self.rank]):
            self._swap.finite = False

    def exchange(self, transport: Transport) -> None:
        self._swap.exchange(transport)
        with transport.clock("decode"):
            self._add_up()

    def max_bytes_to(self, place: int) -> int:
        return self._swap.max_bytes_to(place)

    def messages(self) -> tuple[list[Tensor], bool]:
        return self._swap.messages()

    def take(self, received: list[Tensor], finite: bool) -> None:
        self._swap.take(received, finite)
        self._add_up()

    def _add_up(self) -> None:
        self.finite = self._swap.finite
        totals, own = self._swap.sums(), self._shards[self.rank]
        self._sums = [
            narrowed(total, self.weight, part) for total, part in zip(totals, own, strict=True)
        ]

    def finish(self) -> None:
        if self.finite:
            self._swap.settle()
            for part in self._shards[self.rank]:
                if part.r is not None:
                    part.r.zero_()
        for out, total in zip(self._into, self._sums, strict=True):
            out.copy_(total)
