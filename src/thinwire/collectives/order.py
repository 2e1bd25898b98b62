"""The order of a channel's exchanges, of which a few are under way at a time.

All members submit the same exchanges in the same order, but not at the same moment. Connections of
its own (a lane) let an exchange go beside the one before it, if all members know that all of them
will use these connections for the same exchange. What they know alike is what they told each other:

- With its record each member says how many exchanges wait **behind** the one that meets. As many as
  wait on every member are then **released**: each of them begins when it is ready, at most
  `AT_ONCE` at a time, in the lane after that of the exchange before it.
- One that is not released begins when all before it have moved their data, in the first lane. So
  who waits for each exchange before starting the next never needs more than one.
- Whether one takes part at all may depend on those before it. One that is released always does, as
  these may not have ended everywhere; what comes of it is then thrown away in its turn.

They end in their order, with the results of one exchange after the other.
"""

import itertools
import threading
import time
from collections import deque
from typing import Any, Protocol

AT_ONCE = 3  # exchanges under way at a time, each with its payloads


class Ordered(Protocol):
    """What is put in order; see `thinwire.collectives.exchange.Exchange`."""

    looks_back: bool

    def may_run_beside(self, other: Any) -> bool: ...


class Turn:
    """An exchange in the order of its channel.

    Args:
        exchange: that it is about.
        order: in which it stands.

    Attributes:
        released: all members know that it goes beside those before it.
        lane: which connections it has, when it has begun.
    """

    def __init__(self, exchange: Ordered, order: "Order") -> None:
        self.exchange = exchange
        self.released = False
        self.lane = 0
        self._order = order
        self._prepared = False
        self._begun = False
        self._began = self._stopped = 0.0
        self._moved = False  # all its data, well
        self._ending = False  # whoever waits for it is being told

    @property
    def behind(self) -> int:
        """How many exchanges wait behind this one."""
        return self._order.count_behind(self)

    def note_prepared(self) -> None:
        """The next may be prepared."""
        self._order.note_prepared(self)

    def release(self, count: int) -> None:
        """So many exchanges wait behind this one on every member."""
        self._order.release(self, count)

    @property
    def judged_late(self) -> bool:
        """Whether it takes part without knowing what came of all before it."""
        return self.released and not self.exchange.looks_back


class Order:
    """The turns of a channel that have not ended, in their order."""

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()
        self._changed = threading.Condition()
        self._lane = 0  # of the last that has begun
        self._stopped = 0.0  # when the last of those that have ended stopped moving data

    def join(self, exchange: Ordered) -> tuple[Turn, int]:
        """A turn behind all others, and how many somebody must carry out now."""
        turn = Turn(exchange, self)
        with self._changed:
            self._turns.append(turn)
            return turn, sum(not each._ending for each in self._turns)

    @property
    def empty(self) -> bool:
        """Whether all have ended."""
        return not self._turns

    def may_prepare(self, turn: Turn) -> bool:
        """Wait until it may be prepared: those before it are, and have ended if they share memory
        with it. False if all of them have ended."""
        with self._changed:
            before = self._before(turn)
        shared = [each for each in before if not turn.exchange.may_run_beside(each.exchange)]

        def ready() -> bool:
            return all(each._prepared and each not in shared for each in self._before(turn))

        with self._changed:
            self._changed.wait_for(ready)
            return not self._is_first(turn)

    def note_prepared(self, turn: Turn) -> None:
        """The next may be."""
        with self._changed:
            turn._prepared = True
            self._changed.notify_all()

    def begin(self, turn: Turn) -> None:
        """Wait until it may begin; it has its lane then."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_begin(turn))
            turn.lane = self._lane = (self._lane + 1) % AT_ONCE if turn.released else 0
            turn._begun, turn._began = True, time.perf_counter()
            self._changed.notify_all()

    def _may_begin(self, turn: Turn) -> bool:
        before = self._before(turn)
        if turn.exchange.looks_back:
            return not before
        return all(each._begun if turn.released else each._moved for each in before)

    def count_behind(self, turn: Turn) -> int:
        """How many are behind a turn."""
        with self._changed:
            return len(self._turns) - 1 - self._turns.index(turn)

    def release(self, turn: Turn, count: int) -> None:
        """So many turns behind this one go beside it."""
        with self._changed:
            first = self._turns.index(turn) + 1
            for place in range(first, first + count):
                self._turns[place].released = True
            self._changed.notify_all()

    def stop(self, turn: Turn, moved: bool) -> None:
        """It has nothing more to do with the others; return in its turn to end.

        Args:
            moved: all its data, well.
        """
        with self._changed:
            turn._moved, turn._begun, turn._stopped = moved, True, time.perf_counter()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_first(turn))

    def share(self, turn: Turn) -> float:
        """Of the time in which a turn moved its data, that in which none before it did; once it
        has stopped. So the times of all add up to that in which any did."""
        whole = turn._stopped - turn._began
        return max(0.0, turn._stopped - max(turn._began, self._stopped)) / whole if whole else 1.0

    def note_ending(self, turn: Turn) -> None:
        """Whoever waits for it is about to be told."""
        with self._changed:
            turn._ending = True

    def end(self, turn: Turn) -> None:
        """The first has ended, and whoever waited for it knows."""
        with self._changed:
            assert self._is_first(turn), "exchanges end in their order"
            self._turns.popleft()
            self._stopped = max(self._stopped, turn._stopped)
            self._changed.notify_all()

    def _is_first(self, turn: Turn) -> bool:
        return self._turns[0] is turn

    def _before(self, turn: Turn) -> list[Turn]:
        return list(itertools.takewhile(lambda each: each is not turn, self._turns))
