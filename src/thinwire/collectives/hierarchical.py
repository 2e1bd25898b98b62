"""hierarchical: sums inside nodes travel light, what goes between nodes is compressed.

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
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives.carry import carry
from thinwire.collectives.layered import Held
from thinwire.collectives.link import GivenUpError
from thinwire.collectives.message import bundle, unbundle
from thinwire.collectives.nodes import Layers
from thinwire.collectives.talk import Side, Talk
from thinwire.collectives.twoshot import settle_shards, sum_shards
from thinwire.collectives.work import Part, Work, share
from thinwire.compressors import SparseCompressor
from thinwire.compressors.base import narrow
from thinwire.compressors.sparsifiers import Selection, encode_selection, raw_values
from thinwire.errors import MismatchError, PeerError
from thinwire.frames import Payload

FEW = 4  # one in so many elements: below that, single elements are the shorter form


def hierarchical(talk: Talk, work: Work, layers: Layers, between: str) -> None:
    """`between` is the flat collective that goes between nodes."""
    _Exchange(talk, work, layers, between).run()


class _Exchange:
    def __init__(self, talk: Talk, work: Work, layers: Layers, between: str) -> None:
        self.talk, self.work, self.layers, self.between = talk, work, layers, between
        self.place = talk.members.index
        self.number = layers.node_of(self.place)
        self.node = layers.places[self.number]
        self.me = self.node.index(self.place)
        self.owner = self.me < layers.num_shards
        self.inside = replace(work, compressor=layers.inner)
        # What is averaged as float16 is divided before it is summed: an average fits where a sum
        # may not.
        half = any(part.x.dtype == torch.float16 for part in work.parts)
        self.first = work.weight if half else 1.0
        self.nothing = torch.empty(0, dtype=torch.uint8, device=talk.device)

    def run(self) -> None:
        talk, count = self.talk, self.layers.num_shards
        with talk.preparing():
            shards = [[_shard(part, j, count) for part in self.work.parts] for j in range(count)]
            sent = self._drafts(shards)
            messages = [bundle(each) if each else self.nothing for each in sent]
            bad = any(p.non_finite for each in sent for p in each)
            bad = bad or (self.owner and not all(part.finite for part in shards[self.me]))
        words = [0] * talk.members.size
        for j, message in enumerate(messages):
            words[self.node[j]] = message.numel()
        said = talk.meet([bad], words)
        if any(one.numbers[0] for one in said):
            self._spoil()
            return
        received = self._swap(messages, [said[place].words[self.place] for place in self.node])
        del messages
        if not Held.keeps(self.work, self.layers):
            sent = []
        with talk.preparing():
            outer = self._sums(shards[self.me], received) if self.owner else None
        del received
        results: list[Payload] = []
        message = self.nothing
        if outer is not None:
            with self._telling():
                self._exchange(outer)
                if talk.account.finite:
                    results = [self._result(part) for part in outer.parts]
                    message = bundle(results)
        bad = not talk.account.finite or any(p.non_finite for p in results)
        said = talk.attend([bad, message.numel()])
        if any(one.numbers[0] for one in said):
            self._spoil()
            return
        lengths = [said[place].numbers[1] for place in self.node]
        others = [self.nothing if j == self.me else message for j in range(len(self.node))]
        lengths[self.me] = 0
        received = self._swap(others, lengths)
        with talk.preparing():
            opened = [
                results if j == self.me else self._opened(received[j], parts)
                for j, parts in enumerate(shards)
            ]
        talk.meet()
        with talk.clock("decode"):
            self._settle(shards, sent, outer, results)
            for parts, payloads in zip(shards, opened, strict=True):
                for part, payload in zip(parts, payloads, strict=True):
                    payload.restore(part.x)

    def _drafts(self, shards: list[list[Part]]) -> list[list[Payload]]:
        """For each shard that somebody else of the node owns."""
        return [
            [] if j == self.me else [part.draft(self.layers.inner) for part in parts]
            for j, parts in enumerate(shards)
        ]

    def _swap(self, messages: list[Tensor], lengths: list[int]) -> list[Tensor]:
        """Inside the node: messages[j] to its j-th member, the first ones if there are fewer."""
        if len(self.node) == 1:
            return [self.nothing]
        missing = len(self.node) - len(messages)
        return Side(self.talk, self.node).swap(messages + [self.nothing] * missing, lengths)

    def _sums(self, own: list[Part], received: list[Tensor]) -> Work:
        """The node's sums of the own shard, as a work among owners of the same shard."""
        others = [message for j, message in enumerate(received) if j != self.me]
        parts = []
        for part, total in zip(own, sum_shards(self.inside, own, others), strict=True):
            if self.first != 1:
                total.mul_(self.first)
            if part.r is None:
                parts.append(Part(total.to(part.x.dtype), None, part.key))
            else:
                x = narrow(total, part.x.dtype)
                rest = torch.zeros_like(total) if x is total else total.sub_(x)
                parts.append(Part(x, rest, part.key))
        weight = self.work.weight / self.first
        limit = self.work.limit
        if limit is not None:
            limit -= Held.of(self.work, self.layers, self.place).num_bytes
        return Work(parts, self.work.compressor, weight, [], limit)

    def _exchange(self, outer: Work) -> None:
        side = Side(self.talk, self.layers.owners(self.me))
        before = side.link.bytes_sent
        carry(self.between, side, outer)
        self.talk.account.between_bytes = side.link.bytes_sent - before

    def _result(self, part: Part) -> Payload:
        inner, x = self.layers.inner, part.x
        if isinstance(self.work.compressor, SparseCompressor) and x.numel():
            there = x.nonzero().flatten()
            if FEW * there.numel() <= x.numel():
                return _single(there, part, inner.fingerprint)
        return inner.draft(x)

    def _opened(self, message: Tensor, parts: list[Part]) -> list[Payload]:
        return unbundle(message, [p.extent for p in parts], self.layers.inner.fingerprint)

    def _settle(
        self,
        shards: list[list[Part]],
        sent: list[list[Payload]],
        outer: Work | None,
        results: list[Payload],
    ) -> None:
        if sent:
            settle_shards(self.inside, shards, sent)
        else:
            for part in (part for j, parts in enumerate(shards) if j != self.me for part in parts):
                if part.r is not None:
                    part.r.zero_()
        if outer is None:
            return
        rounded = self.number == 0 and self.layers.remembers and not self.layers.inner.lossless
        for part, done, result in zip(shards[self.me], outer.parts, results, strict=True):
            if part.r is not None and done.r is not None:
                torch.div(done.r, self.first, out=part.r)
                if rounded:
                    left = done.x.to(done.r.dtype, copy=True)
                    result.add_to(left, -1.0)
                    part.r.add_(left, alpha=1.0 / self.work.weight)

    def _spoil(self) -> None:
        """A value is not finite somewhere."""
        self.talk.account.finite = False
        for part in self.work.parts:
            part.x.fill_(torch.nan)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """For an exchange of some: what ends it here, and was not told yet, is told to all."""
        try:
            yield
        except (GivenUpError, MismatchError, PeerError):
            raise  # all have got the same, or the connections are gone
        except Exception as error:
            if not self.talk.account.told:
                self.talk.tell(error)
            raise


def _shard(part: Part, index: int, count: int) -> Part:
    return part.cut(*share(part.x.numel(), index, count), part.key.derive(index))


def _single(there: Tensor, part: Part, fingerprint: int) -> Payload:
    """The elements at these positions, as they are, in the name of the inner compressor."""
    chosen = Selection(there, part.x[there])
    encoded = encode_selection(chosen, part.extent, part.key, raw_values)
    assert encoded is not None
    code, sections, known = encoded
    shape, device = part.x.shape, part.x.device
    return Payload(code, part.x.dtype, shape, sections, device, False, fingerprint, known)
