"""How often exchanges wait for others: with distance between ranks that is what they cost.

Functions with a leading `on_` run on every rank, in the processes of ranks.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import raised
from tensors import normal, same

import thinwire as tw
from thinwire.collectives.link import Link
from thinwire.collectives.transport import LEAST_ROOM, MOST_ROOM, Transport

N = 4096
LIMIT = 600.0  # seconds for a call; ranks.py ends it long before


def calls() -> dict[str, Callable[[], object]]:
    me, size = dist.get_rank(), dist.get_world_size()
    x, r = normal(N, me), torch.zeros(N)

    def reduce(spec: str, collective: str, **more: Any) -> Callable[[], object]:
        return lambda: tw.all_reduce(x.clone(), spec, collective=collective, timeout=LIMIT, **more)

    return {
        "gather": reduce("topk:0.01", "gather", residual=r),
        "gather of several": lambda: tw.all_reduce_coalesced(
            [normal(N, me), normal(100, me)], "quantize:4", collective="gather", timeout=LIMIT
        ),
        "twoshot": reduce("quantize:4", "twoshot", residual=r),
        "sparse": reduce("topk:0.01", "sparse", residual=r),
        "none": lambda: tw.all_reduce(normal(500, me), "none", timeout=LIMIT),
        "summable": reduce("randomk:0.1,shared=true", "summable"),
        "joint": lambda: tw.all_reduce(normal(N, me).view(64, 64), "powersgd:1", timeout=LIMIT),
        "all_gather": lambda: tw.all_gather(torch.empty(N * size), x, "onebit", timeout=LIMIT),
        "reduce_scatter": lambda: tw.reduce_scatter(
            torch.empty(N // size), normal(N // size * size, me), "onebit", timeout=LIMIT
        ),
        "broadcast": lambda: tw.broadcast(x.clone(), "quantize:8", src=1, timeout=LIMIT),
    }


ROUNDS = {
    **{"gather": 1, "gather of several": 1, "none": 1, "summable": 1},
    **{"twoshot": 2, "sparse": 2, "joint": 2},
    **{"all_gather": 1, "reduce_scatter": 1, "broadcast": 1},
}


def on_counts() -> dict[str, int]:
    counts, waited = {}, 0
    finish = Link._finish

    def counting(self: Any, pending: Any, limit: Any) -> None:
        nonlocal waited
        waited += 1
        finish(self, pending, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "_finish", counting)
        for name, call in calls().items():
            waited = 0
            call()
            counts[name] = waited
    return counts


@pytest.mark.parametrize("size", [2, 4])
def test_small_exchanges_take_the_fewest_rounds(size):
    for counts in ranks.run(on_counts, ranks=size):
        assert counts == ROUNDS


def on_along(lengths: list[int]) -> list[bool]:
    """Messages that fit behind a record and such that do not, alone and mixed."""
    me, size, found = dist.get_rank(), dist.get_world_size(), []
    for length in lengths:
        for others in (length, 1):  # what all but the first rank send
            wanted = [torch.arange(length if j == 0 else others).add_(j) for j in range(size)]
            got = [torch.empty_like(each) for each in wanted]
            tw.all_gather(got, wanted[me], "none", timeout=LIMIT)
            found.append(all(same(a, b) for a, b in zip(got, wanted, strict=True)))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_every_length_arrive(size):
    edge = MOST_ROOM // 8
    for found in ranks.run(on_along, [1, 100, edge - 100, edge, edge + 1, 3 * edge], ranks=size):
        assert all(found)


def on_a_long_letter(length: int) -> str:
    """One rank says that more came along with its record than there is room for."""
    if dist.get_rank() == 1:
        send = Link.all_to_all_shorter

        def lying(self: Any, outgoing: torch.Tensor, *rest: Any) -> torch.Tensor:
            outgoing[:40].view(torch.int64)[4] = length
            return send(self, outgoing, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Link, "all_to_all_shorter", lying)
            return raised(lambda: tw.all_reduce(normal(N), "topk:0.1", timeout=LIMIT))
    return raised(lambda: tw.all_reduce(normal(N), "topk:0.1", timeout=LIMIT))


@pytest.mark.parametrize("length", [1 << 40, -1, MOST_ROOM + 1])
def test_what_does_not_fit_behind_a_record_is_refused(length):
    honest, _ = ranks.run(on_a_long_letter, length, ranks=2)
    assert honest.startswith("PeerError")
    assert f"rank 1 sends a message of {length:,} bytes with its record" in honest


def test_a_shorter_message_than_announced_is_no_message():
    """What was not sent is whatever lay in memory: the frame's checksum finds out."""
    honest, _ = ranks.run(on_a_long_letter, MOST_ROOM, ranks=2)
    assert honest.startswith("FrameError")


@pytest.mark.parametrize("size", [2, 5, 8, 64, 1000])
def test_what_comes_along_takes_little_room(size):
    class Link:
        takes_shorter = True

    class Members:
        pass

    transport = object.__new__(Transport)
    transport.link, transport.members = Link(), Members()  # type: ignore[assignment]
    transport.members.size = size  # type: ignore[misc]
    assert LEAST_ROOM <= transport.room <= MOST_ROOM
    assert (size - 1) * transport.room <= 1 << 22
