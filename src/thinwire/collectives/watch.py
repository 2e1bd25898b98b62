"""The death watch: who dies in the middle of a transfer is noticed at once.

gloo tells those who wait to receive from a dead peer, but not always those who wait to send to it:
they would sit there until the timeout. So every member watches its left neighbour over a connection
of its own, on which it waits to receive and on which nothing is ever sent but a farewell. Whoever
sees its neighbour die closes its own connections, and the news goes round the ring.
"""

import contextlib
import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

c10d: Any = dist.distributed_c10d
WATCHED, WATCHER = 0, 1
FOR_EVER = timedelta(days=30)
FAREWELL = timedelta(milliseconds=300)  # for the neighbour to end its watch, too

Connect = Callable[[str, int, int], Any]  # (name, own place, members) -> a gloo group


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
        self._work = self._left.broadcast([torch.zeros(1)], _options())

    def alarmed(self) -> bool:
        """Whether the neighbour is gone without a farewell."""
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError:
            return True
        return False

    def close(self, farewell: bool) -> None:
        """End both watches; with a farewell the neighbour knows that all is well."""
        if farewell:
            with contextlib.suppress(RuntimeError):  # nobody may be there any more
                self._right.broadcast([torch.ones(1)], _options()).wait(FAREWELL)
        self._right = None
        try:
            self._work.wait(FAREWELL)
        except RuntimeError:
            if not self._work.is_completed():
                # Its destructor would wait for the neighbour, who may live on.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._left))
        self._left = self._work = None


def _options() -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank = WATCHED
    options.timeout = FOR_EVER
    return options
