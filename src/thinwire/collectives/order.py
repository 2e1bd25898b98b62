"""The order of a channel's exchanges, of which a few are under way at a time.

All members submit the same exchanges in the same order, but not at the same moment. Connections of
its own (a lane) let an exchange go beside the one before it, if all members know that all of them
will use these connections for the same exchange. What they know alike is what they told each other:

- With its record each member says how many exchanges wait **behind** the one that meets and may go
  beside it. As many as wait on every member are then **released**: each of them begins when it is
  ready, at most `AT_ONCE` at a time, in the lane after that of the exchange before it.
- One that is not released begins when all before it have moved their data, in the first lane. So
  who waits for each exchange before starting the next never needs more than one.
- Whether one takes part at all may depend on those before it. One that is released always does, as
  these may not have ended everywhere; what comes of it is then thrown away in its turn. So nothing
  is released over the end of a **batch**, the exchanges that one failure ends: where a member gives
  up, its next exchange is of another batch than that of the others.

They end in their order, with the results of one exchange after the other.
"""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

AT_ONCE = 3  # exchanges under way at a time, each with its payloads
Span = tuple[float, float]  # from when to when


class Ordered(Protocol):
    """What is put in order; see `thinwire.collectives.exchange.Exchange`."""

    looks_back: bool
    batch: object

    def may_run_beside(self, other: Any) -> bool: ...


class Turn:
    """An exchange in the order of its channel.

    Args:
        exchange: that it is about.
        order: in which it stands.
        shared: those shortly before it that may not be under way at the same time.

    Attributes:
        released: all members know that it goes beside those before it.
        lane: which connections it has, when it has begun.
        spans: from when to when it moved data.
    """

    def __init__(self, exchange: Ordered, order: "Order", shared: "Sequence[Turn]") -> None:
        self.exchange = exchange
        self.released = False
        self.lane = 0
        self.spans: list[Span] = []
        self._order = order
        self._shared = shared
        self._taken = False  # by a thread that carries it out
        self._prepared = False
        self._begun = False
        self._moved = False  # all its data, well
        self._ending = False  # whoever waits for it is being told

    @property
    def behind(self) -> int:
        """How many exchanges wait behind this one that may go beside it and each other."""
        return self._order.count_behind(self)

    def note_prepared(self) -> None:
        """The next may be prepared."""
        self._order.note_prepared(self)

    def release(self, count: int) -> None:
        """So many exchanges wait behind this one on every member."""
        self._order.release(self, count)


class Order:
    """The turns of a channel that have not ended, in their order."""

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()
        self._changed = threading.Condition()
        self._lane = 0  # of the last that has begun
        self._last_spans: deque[list[Span]] = deque(maxlen=AT_ONCE - 1)  # of those that ended

    def join(self, exchange: Ordered) -> None:
        """Let it have a turn behind all others."""
        shared: Sequence[Turn] = ()
        if self._turns:
            with self._changed:
                near = list(self._turns)[1 - AT_ONCE :]
            shared = [each for each in near if not exchange.may_run_beside(each.exchange)]
        turn = Turn(exchange, self, shared)
        with self._changed:
            self._turns.append(turn)

    def take(self) -> Turn | None:
        """The next that nobody carries out yet."""
        with self._changed:
            for turn in self._turns:
                if not turn._taken:
                    turn._taken = True
                    return turn
        return None

    @property
    def waiting(self) -> int:
        """How many somebody must carry out now."""
        with self._changed:  # they end in their order, so none but the first may be ending
            return len(self._turns) - (self._turns[0]._ending if self._turns else 0)

    def may_prepare(self, turn: Turn) -> bool:
        """Wait until it may be prepared: those before it are, and have ended if they may not be
        under way beside it. False if all of them have ended."""

        def ready() -> bool:
            before = self._before(turn)
            return all(each._prepared and each not in turn._shared for each in before)

        if self._is_first(turn):
            return False
        with self._changed:
            self._changed.wait_for(ready)
            return not self._is_first(turn)

    def note_prepared(self, turn: Turn) -> None:
        """The next may be."""
        turn._prepared = True
        self._tell()

    def begin(self, turn: Turn) -> None:
        """Wait until it may begin; it has its lane then."""
        if not self._is_first(turn):
            with self._changed:
                self._changed.wait_for(lambda: self._may_begin(turn))
        turn.lane = self._lane = (self._lane + 1) % AT_ONCE if turn.released else 0
        turn._begun = True
        self._tell()

    def _tell(self) -> None:
        """Something has changed for those who wait, if anybody does."""
        if len(self._turns) > 1:
            with self._changed:
                self._changed.notify_all()

    def _may_begin(self, turn: Turn) -> bool:
        before = self._before(turn)
        if turn.exchange.looks_back:
            return not before
        return all(each._begun if turn.released else each._moved for each in before)

    def count_behind(self, turn: Turn) -> int:
        """How many behind a turn may go beside it and each other: of its batch, none of which
        looks back or has to wait for another."""
        batch, count = turn.exchange.batch, 0
        with self._changed:
            for each in itertools.islice(self._turns, self._turns.index(turn) + 1, None):
                own = each.exchange
                if own.batch is not batch or own.looks_back or each._shared:
                    break
                count += 1
        return count

    def release(self, turn: Turn, count: int) -> None:
        """So many turns behind this one go beside it."""
        with self._changed:
            first = self._turns.index(turn) + 1
            for each in itertools.islice(self._turns, first, first + count):
                each.released = True
            self._changed.notify_all()

    def stop(self, turn: Turn, moved: bool) -> None:
        """It has nothing more to do with the others; return in its turn to end.

        Args:
            moved: all its data, well.
        """
        turn._moved, turn._begun = moved, True
        self._tell()
        if not self._is_first(turn):
            with self._changed:
                self._changed.wait_for(lambda: self._is_first(turn))

    def alone(self, turn: Turn) -> float:
        """Seconds in which the first moved data and none before it did; once it has stopped. So the
        times of all add up to that in which any did."""
        before = [span for spans in self._last_spans for span in spans]
        return covered([*before, *turn.spans]) - (covered(before) if before else 0.0)

    def note_ending(self, turn: Turn) -> None:
        """Whoever waits for it is about to be told."""
        turn._ending = True

    def end(self, turn: Turn) -> None:
        """The first has ended, and whoever waited for it knows."""
        with self._changed:
            assert self._is_first(turn), "exchanges end in their order"
            self._turns.popleft()
            self._last_spans.append(turn.spans)
            self._changed.notify_all()

    def _is_first(self, turn: Turn) -> bool:
        return self._turns[0] is turn

    def _before(self, turn: Turn) -> list[Turn]:
        return list(itertools.takewhile(lambda each: each is not turn, self._turns))


def covered(spans: Iterable[Span]) -> float:
    """The length of spans of time, what they share counted once."""
    seconds, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return seconds
