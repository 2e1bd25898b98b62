"""twoshot: every rank sums one shard of the tensor, then sends the sum to all, compressed again.

This is what a parameter server with compression both ways does, with every rank as the server of
one shard.

1. Draft a payload for every other rank's shard; meet (lengths; short messages come along);
   all-to-all.
2. Sum the own shard: x + r of this rank uncompressed, plus the decoded shards of the others.
3. Draft the payload of the weighted sum; meet, as before; all-gather.
4. Residual <- (x + r) - payload for the shards of others; for the own shard, the sum less what was
   sent of it. Tensor <- the decoded sums, the same frames on all ranks.

The residual of the own shard is the server-side residual: this rank's contribution to its own shard
is never sent, so nothing else has to be remembered there (docs/decisions/0007). 2 (P - 1) / P
payloads leave each rank.
"""

import torch
from torch import Tensor

from thinwire.collectives.algorithm import StreamAlgorithm, ToAll, ToEach
from thinwire.collectives.memory import check_real
from thinwire.collectives.message import LENGTH, bundle, max_message_bytes, unbundle
from thinwire.collectives.reduction import Part, Reduction
from thinwire.collectives.transport import Transport
from thinwire.compressors import LocalCompressor
from thinwire.frames import Payload
from thinwire.frames.payload import add_all

Shards = list[list[Part]]  # for each owner, its stretch of each tensor


class TwoShot(StreamAlgorithm, ToAll):
    def __init__(self, reduction: Reduction, rank: int, size: int) -> None:
        super().__init__(reduction, rank, size)
        self._shards = [[part.shard(j, size) for part in reduction.parts] for j in range(size)]
        self._swap = ShardSwap(reduction, self._shards, rank, "twoshot")

    @property
    def to_each(self) -> ToEach:
        return self._swap

    @property
    def to_all(self) -> ToAll:
        return self

    def prepare(self) -> None:
        self._swap.prepare()

    def exchange(self, transport: Transport) -> None:
        self._swap.exchange(transport)
        with transport.preparing():
            message, finite = self.message()
        records = transport.meet([message.numel(), not finite], along=message)
        lengths = [record.numbers[0] for record in records]
        transport.checked(LENGTH, lengths, max_shard_bytes(self._shards, self.compressor))
        finite = not any(record.numbers[1] for record in records)
        messages = transport.gather(message, lengths, records)
        with transport.clock("decode"):
            self.take_all(messages, finite)

    def max_bytes_to_all(self) -> int:
        return max(max_shard_bytes(self._shards, self.compressor))

    def message(self) -> tuple[Tensor, bool]:
        own = self._shards[self.rank]
        self._sums = self._swap.sums()
        self._second = []
        for total, part in zip(self._sums, own, strict=True):
            mean = narrowed(total, self.weight, part)
            zeros, key = _zero_residual(mean, part), part.key.derive(self.size)
            self._second.append(self.compressor.draft(mean, residual=zeros, key=key))
        finite = self._swap.finite and not any(p.non_finite for p in self._second)
        return bundle(self._second), finite

    def take_all(self, received: list[Tensor], finite: bool) -> None:
        self.finite = finite
        self._results = [
            unbundle(m, [part.extent for part in parts], self.compressor.fingerprint)
            for m, parts in zip(received, self._shards, strict=True)
        ]

    def finish(self) -> None:
        if self.finite:
            self._swap.settle()
            own = self._shards[self.rank]
            for part, total, payload in zip(own, self._sums, self._second, strict=True):
                if part.r is not None:
                    part.r.copy_(total)
                    payload.add_to(part.r, -1.0 / self.weight)
        for parts, payloads in zip(self._shards, self._results, strict=True):
            for part, payload in zip(parts, payloads, strict=True):
                payload.restore(part.x)


class ShardSwap(ToEach):
    """The first half: each rank gets, compressed, what the others have of its shard.

    Args:
        shards: of the reduction's tensors.
        rank: this member, which owns shards[rank].
        collective: whose memory is checked.

    Attributes:
        finite: whether all that was sent is, known after `exchange`.
    """

    def __init__(self, reduction: Reduction, shards: Shards, rank: int, collective: str) -> None:
        self._reduction, self._shards, self._rank = reduction, shards, rank
        self._collective = collective
        assert isinstance(reduction.compressor, LocalCompressor)
        self._compressor = reduction.compressor
        self.finite = True

    def prepare(self) -> None:
        """Draft a payload for every other rank's shard."""
        compressor = self._compressor
        self._sent = [
            [] if j == self._rank else [part.draft(compressor) for part in parts]
            for j, parts in enumerate(self._shards)
        ]
        nothing = torch.empty(0, dtype=torch.uint8, device=self._shards[0][0].x.device)
        self._messages = [bundle(each) if each else nothing for each in self._sent]
        check_real(self._collective, self._reduction, self._messages, len(self._shards))
        self.finite = not any(p.non_finite for each in self._sent for p in each)

    def exchange(self, transport: Transport) -> None:
        """Send them, receive those for the own shard."""
        messages, finite = self.messages()
        lengths = [message.numel() for message in messages]
        records = transport.meet([not finite], lengths, along=messages)
        most = max_shard_bytes(self._shards, self._compressor)
        transport.checked_words(LENGTH, records, most)
        lengths = [record.words[self._rank] for record in records]
        longest = max(length for record in records for length in record.words)
        received = transport.swap(messages, lengths, records, longest)
        del messages
        del received[self._rank]
        self.take(received, not any(record.numbers[0] for record in records))

    def max_bytes_to(self, place: int) -> int:
        parts = self._shards[place]
        return max_message_bytes([part.extent for part in parts], self._compressor)

    def messages(self) -> tuple[list[Tensor], bool]:
        messages, self._messages = self._messages, []
        return messages, self.finite

    def take(self, received: list[Tensor], finite: bool) -> None:
        self._received, self.finite = received, finite

    def sums(self) -> list[Tensor]:
        """The sums of the own shard over all ranks, in the type that sums are formed in."""
        received, self._received = self._received, []  # freed with this call
        return sum_shards(self._shards[self._rank], received, self._compressor)

    def settle(self) -> None:
        """Bring the residuals of other ranks' shards up to date."""
        settle_shards(self._shards, self._sent, self._compressor)


def max_shard_bytes(shards: Shards, compressor: LocalCompressor) -> list[int]:
    """The longest message that there can be of each shard."""
    return [max_message_bytes([part.extent for part in parts], compressor) for parts in shards]


def sum_shards(
    own: list[Part], received: list[Tensor], compressor: LocalCompressor
) -> list[Tensor]:
    """x + r of the own shard plus what came from the others, in rank order."""
    extents = [part.extent for part in own]
    opened = [unbundle(message, extents, compressor.fingerprint) for message in received]
    sums = []
    for i, part in enumerate(own):
        total = part.x.to(part.real, copy=True)
        if part.r is not None:
            total.add_(part.r)
        add_all([theirs[i] for theirs in opened], total)
        sums.append(total)
    return sums


def settle_shards(shards: Shards, sent: list[list[Payload]], compressor: LocalCompressor) -> None:
    """Residual <- (x + r) - payload, for the shards of which a payload was sent."""
    for parts, payloads in zip(shards, sent, strict=True):
        if payloads:
            for part, payload in zip(parts, payloads, strict=True):
                part.settle(compressor, payload)


def narrowed(total: Tensor, weight: float, part: Part) -> Tensor:
    """weight * total in the tensor's own type: that decides how wide values are sent."""
    scaled = total if weight == 1 else total * weight
    return scaled.to(part.x.dtype)


def _zero_residual(mean: Tensor, part: Part) -> Tensor | None:
    """A zero residual where there is one: RandomK scales what it sends unless it is remembered."""
    if part.r is None:
        return None
    return torch.zeros(mean.numel(), dtype=part.r.dtype, device=mean.device)
