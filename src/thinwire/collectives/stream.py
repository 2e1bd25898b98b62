"""Large tensors go in slices, one behind the other.

An exchange compresses, meets, moves, adds up. Where its tensors are large it does so slice by
slice, without meetings in between: while one slice moves, a thread compresses the next, and what
has come of the one before is added up (docs/decisions/0025).

1. Meet once: compare the calls; a member with a memory limit, or whose tensors overlap, has all go
   in one.
2. For each slice, as soon as it is compressed: send a letter to every other member; when theirs
   have come, add up, compress again and send a letter to all. Or one of the two, as the algorithm
   has it. Several slices are under way in either half.
3. If a letter said that its sender could not go on: meet, so that all learn why.

A letter begins with what a record would say: how long the message is, whether all is finite,
whether its sender can go on. Who cannot, sends letters without a message to the end, so nobody
waits in vain. Nothing is written before all slices have come. Slices are cut where the compressor
sees no difference (`Compressor.grain`), and how many there are follows from the tensors alone.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.collectives.algorithm import Algorithm, StreamAlgorithm
from thinwire.collectives.link import Transfer
from thinwire.collectives.memory import Load
from thinwire.collectives.message import LENGTH, aligned, max_message_bytes
from thinwire.collectives.reduction import Reduction
from thinwire.collectives.transport import MAGIC, Transport
from thinwire.errors import PeerError

T = TypeVar("T")
# Bytes of a slice's tensors, at least, and slices, at most. The first is compressed and the last
# added up while nothing moves; each costs some hundred microseconds.
LEAST_BYTES, MOST = 1 << 22, 4
# Compressed bytes of a slice, at least: over a distance, two slices that move at a time fill the
# link only if they are long. 1.25 MB in eight took 724 ms over 30 ms, in two 456.
LEAST_MESSAGE = 1 << 19
# Bytes of a slice's tensors for each rank, at least: a slice goes around rings of all ranks, and
# with many of them hops count for more than what overlaps.
LEAST_SHARE = 1 << 18
AHEAD = 2  # slices that are compressed before they are sent
# Slices that are sent to all before the first of them is waited for: gloo moves two at a time, and
# the next must be there when one of them has ended. Their frames are kept anyway.
LAG = 4
HEAD = 64  # bytes of a letter before its message
FAILED, NON_FINITE = 1, 2  # what a letter says of its sender
# Messages that fill at least this share of their longest go round a ring, which needs one length.
FULL = 0.95


def in_stream(algorithm: Algorithm) -> Algorithm:
    """The same in slices, if its tensors are large and can be cut."""
    if not isinstance(algorithm, StreamAlgorithm):
        return algorithm
    count = slice_count(algorithm.reduction, algorithm.size)
    if count == 1:
        return algorithm
    slices = algorithm.sliced(count)
    return algorithm if len(slices) == 1 else Stream(algorithm, slices)


def slice_count(reduction: Reduction, size: int) -> int:
    """In how many slices a reduction among so many should go."""
    parts = reduction.parts
    num_bytes = sum(part.x.nbytes for part in parts)
    # What a message can come to takes a tenth of a short call to work out.
    if parts[0].x.device.type != "cpu" or num_bytes < 2 * LEAST_BYTES:
        return 1
    message = max_message_bytes([part.expected for part in parts])
    return slices_for(num_bytes, message, size)


def slices_for(num_bytes: float, message: float, size: int) -> int:
    """In how many slices tensors of so many bytes, and so many compressed, go among so many
    ranks."""
    least = max(LEAST_BYTES, size * LEAST_SHARE)
    return max(1, min(MOST, int(num_bytes // least), int(message // LEAST_MESSAGE)))


class Stream(Algorithm):
    """One algorithm for each slice of a reduction.

    Args:
        whole: the algorithm for all of it in one.
        slices: those for each slice.
    """

    def __init__(self, whole: StreamAlgorithm, slices: Sequence[StreamAlgorithm]) -> None:
        super().__init__(whole.reduction, whole.rank, whole.size)
        # What a memory limit is compared with was counted for the whole.
        self._limited = self.reduction.max_bytes is not None or whole.in_one
        self._whole = whole
        self._slices = [whole] if self._limited else slices

    def prepare(self) -> None:
        self._slices[0].prepare()

    def exchange(self, transport: Transport) -> None:
        streams = transport.link.takes_shorter
        if streams:
            records = transport.meet([self._limited])
            streams = not any(record.numbers[0] for record in records)
        if streams:
            Flow(self._slices, transport).run()
        else:
            if not self._limited:
                self._slices = [self._whole]
                with transport.preparing():
                    self._whole.prepare()
            self._whole.exchange(transport)
        self.finite = all(each.finite for each in self._slices)
        for each in self._slices:
            if each is not self._whole:
                self.reduction.count_all(each.reduction)

    def finish(self) -> None:
        for each in self._slices:
            each.finite = self.finite
            each.finish()


class Flow:
    """The way of slices through an exchange; the first of them is prepared."""

    def __init__(self, slices: Sequence[StreamAlgorithm], transport: Transport) -> None:
        self._slices, self._transport = slices, transport
        self._me, self._size = transport.members.index, transport.members.size
        self._ring = self._size > 2 and _is_full(slices[0])
        self._finite: dict[int, bool] = {}  # what the own letters of a slice have said
        self._own: dict[int, Tensor] = {}  # the own messages to all
        self._under_way: dict[tuple[str, int], Transfer] = {}
        self._spans: list[tuple[float, float]] = []  # in which something was
        self._error: Exception | None = None  # why this member cannot go on
        self._failed = False  # somebody cannot
        self._preparer = Preparer(slices[1:])

    def run(self) -> None:
        """Carry them all out.

        Raises:
            PeerError: another member could not go on.
        """
        try:
            self._preparer.start()
            for number in range(len(self._slices) + LAG):
                self._begin(number)
                self._pass_on(number - 1)
                self._end(number - LAG)
        finally:
            self._preparer.stop()
            for transfer in self._under_way.values():
                transfer.leave()
            self._under_way.clear()
        seconds = self._transport.account.seconds
        seconds["encode"] = seconds.get("encode", 0.0) + self._preparer.seconds
        self._transport.note_moving(self._spans)
        error, self._error = self._error, None
        if error is not None:
            self._transport.announce(error)
            raise error
        if self._failed:
            self._transport.meet()  # raises what it was
            self._refuse("a rank could not go on, and did not say why")

    def _begin(self, number: int) -> None:
        """Send the first letters of a slice."""
        if number >= len(self._slices):
            return
        if number:
            self._try(self._preparer.wait)
        if self._slices[number].to_each is None:
            self._send_to_all(number)
        else:
            self._send_to_each(number)

    def _pass_on(self, number: int) -> None:
        """Take what others sent of a slice to this member, and send the sums to all."""
        if ("each", number) not in self._under_way:
            return
        half = self._slices[number].to_each
        assert half is not None
        messages, finite = self._opened(("each", number))
        del messages[self._me]
        if self._slices[number].to_all is not None:
            with self._transport.clock("encode"):
                self._try(lambda: half.take(messages, finite))
            self._send_to_all(number)
        elif not self._failed:  # no letter follows that could tell of a failure
            with self._transport.clock("decode"):
                half.take(messages, finite)

    def _end(self, number: int) -> None:
        """Take what all have sent to all of a slice."""
        if ("all", number) not in self._under_way:
            return
        half = self._slices[number].to_all
        assert half is not None
        messages, finite = self._opened(("all", number))
        messages[self._me] = self._own.pop(number)
        if not self._failed:
            with self._transport.clock("decode"):
                half.take_all(messages, finite)
            self._look()

    def _send_to_each(self, number: int) -> None:
        half = self._slices[number].to_each
        assert half is not None
        messages, finite = self._try(half.messages) or ([_nothing()] * self._size, True)
        letters = [self._letter(message, number, finite) for message in messages]
        self._send(("each", number), letters, half.max_bytes_to(self._me))

    def _send_to_all(self, number: int) -> None:
        half = self._slices[number].to_all
        assert half is not None
        with self._transport.clock("encode"):
            message, finite = self._try(half.message) or (_nothing(), True)
        self._own[number] = message
        most = half.max_bytes_to_all()
        letter = self._letter(message, number, finite)
        if self._ring:
            padded = letter.new_empty(HEAD + aligned(most))
            padded[: letter.numel()] = letter
            link, limit = self._transport.link, self._transport.limit
            self._under_way["all", number] = link.start_all_gather(padded, limit)
        else:
            self._send(("all", number), [letter] * self._size, most)

    def _send(self, which: tuple[str, int], letters: Sequence[Tensor], most: int) -> None:
        """A letter to each other member, of which at most so long ones come."""
        sent = [0 if j == self._me else letter.numel() for j, letter in enumerate(letters)]
        rooms = [0 if j == self._me else HEAD + aligned(most) for j in range(self._size)]
        others = [letter for j, letter in enumerate(letters) if j != self._me]
        outgoing = others[0] if len(others) == 1 else torch.cat(others)
        link, limit = self._transport.link, self._transport.limit
        self._under_way[which] = link.start_all_to_all(outgoing, sent, rooms, HEAD, limit)

    def _letter(self, message: Tensor, number: int, finite: bool) -> Tensor:
        self._finite[number] = self._finite.get(number, True) and finite
        state = (FAILED if self._failed else 0) | (0 if finite else NON_FINITE)
        head = [MAGIC, number, state, message.numel()]
        numbers = torch.tensor([*head, *[0] * (HEAD // 8 - len(head))])
        return torch.cat([numbers.view(torch.uint8), message])

    def _opened(self, which: tuple[str, int]) -> tuple[list[Tensor], bool]:
        """The messages of all members in letters that have come, and whether all is finite."""
        transfer = self._under_way[which]
        rows = transfer.wait()
        self._spans.append(transfer.span)
        del self._under_way[which], transfer
        self._look()
        number, finite, messages, received = which[1], self._finite[which[1]], [], 0
        for place, row in enumerate(rows):
            if place == self._me:
                messages.append(_nothing())
                continue
            magic, theirs, state, length = row[:HEAD].view(torch.int64).tolist()[:4]
            if magic != MAGIC or theirs != number or not 0 <= length <= row.numel() - HEAD:
                self._refuse(
                    f"rank {self._transport.members.ranks[place]} announces {LENGTH} for slice "
                    f"{theirs}: {length:,}; expected slice {number} and at most "
                    f"{row.numel() - HEAD:,}"
                )
            self._failed = self._failed or bool(state & FAILED)
            finite = finite and not state & NON_FINITE
            messages.append(row[HEAD : HEAD + length])
            received += HEAD + length
        if not (self._ring and which[0] == "all"):
            self._transport.link.note_received(received)
        return messages, finite

    def _look(self) -> None:
        """What has arrived meanwhile was not under way any longer."""
        for transfer in self._under_way.values():
            transfer.look()

    def _try(self, work: Callable[[], T]) -> T | None:
        """What may fail on this member alone: the others learn of it from its next letters."""
        if self._failed:
            return None
        try:
            found = work()
            self._look()
            return found
        except Exception as error:
            self._error, self._failed = error, True
            self._preparer.stop()
            return None

    def _refuse(self, why: str) -> None:
        self._transport.link.close()
        raise PeerError(why)


class Preparer:
    """A thread that prepares slices, a few before they are sent."""

    def __init__(self, slices: Sequence[StreamAlgorithm]) -> None:
        self.seconds = 0.0  # that it took
        self._slices, self._stopped = slices, False
        self._ahead = threading.Semaphore(AHEAD)
        self._outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="thinwire slices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Return when the next one is prepared; raises its error."""
        outcome = self._outcomes.get()
        self._ahead.release()
        if outcome is not None:
            raise outcome

    def stop(self) -> None:
        """End with the one that is being prepared."""
        self._stopped = True
        self._ahead.release()
        self._thread.join()

    def _run(self) -> None:
        for each in self._slices:
            self._ahead.acquire()
            if self._stopped:
                return
            begin, outcome = time.perf_counter(), None
            try:
                each.prepare()
            except Exception as error:
                outcome = error
            self.seconds += time.perf_counter() - begin
            self._outcomes.put(outcome)


def _is_full(algorithm: StreamAlgorithm) -> bool:
    """Whether messages are about as long as they can be, as far as all ranks know: not all
    collectives compare residuals."""
    parts = [part._replace(r=None) for part in algorithm.reduction.parts]
    most = max_message_bytes([part.expected for part in parts])
    return Load.of(parts).frame >= FULL * most


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
