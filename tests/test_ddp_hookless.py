"""Passes that DDP carries out by itself, because a policy has no use for them.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. Models and batches
are those of nets.py.
"""

import copy
import gc
import io
import os
import signal
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import (
    Books,
    all_same,
    alone,
    backward,
    batch,
    gradients,
    loss_of,
    named,
    net,
    plain,
    raised,
    train,
    wired,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.collectives.handle import Handle
from thinwire.parallel.ddp import COMPARED_OF_DDP, SETTLED, BackwardPass
from thinwire.policies.base import Choice, Chooser, Measured, Policy, PolicyContext, TensorInfo

STEPS = COMPARED_OF_DDP + 8


@dataclass(frozen=True)
class Idle(Policy):
    """topk:0.1 in steps `first` to `last`, and nothing to do in all others but every `every`-th,
    after which ranks tell each other a number."""

    first: int = 0
    last: int = 0
    every: int = 1000
    name: ClassVar[str] = "idle"
    main = tw.parse("topk:0.1")

    def begin(self, context: PolicyContext) -> Chooser:
        return _Idle(self)


class _Idle(Chooser):
    num_reports = 1
    listens_every = 4

    def __init__(self, policy: Idle) -> None:
        self._policy = policy
        self.asked: list[int] = []
        self.learnt: list[int] = []
        self.ended: list[float] = []  # seconds of steps

    def _compresses(self, step: int) -> bool:
        return self._policy.first <= step <= self._policy.last

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self._policy.main if self._compresses(step) else None

    def due(self, step: int) -> bool:
        return step % self._policy.every == 0 or step in self.asked

    def idle(self, step: int) -> bool:
        return not (self._compresses(step) or self.due(step))

    def doubts(self, measured: Measured) -> bool:
        self.ended.append(measured.step)
        return False

    def ask(self, step: int) -> None:
        self.asked.append(step)

    def report(self, measured: Measured) -> list[float]:
        return [measured.network]

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        self.learnt.append(step)


def idle_model(policy: Any = None, **options: Any) -> tuple[Any, tw.Wire]:
    """DDP has limits of its own: with a time limit of ours every pass goes through the hook."""
    return wired(policy or Idle(), **{"timeout": None} | options)


def by_ddp(model: Any, wire: tw.Wire, step: int) -> bool:
    """Whether DDP itself carries out a step, which is done here."""
    before = wire._reducer.ledger.steps_of_ddp
    backward(model, step)
    return wire._reducer.ledger.steps_of_ddp > before


def attempt(model: Any, step: int) -> str:
    return raised(lambda: backward(model, step))


def on_bits() -> tuple[list[int], list[int], Any, Any, str]:
    (model, wire), (other, direct), third = idle_model(), wired("none"), plain()
    left, same = [], []
    for step in range(1, STEPS):
        left += [step] if by_ddp(model, wire, step) else []
        backward(other, step)
        backward(third, step)
        same += [step] if all_same(gradients(model), gradients(third)) else []
    return left, same, wire.stats(), direct.stats(), wire.explain()


def test_ddp_carries_out_what_needs_no_hook():
    """With three ranks, where 1/3 is rounded. A direct pass comes first; ranks meet now and then.
    In its first pass DDP has one bucket, which its ring cuts in other places."""
    expected = [n for n in range(SETTLED + 2, STEPS) if n != COMPARED_OF_DDP + SETTLED]
    for left, same, stats, direct, words in ranks.run(on_bits, ranks=3):
        assert left == expected
        assert set(same) >= set(expected[1:])
        assert stats["step"] == STEPS - 1
        assert f"{len(expected)} steps of these had nothing to compress: DDP's own." in words
        # The same as passes through the hook, but for what ranks compare after other passes.
        for name, row in stats["tensors"].items():
            assert row["steps"] == direct["tensors"][name]["steps"]
            assert row["bytes_in"] == direct["tensors"][name]["bytes_in"]
        sent, other = (each["total"]["network_bytes"] for each in (stats, direct))
        assert sent == pytest.approx(other, rel=0.02)
        assert stats["seconds"]["waiting"] > 0


def on_changes() -> tuple[list[int], dict[str, float], list[int]]:
    model, wire = idle_model(Idle(9, 11, every=6))
    books, left = Books(model, wire), []
    for step in range(1, 25):
        books.put(alone(model, step))
        left += [step] if by_ddp(model, wire, step) else []
        books.take()
    return left, books.balance(), wire._choices.chooser.learnt


def test_compression_begins_and_ends_in_the_step_that_the_policy_says():
    """What ranks told each other is heard before the next step is left to DDP."""
    for left, balance, learnt in ranks.run(on_changes, ranks=2):
        # 6, 12, 18, 24 are due; 12 sends the residuals, in 13 and 14 ranks meet, 15 is direct.
        assert left == [4, 5, 7, 8, 16, 17, 19, 20, 21, 22, 23]
        assert learnt == [6, 12, 18, 24]
        assert all(value <= 1 for value in balance.values()), balance


def on_doubts() -> tuple[list[int], list[int], list[int]]:
    model, wire = idle_model()
    left = []
    for step in range(1, 20):
        if step == 10 and dist.get_rank() == 1:
            wire._choices.doubts = True
        left += [step] if by_ddp(model, wire, step) else []
    chooser = wire._choices.chooser
    return left, chooser.asked, chooser.learnt


def test_ranks_hear_of_doubts_beside_passes_of_ddp():
    for left, asked, learnt in ranks.run(on_doubts, ranks=3):
        # They listen after every fourth pass: in the 13th, so 14 goes through the hook.
        assert asked == [14]
        assert learnt == [14]
        assert left == [n for n in range(4, 20) if n != 14]


def on_other_step() -> list[str]:
    model, wire = idle_model()
    train(model, range(6))
    wire.step += dist.get_rank()
    return [attempt(model, step) for step in range(4)]


def test_ranks_in_different_steps_learn_so_beside_passes_of_ddp():
    for errors in ranks.run(on_other_step, ranks=2):
        words = "MismatchError: ranks disagree in one call, step: 9 on some ranks but 10 on others"
        assert errors[:3] == ["", "", words]
        assert errors[3].startswith("MismatchError: ranks disagree in one call, step: 10 on rank 0")


def on_accumulation() -> tuple[bool, int, int]:
    (model, wire), other = idle_model(), plain()
    same = True
    for step in range(8):
        for each in (model, other):
            each.zero_grad()
            with each.no_sync():
                each(torch.full((8, 20), 0.1 * step)).square().mean().backward()
            each(torch.full((8, 20), 0.2)).square().mean().backward()
        same = same and all_same(gradients(model), gradients(other))
    return same, wire.step, wire._reducer.ledger.steps_of_ddp


def test_passes_that_only_accumulate_do_not_count():
    assert ranks.run(on_accumulation, ranks=2) == [(True, 8, 8 - SETTLED - 1)] * 2


class Twice(nn.Module):
    """`net` with a layer whose activations are computed twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.head, self._reentrant = net(), nn.Linear(10, 10), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return self.head(checkpoint(self.inner, x, use_reentrant=self._reentrant))


def _without_sync(model: Any, step: int) -> None:
    with model.no_sync():
        loss = loss_of(model, step)
    loss.backward()


def _backward_without_sync(model: Any, step: int) -> None:
    loss = loss_of(model, step)
    with model.no_sync():
        loss.backward()


def _sum_of_two(model: Any, step: int) -> None:
    (loss_of(model, step) + loss_of(model, step + 1)).backward()


def _two(model: Any, step: int) -> None:
    for loss in [loss_of(model, step), loss_of(model, step + 1)]:
        loss.backward()


def _again(model: Any, step: int) -> None:
    loss = loss_of(model, step)
    loss.backward(retain_graph=True)
    loss.backward()


def _in_two_parts(model: Any, step: int) -> None:
    """The first pass has no gradient for the first layers."""
    loss = loss_of(model, step)
    loss.backward(inputs=list(model.module[4].parameters()), retain_graph=True)
    loss.backward(inputs=[p for layer in model.module[:4] for p in layer.parameters()])


def _own(model: Any, step: int) -> None:
    """One rank looks at gradients by itself."""
    loss_of(model, step).backward()
    if dist.get_rank() == 0:
        loss_of(model.module, step).backward()


def _failed_forward(model: Any, step: int) -> None:
    """One rank's forward pass fails, and it looks at gradients by itself."""
    if dist.get_rank() == 0:
        assert raised(lambda: model(torch.zeros(1, 3)))
        loss_of(model.module, step).backward()
    loss_of(model, step).backward()


def _unused_forward(model: Any, step: int) -> None:
    """A pass that DDP was told of comes after all, though inside of no_sync."""
    loss_of(model, step)
    with model.no_sync():
        loss_of(model, step).backward()


def _told_by_hand(model: Any, step: int) -> None:
    """As pipelines of torch do."""
    with model.no_sync():
        loss = loss_of(model, step)
        model.reducer.prepare_for_backward([])
        loss.backward()


def _forward(model: Any, step: int) -> None:
    loss_of(model.forward, step).backward()


def _recomputed(model: Any, step: int) -> None:
    x = batch(step).requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().mean().backward()


PASSES: dict[str, tuple[Any, Any]] = {
    "forward in no_sync": (_without_sync, net),
    "backward in no_sync": (_backward_without_sync, net),
    "sum of two": (_sum_of_two, net),
    "two": (_two, net),
    "again": (_again, net),
    "in two parts": (_in_two_parts, net),
    "one rank's own": (_own, net),
    "one rank's failed forward": (_failed_forward, net),
    "unused forward": (_unused_forward, net),
    "told by hand": (_told_by_hand, net),
    "forward called": (_forward, net),
    "recomputed": (backward, lambda: Twice(False)),
    "recomputed, reentrant": (backward, lambda: Twice(True)),
    "model recomputed": (_recomputed, net),
}


def on_passes(kind: str) -> tuple[int, int, int, bool, str]:
    """The steps that were counted without the hook, and with it; those without; the gradients
    beside those of plain DDP."""
    passes, make = PASSES[kind]
    models = [idle_model(inner=make()), wired("none", make())]
    other = plain(make())
    other.load_state_dict(models[0][0].state_dict())
    models[1][0].load_state_dict(models[0][0].state_dict())
    alike, counted = True, []
    for model in (models[0][0], models[1][0], other):
        for step in range(SETTLED + 3):
            backward(model, step)
    left = models[0][1]._reducer.ledger.steps_of_ddp
    for step in range(5):
        for model in (models[0][0], models[1][0], other):
            model.zero_grad()
            passes(model, step)
        alike = alike and all_same(gradients(models[0][0]), gradients(other))
    counted = [wire.step for _, wire in models]
    left = models[0][1]._reducer.ledger.steps_of_ddp - left
    error = raised(lambda: train(models[0][0], range(3)))
    return counted[0], counted[1], left, alike, error


@pytest.mark.parametrize("kind", PASSES)
def test_those_passes_count_that_ddp_averages(kind):
    """The hook is called in them, and only in them."""
    expected = 0 if kind == "forward in no_sync" else 5
    for without, with_hook, left, alike, error in ranks.run(on_passes, kind, ranks=2):
        assert without == with_hook == SETTLED + 3 + expected
        assert left == expected
        assert alike
        assert not error


def on_interrupted(where: str) -> tuple[list[str], int, bool]:
    """Rank 0 is interrupted when DDP has waited, or in a pass through the hook that comes before
    one of DDP's own; with a report or without."""
    before = {"hook": SETTLED, "DDP's own": 8, "report": 7}[where]
    model, wire = idle_model(Idle(every=8 if where == "report" else 1000))
    train(model, range(before))
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            own = where == "DDP's own"
            target = (wire._hook._hookless, "_ended") if own else (BackwardPass, "wait")
            patch.setattr(*target, lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                backward(model, 9)
    else:
        backward(model, 9)
    errors = [attempt(model, step) for step in range(10, 20)]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, gradients(model))
    return errors, wire.step, all_same(*everyone)


@pytest.mark.parametrize("where", ["hook", "DDP's own", "report"])
def test_training_goes_on_after_ctrl_c(where):
    """Eight passes went before DDP's own: it is one in which ranks listen."""
    for errors, step, alike in ranks.run(on_interrupted, where, ranks=2):
        assert not any(errors), errors
        assert step == {"hook": SETTLED, "DDP's own": 8, "report": 7}[where] + 11
        assert alike


def on_evaluation() -> tuple[list[bool], list[str]]:
    """Rank 0 evaluates when a report is under way, before the second reducer was made."""
    model, wire = idle_model(Idle(every=SETTLED + 2))
    train(model, range(1, SETTLED + 3))
    if dist.get_rank() == 0:
        with torch.inference_mode():
            model(torch.zeros(8, 20))
    left, errors = [], []
    for step in range(SETTLED + 3, 14):
        before = wire._reducer.ledger.steps_of_ddp
        errors.append(attempt(model, step))
        left.append(wire._reducer.ledger.steps_of_ddp > before)
    return left, errors


def test_an_evaluation_comes_before_the_first_pass_of_ddp():
    for left, errors in ranks.run(on_evaluation, ranks=2):
        assert not any(errors), errors
        assert left[0]


def on_frozen_for_a_while(layers: int) -> tuple[bool, int, bool]:
    """Some layers, or all, are not trained in a forward pass between two steps, as those of a
    discriminator while its generator learns."""
    model, wire = idle_model(Idle(every=3))
    other = plain(copy.deepcopy(model.module))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    exact = True
    for step in range(1, 20):
        for each, optimizer in zip((model, other), optimizers, strict=True):
            backward(each, step)
            optimizer.step()
            parts = [part for part in each.module if list(part.parameters())][:layers]
            for part in parts:
                part.requires_grad_(False)
            x = batch(step).requires_grad_(layers == 3)
            with torch.set_grad_enabled(layers == 3):
                each(x).sum()
            for part in parts:
                part.requires_grad_(True)
        exact = exact and all_same(gradients(model), gradients(other))
    tw.check_replicas(model)
    return exact, wire._reducer.ledger.steps_of_ddp, wire.step == 19


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_that_are_not_trained_for_a_while_are_averaged_afterwards(layers):
    for exact, count, counted in ranks.run(on_frozen_for_a_while, layers, ranks=2):
        assert count > 0
        assert exact
        assert counted


def on_unheard() -> tuple[list[int], list[int], str]:
    """A report is under way when rank 0 is interrupted in its forward pass. From a later one the
    policy cannot learn: backward passes tell of that, and no forward pass does."""
    model, wire = idle_model(Idle(every=6))
    train(model, range(1, 7))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(Handle, "wait_until_ended", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                backward(model, 7)
    left = [step for step in range(7, 13) if by_ddp(model, wire, step)]
    chooser = wire._choices.chooser
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "learn", lambda step, rows: [][step])
        model(torch.zeros(8, 20))
        error = attempt(model, 13)
    return left, chooser.learnt, error


def _interrupted(handle: Handle) -> None:
    raise KeyboardInterrupt


def test_what_is_heard_before_a_forward_pass_is_neither_lost_nor_fatal_there():
    for left, learnt, error in ranks.run(on_unheard, ranks=2):
        assert left == [7, 8, 9, 10, 11]
        assert learnt == [6]
        assert error == "IndexError: list index out of range"


def on_join() -> tuple[list[bool], str]:
    """Rank 1 has fewer batches; before and after that all have as many."""
    model, wire = idle_model()
    left = [by_ddp(model, wire, step) for step in range(6)]
    with model.join():
        for step in range(2 + 2 * (dist.get_rank() == 0)):
            left.append(by_ddp(model, wire, step))
    error = raised(lambda: train(model, range(1)))
    return left, error


def test_ranks_that_join_early_take_part_through_the_hook():
    for left, error in ranks.run(on_join, ranks=2):
        assert left[:6] == [False] * 3 + [True] * 3
        assert not any(left[6:])
        assert not error


def on_states() -> tuple[bool, bool, bool, list[bool]]:
    """Loading, copying and detaching while passes go without the hook."""
    (model, wire), other = idle_model(), plain()
    train(model, range(6))
    before = wire._hook._hookless.next
    state = wire.state_dict()
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    wire.load_state_dict(state)
    loaded = wire._hook._hookless.next
    train(model, range(6, 16))
    train(other, range(6))
    train(other, range(6, 16))
    alike = all_same(gradients(model), gradients(other))
    wire.detach()
    train(model, range(16, 18))
    train(copied, range(2))
    again = tw.attach(model, Idle(), min_numel=10)
    return before, loaded, alike, [by_ddp(model, again, step) for step in range(5)]


def test_states_copies_and_detaching():
    for before, loaded, alike, again in ranks.run(on_states, ranks=2):
        assert (before, loaded, alike) == (True, False, True)
        assert again == [False] * (SETTLED + 1) + [True] * (4 - SETTLED)


def on_death() -> str:
    model, wire = idle_model()
    train(model, range(6))
    assert wire._hook._hookless.next
    if dist.get_rank() == 1:

        def die(gradient: Tensor) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        named(model)["2.weight"].register_hook(die)
    return raised(lambda: train(model, range(6, 8)))


def test_a_rank_that_dies_in_a_pass_of_ddp_is_ddps_error():
    """Of three ranks one might wait for the other survivor, whose connections end with its process:
    that is DDP's own way too."""
    with ranks.Ranks(2) as group:
        error = group.run(on_death, dying=[1])[0]
    assert error.startswith(("RuntimeError: ", "DistBackendError: ", "PeerError: ")), error


def on_refusals(ddp: dict[str, Any], options: dict[str, Any]) -> bool:
    model, wire = idle_model(ddp=ddp, **options)
    train(model, range(6))
    return wire._reducer.ledger.steps_of_ddp > 0


@pytest.mark.parametrize(
    ("ddp", "options"),
    [
        ({"gradient_as_bucket_view": True}, {}),
        ({"find_unused_parameters": True}, {}),
        ({"static_graph": True}, {}),
        ({}, {"timeout": 600.0}),
        ({}, {"max_bytes": "1GiB"}),
        ({}, {"scaler": torch.amp.GradScaler("cpu", enabled=False)}),
    ],
    ids=["view", "unused", "static", "timeout", "memory", "scaler"],
)
def test_what_ddp_would_do_otherwise_goes_through_the_hook(ddp, options):
    assert ranks.run(on_refusals, ddp, options, ranks=2) == [False, False]


def on_compiled() -> tuple[int, bool]:
    """Switching must not have the model compiled anew, which torch does only so often."""
    one = {"bucket_cap_mb": 25}  # torch.compile asks for a first bucket that is smaller
    (model, wire), other = idle_model(Idle(every=5), ddp=one), DistributedDataParallel(net())
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(20):
            backward(compiled, step)
            backward(other, step)
    return wire._reducer.ledger.steps_of_ddp, all_same(gradients(model), gradients(other))


def test_a_compiled_model_follows():
    """Four steps with a report go through the hook."""
    assert ranks.run(on_compiled, ranks=2) == [(20 - SETTLED - 1 - 4, True)] * 2


def on_dropped() -> list[bool]:
    def trained() -> list[weakref.ref[Any]]:
        model, wire = idle_model()
        train(model, range(6))
        assert wire._hook._hookless.next
        return [weakref.ref(model), weakref.ref(named(model)["0.weight"])]

    kept = trained()
    gc.collect()
    return [each() is not None for each in kept]


def test_a_model_that_nobody_needs_any_more_is_freed():
    assert ranks.run(on_dropped, ranks=2) == [[False, False]] * 2


def on_lost_lane() -> tuple[str, str]:
    """The connections for comparisons are gone; DDP has its own."""
    model, wire = idle_model()
    train(model, range(8))
    wire._hook._direct_sums.channel.link.close()
    first = attempt(model, 8)
    return first, attempt(model, 9)


def test_a_comparison_that_cannot_begin_is_told_when_ddp_has_ended():
    for first, later in ranks.run(on_lost_lane, ranks=2):
        assert first.startswith("PeerError: "), first
        assert later.startswith("PeerError: "), later
