"""What an exchange moves data with: meetings of all members, then messages of agreed lengths.

Before any data is used, all members meet: each gives a short record of numbers, and from the
records everybody knows that all want the same, how long the messages will be, and whether somebody
cannot go on. What can fail on one rank alone is done before such a meeting, so that a failure can
be told to the others instead of leaving them waiting.

Short messages come along with the records, straight from each member to each: an exchange of those
takes as long as one message takes to arrive. Longer ones follow when the records are known, through
the backend's own collectives.

What a record says is not believed: whoever uses a number of another member gives the bounds it must
keep (`checked`, `checked_words`). All have the same records, so all refuse the same.
"""

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.handle import Account
from thinwire.collectives.link import Link
from thinwire.collectives.message import aligned, joined, padded
from thinwire.collectives.order import AT_ONCE, Span, Turn, covered
from thinwire.errors import FrameError, MismatchError, PeerError
from thinwire.telemetry import span

MAGIC = 0x7468696E77697265
HEADER = 5  # numbers that a record begins with
FIELDS = 8  # numbers that every record has room for, besides one for each member
MOST_TEXT = 1 << 20  # bytes of an explanation
LISTED = "; "  # between what is said of each of several tensors
STAGED = ("cuda",)  # devices whose tensors go through page-locked memory of the host
FAILED, IDLE, ALONG = 1, 2, 4  # a member cannot go on, has nothing to say, sends all its messages
BEHIND = 3  # bits of these; above them, how many exchanges wait behind this one
# Bytes that come along with the records of all others, at most, and with that of one.
ROOM, MOST_ROOM, LEAST_ROOM = 1 << 19, 1 << 17, 1 << 12
# Sums of up to so many bytes, times members, are formed from what comes along: more bytes than a
# ring all-reduce sends, in one hop instead of 2 (P - 1). 32 KiB take as long as a hop of 0.25 ms
# at 1 Gbit/s, of 25 ms at 10 Mbit/s.
MOST_SUMMED = 1 << 15
# Bytes from which a message is long: less passes while two ranks wait for each other anyway.
LONG = 1 << 17
# What gloo adds up, and in what type we do.
SUMMED_IN = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int8: torch.int8,
    torch.uint8: torch.uint8,
}


class Call(NamedTuple):
    """What a rank asked for, in words: ranks must agree in all of it."""

    name: str  # "all_reduce"
    details: tuple[tuple[str, str], ...]  # ("compressor", "topk:0.01"), ...

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"{key}={value}" for key, value in self.details)])


class Record(NamedTuple):
    """What one member gave to a meeting."""

    numbers: list[int]
    words: list[int]  # one for each member
    idle: bool = False  # comes only because others meet
    along: Tensor | None = None  # the message that came with it, if all of its sender's did


class Transport:
    """The connections of a group during one exchange.

    Args:
        link: the connections.
        limit: how long to wait for others, each time.
        call: what this rank wants.
        account: where times are noted.
        device: where the tensors are.
        turn: of the exchange, if others may go beside it: members then tell each other how many
            wait behind.
    """

    def __init__(
        self,
        link: Link,
        limit: timedelta,
        call: Call,
        account: Account,
        device: torch.device,
        turn: Turn | None = None,
    ) -> None:
        self.link = link
        self.members = link.members
        self.account = account
        self.device = device
        self.limit = self._own_limit = limit
        self._turn = turn
        self._beside = turn is not None and link.takes_shorter and link.members.may_branch
        if turn is not None and turn.released:
            self._have_patience()
        self._call = call
        text = str(call).encode()
        self._call_text, self._call_mark = text[:MOST_TEXT], zlib.crc32(text)
        # gloo and MPI move memory of the host, others that of the device.
        on_host = self.members.backend.name in ("gloo", "mpi")
        self._transfer_device = torch.device("cpu") if on_host else device
        self._staged = on_host and device.type in STAGED
        link.pins_memory = self._staged and device.type == "cuda"

    def _to_link(self, tensor: Tensor) -> Tensor:
        """A tensor where the backend can read it, complete.

        Page-locked memory, to which a GPU copies at the full rate of its bus. torch keeps it for
        later, and gives none of it away before the copies that it is part of have ended.
        """
        if not self._staged:
            return tensor.to(self._transfer_device)
        host = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.link.pins_memory
        )
        host.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:  # this stream alone, which the backend knows nothing of
            torch.cuda.current_stream(tensor.device).synchronize()
        return host

    def _from_link(self, tensor: Tensor) -> Tensor:
        """What was received, on the device of the exchange: ready for what its stream does next."""
        return tensor.to(self.device, non_blocking=self._staged)

    @contextmanager
    def clock(self, kind: str) -> Iterator[None]:
        """Add the time of a block to the account."""
        start = time.perf_counter()
        try:
            with span(kind):
                yield
        finally:
            end, seconds = time.perf_counter(), self.account.seconds
            if kind == "network":
                self.note_moving([(start, end)])
            else:
                seconds[kind] = seconds.get(kind, 0.0) + end - start

    def note_moving(self, spans: Sequence[Span]) -> None:
        """Data moved from then to then."""
        seconds = self.account.seconds
        seconds["network"] = seconds.get("network", 0.0) + covered(spans)
        if self._turn is not None:
            self._turn.spans += spans

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """For what may fail on this rank before a meeting: the others then get to know."""
        try:
            with self.clock("encode"):
                yield
        except Exception as error:
            self.announce(error)
            raise

    def announce(self, error: Exception) -> None:
        """Tell the others in their next meeting that this member cannot go on."""
        self.account.announced = True
        self._meet([], [], error)

    def meet(
        self,
        numbers: Sequence[int] = (),
        words: Sequence[int] = (),
        along: Tensor | Sequence[Tensor] | None = None,
    ) -> list[Record]:
        """Exchange up to eight numbers and one for each member; returns what each member gave.

        Args:
            along: a message that `gather`, or one for each member that `swap` is to send next:
                sent right now if it is short. They find it in the records.

        Raises:
            MismatchError: the members want different things.
            PeerError: one of them cannot go on.
        """
        return self._meet(numbers, words, None, along=along)

    def attend(self, numbers: Sequence[int] = ()) -> list[Record]:
        """Come to the meetings of others until nobody calls one; the records of the last."""
        while True:
            records = self._meet(numbers, (), None, idle=True)
            if all(one.idle for one in records):
                return records

    def checked(
        self,
        what: str,
        given: Sequence[float],
        most: Sequence[float] | float,
        least: float = 0,
    ) -> None:
        """Numbers that members gave in a meeting, one each, must lie between `least` and `most`.

        Args:
            what: the number is, for the error: "a message of bytes".
            most: for all members, or for each.

        Raises:
            PeerError: on all members, as all have seen the same; nothing was sent, and the
                connections stay.
        """
        bounds = most if isinstance(most, Sequence) else [most] * len(given)
        for rank, number, bound in zip(self.members.ranks, given, bounds, strict=True):
            if not least <= number <= bound:
                self._refuse(
                    PeerError(
                        f"{self._call.name}: rank {rank} announces {what}: {number:,}, which must "
                        f"be between {least:,} and {bound:,}"
                    )
                )

    def checked_words(self, what: str, records: Sequence[Record], most: Sequence[int]) -> None:
        """The same for what each member gave for every other: that for the j-th is at most
        most[j]."""
        for j, bound in enumerate(most):
            self.checked(what, [record.words[j] for record in records], bound)

    def _refuse(self, error: PeerError) -> None:
        raise error

    def _meet(
        self,
        numbers: Sequence[int],
        words: Sequence[int],
        failure: Exception | None,
        idle: bool = False,
        along: Tensor | Sequence[Tensor] | None = None,
    ) -> list[Record]:
        size = self.members.size
        text = self._call_text if failure is None else _explain(failure).encode()[:MOST_TEXT]
        state = FAILED if failure is not None else IDLE if idle else 0
        messages = self._short_enough(along)
        behind = self._turn.behind if self._turn is not None and self._beside else 0
        state |= (ALONG if messages else 0) | behind << BEHIND
        record = [MAGIC, self._call_mark, state, len(text), 0, *numbers]
        record += [0] * (HEADER + FIELDS - len(record))
        record += [*words, *[0] * (size - len(words))]
        with self.clock("network"):
            if self.link.takes_shorter:
                table, found = self._send_records(record, messages)
            else:
                mine = torch.tensor(record, dtype=torch.int64, device=self._transfer_device)
                table = self.link.all_gather(mine, self.limit).view(size, -1).tolist()
                found = [None] * size
        failed = [bool(row[2] & FAILED) for row in table]
        if any(failed) or any(row[:2] != table[0][:2] for row in table):
            self._explain_failure(text, [row[3] for row in table], failed)
        else:
            self._release(min(row[2] >> BEHIND for row in table))
        fields = HEADER + FIELDS
        return [
            Record(row[HEADER:fields], row[fields:], bool(row[2] & IDLE), message)
            for row, message in zip(table, found, strict=True)
        ]

    def _release(self, behind: int) -> None:
        """So many exchanges wait behind this one on every member."""
        if self._turn is not None and behind > 0:
            self._turn.release(behind)
            self._have_patience()

    def _have_patience(self) -> None:
        """Whatever others move beside this exchange, it has as long as if it had the link alone."""
        self.limit = AT_ONCE * self._own_limit

    @property
    def room(self) -> int:
        """Bytes of the longest message that can come along with a record; equal on all members."""
        if not self.link.takes_shorter:
            return 0
        return min(MOST_ROOM, max(LEAST_ROOM, aligned(ROOM // (self.members.size - 1))))

    def _short_enough(self, along: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
        """The message to all members, or those to each, if they can come along; otherwise none."""
        if along is None:
            return []
        messages = [along] if isinstance(along, Tensor) else list(along)
        room = self.room
        return messages if all(message.numel() <= room for message in messages) else []

    def _send_records(
        self, record: list[int], messages: list[Tensor]
    ) -> tuple[list[list[int]], list[Tensor | None]]:
        """Everybody's record, and the message behind it where all of its sender's came along."""
        size, me = self.members.size, self.members.index
        begin = aligned(8 * len(record))

        def letter(message: Tensor) -> Tensor:
            numbers = [*record[:4], message.numel(), *record[5:]]
            numbers += [0] * (begin // 8 - len(record))
            return torch.cat([torch.tensor(numbers).view(torch.uint8), self._to_link(message)])

        if len(messages) == size:
            letters = [letter(messages[j]) for j in range(size) if j != me]
        else:  # the same for all
            one = letter(messages[0] if messages else torch.empty(0, dtype=torch.uint8))
            letters = [one] * (size - 1)
        lengths = [each.numel() for each in letters]
        lengths.insert(me, 0)
        outgoing = letters[0] if size == 2 else torch.cat(letters)
        rows = self.link.all_to_all_shorter(outgoing, lengths, begin + self.room, begin, self.limit)
        heads = rows[:, : 8 * len(record)].contiguous().view(torch.int64).tolist()
        found: list[Tensor | None] = []
        for rank, head, row in zip(self.members.others, heads, rows, strict=True):
            came, length = bool(head[2] & ALONG), head[4]
            if not 0 <= length <= self.room:
                self.link.close()
                raise PeerError(
                    f"{self._call.name}: rank {rank} sends a message of {length:,} bytes with its "
                    f"record, which must be between 0 and {self.room:,}"
                )
            # A copy: the rows together are much longer than most messages.
            message = row[begin : begin + length]
            found.append(
                message.to(self.device, copy=True, non_blocking=self._staged) if came else None
            )
        self.link.note_received(sum(begin + head[4] for head in heads))
        heads.insert(me, record)
        found.insert(
            me, (messages[me] if len(messages) == size else messages[0]) if messages else None
        )
        return heads, found

    def _explain_failure(self, text: bytes, lengths: list[int], failed: list[bool]) -> None:
        """Something is wrong somewhere: exchange the texts and raise what they come to."""
        ranks = self.members.ranks
        me = self.members.index
        if failed[me] and not all(0 <= length <= MOST_TEXT for length in lengths):
            return  # the own error is raised
        for rank, length in zip(ranks, lengths, strict=True):
            if not 0 <= length <= MOST_TEXT:
                raise PeerError(
                    f"{self._call.name}: rank {rank} announces an explanation of {length:,} bytes, "
                    f"which must be between 0 and {MOST_TEXT:,}"
                )
        slot = torch.zeros(max(lengths), dtype=torch.uint8)
        if text:
            slot[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        table = self.link.all_gather(slot.to(self._transfer_device), self.limit).cpu()
        rows = table.view(len(lengths), -1)
        texts = [
            bytes(row[:length].numpy()).decode(errors="replace")
            for row, length in zip(rows, lengths, strict=True)
        ]
        if failed[me]:
            return  # the own error is raised
        if any(failed):
            who = [f"rank {ranks[i]}: {texts[i]}" for i, f in enumerate(failed) if f]
            raise PeerError(f"{self._call.name}: could not go on at " + "; ".join(who))
        raise MismatchError(_difference(ranks, texts))

    def _came_along(self, records: Sequence[Record], lengths: Sequence[int]) -> list[Tensor] | None:
        """The messages that came with these records; None unless everybody's did."""
        if not records or any(record.along is None for record in records):
            return None
        messages = [record.along for record in records if record.along is not None]
        for place, (message, length) in enumerate(zip(messages, lengths, strict=True)):
            self._check_length(place, message, length)
        return messages

    def _check_length(self, place: int, message: Tensor, length: int) -> None:
        if message.numel() != length:
            raise FrameError(
                f"rank {self.members.ranks[place]} announces {length:,} bytes and sends "
                f"{message.numel():,}"
            )

    def gather(
        self, message: Tensor, lengths: Sequence[int], records: Sequence[Record] = ()
    ) -> list[Tensor]:
        """All members' messages, of agreed lengths; what came along with records is not sent
        again."""
        came = self._came_along(records, lengths)
        if came is not None:
            return came
        if self.members.size == 2 and self.link.takes_shorter:  # a ring of two is both ways in one
            nothing, me = message[:0], self.members.index
            others = [0 if j == me else n for j, n in enumerate(lengths)]
            messages = [nothing if j == me else message for j in range(2)]
            both = self.swap(messages, others, longest=max(lengths))
            both[me] = message
            return both
        slot = aligned(max(lengths))
        with self.clock("network"):
            buffer = self._to_link(padded(message, slot))
            table = self._from_link(self.link.all_gather(buffer, self.limit))
        return [table[i * slot : i * slot + n] for i, n in enumerate(lengths)]

    def swap(
        self,
        messages: Sequence[Tensor],
        lengths: Sequence[int],
        records: Sequence[Record] = (),
        longest: int = 0,
    ) -> list[Tensor]:
        """messages[j] to member j; returns what each sent here, of the agreed lengths; what came
        along with records is not sent again.

        Args:
            longest: bytes of the longest message between any two members, where all know that and
                nobody sends to itself: long ones then go both ways at the same time.
        """
        came = self._came_along(records, lengths)
        if came is not None:
            return came
        sent = [aligned(message.numel()) for message in messages]
        received = [aligned(length) for length in lengths]
        with self.clock("network"):
            outgoing = self._to_link(joined(messages, sent))
            both_ways = longest >= LONG and self.link.takes_shorter
            move = self.link.all_to_all_both_ways if both_ways else self.link.all_to_all
            table = move(outgoing, sent, received, self.limit)
            slots = torch.split(self._from_link(table), received)
        return [slot[:length] for slot, length in zip(slots, lengths, strict=True)]

    def summands(self, pools: dict[torch.dtype, Tensor]) -> Tensor | None:
        """The message to come along for a `sum` of these tensors, if they are small enough."""
        bytes_sent = (self.members.size - 1) * sum(pool.nbytes for pool in pools.values())
        if not bytes_sent or bytes_sent > MOST_SUMMED or not SUMMED_IN.keys() >= pools.keys():
            return None
        return torch.cat([pool.view(torch.uint8) for pool in pools.values()])

    def sum(
        self, pools: dict[torch.dtype, Tensor], records: Sequence[Record] = ()
    ) -> dict[torch.dtype, Tensor]:
        """The sums over members, in rank order if `summands` came along with the records,
        otherwise by the backend. The tensors' memory may be used for them."""
        length = sum(pool.nbytes for pool in pools.values())
        came = self._came_along(records, [length] * self.members.size)
        if came is None:
            return {key: self.reduce(pool, dist.ReduceOp.SUM) for key, pool in pools.items()}
        with self.clock("decode"):
            sums, begin = {}, 0
            for dtype, pool in pools.items():
                end = begin + pool.nbytes
                rows = [each[begin:end].clone().view(dtype) for each in came]
                total = rows[0].to(SUMMED_IN[dtype])
                for row in rows[1:]:
                    total.add_(row)
                sums[dtype], begin = total.to(dtype), end
            return sums

    def reduce(self, tensor: Tensor, op: Any) -> Tensor:
        """The backend's reduction; the tensor's memory may be used for the result."""
        with self.clock("network"):
            buffer = self._to_link(tensor)
            self.link.all_reduce(buffer, op, self.limit)
            return self._from_link(buffer)

    def broadcast(
        self, message: Tensor | None, length: int, root: int, records: Sequence[Record] = ()
    ) -> Tensor:
        """The root's message, of agreed length, unless it came along with its record."""
        along = records[root].along if records else None
        if along is not None:
            self._check_length(root, along, length)
            return along
        with self.clock("network"):
            if message is None:
                buffer = torch.empty(
                    length,
                    dtype=torch.uint8,
                    device=self._transfer_device,
                    pin_memory=self.link.pins_memory,
                )
            else:
                buffer = self._to_link(message)
            self.link.broadcast(buffer, root, self.limit)
            return self._from_link(buffer)


class SubgroupTransport(Transport):
    """The same for some of the members, over connections of their own.

    Their meetings are those of all: whoever has no part in it attends. So whatever is said there,
    that somebody cannot go on above all, is heard by everybody.

    Args:
        whole: the transport of all.
        places: of these members among all.
    """

    def __init__(self, whole: Transport, places: tuple[int, ...]) -> None:
        link = whole.link.subgroup(places, whole.limit)
        super().__init__(link, whole.limit, whole._call, whole.account, whole.device)
        self._whole, self._places = whole, places

    def _refuse(self, error: PeerError) -> None:
        # Members outside the subgroup have not looked at its numbers.
        self.announce(error)
        raise error

    def _meet(
        self,
        numbers: Sequence[int],
        words: Sequence[int],
        failure: Exception | None,
        idle: bool = False,
        along: Tensor | Sequence[Tensor] | None = None,
    ) -> list[Record]:
        # Nothing comes along: the meeting is that of all, and most have no part in it.
        records = self._whole._meet(numbers, words, failure, idle=idle)
        return [
            one._replace(words=one.words[: len(self._places)])
            for one in (records[place] for place in self._places)
        ]


def _explain(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _difference(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """Who differs from the others, and in what."""
    calls = [_parse(text) for text in texts]
    fields = list(dict.fromkeys(key for call in calls for key in call))
    lines = []
    for key in fields:
        values = [call.get(key, "none").split(LISTED) for call in calls]
        same_count = len(set(map(len, values))) == 1
        items = zip(*values, strict=True) if same_count else [map(LISTED.join, values)]
        for item in items:
            by_value: dict[str, list[int]] = {}
            for rank, value in zip(ranks, item, strict=True):
                by_value.setdefault(value, []).append(rank)
            if len(by_value) > 1:
                parts = [
                    f"{value} on {'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))}"
                    for value, who in sorted(by_value.items(), key=lambda item: -len(item[1]))
                ]
                lines.append(f"{key}: {' but '.join(parts)}")
    return "ranks disagree in one call, " + "; ".join(lines)


def _parse(text: str) -> dict[str, str]:
    name, *rest = text.split("\n")
    return {"call": name, **dict(line.partition("=")[::2] for line in rest)}
