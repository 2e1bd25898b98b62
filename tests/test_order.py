"""Exchanges that go beside each other: as many as all ranks know of, on the same connections.

Functions with a leading `on_` run on every rank, in the processes of ranks.py.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from tensors import normal, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.collectives.allreduce import AllReduce
from thinwire.collectives.channel import Channel, channel_of
from thinwire.collectives.connect import Members
from thinwire.collectives.options import Options
from thinwire.collectives.order import AT_ONCE, Order, Turn
from thinwire.parallel.replicas import ReplicaCheck
from thinwire.reducer.exchange import Driver
from thinwire.reducer.units import UnitReducer

N = 2000
LONG = 60.0  # seconds that something which must happen may take on a busy machine
LIMIT = 600.0  # seconds for a call; ranks.py ends it long before
COUNT = 7


def channel() -> Channel:
    group = dist.group.WORLD
    assert group is not None
    return channel_of(group, torch.device("cpu"))


@contextmanager
def held_until_all_wait(
    count: int, fails: Callable[[Any], bool] = lambda exchange: False
) -> Iterator[None]:
    """The first of so many exchanges meets the others when all of them were submitted.

    Args:
        fails: which of them cannot be prepared on this rank.
    """
    all_wait, submitted = threading.Event(), 0
    prepare, submit = AllReduce.prepare, Channel.submit

    def late(exchange: Any) -> None:
        all_wait.wait(LONG)
        if fails(exchange):
            raise MemoryError("no memory for this one")
        prepare(exchange)

    def counted(self: Any, exchange: Any) -> None:
        nonlocal submitted
        submit(self, exchange)
        submitted += 1
        if submitted == count:
            all_wait.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduce, "prepare", late)
        patch.setattr(Channel, "submit", counted)
        yield


def start_all(tensors: list[torch.Tensor], spec: str = "quantize:4", **more: Any) -> list[Any]:
    return [
        tw.all_reduce(x, spec, op="avg", async_op=True, timeout=LIMIT, key=tw.Key(step=i), **more)
        for i, x in enumerate(tensors)
    ]


class Watching:
    """How many exchanges move their data at a time. Those that have been released wait for each
    other, until as many are there as can be."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most = self._now = self._begun = 0
        self.lanes: list[int] = []
        self.limits: list[float] = []
        self._together = threading.Event()
        self._lock = threading.Lock()
        exchange, begin = AllReduce.exchange, Order.begin

        def watched(this: Any, transport: Any) -> None:
            with self._lock:
                self._begun += 1
                first = self._begun == 1
                self._now += 1
                self.most = max(self.most, self._now)
                if self._now == AT_ONCE:
                    self._together.set()
            if not first:
                self._together.wait(LONG)
            exchange(this, transport)
            with self._lock:
                self._now -= 1
                self.limits.append(transport.limit.total_seconds())

        def noted(this: Any, turn: Turn) -> None:
            begin(this, turn)
            self.lanes.append(turn.lane)

        patch.setattr(AllReduce, "exchange", watched)
        patch.setattr(Order, "begin", noted)


def on_several() -> tuple[int, list[int], list[float], list[torch.Tensor], int]:
    tw.all_reduce(torch.ones(N), "none", timeout=LIMIT)  # connected
    tensors = [normal(N, 10 * dist.get_rank() + i) for i in range(COUNT)]
    with pytest.MonkeyPatch.context() as patch, held_until_all_wait(COUNT):
        watching = Watching(patch)
        tw.wait_all(start_all(tensors))
    return watching.most, watching.lanes, watching.limits, tensors, len(channel()._helpers)


def on_one_by_one() -> tuple[list[torch.Tensor], int, list[str]]:
    tensors = [normal(N, 10 * dist.get_rank() + i) for i in range(COUNT)]
    for i, x in enumerate(tensors):
        tw.all_reduce(x, "quantize:4", op="avg", timeout=LIMIT, key=tw.Key(step=i))
    link = channel().link
    assert link is not None
    lanes = [name for name in link._branches if name.startswith("lane")]
    return tensors, len(channel()._helpers), lanes


def test_what_waits_on_all_ranks_goes_beside_and_comes_to_the_same_bits():
    one_by_one = ranks.run(on_one_by_one, ranks=3)
    for (most, lanes, limits, found, helpers), (wanted, *_) in zip(
        ranks.run(on_several, ranks=3), one_by_one, strict=True
    ):
        assert most == AT_ONCE
        assert lanes == [i % AT_ONCE for i in range(COUNT)]
        assert helpers == AT_ONCE - 1
        # Each has as much time as if the others were not there.
        assert limits == [AT_ONCE * LIMIT] * COUNT
        assert all(same(x, y) for x, y in zip(found, wanted, strict=True))


def test_who_waits_for_each_has_one_thread_and_one_set_of_connections():
    for _, helpers, lanes in ranks.run(on_one_by_one, ranks=2):
        assert (helpers, lanes) == (0, [])


def on_different_moments(seed: int) -> tuple[list[tuple[int, bool]], list[torch.Tensor]]:
    """Each rank submits at its own pace, some of the same tensors."""
    me, pause = dist.get_rank(), random.Random(f"{seed} {dist.get_rank()}")
    choose = random.Random(seed)
    tensors = [normal(N, 10 * me + i) for i in range(5)]
    begin, seen = Order.begin, []

    def noted(this: Any, turn: Turn) -> None:
        begin(this, turn)
        seen.append((turn.lane, turn.released))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Order, "begin", noted)
        handles = []
        for step in range(40):
            x = tensors[choose.randrange(5)]
            key, spec = tw.Key(step=step), choose.choice(["none", "topk:0.1", "onebit"])
            handles.append(tw.all_reduce(x, spec, op="avg", async_op=True, timeout=LIMIT, key=key))
            time.sleep(pause.choice([0, 0, 0, 0.001, 0.005]))
        tw.wait_all(handles)
    return seen, tensors


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ranks_agree_in_the_connections_of_each_whenever_they_come(seed):
    (seen, tensors), *others = ranks.run(on_different_moments, seed, ranks=3)
    assert any(released for _, released in seen), "none went beside another"
    for also, their_tensors in others:
        assert also == seen
        assert all(same(x, y) for x, y in zip(tensors, their_tensors, strict=True))


def on_a_failure(how: str) -> tuple[list[str], list[bool], bool]:
    """The third of seven fails, in a way that all ranks get to know."""
    me = dist.get_rank()
    tensors = [normal(N, 10 * me + i) for i in range(COUNT)]
    before = [x.clone() for x in tensors]
    tw.all_reduce(torch.ones(N), "none", timeout=LIMIT)

    def fails(exchange: Any) -> bool:
        return how == "prepare" and me == 1 and exchange._tensors[0] is tensors[2]

    with held_until_all_wait(COUNT, fails):
        handles = []
        for i, x in enumerate(tensors):
            spec = "onebit" if how == "mismatch" and (me, i) == (1, 2) else "quantize:4"
            handles.append(tw.all_reduce(x, spec, async_op=True, timeout=LIMIT, key=tw.Key(step=i)))
        for handle in handles:
            handle.wait_until_ended()
    errors = [str(handle.exception() or "") for handle in handles]
    usable = torch.ones(10)
    tw.all_reduce(usable, "none", timeout=LIMIT)
    unchanged = [same(x, y) for x, y in zip(tensors, before, strict=True)]
    return errors, unchanged, bool((usable == dist.get_world_size()).all())


@pytest.mark.parametrize(
    ("how", "text"), [("prepare", "no memory for this one"), ("mismatch", "ranks disagree")]
)
def test_one_that_fails_beside_others_fails_alone(how, text):
    for errors, unchanged, usable in ranks.run(on_a_failure, how, ranks=3):
        assert [bool(error) for error in errors] == [i == 2 for i in range(COUNT)]
        assert text in errors[2]
        assert unchanged == [i == 2 for i in range(COUNT)]
        assert usable


def residuals(wire: Any) -> dict[str, torch.Tensor]:
    tensors = wire.state_dict()["reducer"]["tensors"]
    return {name: state["residual"] for name, state in tensors.items()}


def on_a_failing_step() -> tuple[str, int, list[str], list[torch.Tensor]]:
    """In a backward pass: what goes beside a bucket that fails is thrown away."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(60, 60) for _ in range(8))), bucket_cap_mb=0.01
    )
    wire = tw.attach(model, "topk:0.1", min_numel=0, timeout=LIMIT)
    x = normal(4 * 60, dist.get_rank()).view(4, 60)
    for _ in range(3):
        before = channel().count
        model(x).sum().backward()
    count, remembered = channel().count - before, residuals(wire)
    numbers = itertools.count(1)

    def fails(exchange: Any) -> bool:
        return next(numbers) == 2 and dist.get_rank() == 1

    ended: list[str] = []
    come = Channel._come_to_an_end

    def noted(self: Any, exchange: Any, late: bool, error: Any) -> Any:
        error = come(self, exchange, late, error)
        ended.append(f"{type(error).__name__} {late}")
        return error

    model.zero_grad()
    error = ""
    with pytest.MonkeyPatch.context() as patch, held_until_all_wait(count, fails):
        patch.setattr(Channel, "_come_to_an_end", noted)
        try:
            model(x).sum().backward()
        except Exception as raised:
            error = str(raised)
    after = residuals(wire)
    changed = sum(not same(after[name], x) for name, x in remembered.items())
    model.zero_grad()
    model(x).sum().backward()
    return error, changed, ended, [p.grad for p in model.parameters() if p.grad is not None]


def test_in_a_backward_pass_nothing_beside_a_bucket_that_fails_counts():
    (error, changed, ended, gradients), (also, *same_there) = ranks.run(on_a_failing_step, ranks=2)
    assert "no memory for this one" in error
    assert "no memory for this one" in also
    # The first had ended before; the second failed, and so no other counts.
    first, second, *others = ended
    assert first == "NoneType False"
    assert second.startswith("PeerError")
    assert len(others) > AT_ONCE
    assert all(each.startswith("SkippedError") for each in others)
    assert all(each.endswith("True") for each in others), "some did not go beside others"
    assert changed == same_there[0] == 1
    assert all(same(x, y) for x, y in zip(gradients, same_there[2], strict=True))


def on_lost() -> tuple[list[str], list[bool], str]:
    """A peer dies while several exchanges wait for it."""
    with held_until_all_wait(COUNT):
        tw.wait_all(start_all([torch.ones(N) for _ in range(COUNT)]))  # all lanes are connected
    tensors = [normal(N, i) for i in range(COUNT)]
    before = [x.clone() for x in tensors]
    begin, numbers, all_begun = Order.begin, itertools.count(1), threading.Event()

    def noted(this: Any, turn: Turn) -> None:
        begin(this, turn)
        if next(numbers) == AT_ONCE:
            all_begun.set()

    exchange = AllReduce.exchange

    def deadly(this: Any, transport: Any) -> None:
        if this._tensors[0] is not tensors[0]:
            all_begun.wait(LONG)
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(this, transport)

    with pytest.MonkeyPatch.context() as patch, held_until_all_wait(COUNT):
        patch.setattr(Order, "begin", noted)
        if dist.get_rank() == 1:
            patch.setattr(AllReduce, "exchange", deadly)
        handles = start_all(tensors)
        for handle in handles:
            handle.wait_until_ended()
    with pytest.raises(tw.PeerError) as later:
        tw.all_reduce(torch.ones(N), "none", timeout=LIMIT)
    errors = [str(handle.exception() or "") for handle in handles]
    unchanged = [same(x, y) for x, y in zip(tensors, before, strict=True)]
    return errors, unchanged, str(later.value)


def test_a_death_beside_others_is_the_reason_that_all_of_them_give():
    with ranks.Ranks(3) as group:
        found = group.run(on_lost, dying=[1])
    for errors, unchanged, later in (found[0], found[2]):
        assert not errors[0]
        assert unchanged == [bool(error) for error in errors]
        for error in errors[1:]:
            assert "lost the connection" in error
        assert "in an earlier call" in later


def on_a_group_that_ends() -> list[str]:
    """The group is destroyed while exchanges are under way and others wait."""
    group = dist.new_group(list(range(dist.get_world_size())))
    assert group is not None
    tw.all_reduce(torch.ones(N), "none", group=group, timeout=LIMIT)
    handles: list[Any] = []
    if dist.get_rank() == 0:
        handles = [
            tw.all_reduce(normal(N, i), "none", group=group, async_op=True, timeout=LIMIT)
            for i in range(COUNT)
        ]
        own = channel_of(group, torch.device("cpu"))
        own.close()
        for handle in handles:
            handle.wait_until_ended()
        own.thread.join(LONG)
        assert own.ended
        assert not any(helper.is_alive() for helper in own._helpers)
    dist.barrier()  # the other one has not left before
    return [str(handle.exception()) for handle in handles]


def test_all_that_wait_end_with_the_group():
    found = ranks.run(on_a_group_that_ends, ranks=2)[0]
    assert len(found) == COUNT
    for error in found:
        assert "given up" in error or "destroyed" in error, found


def on_shared_memory() -> tuple[list[int], int]:
    """Six exchanges of one tensor."""
    tw.all_reduce(torch.ones(N), "none", timeout=LIMIT)
    x, begin, lanes = torch.ones(N), Order.begin, []

    def noted(this: Any, turn: Turn) -> None:
        begin(this, turn)
        lanes.append(turn.lane)

    with pytest.MonkeyPatch.context() as patch, held_until_all_wait(6):
        patch.setattr(Order, "begin", noted)
        tw.wait_all([tw.all_reduce(x, "none", async_op=True, timeout=LIMIT) for _ in range(6)])
    return lanes, int(x[0])


def test_what_must_go_in_turn_has_one_set_of_connections():
    for lanes, value in ranks.run(on_shared_memory, ranks=2):
        assert lanes == [0] * 6
        assert value == 2**6


def on_a_step_that_one_rank_gives_up() -> tuple[str, list[float], str]:
    """One rank refuses to send the second exchange of a step; other calls follow at once."""
    me = dist.get_rank()
    tw.all_reduce(torch.ones(10), "none", timeout=LIMIT)
    specs = {"p": "powersgd:2", "s": "topk:0.1", "a": None}
    reducer = tw.Reducer(specs.__getitem__, timeout=LIMIT, check_every=1)
    start, numbers = UnitReducer.start, itertools.count(1)
    tensors = {"s": normal(N, me), "p": normal(N, me).view(40, 50), "a": torch.ones(100)}
    after = [torch.full((50,), 10.0**i * (me + 1)) for i in range(4)]

    def failing(self: Any, units: Any, driver: Any, **options: Any) -> Any:
        if next(numbers) == 2 and me == 1:
            raise MemoryError("no memory for this one")
        return start(self, units, driver, **options)

    gate, prepare = threading.Event(), AllReduce.prepare

    def late(exchange: Any) -> None:
        gate.wait(LONG)
        prepare(exchange)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduce, "prepare", late)
        patch.setattr(UnitReducer, "start", failing)
        step = reducer.average(tensors, async_op=True)
        handles = [tw.all_reduce(x, "none", async_op=True, timeout=LIMIT) for x in after]
        gate.set()
        with pytest.raises((MemoryError, tw.PeerError)) as error:
            step.wait()
        tw.wait_all(handles)
    return str(error.value), [float(x[0]) for x in after], type(error.value).__name__


def test_a_step_that_one_rank_gives_up_mixes_nothing_up():
    found = ranks.run(on_a_step_that_one_rank_gives_up, ranks=2)
    for error, after, _ in found:
        assert "no memory for this one" in error
        assert after == [3.0, 30.0, 300.0, 3000.0]
    assert [kind for *_, kind in found] == ["PeerError", "MemoryError"]


def on_recalled(feedback: str) -> tuple[list[bool], list[torch.Tensor]]:
    """Averages of one name, each of a tensor of its own: at once, and one after the other."""
    found = []
    for at_once in (True, False):
        reducer = tw.Reducer("powersgd:2", feedback=feedback, timeout=LIMIT, seed=3)
        tensors = [normal(600, 100 * i + dist.get_rank()).view(30, 20) for i in range(8)]
        handles = []
        for x in tensors:
            handles.append(reducer.average({"w": x}, async_op=True))
            if not at_once:
                handles[-1].wait()
        tw.wait_all(handles)
        found.append(tensors)
    return [same(x, y) for x, y in zip(*found, strict=True)], found[0]


@pytest.mark.parametrize("feedback", ["none", "ef14"])
def test_what_is_recalled_by_name_is_that_of_the_call_before(feedback):
    (alike, tensors), (also, others) = ranks.run(on_recalled, feedback, ranks=2)
    assert all(alike)
    assert all(also)
    assert all(same(x, y) for x, y in zip(tensors, others, strict=True))


def on_no_threads() -> tuple[list[float], bool]:
    """No other thread can be started for the group."""
    group = dist.new_group(list(range(dist.get_world_size())))
    assert group is not None
    tw.all_reduce(torch.ones(N), "none", group=group, timeout=LIMIT)
    start = threading.Thread.start

    def refused(self: Any) -> None:
        if self._target.__name__ == "_help":
            raise RuntimeError("can't start new thread")
        start(self)

    tensors = [torch.full((50,), float(i)) for i in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        tw.wait_all(
            [tw.all_reduce(x, "none", group=group, async_op=True, timeout=LIMIT) for x in tensors]
        )
    own = channel_of(group, torch.device("cpu"))
    dist.barrier()
    own.close()
    own.thread.join(LONG)
    return [float(x[0]) for x in tensors], own.ended


def test_where_no_other_thread_can_be_started_one_does_all():
    for values, ended in ranks.run(on_no_threads, ranks=2):
        assert values == [0.0, 2.0, 4.0, 6.0]
        assert ended


def on_an_interrupted_call() -> list[float]:
    """Ctrl-C just when an exchange has its turn and no thread was told yet."""
    tw.all_reduce(torch.ones(N), "none", timeout=LIMIT)
    tensors = [torch.full((50,), float(i + 1)) for i in range(3)]
    join = Order.join

    def interrupted(self: Any, exchange: Any) -> None:
        join(self, exchange)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Order, "join", interrupted)
        with suppress(KeyboardInterrupt):
            tw.all_reduce(tensors[0], "none", async_op=True, timeout=LIMIT)
    for x in tensors[1:]:
        tw.all_reduce(x, "none", timeout=LIMIT)
    return [float(x[0]) for x in tensors]


def test_ctrl_c_inside_a_call_holds_nobody_up():
    assert ranks.run(on_an_interrupted_call, ranks=2) == [[2.0, 4.0, 6.0]] * 2


class OddDriver(Driver):
    """Cannot say on one rank whether an exchange takes part."""

    def admit(self) -> None:
        if dist.get_rank() == 1:
            raise MemoryError("no memory to look")


def on_an_error_of_admit() -> str:
    tw.all_reduce(torch.ones(N), "none", timeout=LIMIT)
    check = ReplicaCheck({"x": torch.ones(3)}, Options.of(None, timeout=LIMIT), driver=OddDriver())
    with pytest.raises((MemoryError, tw.PeerError)) as error:
        check.start()
    return str(error.value)


def test_an_error_in_deciding_whether_to_take_part_is_told_to_the_others():
    other, own = ranks.run(on_an_error_of_admit, ranks=2)
    assert own == "no memory to look"
    assert "connection" in other


def on_one_store() -> list[int]:
    """A store with one connection for all threads, as older releases of torch have."""
    begin, lanes = Order.begin, []

    def noted(this: Any, turn: Turn) -> None:
        begin(this, turn)
        lanes.append(turn.lane)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Members, "may_branch", dist.get_rank() != 1)
        tw.all_reduce(torch.ones(N), "none", timeout=LIMIT)
        tensors = [normal(N, i) for i in range(COUNT)]
        with held_until_all_wait(COUNT):
            patch.setattr(Order, "begin", noted)
            tw.wait_all(start_all(tensors))
    return lanes


def test_where_one_rank_cannot_connect_twice_at_a_time_all_use_one_set_of_connections():
    assert ranks.run(on_one_store, ranks=2) == [[0] * COUNT] * 2


class Plain:
    """An exchange that can go beside any other."""

    looks_back = False
    batch: object = None

    def may_run_beside(self, other: Any) -> bool:
        return True


def turns_of(order: Order, *exchanges: Any) -> list[Turn]:
    for each in exchanges:
        order.join(each)
    turns = [order.take() for _ in exchanges]
    assert order.take() is None
    return [turn for turn in turns if turn is not None]


def test_times_of_several_add_up_to_that_in_which_any_moved_data():
    order = Order()
    spans = [
        [(0.0, 2.0), (3.0, 4.0)],
        [(1.0, 2.5), (5.0, 6.0)],
        [(2.0, 3.5), (5.5, 5.75)],
        [(5.0, 7.0)],
    ]
    alone = []
    for turn, own in zip(turns_of(order, *(Plain() for _ in spans)), spans, strict=True):
        turn.spans += own
        order.stop(turn, moved=True)
        alone.append(order.alone(turn))
        order.end(turn)
    assert alone == pytest.approx([3.0, 1.5, 0.5, 1.0])


def test_what_waits_is_counted_up_to_one_that_cannot_go_beside():
    class Alone(Plain):
        def may_run_beside(self, other: Any) -> bool:
            return False

    class Back(Plain):
        looks_back = True

    class Other(Plain):
        batch = "another"

    for last in (Alone, Back, Other):
        first, *_ = turns_of(Order(), Plain(), Plain(), Plain(), last(), Plain())
        assert first.behind == 2, last


def test_order_is_that_of_the_calls_for_whoever_takes_them():
    """Also where somebody was interrupted before a thread was told."""
    order = Order()
    first, second = turns_of(order, Plain(), Plain())
    assert order.waiting == 2
    order.begin(first)
    assert not order.may_prepare(first)
    order.stop(first, moved=True)
    order.note_ending(first)
    assert order.waiting == 1
    order.end(first)
    order.begin(second)
    assert (first.lane, second.lane) == (0, 0)
