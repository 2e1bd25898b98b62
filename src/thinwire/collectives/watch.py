"""The death watch: who dies in the middle of a transfer is noticed at once.

gloo tells those who wait to receive from a dead peer, but not always those who wait to send to it:
they would sit there until the timeout. So every member watches its left neighbour over a connection
of its own, on which it waits to receive and on which nothing is ever sent but a farewell. Whoever
sees its neighbour die closes its own connections, and the news goes round the ring.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from thinwire import torch_internals

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
        self._pending = _broadcast(self._left, torch.zeros(1))

    def alarmed(self) -> bool:
        """Whether the neighbour is gone without a farewell."""
        if not self._pending.is_completed():
            return False
        try:
            self._pending.wait()
        except RuntimeError:
            return True
        return False

    def close(self, farewell: bool) -> None:
        """End both watches; with a farewell the neighbour knows that all is well."""
        if farewell:
            with contextlib.suppress(RuntimeError):  # nobody may be there any more
                _broadcast(self._right, torch.ones(1)).wait(FAREWELL)
        self._right = None
        try:
            self._pending.wait(FAREWELL)
        except RuntimeError:
            if not self._pending.is_completed():
                # Its destructor would wait for the neighbour, who may live on.
                torch_internals.keep_for_ever(self._left)
        self._left = self._pending = None


def _broadcast(pair: Any, tensor: torch.Tensor) -> Any:
    return torch_internals.broadcast(pair, tensor, WATCHED, FOR_EVER)
