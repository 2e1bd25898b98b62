"""What comes out of forward() and backward() of sharded models when ranks die, stall or fail.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. Models and batches
are those of sharded_nets.py.
"""

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from nets import all_same, raised
from sharded_nets import (
    Books,
    Tower,
    backward,
    distance,
    gradients,
    loss_of,
    residuals,
    shard,
    wired,
)

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

SHORT = 1.5  # seconds: a timeout that is meant to pass


class Victim:
    """Kills its process, or lets it sleep, in the middle of a pass."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, *_: Any) -> None:
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)


def attempt(model: Any, step: int) -> str:
    return raised(lambda: backward(model, step))


def on_loss(how: str, where: str, timeout: float) -> tuple[list[str], bool]:
    """The last rank is lost in the second step; what the others see of that and of the next, and
    whether their residuals are as they were."""
    model, wire = wired("topk:0.1", weights="quantize:8", timeout=timeout)
    backward(model, 0)
    before = residuals(wire)
    if dist.get_rank() == dist.get_world_size() - 1:
        block = model.blocks[0]
        if where == "forward":
            block.register_forward_pre_hook(Victim(how), prepend=True)
        else:
            block.register_full_backward_pre_hook(Victim(how))
    errors = [attempt(model, 1)]
    model.reset_iter_state()
    errors.append(attempt(model, 2))
    after = residuals(wire)
    kept = [name for name in before if name.startswith("blocks.0")]
    return errors, all(bool((before[name] == after[name]).all()) for name in kept)


@pytest.mark.parametrize(
    ("how", "where"), [("dies", "backward"), ("dies", "forward"), ("stalls", "backward")]
)
def test_a_lost_rank_is_an_error_of_its_own_on_all_others(how, where):
    timeout = 600.0 if how == "dies" else SHORT
    with ranks.Ranks(3) as group:
        found = group.run(on_loss, how, where, timeout, dying=[2])
    for (error, later), untouched in found[:2]:
        assert error.startswith("PeerError: "), error
        assert later.startswith("PeerError: "), later
        assert "in an earlier call" in later
        assert untouched


def on_nan(spec: str) -> tuple[bool, bool, bool, float]:
    """Whether averages of a step with a NaN on one rank show it, whether residuals are as before,
    whether the next step is finite, and how the books balance without the step."""
    model, wire = wired(spec, feedback="ef14")
    books = Books(Tower(), model, wire)
    for step in range(4):
        if step == 2:
            before = residuals(wire)
            model.zero_grad()
            loss = loss_of(model, step)
            (loss * float("nan") if dist.get_rank() == 0 else loss).backward()
            shown = any(not bool(g.isfinite().all()) for g in gradients(model).values())
            untouched = all_same(residuals(wire), before)
            continue
        books.put(step)
        backward(model, step)
        books.take()
    finite = all(bool(g.isfinite().all()) for g in gradients(model).values())
    return shown, untouched, finite, books.balance()


@pytest.mark.parametrize("spec", ["topk:0.1", "quantize:2"])
def test_a_nan_on_one_rank_poisons_no_residual(spec):
    for shown, untouched, finite, error in ranks.run(on_nan, spec, ranks=2):
        assert shown
        assert untouched
        assert finite
        assert error < 32 * 2**-23


def on_failed(where: str) -> tuple[str, list[bool], float, int]:
    """What a rank sees of an exchange that one rank has no memory for; whether the next steps are
    those of plain FSDP; how books of a compressed model balance; and its steps."""
    model, wire = wired("none", weights="none" if where == "forward" else None)
    other = shard(Tower())
    close, lossy = wired("topk:0.1")
    books = Books(Tower(), close, lossy)
    for step in range(2):
        for each in (model, other):
            backward(each, step)
        books.put(step)
        backward(close, step)
        books.take()
    errors = []
    for each, own in ((model, wire), (close, lossy)):
        holders: list[Any] = [own._reducer]
        name = "options"
        if where == "forward":
            holders, name = list(own.gathers.values()), "_options"
        kept = [getattr(holder, name) for holder in holders]
        if dist.get_rank() == 1:
            for holder in holders:
                setattr(holder, name, replace(getattr(holder, name), max_bytes=1))
        if each is model or where == "backward":
            errors.append(attempt(each, 2))
            each.reset_iter_state()
        for holder, options in zip(holders, kept, strict=True):
            setattr(holder, name, options)
    found = []
    for step in range(3, 5):
        for each in (model, other):
            backward(each, step)
        found.append(distance(gradients(model), gradients(other)) == 0.0)
        books.put(step)
        backward(close, step)
        books.take()
    return errors[-1], found, books.balance(), lossy.step


@pytest.mark.parametrize("where", ["backward", "forward"])
def test_training_goes_on_after_an_exchange_that_failed(where):
    """After `reset_iter_state`, which FSDP wants to be called after any error in the middle."""
    found = ranks.run(on_failed, where, ranks=2)
    errors = [error for error, *_ in found]
    assert errors[0].startswith("PeerError: "), errors
    assert errors[1].startswith("MemoryLimitError: "), errors
    for _, equal, error, steps in found:
        assert steps == (5 if where == "backward" else 4)
        assert equal == [True, True]
        assert error < 32 * 2**-23


def on_mismatch() -> tuple[str, str]:
    """Ranks that send differently, and then alike again."""
    model, wire = wired("topk:0.1")
    if dist.get_rank() == 1:
        wire.detach()
        wire = tw.attach(model, "topk:0.2", min_numel=10)
    error = attempt(model, 0)
    model.reset_iter_state()
    if dist.get_rank() == 1:
        state = wire.state_dict()
        wire.detach()
        wire = tw.attach(model, "topk:0.1", min_numel=10)
        wire.load_state_dict(state)
    return error, attempt(model, 1)


def test_ranks_that_disagree_are_told_so_and_can_go_on():
    for error, later in ranks.run(on_mismatch, ranks=2):
        assert error.startswith("MismatchError: "), error
        assert "topk" in error
        assert later == ""
