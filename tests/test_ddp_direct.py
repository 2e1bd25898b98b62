"""Passes in which nothing is compressed: buckets are averaged directly, without a meeting.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. Models and batches
are those of nets.py.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from nets import Books, all_same, alone, backward, gradients, named, plain, raised, train, wired
from torch import Tensor

import thinwire as tw
from thinwire.collectives.direct import DirectSums
from thinwire.parallel.ddp import COMPARED, SETTLED, BackwardPass
from thinwire.policies.base import Choice, Chooser, Policy, PolicyContext, TensorInfo

SHORT = 1.5  # seconds: a timeout that is meant to pass


@contextmanager
def counted() -> Iterator[list[int]]:
    """Elements of the tensors that were averaged directly."""
    found: list[int] = []
    whole = DirectSums.average

    def average(sums: DirectSums, tensor: Tensor) -> Any:
        found.append(tensor.numel())
        return whole(sums, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectSums, "average", average)
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
    expected = [n for n in range(SETTLED + 1, COMPARED + 5) if n % COMPARED]
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


def on_interrupted() -> tuple[list[str], bool]:
    """Rank 0 is interrupted while it waits for rank 1, which comes after that."""
    model, _ = wired("none")
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


def test_training_goes_on_after_ctrl_c_in_a_pass_that_waits():
    for errors, alike in ranks.run(on_interrupted, ranks=2):
        assert not any(errors)
        assert alike


def on_other_step() -> list[str]:
    model, wire = wired("none")
    train(model, range(4))
    wire.step += dist.get_rank()
    return [attempt(model, step) for step in (4, 5)]


def test_ranks_in_different_steps_learn_so():
    for first, later in ranks.run(on_other_step, ranks=2):
        words = "MismatchError: ranks disagree in one call, step: "
        assert first == f"{words}5 on some ranks but 6 on others"
        assert later.startswith(f"{words}6 on rank 0 but 7 on rank 1"), later


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
