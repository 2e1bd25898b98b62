"""The death watch: who dies in the middle of a transfer is noticed at once.

gloo tells those who wait to receive from a dead peer, but not always those who wait to send to it:
they would sit there until the timeout. So every member watches its left neighbour over a connection
of its own, on which it waits to receive and on which nothing is sent but short notices: a farewell
at the end and, between two members, what `pairs` has to say. Whoever sees its neighbour die closes
its own connections, and the news goes round the ring.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from thinwire import torch_internals

WATCHED, WATCHER = 0, 1
FOR_EVER = timedelta(days=30)
MOMENT = timedelta(milliseconds=300)  # to take a notice, or to end
FAREWELL = 1  # the kind of a notice; `pairs` has more

Connect = Callable[[str, int, int], Any]  # (name, own place, members) -> a gloo group


class Notice(NamedTuple):
    """What a member tells its right neighbour."""

    kind: int
    tag: int = 0


class Watch:
    """One member's part of the ring.

    Args:
        connect: makes the connection of a pair.
        index, size: this member's place among all.
    """

    def __init__(self, connect: Connect, index: int, size: int) -> None:
        left = (index - 1) % size
        # Pairs are made in an order in which nobody waits for somebody who waits for him.
        if index % 2 == 0:
            self._right = connect(f"watch/{index}", WATCHED, 2)
            self._left = connect(f"watch/{left}", WATCHER, 2)
        else:
            self._left = connect(f"watch/{left}", WATCHER, 2)
            self._right = connect(f"watch/{index}", WATCHED, 2)
        self._lock = threading.Lock()
        self._told: list[Any] = []  # notices that the neighbour may not have taken yet
        self._listen()

    def _listen(self) -> None:
        self._heard = torch.zeros(2, dtype=torch.int64)
        self._pending = _broadcast(self._left, self._heard)

    def alarmed(self) -> bool:
        """Whether the neighbour is gone without a farewell."""
        pending = self._pending
        if pending is None or not pending.is_completed():
            return False
        try:
            pending.wait()
        except RuntimeError:
            return True
        return False

    @property
    def neighbour_left(self) -> bool:
        """Whether the neighbour has said farewell."""
        pending, heard = self._pending, self._heard
        return (
            pending is not None
            and pending.is_completed()
            and not self.alarmed()
            and int(heard[0]) == FAREWELL
        )

    def tell(self, notice: Notice) -> None:
        """Send a notice; returns at once."""
        self._told = [each for each in self._told if not each.is_completed()]
        with contextlib.suppress(RuntimeError):  # nobody may be there any more
            self._told.append(_broadcast(self._right, torch.tensor(notice)))

    def hear(self, step: timedelta) -> Notice | None:
        """The next notice; None if there is none within a step. Called by one thread only.

        Raises:
            RuntimeError: the neighbour is gone, or this watch has ended.
        """
        with self._lock:
            pending, heard = self._pending, self._heard
        if pending is None:
            raise RuntimeError("the watch has ended")
        try:
            pending.wait(step)
        except RuntimeError:
            if not pending.is_completed():
                return None
            pending.wait()
        notice = Notice(*heard.tolist())
        with self._lock:
            if self._pending is not None and notice.kind != FAREWELL:
                self._listen()
        return notice

    def close(self, farewell: bool) -> None:
        """End both watches; with a farewell the neighbour knows that all is well."""
        if farewell:
            self.tell(Notice(FAREWELL))
        told, self._told = self._told, []
        for each in told:
            with contextlib.suppress(RuntimeError):
                each.wait(MOMENT)
        if told and not told[-1].is_completed():
            end(self._right, told[-1])
        self._right = None
        with self._lock:
            left, pending = self._left, self._pending
            self._left = self._pending = None
        with contextlib.suppress(RuntimeError):
            pending.wait(MOMENT)
        if not pending.is_completed():
            end(left, pending)  # the neighbour may live on


def _broadcast(pair: Any, tensor: torch.Tensor) -> Any:
    return torch_internals.broadcast(pair, tensor, WATCHED, FOR_EVER)


# Groups with an operation under way, which their destructors would wait for: each has a thread, and
# the memory of the operation, until then.
_ending: list[tuple[Any, Any]] = []
_lock = threading.Lock()


def end(group: Any, pending: Any) -> None:
    """Close the connections of a group whose operation would wait, maybe for ever.

    The operation ends now or, if it is in the middle of a message, with its own time limit: the
    group is left to itself until then.
    """
    torch_internals.abort(group)
    with contextlib.suppress(RuntimeError):
        pending.wait(MOMENT)
    if not pending.is_completed():
        torch_internals.keep(group)
        with _lock:
            _ending.append((group, pending))


def reap() -> bool:
    """Destroy groups whose operations have ended since; whether there are any left."""
    with _lock:
        ended = [each for each in _ending if each[1].is_completed()]
        _ending[:] = [each for each in _ending if not each[1].is_completed()]
        left = bool(_ending)
    for group, _ in ended:
        torch_internals.let_go(group)
    return left
