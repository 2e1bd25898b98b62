"""The laws of `attach`: what a DDP model with a wire computes, with two and three real ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of nets.py.
"""

import itertools
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import (
    Books,
    all_same,
    alone,
    backward,
    digest,
    gradients,
    loss_of,
    memory,
    named,
    net,
    plain,
    residuals,
    train,
    wired,
)
from tensors import same
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim.optimizer import _global_optimizer_post_hooks

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

GRANULARITIES = ("bucket", "tensor")
over_granularities = pytest.mark.parametrize("granularity", GRANULARITIES)


# What it computes


DDP_OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
over_options = pytest.mark.parametrize("options", DDP_OPTIONS)


def on_none(options: str) -> list[bool]:
    """Whether gradients and parameters have the same bits as without a wire, step by step."""
    ddp = DDP_OPTIONS[options]
    model, _ = wired("none", ddp=ddp)
    other, found = plain(**ddp), []
    for step in range(4):
        for each in (model, other):
            train(each, range(step, step + 1))
        found.append(all_same(gradients(model), gradients(other)))
        found.append(all_same(named(model), named(other)))
    return found


@over_options
def test_without_compression_every_bit_is_that_of_plain_ddp(options):
    """With two ranks: dividing by two is exact, before the sum and after it."""
    for found in ranks.run(on_none, options, ranks=2):
        assert found == [True] * 8


def buckets_seen(steps: int) -> list[list[list[str]]]:
    """Which tensors DDP has in each bucket, in each step, as a hook of our own sees it."""
    model, seen = plain(), []
    names = {id(p): name for name, p in named(model).items()}

    def spy(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen[-1].append([names[id(p)] for p in bucket.parameters()])
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, spy)
    for step in range(steps):
        seen.append([])
        backward(model, step)
    return seen


def by_hand(model: Any, spec: str, granularity: str, buckets: list, step: int, left: dict) -> dict:
    """One step of EF14 with the compressor itself; `left` is what each rank has left out."""
    size, compressor, found = dist.get_world_size(), tw.parse(spec), {}
    own = [alone(model, step, rank) for rank in range(size)]
    for bucket in buckets:
        matrices = [name for name in bucket if own[0][name].dim() > 1]
        for name in set(bucket) - set(matrices):
            found[name] = sum(g[name] for g in own) / size
        for unit in [matrices] if granularity == "bucket" else [[name] for name in matrices]:
            lengths = [own[0][name].numel() for name in unit]
            total = torch.zeros(sum(lengths))
            for rank, g in enumerate(own):
                p = torch.cat([(g[name].flatten() + left[rank][name]) for name in unit])
                sent = tw.decode(tw.pack(compressor.encode(p)))
                total += sent / size
                left[rank] |= dict(zip(unit, torch.split(p - sent, lengths), strict=True))
            for name, mean in zip(unit, torch.split(total, lengths), strict=True):
                found[name] = mean.view(own[0][name].shape)
    return found


def on_ef14(spec: str, granularity: str) -> tuple[list[bool], int]:
    """Whether each step gives the bits that are computed by hand, and the number of buckets."""
    steps = 4
    seen = buckets_seen(steps)
    model, wire = wired(spec, feedback="ef14", granularity=granularity)
    zeros = {name: torch.zeros(p.numel()) for name, p in named(model).items()}
    left, found = [dict(zeros) for _ in range(dist.get_world_size())], []
    for step in range(steps):
        wanted = by_hand(model, spec, granularity, seen[step], step, left)
        backward(model, step)
        found.append(all_same(gradients(model), wanted))
        own = residuals(wire)
        found.append(all(same(own[name], left[dist.get_rank()][name]) for name in own))
    return found, len(seen[-1])


@over_granularities
@pytest.mark.parametrize("spec", ["topk:0.1", "quantize:4"])
def test_ef14_gives_what_the_compressor_gives_by_hand(spec, granularity):
    """Bit for bit with two ranks: halves are exact, so there is nothing left to round."""
    for found, buckets in ranks.run(on_ef14, spec, granularity, ranks=2):
        assert found == [True] * 8
        assert buckets > 2


TRAINED = [
    *("topk:0.05", "quantize:4", "onebit", "randomk:0.1,shared=true", "qsgd:7", "cast:bf16"),
    "topk:0.1|quantize:4",
]
FEEDBACKS = ["none", "ef14", "ef21", "ef21m:0.5"]


def on_training() -> list[tuple[str, str, str]]:
    """What was trained, and digests of the parameters and gradients in the end."""
    found = []
    for (i, spec), (j, feedback) in itertools.product(enumerate(TRAINED), enumerate(FEEDBACKS)):
        if (i + j) % 2:
            continue  # half of them will do
        granularity = GRANULARITIES[i // 2 % 2]
        model, _ = wired(spec, feedback=feedback, granularity=granularity)
        train(model, range(3))
        tw.check_replicas(model)
        case = f"{spec} {feedback} {granularity}"
        found.append((case, digest(model.parameters()), digest(gradients(model).values())))
    return found


def test_all_ranks_end_with_the_same_bits_whatever_the_compressor():
    first, *others = ranks.run(on_training, ranks=3)
    for other in others:
        assert other == first
    assert len({parameters for _, parameters, _ in first}) == len(first), "all did the same"


# Nothing is lost


def on_rebuild(options: str, granularity: str) -> tuple[dict[str, float], list[int]]:
    """The books over DDP's new buckets, and the number of exchanges in the steps."""
    model, wire = wired(granularity=granularity, ddp=DDP_OPTIONS[options])
    books, exchanges = Books(model, wire), []
    for step in range(5):
        books.put(alone(model, step))
        backward(model, step)
        books.take()
        exchanges.append(wire.stats()["total"]["exchanges"] - sum(exchanges))
    return books.balance(), exchanges


@over_granularities
@over_options
def test_nothing_is_lost_when_ddp_forms_new_buckets(options, granularity):
    for balance, exchanges in ranks.run(on_rebuild, options, granularity, ranks=2):
        assert max(balance.values()) <= 1, balance
        assert (exchanges[0] != exchanges[-1]) == (options != "unused"), "were there new buckets?"


def on_no_sync(spec: str) -> tuple[bool, dict[str, float], int]:
    model, wire = wired(spec)
    other, books = plain(), Books(model, wire)
    for step in range(0, 9, 3):
        for each in (model, other):
            each.zero_grad()
            with each.no_sync():
                loss_of(each, step).backward()
                loss_of(each, step + 1).backward()
            loss_of(each, step + 2).backward()
        for micro in range(3):
            books.put(alone(model, step + micro))
        books.take()
    return all_same(gradients(model), gradients(other)), books.balance(), wire.step


def test_accumulated_gradients_travel_once():
    for equal, _, step in ranks.run(on_no_sync, "none", ranks=2):
        assert equal
        assert step == 3
    for _, balance, _ in ranks.run(on_no_sync, "topk:0.1", ranks=2):
        assert max(balance.values()) <= 1, balance


INPUTS = (1, 4, 2)  # of each rank


def on_join(granularity: str) -> dict[str, float]:
    model, wire = wired(granularity=granularity)
    books = Books(model, wire)
    with model.join():
        for step in range(INPUTS[dist.get_rank()]):
            books.put(alone(model, step))
            backward(model, step)
            books.take()
    # Only who went on to the end has seen all averages.
    last = [books._out, books._steps]
    dist.broadcast_object_list(last, src=INPUTS.index(max(INPUTS)))
    books._out, books._steps = last
    assert wire.step == max(INPUTS)
    return books.balance()


@over_granularities
def test_nothing_is_lost_when_ranks_have_different_numbers_of_batches(granularity):
    """A rank that has joined sends what its residual holds."""
    for balance in ranks.run(on_join, granularity, ranks=3):
        assert max(balance.values()) <= 1, balance


# Loss scaling


class Overflow:
    """Makes one element of a parameter's gradient infinite, on the last rank, when told so."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.due = False
        parameter.register_hook(self)

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.due and dist.get_rank() == dist.get_world_size() - 1:
            gradient = gradient.clone()
            gradient.view(-1)[0] = torch.inf
        return gradient


SKIPPED = 3
SCALED = [
    (feedback, where, granularity)
    for feedback in ("ef14", "ef21m:0.5", "ef14:storage=int8")
    for where, granularity in (("4.weight", "bucket"), ("0.bias", "tensor"))
]


def on_scaler(feedback: str, where: str, granularity: str) -> dict[str, Any]:
    """Training with a scale that grows and falls against training that has none and leaves out the
    step that was skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model, wire = wired(feedback=feedback, granularity=granularity, scaler=scaler)
    other, bare = wired(feedback=feedback, granularity=granularity)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    overflow, scales, found = Overflow(named(model)[where]), [], {}
    for step in range(7):
        overflow.due = step == SKIPPED
        before = memory(wire), digest(model.parameters())
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == SKIPPED:
            found["nan"] = [not g.isfinite().all() for g in gradients(model).values()]
            found["remembered"] = all_same(memory(wire), before[0])
        scaler.step(optimizer)
        scaler.update()
        if step == SKIPPED:
            found["skipped"] = digest(model.parameters()) == before[1]
    train(other, [step for step in range(7) if step != SKIPPED])
    found["scales"] = scales
    found["equal"] = all_same(named(model), named(other))
    vectors = {k: v for k, v in memory(wire).items() if not k.endswith(" steps")}
    unscaled = {name: vector / scales[-1] for name, vector in vectors.items()}
    found["memory"] = all(same(v, memory(bare)[name]) for name, v in unscaled.items())
    return found


@pytest.mark.parametrize(("feedback", "where", "granularity"), SCALED)
def test_a_step_that_the_scaler_skips_leaves_no_trace(feedback, where, granularity):
    """Scales are powers of two, so that scaled training has the same bits as training without."""
    for found in ranks.run(on_scaler, feedback, where, granularity, ranks=2):
        assert any(found["nan"])
        assert found["remembered"], "something of the step that was skipped is remembered"
        assert found["skipped"]
        assert {b / a for a, b in itertools.pairwise(found["scales"])} == {0.5, 1, 2}
        assert found["equal"]
        assert found["memory"]


def on_forgotten_scaler() -> dict[str, list[str]]:
    """The warnings of trainings that differ in who takes the optimizer's steps."""
    found, before = {}, set(_global_optimizer_post_hooks)
    for case, (options, enabled) in UNTOLD.items():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        if case == "told":
            options = {"scaler": scaler}
        model, _ = wired(**options)
        other = net()
        scheduled, bystander = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
        torch.optim.lr_scheduler.ConstantLR(scheduled)  # puts a wrapper around step
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                bystander.step()
                scheduled.zero_grad()
                scaler.scale(loss_of(model, step)).backward()
                if case == "by hand":
                    scheduled.step()
                else:
                    scaler.step(scheduled)
                    scaler.update()
        ours = [w for w in caught if issubclass(w.category, tw.errors.ThinwireWarning)]
        found[case] = [str(w.message) for w in ours]
    found["hooks"] = [str(hook) for hook in set(_global_optimizer_post_hooks) - before]
    return found


UNTOLD: dict[str, tuple[dict[str, Any], bool]] = {
    "forgotten": ({}, True),
    "disabled": ({}, False),
    "told": ({}, True),
    "nothing remembered": ({"feedback": "none"}, True),
    "by hand": ({}, True),
}


def test_a_scaler_that_attach_was_not_given_is_noticed():
    for found in ranks.run(on_forgotten_scaler, ranks=2):
        (warning,) = found.pop("forgotten")
        assert "GradScaler that attach does not know of" in warning
        assert "scaler=scaler" in warning
        assert not any(found.values()), found
