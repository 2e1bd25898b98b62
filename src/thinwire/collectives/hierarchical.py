"""hierarchical: sums inside nodes are sent light, what goes between nodes is compressed.

1. Draft payloads of x + r with the inner compressor for the owners of shards in this node; meet;
   all-to-all inside the node.
2. Each owner sums its shard over the node.
3. The owners of the same shard in all nodes exchange these sums with the compressor, through the
   flat collective that suits; those who own nothing attend their meetings.
4. Meet; each owner sends its shard of the result to the others of its node, with the inner
   compressor, or as single elements where most are zero.
5. Open and check everything; meet once more: all is well everywhere.
6. Residual <- what the inner compressor left of the shards of others; for the own shard, the node's
   sum less what was sent of it. Tensor <- the decoded results.

With S members in the smallest node, the first S of each node own a shard each. One payload of the
whole tensor leaves each node for each that a flat collective over the nodes would send
(docs/decisions/0015). What the inner compressor rounds off a result is the same in all nodes: the
first node's owner keeps it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.collectives.algorithm import Algorithm
from thinwire.collectives.connect import GivenUpError
from thinwire.collectives.flat import algorithm_for, collective_for
from thinwire.collectives.memory import (
    MOST_ROUNDS,
    Estimate,
    Load,
    Phase,
    estimate,
    kind_of,
    largest,
    refusal,
)
from thinwire.collectives.message import LENGTH, bundled_bytes, unbundle
from thinwire.collectives.nodes import NodeLayout
from thinwire.collectives.reduction import Part, Reduction
from thinwire.collectives.stream import in_stream
from thinwire.collectives.transport import SubgroupTransport, Transport
from thinwire.collectives.twoshot import max_shard_bytes, settle_shards, sum_shards
from thinwire.compressors import LocalCompressor, SparseCompressor
from thinwire.compressors.base import narrow
from thinwire.compressors.sparsifiers import Selection, encode_selection, raw_values
from thinwire.errors import MismatchError, PeerError
from thinwire.frames import Payload
from thinwire.frames.code import Extent
from thinwire.frames.header import LONGEST_HEADER
from thinwire.frames.positions import max_position_bytes

FEW = 4  # one in so many elements: below that, single elements are the shorter form


class Hierarchical(Algorithm):
    """Args:
    nodes: the members by node.
    """

    def __init__(self, reduction: Reduction, rank: int, size: int, nodes: NodeLayout) -> None:
        super().__init__(reduction, rank, size)
        self._nodes, self._inner = nodes, nodes.inner
        self._node_number = nodes.node_of(rank)
        self._node = nodes.places[self._node_number]
        self._place = self._node.index(rank)  # inside the node
        self._owner = self._place < nodes.num_shards
        # What is averaged as float16 is divided before it is summed: an average fits where a sum
        # may not.
        half = any(part.x.dtype == torch.float16 for part in reduction.parts)
        self._first_weight = reduction.weight if half else 1.0
        self._between_bytes = 0

    @property
    def between(self) -> str:
        """The flat collective that goes between nodes."""
        return between(self.reduction, self._nodes)

    @property
    def between_bytes(self) -> int:
        """What this rank sent to other nodes."""
        return self._between_bytes

    def prepare(self) -> None:
        guard_nodes(self.reduction, self._nodes, self.rank, self.size)
        count, parts = self._nodes.num_shards, self.reduction.parts
        inner = [part.using(self._inner) for part in parts]
        self._shards = [[part.shard(j, count) for part in inner] for j in range(count)]
        self._sent = [
            [] if j == self._place else [part.draft() for part in shard]
            for j, shard in enumerate(self._shards)
        ]
        self._nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._messages = [
            self.reduction.bundle(shard, each) if each else self._nothing
            for shard, each in zip(self._shards, self._sent, strict=True)
        ]
        self.finite = not any(p.non_finite for each in self._sent for p in each)
        if self._owner:
            own = self._shards[self._place]
            self.finite = self.finite and all(part.finite for part in own)
        self._sums: Reduction | None = None  # of the own shard, among its owners
        self._results: list[Payload] = []

    def exchange(self, transport: Transport) -> None:
        if self._sum_inside(transport):
            message = self._sum_between(transport)
            if self._spread_inside(transport, message):
                transport.meet()

    def _sum_inside(self, transport: Transport) -> bool:
        """Steps 1 and 2; whether all is finite."""
        words = [0] * self.size
        for j, message in enumerate(self._messages):
            words[self._node[j]] = message.numel()
        records = transport.meet([not self.finite], words)
        self.finite = not any(record.numbers[0] for record in records)
        if not self.finite:
            return False
        most = max(max_shard_bytes(self._shards))
        transport.checked_words(LENGTH, records, [most] * self.size)
        lengths = [records[place].words[self.rank] for place in self._node]
        longest = max(records[i].words[j] for i in self._node for j in self._node)
        received = self._swap(transport, self._messages, lengths, longest)
        self._messages = []
        if not Held.keeps(self.reduction, self._nodes):
            self._sent = []
        with transport.preparing():
            if self._owner:
                self._sums = self._summed(received)
        return True

    def _summed(self, received: list[Tensor]) -> Reduction:
        """The node's sums of the own shard, to be reduced among the owners of the same shard."""
        own = self._shards[self._place]
        others = [message for j, message in enumerate(received) if j != self._place]
        compressors = [part.compressor for part in self.reduction.parts]
        parts = []
        for part, total, compressor in zip(own, sum_shards(own, others), compressors, strict=True):
            if self._first_weight != 1:
                total.mul_(self._first_weight)
            x, rest = total.to(part.x.dtype), None
            if part.r is not None:
                x = narrow(total, part.x.dtype)
                rest = torch.zeros_like(total) if x is total else total.sub_(x)
            parts.append(Part(x, rest, part.key, compressor, place=part.place))
        limit = self.reduction.max_bytes
        if limit is not None:
            limit -= Held.of(self.reduction, self._nodes, self.rank).num_bytes
        return Reduction(parts, self.weight / self._first_weight, limit)

    def _sum_between(self, transport: Transport) -> Tensor:
        """Step 3: the message with the results of the own shard."""
        if self._sums is None:
            return self._nothing
        with self._announcing(transport):
            owners = self._nodes.owners(self._place)
            subgroup = SubgroupTransport(transport, owners)
            before = subgroup.link.bytes_sent
            flat = in_stream(
                algorithm_for(self.between, self._sums, owners.index(self.rank), len(owners))
            )
            with subgroup.preparing():
                flat.prepare()
            flat.exchange(subgroup)
            with transport.clock("decode"):
                flat.finish()
            self.finite = flat.finite
            del flat  # and with it the payloads that went between nodes
            self.reduction.count_all(self._sums)
            self._between_bytes = subgroup.link.bytes_sent - before
            if self.finite:
                self._results = [self._result(part) for part in self._sums.parts]
                return self.reduction.bundle(self._sums.parts, self._results)
        return self._nothing

    def _spread_inside(self, transport: Transport, message: Tensor) -> bool:
        """Steps 4 and 5; whether all is finite."""
        bad = not self.finite or any(p.non_finite for p in self._results)
        records = transport.attend([bad, message.numel()])
        self.finite = not any(record.numbers[0] for record in records)
        if not self.finite:
            return False
        most = max(_max_result_bytes(shard, self._inner) for shard in self._shards)
        transport.checked(LENGTH, [record.numbers[1] for record in records], most)
        lengths = [records[place].numbers[1] for place in self._node]
        longest = max(lengths)
        lengths[self._place] = 0
        others = [self._nothing if j == self._place else message for j in range(len(self._node))]
        received = self._swap(transport, others, lengths, longest)
        with transport.preparing():
            self._opened = [
                self._results
                if j == self._place
                else unbundle(received[j], [part.expected for part in shard])
                for j, shard in enumerate(self._shards)
            ]
        return True

    def _swap(
        self, transport: Transport, messages: list[Tensor], lengths: list[int], longest: int
    ) -> list[Tensor]:
        """Inside the node: messages[j] to its j-th member, the first ones if there are fewer."""
        if len(self._node) == 1:
            return [self._nothing]
        missing = len(self._node) - len(messages)
        inside = SubgroupTransport(transport, self._node)
        return inside.swap(messages + [self._nothing] * missing, lengths, longest=longest)

    def _result(self, part: Part) -> Payload:
        x = part.x
        if isinstance(part.compressor, SparseCompressor) and x.numel():
            there = x.nonzero().flatten()
            if there.numel() <= x.numel() // FEW:
                return _single_elements(there, part, self._inner.fingerprint)
        return self._inner.draft(x)

    def finish(self) -> None:
        if not self.finite:
            self.fill_with_nan()
            return
        self._settle()
        for shard, payloads in zip(self._shards, self._opened, strict=True):
            for part, payload in zip(shard, payloads, strict=True):
                payload.restore(part.x)

    def _settle(self) -> None:
        if self._sent:
            settle_shards(self._shards, self._sent)
        else:
            others = [shard for j, shard in enumerate(self._shards) if j != self._place]
            for part in (part for shard in others for part in shard):
                if part.r is not None:
                    part.r.zero_()
        if self._sums is None:
            return
        rounded = self._nodes.remembers and not self._inner.lossless and self._node_number == 0
        own = self._shards[self._place]
        for part, done, result in zip(own, self._sums.parts, self._results, strict=True):
            if part.r is not None and done.r is not None:
                torch.div(done.r, self._first_weight, out=part.r)
                if rounded:
                    left = done.x.to(done.r.dtype, copy=True)
                    result.add_to(left, -1.0)
                    part.r.add_(left, alpha=1.0 / self.weight)

    @contextmanager
    def _announcing(self, transport: Transport) -> Iterator[None]:
        """For an exchange of some: what ends it here, and was not announced yet, all are told."""
        try:
            yield
        except (GivenUpError, MismatchError, PeerError):
            raise  # all have got the same, or the connections are gone
        except Exception as error:
            if not transport.account.announced:
                transport.announce(error)
            raise


def _single_elements(there: Tensor, part: Part, fingerprint: int) -> Payload:
    """The elements at these positions, uncompressed, in the name of the inner compressor."""
    chosen = Selection(there, part.x[there])
    encoded = encode_selection(chosen, part.extent, part.key, raw_values)
    assert encoded is not None
    code, sections, known = encoded
    shape, device = part.x.shape, part.x.device
    return Payload(code, part.x.dtype, shape, sections, device, False, fingerprint, known)


def _max_result_bytes(shard: list[Part], inner: LocalCompressor) -> int:
    """The longest message of a shard's results: through the inner compressor or as few elements."""

    def longest(extent: Extent) -> int:
        few = extent.numel // FEW
        single = max_position_bytes(few, extent.numel) + few * extent.dtype.itemsize
        return max(inner.max_payload_bytes(extent.numel, extent.dtype), LONGEST_HEADER + single)

    return bundled_bytes([longest(part.extent) for part in shard])


def between(reduction: Reduction, nodes: NodeLayout) -> str:
    """The flat collective that goes between nodes."""
    return collective_for(reduction, len(nodes.places), 1 / nodes.num_shards)


# Memory: what a member holds, and a limit above which the exchange is refused.


class Held(NamedTuple):
    """What a member holds while sums go between nodes.

    Args:
        payloads: bytes of the inner payloads it has sent, until residuals are brought up to date.
        sums: bytes of the node's sum of its shard, and of what is not sent of it.
    """

    payloads: float
    sums: float

    @classmethod
    def of(cls, reduction: Reduction, nodes: NodeLayout, rank: int) -> "Held":
        inner = Load.of([part.using(nodes.inner) for part in reduction.parts])
        sent, own = _shares(nodes, rank)
        kept = sent * inner.draft if cls.keeps(reduction, nodes) else 0.0
        remembered = inner.sums if reduction.has_residual else 0.0
        wide = inner.dense if inner.converted else inner.sums
        return cls(kept, own * (wide + remembered))

    @staticmethod
    def keeps(reduction: Reduction, nodes: NodeLayout) -> bool:
        """Whether the payloads sent inside are needed again: they may have left something out."""
        parts = reduction.parts
        exact = nodes.inner.lossless and all(part.real == part.x.dtype for part in parts)
        return nodes.remembers and not exact and reduction.has_residual

    @property
    def num_bytes(self) -> int:
        return int(self.payloads + self.sums)

    @property
    def phase(self) -> Phase:
        return {"payloads kept": self.payloads, "the node's sum": self.sums}


def guard_nodes(reduction: Reduction, nodes: NodeLayout, rank: int, size: int) -> None:
    """Refuse an exchange that would take more than the limit on this rank."""
    limit = reduction.max_bytes
    if limit is None:
        return
    rounds, need = 1, estimate_nodes(reduction, nodes, rank)
    while need.num_bytes > limit and rounds < MOST_ROUNDS:
        rounds *= 2
        need = estimate_nodes(reduction, nodes, rank, rounds)
    if need.num_bytes > limit:
        raise refusal("hierarchical", need, limit, size)


def estimate_nodes(reduction: Reduction, nodes: NodeLayout, rank: int, rounds: int = 1) -> Estimate:
    """Peak extra bytes on one rank, with so many rounds between nodes if "gather" goes there."""
    return largest(_phases(reduction, nodes, rank, rounds))


def _shares(nodes: NodeLayout, rank: int) -> tuple[float, float]:
    """Of the tensor: what a member sends to owners in its node, and what it owns."""
    node, count = nodes.places[nodes.node_of(rank)], nodes.num_shards
    own = 1 / count if node.index(rank) < count else 0.0
    return 1 - own, own


def _result_bytes(reduction: Reduction, nodes: NodeLayout) -> tuple[float, float]:
    """Of the results' frames, and of what is held besides them."""
    frame = draft = 0.0
    for part in reduction.parts:
        inner = Load.of([part.using(nodes.inner)])
        # A sparse result has at most the elements that all nodes have sent.
        sparse = isinstance(part.compressor, SparseCompressor)
        outer, times = (Load.of([part]), len(nodes.places)) if sparse else (inner, 1)
        frame += min(inner.frame, times * outer.frame)
        draft += min(inner.draft, times * outer.draft)
    return frame, draft


def _phases(reduction: Reduction, nodes: NodeLayout, rank: int, rounds: int) -> list[Phase]:
    inner = Load.of([part.using(nodes.inner) for part in reduction.parts])
    outer = Load.of(reduction.parts)
    held = Held.of(reduction, nodes, rank)
    sent, own = _shares(nodes, rank)
    others = len(nodes.places[nodes.node_of(rank)]) - 1
    count = nodes.num_shards
    drafts = {"payloads of shards": sent * inner.draft}
    received = {"received": others * own * inner.frame}
    frame, draft = _result_bytes(reduction, nodes)
    result = {"result": own * (draft + frame), "copies": others * own * frame}
    phases: list[Phase] = [
        drafts | {"encoding": inner.passing / count, "messages": sent * inner.frame},
        drafts | {"messages, joined": 2 * sent * inner.frame} | received,
        received | {"opened": others * own * inner.opened} | held.phase,
        held.phase | result | {"results": sent * frame},
    ]
    if own:
        collective = kind_of(between(reduction, nodes), reduction)
        middle = estimate(collective, outer.part(own), len(nodes.places), rounds)
        phases.append(held.phase | dict(middle.items))
    return phases
