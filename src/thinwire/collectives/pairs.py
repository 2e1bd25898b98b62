"""Messages from one member of a group to another: one thread and one link for all tags.

Messages of one tag arrive in the order they were sent, and a receive that waits holds up no other
tag. So sender and receiver first agree on which tag is next, by notices over the watch:

    receiver  READY tag     for each receive that was called
    sender    START tag     a send has found its receive: both now carry out the exchange
    either    GIVEN_UP tag  nobody came in time: this tag has ended for both

Nothing is sent before both sides want it, so nothing needs to be stored, and an exchange that has
started waits for nobody. A message under way holds up those of other tags for as long as it takes.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from thinwire import torch_internals
from thinwire.collectives.channel import (
    ENDED,
    Channel,
    Runnable,
    channel_of,
    error_of,
    forget_ended,
)
from thinwire.collectives.connect import Connecting, GivenUpError, Members
from thinwire.collectives.handle import Account
from thinwire.collectives.link import Link
from thinwire.collectives.transport import Call, Transport
from thinwire.collectives.watch import FAREWELL, Notice, Watch
from thinwire.errors import PeerError

NAME = "send and recv"
SENDER, RECEIVER = 0, 1
READY, START, GIVEN_UP = 2, 3, 4  # kinds of notices
LISTEN = timedelta(milliseconds=100)  # after which a listener looks whether it should end
IDLE_CHECK = 1.0  # seconds between two looks whether the process group still exists
LOOK = 0.01  # seconds between two looks at connections in the making


class Pair(NamedTuple):
    """Two members of a group, by their places, and a tag."""

    sender: int
    receiver: int
    tag: int


class PairRunnable(Runnable, Protocol):
    """What such a channel carries out."""

    pair: Pair

    def prepare_early(self) -> None: ...


def pair_channel_of(group: dist.ProcessGroup, device: torch.device, pair: Pair) -> Channel:
    """The channel from one member to another, made when first asked for."""
    places = (pair.sender, pair.receiver)
    if torch_internals.backend_of(group, device).name == "gloo":
        return channel_of(group, device, places, kind=PairChannel)
    # Without a watch nothing can be agreed on: each tag has connections of its own.
    return channel_of(group, device, places, suffix=f"/{pair.tag}")


@dataclass
class Waiting:
    """An exchange that waits for its turn.

    Args:
        limit: seconds that it may wait as the first of its tag.
        end: when that will be over, by the channel's clock.
        prepared: whether what it sends has been made.
    """

    exchange: PairRunnable
    limit: float
    end: float = float("inf")
    prepared: bool = False


class Listener:
    """A thread that puts what the other member says into a queue; at the end, a farewell."""

    def __init__(self, watch: Watch, into: "queue.SimpleQueue[Any]", name: str) -> None:
        self._watch, self._into, self._stopped = watch, into, False
        self._thread = threading.Thread(target=self._run, name=f"{name} listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            try:
                notice = self._watch.hear(LISTEN)
            except RuntimeError:
                self._into.put(LOST)
                return
            if notice is not None:
                self._into.put(notice)
                if notice.kind == FAREWELL:
                    return


LOST = Notice(-1)  # said by a listener: the other member is gone


class PairChannel(Channel):
    """The thread and the link from one member to another."""

    def __init__(self, members: Members, alive: Callable[[], bool]) -> None:
        self._waiting: dict[int, deque[Waiting]] = {}
        self._ready: dict[int, int] = {}  # receives that the other member has called, by tag
        self._ended: dict[int, str] = {}  # tags that were given up, and why
        self._connecting: Connecting | None = None
        self._listener: Listener | None = None
        self._busy = 0.0  # seconds spent in exchanges, which do not count as waiting
        self._closing = False
        (self._other,) = members.others
        super().__init__(members, alive)

    def _enqueue(self, exchange: Runnable) -> None:
        """Exchanges of several tags are not in one line: the thread sees to their order."""
        self._calls.put(exchange)

    def _check_thread(self, what: str) -> None:
        """Tags set the messages of different threads apart, so any thread may send and receive."""
        return None

    # The thread.

    def _run(self) -> None:
        try:
            while not (self._closing and (not self._waiting or self._given_up())):
                self._step()
        finally:
            self._refuse_the_rest()
        if self._connecting is not None:
            self._connecting.abandon()
        self._hang_up(farewell=True)
        self._linger()

    def _step(self) -> None:
        self._prepare_early()
        try:
            item = self._calls.get(timeout=self._pause())
        except queue.Empty:
            if not self._alive():
                self.close()
            forget_ended()
        else:
            self._take(item)
        self._go_on()

    def _refuse_the_rest(self) -> None:
        self._end_all(PeerError("given up: the process group or the interpreter has ended"))
        with self._lock:
            self._end = time.monotonic()
        while not self._calls.empty():
            item = self._calls.get()
            if item is not None and not isinstance(item, Notice):
                self._end_one(item, PeerError(ENDED))

    def _clock(self) -> float:
        return time.monotonic() - self._busy

    def _pause(self) -> float:
        if self._closing or (self._waiting and self._link is None):
            return LOOK
        ends = [line[0].end for line in self._waiting.values()]
        return max(0.0, min([IDLE_CHECK, *(end - self._clock() for end in ends)]))

    def _take(self, item: Any) -> None:
        if item is None:
            self._closing = True
        elif not isinstance(item, Notice):
            self._line_up(item)
        elif item.kind == READY:
            self._ready[item.tag] = self._ready.get(item.tag, 0) + 1
        elif item.kind == START:
            self._answer(item.tag)
        elif item.kind == GIVEN_UP:
            self._end_tag(item.tag, f"rank {self._other} has given up tag {item.tag}")
        elif item.kind == FAREWELL:
            self._lose(f"rank {self._other} has left the group")
        elif item == LOST:
            self._lose(
                f"lost the connection to one of ranks [{self._other}] (its process has ended)"
            )

    def _line_up(self, exchange: PairRunnable) -> None:
        tag = exchange.pair.tag
        if self._lost is not None:
            text = f"the group lost its connections in an earlier call: {self._lost}"
            self._end_one(exchange, PeerError(text))
        elif tag in self._ended:
            text = f"tag {tag} was given up in an earlier call: {self._ended[tag]}"
            self._end_one(exchange, PeerError(text))
        else:
            limit = exchange.options.timeout or self.members.timeout
            self._waiting.setdefault(tag, deque()).append(Waiting(exchange, limit.total_seconds()))
            self._count_from_now(tag)
            self._tell_ready(tag)
            if self._link is None and self._connecting is None:
                self._connecting = Connecting(self.members, watched=True)

    def _count_from_now(self, tag: int) -> None:
        """The first of a tag waits from now on, if it does not do so already."""
        first = self._waiting[tag][0]
        first.end = min(first.end, self._clock() + first.limit)

    def _tell(self, notice: Notice) -> None:
        if self._link is not None and self._link.watch is not None:
            self._link.watch.tell(notice)

    def _tell_ready(self, tag: int) -> None:
        if self.members.index == RECEIVER:
            self._tell(Notice(READY, tag))

    def _go_on(self) -> None:
        """All that can be done with what is known."""
        if self._connecting is not None and self._waiting:
            self._look_at_connections(self._connecting)
        if self._link is not None and self.members.index == SENDER:
            for tag in [tag for tag in self._waiting if tag in self._ready]:
                self._start(tag)
        late = [tag for tag, line in self._waiting.items() if line[0].end <= self._clock()]
        for tag in late:
            self._give_up(tag)

    def _look_at_connections(self, connecting: Connecting) -> None:
        try:
            if not connecting.ready():
                return
        except PeerError as error:
            connecting.abandon()
            self._connecting = None
            self._lose(str(error))
            return
        self._connecting = None
        self._link = Link(self.members, self.members.timeout, self._given_up, made=connecting)
        assert self._link.watch is not None, "asked for above"
        self._listener = Listener(self._link.watch, self._calls, self.thread.name)
        for tag in self._ended:
            self._tell(Notice(GIVEN_UP, tag))
        for tag, line in self._waiting.items():
            for _ in line:
                self._tell_ready(tag)

    def _prepare_early(self) -> None:
        """What is to be sent is made while the receiver has not come."""
        for line in self._waiting.values() if self.members.index == SENDER else ():
            if not self._calls.empty():
                return
            if not line[0].prepared:
                line[0].prepared = True
                line[0].exchange.prepare_early()

    # Exchanges.

    def _start(self, tag: int) -> None:
        self._ready[tag] -= 1
        if not self._ready[tag]:
            del self._ready[tag]
        self._tell(Notice(START, tag))
        self._exchange(tag)

    def _answer(self, tag: int) -> None:
        """The sender has started: it waits for this member now."""
        if tag in self._waiting:
            self._exchange(tag)
        elif self._link is not None:
            reason = self._ended.get(tag, "nobody receives it")
            call, device = Call(NAME, ()), torch.device("cpu")
            transport = Transport(self._link, self.members.timeout, call, Account(), device)
            try:
                transport.announce(PeerError(f"tag {tag} was given up: {reason}"))
            except (GivenUpError, PeerError) as error:
                self._lose(str(error))

    def _exchange(self, tag: int) -> None:
        line = self._waiting[tag]
        first, begin = line.popleft(), time.monotonic()
        if not line:
            del self._waiting[tag]
        self._carry_out_alone(first.exchange)
        self._busy += time.monotonic() - begin
        if line:
            self._count_from_now(tag)
        if self._lost is not None:
            self._lose(self._lost)

    def _carry_out_alone(self, exchange: PairRunnable) -> None:
        limit = exchange.options.timeout or self.members.timeout

        def take_part() -> None:
            self._check_connections()
            self._run_exchange(exchange, self._connect(limit), limit, None)

        error = self._come_to_an_end(exchange, False, error_of(take_part))
        exchange.handle._end(error)
        error = None  # its traceback holds this frame, and with it the process group

    # The end of a tag, and of all.

    def _give_up(self, tag: int) -> None:
        if tag not in self._waiting:
            return
        seconds = self._waiting[tag][0].limit
        self._tell(Notice(GIVEN_UP, tag))
        self._end_tag(
            tag, f"no answer from rank {self._other} within {seconds:g} s: not yet in this call"
        )

    def _end_tag(self, tag: int, reason: str) -> None:
        self._ended[tag] = reason
        self._ready.pop(tag, None)
        for waiting in self._waiting.pop(tag, ()):
            self._end_one(waiting.exchange, PeerError(reason))

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._hang_up(farewell=False)
        self._end_all(PeerError(reason))

    def _end_all(self, error: PeerError) -> None:
        lines, self._waiting = self._waiting, {}
        for waiting in (waiting for line in lines.values() for waiting in line):
            self._end_one(waiting.exchange, error)

    def _end_one(self, exchange: PairRunnable, error: PeerError) -> None:
        exchange.handle.account.lost = True
        exchange.handle._end(error)

    def _hang_up(self, farewell: bool) -> None:
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        if self._link is not None and not self._link.closed:
            self._link.close(farewell)
