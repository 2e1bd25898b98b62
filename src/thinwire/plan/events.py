"""The loops of the simulator, compiled: messages through links, and a ring.

An event is a message that reaches a link. They are taken in the order of their times from a heap;
each finds its link free or waits for those that came before.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def pass_links(
    release: Times, tail: Times, path: NDArray[Any], sizes: Times, rates: Times
) -> tuple[Times, Times]:
    """When messages have begun to leave their last link, and have passed it with their end.

    Args:
        release: when each may begin.
        tail: before which its end cannot have passed.
        path: for each message the links that it goes through in order; -1 for none.
        sizes: bytes of it on each of them.
        rates: bytes per second of each link.
    """
    found: tuple[Times, Times] = _compiled()[0](
        np.argsort(release, kind="stable"),
        np.ascontiguousarray(release, dtype=np.float64),
        np.ascontiguousarray(tail, dtype=np.float64),
        np.ascontiguousarray(path, dtype=np.int64),
        np.ascontiguousarray(sizes, dtype=np.float64),
        np.ascontiguousarray(rates, dtype=np.float64),
    )
    return found


def turn_ring(begin: Times, hop: Times, hops: int) -> Times:
    """Where `hops` rounds of t[j] <- max(t[j - 1], t[j]) + hop[j] come to.

    The map moves with time: if it adds the same to all ranks once, it does so for ever.
    """
    found: Times = _compiled()[1](begin.astype(np.float64), hop.astype(np.float64), hops)
    return found


@cache
def _compiled() -> tuple[Any, Any]:
    from numba import njit

    return njit(_pass_links), njit(_turn_ring)


# Numba compiles these: plain loops over arrays.


def _pass_links(order, release, tail, path, sizes, rates):  # type: ignore[no-untyped-def]
    count, width = path.shape
    free = np.zeros(len(rates))
    head, end = release.copy(), tail.copy()
    place = np.zeros(count, dtype=np.int64)
    # A binary heap of messages, by the time at which each reaches its next link; of those that come
    # together the first in the list goes first. Sorted, it is one.
    heap, size = order.copy(), count
    while size:
        m = heap[0]
        while place[m] < width and path[m, place[m]] < 0:
            place[m] += 1
        done = place[m] == width
        if not done:
            link = path[m, place[m]]
            seconds = sizes[m, place[m]] / rates[link]
            begin = max(head[m], free[link])
            free[link] = begin + seconds
            head[m] = begin
            end[m] = max(end[m], begin + seconds)
            place[m] += 1
        if done:
            size -= 1
            heap[0] = heap[size]
        # Let the first sink to where it belongs.
        i = 0
        while True:
            least, left = i, 2 * i + 1
            for child in (left, left + 1):
                if child < size:
                    a, b = heap[child], heap[least]
                    if head[a] < head[b] or (head[a] == head[b] and a < b):
                        least = child
            if least == i:
                break
            heap[i], heap[least] = heap[least], heap[i]
            i = least
    return head, end


def _turn_ring(begin, hop, hops):  # type: ignore[no-untyped-def]
    size = len(begin)
    t = begin.copy()
    before = np.empty(size)
    for k in range(hops):
        look = k % 64 == 63
        if look:
            before[:] = t
        last = t[size - 1]
        for j in range(size):
            own = t[j]
            t[j] = max(last, own) + hop[j]
            last = own
        if look:
            step = t[0] - before[0]
            same = True
            for j in range(size):
                if abs(t[j] - before[j] - step) > 1e-12 * (abs(t[j]) + step):
                    same = False
                    break
            if same:
                t += step * (hops - 1 - k)
                break
    return t
