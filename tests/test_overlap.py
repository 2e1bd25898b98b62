"""One exchange is prepared while the one before moves its data, and only where that is safe.

Functions with a leading `on_` run on every rank, in the processes of ranks.py.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tensors import normal, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.collectives.allreduce import AllReduce
from thinwire.collectives.footprint import Footprint
from thinwire.collectives.link import Link
from thinwire.collectives.order import Turn

N = 50_000
LONG = 60.0  # seconds that something which must happen may take on a busy machine
LIMIT = 600.0  # seconds for a call; ranks.py ends it long before


class Watching:
    """Counts preparations that run while another exchange is under way. The first of those does not
    end before (or, where there must be none, waits for a moment)."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float = LONG) -> None:
        self.seen = 0
        self._moving = False
        self._prepared = threading.Event()
        prepare, note, finish = AllReduce.prepare, Turn.note_prepared, AllReduce.finish

        def counted(exchange: Any) -> None:
            self.seen += self._moving
            prepare(exchange)
            if self._moving:
                self._prepared.set()

        def begin(turn: Any) -> None:
            self._moving = True
            note(turn)

        def end(exchange: Any) -> None:
            self._prepared.wait(seconds)
            self._prepared.set()
            self._moving = False
            finish(exchange)

        patch.setattr(AllReduce, "prepare", counted)
        patch.setattr(Turn, "note_prepared", begin)
        patch.setattr(AllReduce, "finish", end)


def on_two(seconds: float, calls: Callable[..., list[Any]]) -> int:
    """How many of two exchanges were prepared while another was under way."""
    tw.all_reduce(torch.ones(N), "quantize:4", timeout=LIMIT)  # connected
    with pytest.MonkeyPatch.context() as patch:
        watching = Watching(patch, seconds)
        for handle in calls():
            handle.wait()
    return watching.seen


def on_slow_finish(spec: str) -> None:
    """What is finished late is not what the next exchange has put in its place."""
    me, size = dist.get_rank(), dist.get_world_size()
    finish = AllReduce.finish

    def late(exchange: Any) -> None:
        time.sleep(0.02)
        finish(exchange)

    tensors = [torch.full((N,), float(10 * i + me)) for i in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduce, "finish", late)
        tw.wait_all([tw.all_reduce(x, spec, op="avg", async_op=True) for x in tensors])
    for i, x in enumerate(tensors):
        assert same(x, torch.full_like(x, 10 * i + (size - 1) / 2)), i


@pytest.mark.parametrize("spec", ["none", "cast:bf16", "topk:1.0"])
def test_an_exchange_that_is_finished_late_keeps_its_own_memory(spec):
    ranks.run(on_slow_finish, spec, ranks=3)


def on_lost_beside() -> tuple[str, bool, str, str]:
    """The second exchange loses its peer while the first is being finished."""
    x = torch.ones(N)
    tw.all_reduce(x, "none", timeout=LIMIT)
    finish, lost = AllReduce.finish, threading.Event()

    def late(exchange: Any) -> None:
        lost.wait(LONG)
        finish(exchange)

    close = Link.close

    def noticed(link: Any, farewell: bool = False) -> None:
        close(link, farewell)
        lost.set()

    if dist.get_rank() == 1:
        tw.all_reduce(torch.ones(N), "none", timeout=LIMIT)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduce, "finish", late)
        patch.setattr(Link, "close", noticed)
        tensors = [torch.ones(N) for _ in range(2)]
        first, second = (tw.all_reduce(x, "none", async_op=True, timeout=LIMIT) for x in tensors)
        first.wait_until_ended()
        second.wait_until_ended()
    with pytest.raises(tw.PeerError) as later:
        tw.all_reduce(x, "none", timeout=LIMIT)
    return str(first.exception()), first.account.lost, str(second.exception()), str(later.value)


def test_connections_lost_while_an_exchange_is_finished_are_the_next_ones_news():
    with ranks.Ranks(2) as group:
        first, lost, second, later = group.run(on_lost_beside, dying=[1])[0]
    assert first == "None"
    assert not lost
    assert "lost the connection" in second
    assert second.splitlines()[0] in later


def on_separate(seconds: float, how: str) -> int:
    def calls() -> list[Any]:
        xs = [normal(N, i) for i in range(2)]
        if how == "pieces":
            xs = list(normal(2 * N).split(N))
        return [tw.all_reduce(x, "quantize:4", async_op=True, timeout=LIMIT) for x in xs]

    return on_two(seconds, calls)


def on_shared(seconds: float, how: str) -> int:
    def calls() -> list[Any]:
        x, r = normal(2 * N), torch.zeros(N)
        more: list[dict[str, Any]] = [{}, {}]
        tensors = [normal(N, i) for i in range(2)]
        if how == "tensor":
            tensors = [x[:N], x[N - 1 : 2 * N - 1]]
        elif how == "columns":  # nothing in common, but that takes more than their ends to see
            tensors = list(x.view(N, 2).unbind(1))
        elif how == "residual":
            more = [{"residual": r}, {"residual": r}]
        elif how == "limit":
            more = [{"max_bytes": "1GB"}] * 2
        return [
            tw.all_reduce(x, "quantize:4", async_op=True, timeout=LIMIT, **each)
            for x, each in zip(tensors, more, strict=True)
        ]

    return on_two(seconds, calls)


@pytest.mark.parametrize("how", ["tensors", "pieces"])
def test_the_next_exchange_is_prepared_while_one_is_under_way(how):
    """Also of another piece of the same flat tensor, as gradients often are."""
    assert ranks.run(on_separate, LONG, how, ranks=2) == [1, 1]


@pytest.mark.parametrize("how", ["tensor", "columns", "residual", "limit"])
def test_not_where_they_share_memory_or_a_limit_counts_it(how):
    assert ranks.run(on_shared, 0.3, how, ranks=2) == [0, 0]


def on_backward() -> int:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(100, 100) for _ in range(4))), bucket_cap_mb=0.05
    )
    tw.attach(model, "topk:0.1", min_numel=0, timeout=LIMIT)
    x = torch.randn(4, 100)
    for _ in range(2):
        model(x).sum().backward()  # DDP forms its buckets anew
    with pytest.MonkeyPatch.context() as patch:
        watching = Watching(patch)
        model(x).sum().backward()
    return watching.seen


def test_buckets_are_compressed_while_those_before_are_sent():
    for seen in ranks.run(on_backward, ranks=2):
        assert seen >= 1


SPECS = ["quantize:4", "topk:0.05", "onebit", "powersgd:2", "none", "topk:0.1|quantize:4"]


def on_a_queue(seed: int) -> list[torch.Tensor]:
    """Many exchanges at once, some of the same tensors and residuals, in one order everywhere."""
    me, choose = dist.get_rank(), torch.Generator().manual_seed(seed)
    tensors = [normal(3000, 10 * me + i).view(60, 50) for i in range(2)]
    tensors += normal(6000, 10 * me + 2).view(120, 50).split(60)  # of one storage
    residuals = [*torch.zeros(2, 60, 50), *(torch.zeros(60, 50) for _ in range(2))]
    handles = []
    for _ in range(24):
        i, spec = (int(torch.randint(n, (), generator=choose)) for n in (4, len(SPECS)))
        residual = None if SPECS[spec] == "none" else residuals[i]
        handles.append(
            tw.all_reduce(
                tensors[i],
                SPECS[spec],
                residual=residual,
                op="avg",
                async_op=True,
                timeout=LIMIT,
                key=tw.Key(step=len(handles)),
            )
        )
    for handle in handles:
        handle.wait()
    return [*tensors, *residuals]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_full_queue_comes_to_the_same_bits_as_one_after_the_other(seed):
    overlapped = ranks.run(on_a_queue, seed, ranks=2)
    with_waits = ranks.run(on_one_by_one, seed, ranks=2)
    for a, b in zip(overlapped, with_waits, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def on_one_by_one(seed: int) -> list[torch.Tensor]:
    start = AllReduce.start

    def waiting(self: Any, async_op: bool = False) -> Any:
        return start(self, False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduce, "start", waiting)
        return on_a_queue(seed)


STORAGE = 30


@given(
    st.lists(st.tuples(st.integers(0, STORAGE), st.integers(0, 5), st.integers(1, 3))), st.data()
)
def test_footprints_meet_where_elements_do(stretches, data):
    """Against sets of addresses; a tensor with gaps counts as if it had none."""
    storage = torch.zeros(2 * STORAGE)
    places = torch.arange(2 * STORAGE)

    def views(of: torch.Tensor) -> list[torch.Tensor]:
        return [of[begin : begin + count * step : step] for begin, count, step in stretches]

    filled = [
        set(range(int(each[0]), int(each[-1]) + 1)) if each.numel() else set()
        for each in views(places)
    ]
    left = [data.draw(st.booleans()) for _ in stretches]
    sides = [
        [view for view, mine in zip(views(storage), left, strict=True) if mine is side]
        for side in (True, False)
    ]
    elements = [
        set().union(*(own for own, mine in zip(filled, left, strict=True) if mine is side))
        for side in (True, False)
    ]
    a, b = (Footprint([None, *side]) for side in sides)
    assert a.meets(b) == b.meets(a) == bool(elements[0] & elements[1])
    assert a.meets(a | b) == bool(elements[0])


def test_footprints_meet_where_they_share_an_object():
    state, other = object(), object()
    assert Footprint([], [state]).meets(Footprint([], [other, state]))
    assert not Footprint([], [state]).meets(Footprint([], [other]))
    assert (Footprint([], [state]) | Footprint([], [other])).meets(Footprint([], [other]))


def on_an_error() -> tuple[list[str], bool, bool]:
    """The second of three cannot be prepared on one rank: all learn of it, the others succeed."""
    me = dist.get_rank()
    tensors = [normal(N, me + i) for i in range(3)]
    before = tensors[1].clone()
    prepare = AllReduce.prepare

    def failing(exchange: Any) -> None:
        if me == 1 and any(t is tensors[1] for t in exchange._tensors):
            raise MemoryError("no memory for this one")
        prepare(exchange)

    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduce, "prepare", failing)
        handles = [tw.all_reduce(x, "quantize:4", async_op=True, timeout=LIMIT) for x in tensors]
        for handle in handles:
            handle.wait_until_ended()
            errors.append(str(handle.exception() or ""))
    usable = torch.ones(10)
    tw.all_reduce(usable, "none", timeout=LIMIT)
    return errors, same(tensors[1], before), bool((usable == dist.get_world_size()).all())


def test_what_cannot_be_prepared_ahead_of_time_fails_alone():
    for errors, untouched, usable in ranks.run(on_an_error, ranks=2):
        assert [bool(error) for error in errors] == [False, True, False]
        assert "no memory for this one" in errors[1]
        assert untouched
        assert usable
