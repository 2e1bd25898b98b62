"""gather: every rank gets every frame and adds them up in rank order.

1. Draft the payload of C(x + r).
2. Meet: compare the calls, exchange the lengths of the messages; short ones come along.
3. All-gather of the messages, unless they have come.
4. Open and check all frames.
5. Residual <- (x + r) - own payload; tensor <- weight * sum of the decoded, in rank order, or the
   mean of each element over the payloads that hold it.

(P - 1) messages leave each rank. When P of them would not fit the memory limit, steps 1 to 4 go in
rounds over slices of the tensors, each slice compressed on its own; the sums grow in a buffer and
step 5 comes after the last round, so that a failure in between changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives.algorithm import StreamAlgorithm, ToAll
from thinwire.collectives.memory import MOST_ROUNDS, rounds_for
from thinwire.collectives.message import LENGTH, max_message_bytes, unbundle
from thinwire.collectives.reduction import Part
from thinwire.collectives.transport import Record, Transport
from thinwire.frames import Payload
from thinwire.frames.payload import add_all, average_held

ROUNDS = "a number of rounds"


@dataclass
class _Slice:
    """The same stretch of every tensor, drafted."""

    parts: list[Part]
    payloads: list[Payload]
    message: Tensor

    @property
    def non_finite(self) -> bool:
        return any(payload.non_finite for payload in self.payloads)


class Gather(StreamAlgorithm, ToAll):
    to_each = None

    @property
    def to_all(self) -> ToAll:
        return self

    def prepare(self) -> None:
        self._rounds = rounds_for(self.reduction, self.size)
        self._first = self._draft(0)
        # What `finish` writes: all payloads of the tensors at once, or sums made round by round.
        self._received: list[list[Payload]] = []
        self._sums: list[tuple[Part, Payload, Tensor]] = []

    def exchange(self, transport: Transport) -> None:
        # Who goes in other rounds has a longer or shorter slice: at most the whole.
        whole = self.reduction.parts
        records = self._announce(transport, self._first, self.reduction.max_bytes, whole)
        agreed = self._agree(transport, records)
        if any(record.numbers[2] != agreed for record in records):
            self._rounds = agreed
            del self._first  # what did not fit
            with transport.preparing():
                self._first = self._draft(0)
            records = self._announce(transport, self._first, None, self._first.parts)
        if self._at_once:
            self._received = self._receive(transport, self._first, records)
            self.finite = not any(record.numbers[1] for record in records)
        else:
            self._go_in_rounds(transport, records)

    # As one slice of several.

    def max_bytes_to_all(self) -> int:
        return max_message_bytes([part.expected for part in self.reduction.parts])

    def message(self) -> tuple[Tensor, bool]:
        return self._first.message, not self._first.non_finite

    def take_all(self, received: list[Tensor], finite: bool) -> None:
        self.finite = finite
        payloads = self._opened(self._first, received)
        if self._at_once:
            # Added up in the end, where the sums belong: in a buffer of their own they would come
            # sooner, but fresh memory and the copy take longer than that saves.
            self._received = payloads
        else:
            self._add_up(self._first, payloads)

    def finish(self) -> None:
        if self._sums:
            for part, payload, total in self._sums:
                if self.finite:
                    part.settle(payload)
                part.x.copy_(total)
            return
        if self.finite:
            for part, payload in zip(self._first.parts, self._first.payloads, strict=True):
                part.settle(payload)
        for i, part in enumerate(self._first.parts):
            self._combine(part, [theirs[i] for theirs in self._received], part.x)

    def _combine(self, part: Part, payloads: list[Payload], out: Tensor) -> None:
        """What the payloads of all ranks come to, in the type that sums are formed in."""
        if self.reduction.senders and part.compressor.leaves_out:
            average_held(payloads, out)
        else:
            add_all(payloads, out, self.weight, fresh=True)

    @property
    def _at_once(self) -> bool:
        """Whether payloads are added to the tensors themselves."""
        whole = all(part.real == part.x.dtype for part in self.reduction.parts)
        return self._rounds == 1 and whole

    def _draft(self, number: int) -> _Slice:
        parts = [self._stretch(part, number) for part in self.reduction.parts]
        payloads = [part.draft() for part in parts]
        return _Slice(parts, payloads, self.reduction.bundle(parts, payloads))

    def _stretch(self, part: Part, number: int) -> Part:
        return part if self._rounds == 1 else part.shard(number, self._rounds)

    def _announce(
        self, transport: Transport, own: _Slice, limit: int | None, longest: list[Part]
    ) -> list[Record]:
        records = transport.meet(
            [own.message.numel(), own.non_finite, self._rounds, limit or 0], along=own.message
        )
        most = max_message_bytes([part.expected for part in longest])
        transport.checked(LENGTH, [record.numbers[0] for record in records], most)
        transport.checked(ROUNDS, [record.numbers[2] for record in records], MOST_ROUNDS, 1)
        return records

    def _agree(self, transport: Transport, records: list[Record]) -> int:
        """The number of rounds that satisfies everybody, now that real lengths are known."""
        wanted = [record.numbers[2] for record in records]
        if any(record.numbers[3] for record in records):
            with transport.preparing():
                frame = max(record.numbers[0] * record.numbers[2] for record in records)
                own = rounds_for(self.reduction, self.size, frame)
            again = [record.numbers[0] for record in transport.meet([own])]
            transport.checked(ROUNDS, again, MOST_ROUNDS, 1)
            wanted += again
        return max(wanted)

    def _receive(
        self, transport: Transport, own: _Slice, records: list[Record]
    ) -> list[list[Payload]]:
        """The payloads of all members, opened and checked."""
        lengths = [record.numbers[0] for record in records]
        messages = transport.gather(own.message, lengths, records)
        with transport.clock("decode"):
            return self._opened(own, messages)

    def _opened(self, own: _Slice, messages: list[Tensor]) -> list[list[Payload]]:
        expected = [part.expected for part in own.parts]
        return [unbundle(message, expected) for message in messages]

    def _add_up(self, own: _Slice, received: list[list[Payload]]) -> None:
        own.message = own.message[:0]
        for i, (part, payload) in enumerate(zip(own.parts, own.payloads, strict=True)):
            total = part.x.new_empty(part.x.numel(), dtype=part.real)
            self._combine(part, [theirs[i] for theirs in received], total)
            self._sums.append((part, payload, total))
            # Sums beyond float16 are the same news as infinities in the tensors, on all ranks.
            self.finite = self.finite and _fits(total, part.x.dtype)

    def _go_in_rounds(self, transport: Transport, records: list[Record]) -> None:
        own = self._first
        for number in range(self._rounds):
            if number:
                with transport.preparing():
                    own = self._draft(number)
                records = self._announce(transport, own, None, own.parts)
            self.finite = self.finite and not any(record.numbers[1] for record in records)
            received = self._receive(transport, own, records)
            with transport.clock("decode"):
                self._add_up(own, received)
            del received


def _fits(total: Tensor, dtype: torch.dtype) -> bool:
    if dtype != torch.float16 or not total.numel():
        return True
    low, high = total.aminmax()
    return max(-float(low), float(high)) < 65520  # what rounds to infinity
