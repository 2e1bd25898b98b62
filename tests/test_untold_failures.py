"""Failures that only one rank knows of: nothing is half done, and nobody goes on without it."""

import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from tensors import normal, same

import thinwire as tw
from thinwire import torch_internals
from thinwire.collectives import gather, watch
from thinwire.collectives.channel import Channel, channel_of
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.options import Options

TIMEOUT = 60.0  # of calls; nobody is to wait for it
N = 1000


class OutOfMemoryHereError(MemoryError):
    """What one rank runs into."""


def fail(*_: Any, **__: Any) -> Any:
    raise OutOfMemoryHereError("no memory on this rank")


def attempt(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, timeout=TIMEOUT, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


CASES = {
    "gather": (gather, "unbundle", {"collective": "gather"}),
    "in the end": (gather, "add_all", {"collective": "gather"}),
}


def on_decoding_that_fails(case: str) -> tuple[str, bool, str]:
    """What this rank saw of the call, whether all is as before, and what it saw of the next."""
    place, name, options = CASES[case]
    me = dist.get_rank()
    x, r = normal(N, me), normal(N, 9 + me)
    before = x.clone(), r.clone()
    with pytest.MonkeyPatch.context() as patch:
        if me == 1:
            patch.setattr(place, name, fail)
        error = attempt(tw.all_reduce, x, "topk:0.1", residual=r, **options)
    untouched = same(x, before[0]) and same(r, before[1])
    return error, untouched, attempt(tw.all_reduce, torch.ones(N), "topk:0.1", **options)


@pytest.mark.parametrize("case", CASES)
def test_what_fails_on_one_rank_after_a_meeting_ends_the_group_for_all(case):
    with ranks.Ranks(3) as group:
        found = group.run(on_decoding_that_fails, case)
    error, untouched, later = found[1]
    assert error.startswith("OutOfMemoryHereError")
    assert untouched or case == "in the end"
    for rank, (error, untouched, later) in enumerate(found):
        if rank != 1:
            assert error == "" or (error.startswith("PeerError") and untouched), rank
        assert later.startswith("PeerError"), rank


def on_many_calls_after_a_loss() -> list[str]:
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "unbundle", fail)
            attempt(tw.all_reduce, torch.ones(N), "topk:0.1", collective="gather")
    else:
        attempt(tw.all_reduce, torch.ones(N), "topk:0.1", collective="gather")
    return [attempt(tw.all_reduce, torch.ones(N), "none") for _ in range(4)][1:]


def test_the_error_after_a_loss_is_always_the_same():
    with ranks.Ranks(2) as group:
        for texts in group.run(on_many_calls_after_a_loss):
            assert len(set(texts)) == 1
            assert texts[0].startswith("PeerError: the group lost its connections")


class Abandoned:
    """An operation of gloo that never ends, until its time is up."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.looks = tensor, 0

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def wait(self, *_: Any) -> None:
        raise RuntimeError("Timed out waiting for recv operation to complete")


def on_an_operation_that_ends_late(tensors: int) -> tuple[list[str], bool]:
    """Rank 0 gives up a sum of gloo's, which writes its result when the call has long returned."""
    # More than comes along with a record, so that gloo is asked for the sum.
    xs = [normal(20_000, 10 * dist.get_rank() + i) for i in range(tensors)]
    before, given_up = [x.clone() for x in xs], []

    def never_ending(_group: Any, tensor: torch.Tensor, *_: Any) -> Abandoned:
        given_up.append(Abandoned(tensor))
        return given_up[-1]

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(torch_internals, "all_reduce", never_ending)
        text = attempt(tw.all_reduce_coalesced, xs, "none")
    for operation in given_up:
        operation.tensor.fill_(99.0)
    untouched = all(same(x, old) for x, old in zip(xs, before, strict=True))
    return text, untouched


@pytest.mark.parametrize("tensors", [1, 2])
def test_an_operation_that_was_given_up_cannot_write_to_tensors_later(tensors):
    for text, untouched in ranks.run(on_an_operation_that_ends_late, tensors, ranks=2):
        assert text.startswith("PeerError")
        assert untouched


# The thread of a channel


def on_a_callback_that_raises() -> list[bool]:
    first = tw.all_reduce(torch.ones(N), "none", async_op=True)
    first.when_ended(lambda _: 1 / 0)
    first.wait()
    x = torch.ones(N)
    tw.all_reduce(x, "topk:1.0", timeout=TIMEOUT)
    return x.eq(2).tolist()


def test_a_callback_that_raises_does_not_end_the_thread():
    for found in ranks.run(on_a_callback_that_raises, ranks=2):
        assert all(found)


def on_a_second_thread() -> tuple[str, str, str, str, list[float]]:
    """A call in another thread: while one waits, beside one in the background that nobody has
    waited for, even if it has ended, and alone; waiting and in the background itself."""
    me, found, x = dist.get_rank(), [], torch.ones(N)
    later = dist.new_group([0, 1])
    # Loads what connecting needs, so that the next call waits for nothing but the other rank.
    tw.all_reduce(torch.ones(N), "none", timeout=TIMEOUT)

    def in_thread(async_op: bool = False) -> None:
        y = torch.ones(N)
        thread = threading.Thread(
            target=lambda: found.append(attempt(tw.all_reduce, y, "none", async_op=async_op)),
            name="second",
        )
        thread.start()
        thread.join()

    if me == 0:
        waiting = threading.Thread(target=lambda: attempt(tw.all_reduce, x, "none"), name="first")
        waiting.start()
        while channel_of(dist.group.WORLD, torch.device("cpu")).count < 2:
            pass
        in_thread()  # refused: rank 1 has not come
        dist.barrier(later)
        waiting.join()
    else:
        dist.barrier(later)
        found.append(attempt(tw.all_reduce, x, "none"))
    background = tw.all_reduce(torch.ones(N), "none", async_op=True)
    in_thread()
    in_thread(async_op=True)
    background.wait()
    in_thread()
    return (*found, x.unique().tolist())


def test_threads_that_call_on_one_group_at_the_same_time_are_refused():
    (refused, *others, first), (_, *also, second) = ranks.run(on_a_second_thread, ranks=2)
    assert refused.startswith("RuntimeError: all_reduce")
    assert "'second'" in refused
    assert "'first'" in refused
    assert first == second == [2.0]
    for found in (others, also):
        *beside, alone = found
        assert alone == ""
        for text in beside:
            assert "thread 'second' while thread 'MainThread' has not yet waited for one" in text


def on_an_operation_that_waits_for_ever() -> tuple[str, list[float], list[float]]:
    """One group is aborted; another of ours and that of the program go on."""
    me, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    backend = torch_internals.backend_of(dist.group.WORLD, torch.device("cpu"))
    groups = [
        torch_internals.gloo_group(
            torch_internals.prefixed(name, store), me, 2, backend.network_devices, backend.timeout
        )
        for name in ("aborted", "other")
    ]
    error, x, y = "", torch.ones(1), torch.ones(1)
    if me == 0:
        pending = torch_internals.broadcast(groups[0], torch.ones(1), 1, timedelta(days=30))
        torch_internals.abort(groups[0])
        try:
            pending.wait()
        except RuntimeError as ended:
            error = str(ended)
    torch_internals.all_reduce(groups[1], x, dist.ReduceOp.SUM, backend.timeout).wait()
    dist.all_reduce(y)
    return error, x.tolist(), y.tolist()


def test_an_operation_that_waits_for_ever_is_ended_without_harm_to_other_groups():
    (error, *sums), (_, *also) = ranks.run(on_an_operation_that_waits_for_ever, ranks=2)
    assert "closure" in error
    assert sums == also == [[2.0], [2.0]]


class Nothing(Exchange):
    def prepare(self) -> None:
        pass

    def exchange(self, transport: Any) -> None:
        pass

    def finish(self) -> None:
        pass


def on_an_exchange_behind_the_end() -> str:
    """The thread has left its loop but not yet said so when an exchange comes."""
    group = dist.new_group([0, 1])
    here, there = threading.Event(), threading.Event()

    class Slow(Channel):
        def _refuse_the_rest(self) -> None:
            here.set()
            there.wait()
            super()._refuse_the_rest()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.collectives.channel._exists", lambda _: False)
        patch.setattr("thinwire.collectives.channel.IDLE_CHECK", 0.01)
        channel = channel_of(group, torch.device("cpu"), kind=Slow)
        here.wait()
    exchange = Nothing("nothing", [torch.ones(1)], Options.of(group))
    channel.submit(exchange)  # accepted: nobody knows better yet
    there.set()
    exchange.handle.wait_until_ended()
    return f"{type(exchange.handle.exception()).__name__}: {exchange.handle.exception()}"


def test_what_is_submitted_behind_the_last_look_into_the_queue_ends():
    for text in ranks.run(on_an_exchange_behind_the_end, ranks=2):
        assert text == "PeerError: the process group has been destroyed"


def on_exchanges_while_the_channel_closes() -> int:
    """Submits from several threads while the channel closes; every handle must end."""
    group = dist.new_group([0, 1])
    dist.barrier()  # nobody leaves while the other connects
    channel = channel_of(group, torch.device("cpu"))
    handles, begin = [], threading.Barrier(4)

    def submit() -> None:
        begin.wait()
        for _ in range(50):
            exchange = Nothing("nothing", [torch.ones(1)], Options.of(group))
            try:
                channel.submit(exchange)
            except tw.PeerError:
                return
            except RuntimeError:  # beside that of another thread
                continue
            handles.append(exchange.handle)

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    begin.wait()
    channel.close()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.wait_until_ended()
    return len([handle for handle in handles if not handle.is_completed()])


def test_what_is_submitted_while_a_channel_closes_ends():
    assert ranks.run(on_exchanges_while_the_channel_closes, ranks=2) == [0, 0]


def on_a_group_that_is_left() -> bool:
    """Whether its channel goes, which holds the group's store and network device."""
    group = dist.new_group([0, 1])
    tw.all_reduce(torch.ones(4), "none", group=group, timeout=TIMEOUT)
    channel = weakref.ref(channel_of(group, torch.device("cpu")))
    dist.destroy_process_group(group)
    del group
    end = time.monotonic() + ranks.PATIENCE / 2
    while channel() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    return channel() is None


def test_a_group_that_is_left_is_not_remembered():
    assert ranks.run(on_a_group_that_is_left, ranks=2) == [True, True]


def on_a_fork() -> tuple[str, bool]:
    """What a forked child gets, and whether the parent goes on."""
    x = torch.ones(8)
    tw.all_reduce(x, "none", timeout=TIMEOUT)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = attempt(tw.all_reduce, torch.ones(8), "none")
            os.write(write, text.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    dist.barrier()
    y = torch.ones(8)
    tw.all_reduce(y, "none", timeout=TIMEOUT)
    return text, bool(y.eq(2).all())


def test_a_forked_child_is_refused_and_its_parent_goes_on():
    with ranks.Ranks(2) as group:
        for text, goes_on in group.run(on_a_fork):
            assert text.startswith("RuntimeError: this process was forked")
            assert goes_on


# What every call says and checks


def on_values_that_are_not_finite() -> dict[str, bool]:
    me = dist.get_rank()
    bad = torch.full((4,), torch.inf if me == 0 else 1.0)
    found = {}
    out = torch.zeros(2)
    found["reduce_scatter"] = tw.reduce_scatter(out, bad, "quantize:4").account.finite
    gathered = torch.zeros(8)
    found["all_gather"] = tw.all_gather(gathered, bad, "quantize:4").account.finite
    found["broadcast"] = tw.broadcast(bad.clone(), "quantize:4", src=0).account.finite
    handle = tw.send(bad, "quantize:4", dst=1) if me == 0 else tw.recv(torch.zeros(4), src=0)
    found["send"] = handle.account.finite
    good = torch.ones(4)
    found["good"] = not tw.all_gather(gathered, good, "quantize:4").account.finite
    return found


def test_every_collective_says_that_values_are_not_finite():
    for found in ranks.run(on_values_that_are_not_finite, ranks=2):
        assert not any(found.values()), found


def test_what_cannot_be_written_to_is_refused(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        stretched = torch.ones(1).expand(4)
        with torch.inference_mode():
            frozen = torch.ones(4)
        x = torch.ones(4)
        for bad, words in ((stretched, "share one place"), (frozen, "inference tensor")):
            for call in (
                lambda bad=bad: tw.all_reduce(bad, "topk:0.5"),
                lambda bad=bad: tw.reduce_scatter(bad, x, "topk:0.5"),
                lambda bad=bad: tw.all_gather(bad, x, "topk:0.5"),
                lambda bad=bad: tw.broadcast(bad, "topk:0.5"),
            ):
                with pytest.raises(ValueError, match=words):
                    call()
        for residual in (x, x.view(2, 2).flatten()):
            with pytest.raises(ValueError, match="in the memory of its tensor"):
                tw.all_reduce(x, "topk:0.5", residual=residual)
        halves = torch.ones(8)
        tw.all_reduce(halves[:4], "topk:0.5", residual=halves[4:])  # beside it is fine
    finally:
        dist.destroy_process_group()


def test_a_reducer_books_the_last_asynchronous_exchange(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        reducer = tw.Reducer("topk:0.5")
        reducer.average({"w": torch.ones(4)}, async_op=True).wait()
        assert reducer.ledger.exchanges == 1
    finally:
        dist.destroy_process_group()


def test_gloos_refusal_leaves_the_group_usable():
    for text, after in ranks.run(on_a_refusal, ranks=2):
        assert text.startswith("BackendRefusedError")
        assert after == ""


def on_a_refusal() -> tuple[str, str]:
    text = attempt(tw.all_reduce, torch.ones(4, dtype=torch.complex64), "none", op="max")
    return text, attempt(tw.all_reduce, torch.ones(4), "none")


def test_a_channel_stays_until_what_it_left_behind_has_ended(monkeypatch):
    """Nobody else may come who would destroy the connections of an operation that ends late."""

    class Late:
        looks = 0

        def is_completed(self) -> bool:
            self.looks += 1
            return self.looks > 4

    group, destroyed = object(), []
    monkeypatch.setattr(watch, "_ending", [(group, Late())])
    monkeypatch.setattr(torch_internals, "let_go", destroyed.append)
    object.__new__(Channel)._linger()
    assert destroyed == [group]
