"""Passes in which nothing is compressed: buckets are averaged directly, without a meeting.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. Models and batches
are those of nets.py.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import Books, all_same, alone, backward, gradients, named, plain, raised, train, wired
from torch import Tensor

import thinwire as tw
from thinwire.collectives.direct import DirectPass
from thinwire.collectives.probe import LinkProbe, ProbeSize
from thinwire.parallel.ddp import COMPARED, SETTLED, BackwardPass
from thinwire.policies.base import (
    LISTENS_EVERY,
    Choice,
    Chooser,
    Measured,
    Policy,
    PolicyContext,
    TensorInfo,
)

SHORT = 1.5  # seconds: a timeout that is meant to pass


@contextmanager
def counted() -> Iterator[list[int]]:
    """Elements of the tensors that were averaged directly."""
    found: list[int] = []
    whole = DirectPass.average

    def average(sums: DirectPass, tensor: Tensor) -> None:
        found.append(tensor.numel())
        whole(sums, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectPass, "average", average)
        yield found


def on_bits(options: dict[str, Any]) -> tuple[list[int], list[int], dict[str, Any]]:
    """The steps with direct sums, those with the same gradients as plain DDP, and statistics."""
    (model, wire), other = wired("none", ddp=options), plain(**options)
    direct, same = [], []
    for step in range(1, COMPARED + 5):
        with counted() as found:
            backward(model, step)
        backward(other, step)
        direct += [step] if found else []
        same += [step] if all_same(gradients(model), gradients(other)) else []
    return direct, same, wire.stats()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copy", "view"])
def test_from_the_third_pass_on_every_bit_is_that_of_plain_ddp(options):
    """With three ranks, where 1/3 is rounded; ranks meet again now and then."""
    expected = [n for n in range(SETTLED + 1, COMPARED + 5) if n != COMPARED + SETTLED]
    for direct, same, stats in ranks.run(on_bits, options, ranks=3):
        assert direct == expected
        assert set(same) >= set(expected)
        assert {each["compressor"] for each in stats["tensors"].values()} == {"none"}
        assert stats["step"] == COMPARED + 4
        assert stats["seconds"]["network"] > 0


class SomeSteps(Policy):
    """topk:0.1 in steps 6 to 8."""

    name = "some-steps"
    main = tw.parse("topk:0.1")

    def begin(self, context: PolicyContext) -> Chooser:
        return _Some()


class _Some(Chooser):
    fixed = False
    num_reports = 0

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return SomeSteps.main if 6 <= step <= 8 else None

    def explain(self) -> list[str]:
        return []

    def due(self, step: int) -> bool:
        return False


class Telling(Policy):
    """Everything uncompressed; ranks tell each other a number after every fifth step, and time the
    link after the first of these."""

    name = "telling"
    main = tw.parse("topk:0.1")

    def begin(self, context: PolicyContext) -> Chooser:
        return _Telling()


class _Telling(_Some):
    num_reports = 1

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return None

    def due(self, step: int) -> bool:
        return step % 5 == 0

    def probes(self, step: int) -> ProbeSize | None:
        return ProbeSize(1000, 3) if step == 5 else None

    def report(self, measured: Measured) -> list[float]:
        return [1.0]

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        pass


def on_changes() -> tuple[list[int], dict[str, float], bool]:
    model, wire = wired(SomeSteps())
    books, direct = Books(model, wire), []
    for step in range(1, 15):
        books.put(alone(model, step))
        with counted() as found:
            backward(model, step)
        books.take()
        direct += [step] if found else []
    states = wire.state_dict()["reducer"]["tensors"].values()
    return direct, books.balance(), any("residual" in state for state in states)


def test_what_waits_to_be_sent_is_sent_before_sums_are_direct_again():
    for direct, balance, remembered in ranks.run(on_changes, ranks=2):
        assert direct == [3, 4, 5, 12, 13, 14]  # 9 sends the residuals, in 10 and 11 ranks meet
        assert all(value <= 1 for value in balance.values()), balance
        assert not remembered


def attempt(model: Any, step: int) -> str:
    return raised(lambda: backward(model, step))


def on_loss(how: str) -> list[str]:
    """The last rank is lost in the sixth pass."""
    model, _ = wired("none", timeout=SHORT if how == "stalls" else 600)
    train(model, range(5))
    if dist.get_rank() == dist.get_world_size() - 1:

        def lose(gradient: Tensor) -> None:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)

        named(model)["2.weight"].register_hook(lose)
    return [attempt(model, step) for step in (5, 6)]


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_rank_that_is_lost_in_a_direct_sum_is_noticed(how):
    with ranks.Ranks(3) as group:
        found = group.run(on_loss, how, dying=[2])
    for first, later in found[:2]:
        assert first.startswith("PeerError: "), first
        assert later.startswith("PeerError: "), later
    if how == "stalls":
        assert any(f"within {SHORT} s" in first for first, _ in found[:2])


def on_interrupted(policy: Any) -> tuple[list[str], bool]:
    """Rank 0 is interrupted while it waits for rank 1, which comes after that."""
    model, _ = wired(policy)
    later, errors = dist.new_group([0, 1]), []
    train(model, range(4))
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackwardPass, "wait", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                backward(model, 4)
        dist.barrier(later)
    else:
        dist.barrier(later)
        errors.append(attempt(model, 4))
    errors += [attempt(model, step) for step in (5, 6)]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, gradients(model))
    return errors, all_same(*everyone)


@pytest.mark.parametrize("policy", ["none", Telling()], ids=["fixed", "with a report"])
def test_training_goes_on_after_ctrl_c_in_a_pass_that_waits(policy):
    for errors, alike in ranks.run(on_interrupted, policy, ranks=2):
        assert not any(errors)
        assert alike


def on_other_step() -> list[str]:
    model, wire = wired("none")
    train(model, range(LISTENS_EVERY - 2))
    wire.step += dist.get_rank()
    return [attempt(model, step) for step in range(4)]


def test_ranks_in_different_steps_learn_so_when_they_compare():
    for *unseen, first, later in ranks.run(on_other_step, ranks=2):
        assert unseen == ["", ""]
        words = "MismatchError: ranks disagree in one call, step: "
        assert first == f"{words}9 on some ranks but 10 on others"
        assert later.startswith(f"{words}10 on rank 0 but 11 on rank 1"), later


def on_failure(where: str) -> list[str]:
    """Rank 0 fails before it has begun, or with the second bucket."""
    model, wire = wired("none")
    train(model, range(4))
    calls = 0

    def fail(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if where == "begin" or calls == 2:
            raise ValueError("no")
        return whole(*given)

    whole = BackwardPass.send_directly
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0 and where == "begin":
            patch.setattr(wire, "_begin_step", fail)
        elif dist.get_rank() == 0:
            patch.setattr(BackwardPass, "send_directly", fail)
        return [attempt(model, step) for step in (4, 5)]


@pytest.mark.parametrize("where", ["begin", "second bucket"])
def test_a_rank_that_fails_where_ranks_do_not_meet_hangs_up(where):
    (own, then), (other, later) = ranks.run(on_failure, where, ranks=2)
    assert own == "ValueError: no"
    assert other.startswith("PeerError: ")
    for each in (then, later):
        assert each.startswith(("PeerError: ", "ValueError: no"))


class FullDisk:
    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if step == 5:
            raise OSError("disk full")


def on_full_disk() -> list[str]:
    model, wire = wired("none", timeout=SHORT)
    if dist.get_rank() == 0:
        wire.log_to(FullDisk(), every=1)
    return [attempt(model, step) for step in range(7)]


def test_what_fails_on_one_rank_after_a_pass_does_not_part_the_ranks():
    own, other = ranks.run(on_full_disk, ranks=2)
    assert own == ["", "", "", "", "OSError: disk full", "", ""]
    assert not any(other)


def on_late_lane(find_unused: bool) -> str:
    """Rank 1 does not come to the first direct pass."""
    options = {"find_unused_parameters": find_unused}
    model, _ = wired("none", ddp=options, timeout=SHORT)
    train(model, range(SETTLED))
    if dist.get_rank() == 1:
        time.sleep(1000)
    return attempt(model, SETTLED)


@pytest.mark.parametrize("find_unused", [False, True])
def test_the_time_limit_holds_before_the_first_direct_sum(find_unused):
    with ranks.Ranks(2) as group:
        first, _ = group.run(on_late_lane, find_unused, dying=[1])
    assert first.startswith("PeerError: "), first
    assert f"within {SHORT} s" in first


def on_broken_policy(what: str) -> tuple[list[str], str]:
    """The report or the probe after step 5 fails on rank 0."""
    model, wire = wired(Telling())
    calls = 0

    def fail(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("no")
        return [1.0]

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            broken = (_Telling, "report") if what == "report" else (LinkProbe, "prepare")
            patch.setattr(*broken, fail)
        errors = [attempt(model, step) for step in range(9)]
    return errors, raised(wire.state_dict)


@pytest.mark.parametrize("what", ["report", "probe"])
def test_a_report_or_probe_that_fails_on_one_rank_ends_one_step(what):
    (own, saved), (other, too) = ranks.run(on_broken_policy, what, ranks=2)
    assert [number for number, error in enumerate(own) if error] == [5]
    assert [number for number, error in enumerate(other) if error] == [5]
    assert own[5] == "ValueError: no"
    assert other[5].startswith("PeerError: ")
    assert not saved + too


def on_other_checks() -> list[str]:
    model, _ = wired("none", check_every=4 if dist.get_rank() == 0 else 0)
    return [attempt(model, step) for step in range(2)]


def test_ranks_that_check_their_replicas_after_other_steps_learn_so():
    words = "MismatchError: ranks disagree in one call, check_every: 4 on rank 0 but 0 on rank 1"
    for errors in ranks.run(on_other_checks, ranks=2):
        assert errors == [words, words]


def on_interrupted_choice() -> str:
    """Ctrl-C on rank 0 when it is not known yet whether ranks will meet."""
    model, wire = wired("none")
    train(model, range(4))
    if dist.get_rank():
        return attempt(model, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(wire._hook), "_is_plain", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            backward(model, 4)
    return attempt(model, 5)


def test_ctrl_c_before_it_is_known_whether_ranks_meet_is_told():
    later, other = ranks.run(on_interrupted_choice, ranks=2)
    assert other.startswith("PeerError: ")
    assert (
        later == "PeerError: the group lost its connections in an earlier call: KeyboardInterrupt"
    )


def on_left() -> tuple[bool, bool]:
    """A neighbour that says farewell while a direct sum is under way, and after it."""
    model, wire = wired("none")
    train(model, range(3))
    channel = wire._hook._direct_sums.channel
    link = channel.link
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(link), "neighbour_left", True)
        transfer = object()
        channel.begin_direct(transfer)
        channel._tidy_up()
        before = link.closed
        channel.end_direct(transfer)
        dist.barrier()
        channel._tidy_up()
        return before, link.closed


def test_connections_stay_while_a_direct_sum_needs_them():
    for before, after in ranks.run(on_left, ranks=2):
        assert (before, after) == (False, True)


def on_abandoned() -> bool:
    """Rank 0 begins a sum, rank 1 never does, and nobody waits: as after Ctrl-C."""
    model, wire = wired("none")
    train(model, range(3))
    if dist.get_rank():
        return True
    sums = wire._hook._direct_sums
    direct = sums.begin()
    direct.average(torch.ones(1000))
    sums.channel.close()
    sums.channel.thread.join(60)
    ((transfer, _),) = direct._under_way
    return not transfer._posted


def test_a_sum_that_nobody_waits_for_does_not_keep_the_process():
    with ranks.Ranks(2) as group:
        assert group.run(on_abandoned) == [True, True]


def on_one() -> set[str]:
    before = {thread.name for thread in threading.enumerate()}
    model, _ = wired("none")
    train(model, range(4))
    return {thread.name for thread in threading.enumerate()} - before


def test_one_rank_alone_has_no_thread_for_exchanges():
    assert ranks.run(on_one, ranks=1) == [set()]
