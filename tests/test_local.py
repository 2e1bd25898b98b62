"""Local steps: what optimizers have done is exchanged, and all ranks go on from common parameters.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Where an independent computation is needed, gradients are given, so that one process
can compute what all ranks do.
"""

import copy
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from nets import (
    MIN,
    TIMEOUT,
    all_same,
    batch,
    digest,
    loss_of,
    named,
    net,
    plain,
    raised,
    residuals,
)
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import PeerError, ThinwireWarning
from thinwire.methods import LocalRecipe, parse
from thinwire.parallel import local as local_module
from thinwire.parallel.buffers import FLAGS
from thinwire.parallel.local import PROGRESS
from thinwire.parallel.noise import NoiseGain

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

LR = 0.1


def local(
    model: nn.Module, compressor: Any = "none", optimizer: Any = None, **options: Any
) -> tuple[tw.LocalSteps, Any]:
    given = {"min_numel": MIN, "timeout": TIMEOUT, **options}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LR)
    return tw.LocalSteps(model, optimizer, compressor, **given), optimizer


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def go(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def values(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named(model).items()}


# Given gradients: what all ranks do can be computed in one place.

SHAPES = {"0.weight": (30, 20), "0.bias": (30,), "2.weight": (40, 30), "2.bias": (40,)}
NAMES = (*SHAPES, "4.weight", "4.bias")


def given_gradient(name: str, shape: Any, step: int, rank: int) -> np.ndarray:
    rng = np.random.default_rng([step, rank, NAMES.index(name)])
    return rng.standard_normal(tuple(shape)).astype(np.float32)


def go_given(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        for name, p in named(model).items():
            p.grad = torch.from_numpy(given_gradient(name, p.shape, step, dist.get_rank()))
        optimizer.step()


def on_given(compressor: str, steps: int, options: dict[str, Any]) -> dict[str, np.ndarray]:
    model = net()
    steps_taken, optimizer = local(model, compressor, check_every=1, **options)
    go_given(model, optimizer, range(steps))
    found = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    steps_taken.detach()
    return found


class Simulated:
    """DiLoCo and its relatives as their papers write them, for all ranks, in float64."""

    def __init__(self, size: int, lr: float = 1.0, momentum: float = 0.0, fragments: int = 1):
        self.size, self.lr, self.momentum, self.fragments = size, lr, momentum, fragments
        start = {name: p.detach().double().numpy() for name, p in net().named_parameters()}
        self.common = {name: p.copy() for name, p in start.items()}
        self.own = [{name: p.copy() for name, p in start.items()} for _ in range(size)]
        self.speed = {name: np.zeros_like(p) for name, p in start.items()}
        layers = list(dict.fromkeys(name.split(".")[0] for name in start))
        self.parts = [
            [n for n in start if layers.index(n.split(".")[0]) % fragments == i]
            for i in range(fragments)
        ]

    def inner(self, step: int) -> None:
        for rank, own in enumerate(self.own):
            for name in own:
                own[name] -= LR * given_gradient(name, own[name].shape, step, rank).astype(float)

    def differences(self, part: int) -> dict[str, np.ndarray]:
        return {
            name: np.mean([self.common[name] - own[name] for own in self.own], axis=0)
            for name in self.parts[part]
        }

    def outer(self, mean: dict[str, np.ndarray], mixing: float = 0.0) -> None:
        for name, d in mean.items():
            self.speed[name] = self.momentum * self.speed[name] + d
            ahead = d + self.momentum * self.speed[name] if self.momentum else d
            self.common[name] = self.common[name] - self.lr * ahead
            for own in self.own:
                own[name] = mixing * own[name] + (1 - mixing) * self.common[name]


def close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return all(np.allclose(found[n], wanted[n], rtol=2e-5, atol=2e-5) for n in found)


@pytest.mark.parametrize(
    ("method", "lr", "momentum"),
    [("local-sgd:3", 1.0, 0.0), ("diloco:3,0.7,0.9", 0.7, 0.9), ("diloco:3,0.5,0", 0.5, 0.0)],
)
def test_twenty_rounds_are_those_of_the_paper(method: str, lr: float, momentum: float) -> None:
    found = ranks.run(on_given, method, 60, {}, ranks=3)
    wanted = Simulated(3, lr, momentum)
    for step in range(60):
        wanted.inner(step)
        if step % 3 == 2:
            wanted.outer(wanted.differences(0))
    for rank in range(3):
        assert close(found[rank], wanted.common)
        assert digest(torch.from_numpy(t) for t in found[rank].values()) == digest(
            torch.from_numpy(t) for t in found[0].values()
        )


def test_streaming_exchanges_fragments_in_turn_while_steps_go_on() -> None:
    method = "streaming-diloco:every=6,fragments=3,overlap=1,mixing=0.5,lr=0.7,momentum=0.9"
    found = ranks.run(on_given, f"{method},compressor=(none)", 60, {}, ranks=2)
    wanted = Simulated(2, 0.7, 0.9, fragments=3)
    under_way: dict[str, np.ndarray] | None = None
    part = 0
    for step in range(60):
        wanted.inner(step)
        if under_way is not None:
            wanted.outer(under_way, mixing=0.5)
            under_way = None
        if step % 2 == 1:
            under_way = wanted.differences(part)
            part = (part + 1) % 3
    for rank in range(2):
        assert close(found[rank], wanted.own[rank])


def test_one_fragment_without_overlap_is_diloco() -> None:
    streaming = "streaming-diloco:every=4,fragments=1,overlap=0,mixing=0,lr=0.7,compressor=(none)"
    one = ranks.run(on_given, streaming, 20, {}, ranks=2)[0]
    other = ranks.run(on_given, "diloco:4", 20, {}, ranks=2)[0]
    assert all(np.array_equal(one[name], other[name]) for name in one)


def on_sparseloco(average: str) -> dict[str, Any]:
    """What it comes to, and what the compressor by itself says that it should."""
    model = net()
    method = parse(f"sparseloco:3,ratio=0.1,chunk=64,average={average}")
    recipe = method.recipe()
    assert isinstance(recipe, LocalRecipe)
    steps_taken, optimizer = local(model, method)
    go_given(model, optimizer, range(60))
    steps_taken.detach()
    size = dist.get_world_size()
    wanted = Simulated(size)
    kept = [{n: torch.zeros(p.shape) for n, p in named(model).items()} for _ in range(size)]
    for step in range(60):
        wanted.inner(step)
        if step % 3 < 2:
            continue
        for name, p in named(model).items():
            if p.dim() < 2:
                wanted.outer(
                    {name: np.mean([wanted.common[name] - o[name] for o in wanted.own], 0)}
                )
                continue
            sent = []
            for own, left in zip(wanted.own, kept, strict=True):
                x = torch.from_numpy((wanted.common[name] - own[name]).astype(np.float32))
                left[name].mul_(0.95)
                payload = recipe.compressor.encode(x, residual=left[name])  # type: ignore[attr-defined]
                sent.append(tw.decode(tw.pack(payload)).numpy())
            total, count = np.sum(sent, 0), np.sum([s != 0 for s in sent], 0)
            by = np.maximum(count, 1) if average == "senders" else size
            wanted.outer({name: total / by})
    found = {name: p.detach().numpy() for name, p in named(model).items()}
    return {
        "apart": max(float(np.abs(found[n] - wanted.common[n]).max()) for n in found),
        "moved": max(float(p.detach().sub(q).abs().max()) for p, q in _pairs(model)),
        "digest": digest(p.detach() for p in model.parameters()),
    }


def _pairs(model: nn.Module) -> Any:
    return zip(model.parameters(), net().parameters(), strict=True)


@pytest.mark.parametrize("average", ["world", "senders"])
def test_sparseloco_is_what_its_parts_say(average: str) -> None:
    found = ranks.run(on_sparseloco, average, ranks=3)
    assert len({each["digest"] for each in found}) == 1
    # Rounding differs between float32 and float64, and with it, rarely, a choice of an element.
    assert all(each["apart"] < 0.02 * each["moved"] for each in found)


# Known answers


def on_ddp(compressor: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, reference = net(), plain()
    steps_taken, optimizer = local(model, compressor)
    go(model, optimizer, range(6))
    go(reference, torch.optim.SGD(reference.parameters(), lr=LR), range(6))
    steps_taken.detach()
    return values(model), values(reference)


def test_one_step_of_sgd_each_is_ddp() -> None:
    for found, wanted in ranks.run(on_ddp, "none", ranks=2):
        for name, tensor in found.items():
            assert torch.allclose(tensor, wanted[name], rtol=1e-5, atol=1e-6)


def on_conservation(keep: float) -> dict[str, float]:
    """All that optimizers have done has arrived or waits."""
    model = net()
    steps_taken, optimizer = local(model, "adam-update:0.1", adam(model), keep=keep)
    done = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named(model).items()}
    start = values(model)

    def note(*_: Any) -> None:
        for name, p in named(model).items():
            done[name] += (before[name] - p.detach()).double()

    for step in range(12):
        before = values(model)
        hook = optimizer.register_step_post_hook(note)
        # Ours came first: move it behind the one that notes.
        optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
        go(model, optimizer, range(step, step + 1))
        hook.remove()
    left = residuals(steps_taken)
    common = steps_taken.state_dict()["local"]["shared"]
    found = {}
    for name, p in named(model).items():
        total = done[name]
        dist.all_reduce(total)
        waits = left.get(name, torch.zeros(p.numel())).double().view(p.shape)
        dist.all_reduce(waits)
        moved = (start[name] - common[name]).double()
        size = dist.get_world_size()
        found[name] = float((total / size - moved - waits / size).abs().max())
    steps_taken.detach()
    return found


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_what_optimizers_have_done_arrives_or_waits(keep: float) -> None:
    for found in ranks.run(on_conservation, keep, ranks=2):
        assert max(found.values()) < 1e-5


def on_kept() -> dict[str, Any]:
    """What a rank goes on from, and what all go on from when they end."""
    model = net()
    steps_taken, optimizer = local(model, "topk:0.1", adam(model), keep=0.5, every=2)
    go(model, optimizer, range(4))
    common = steps_taken.state_dict()["local"]["shared"]
    left = residuals(steps_taken)
    wanted = {
        name: common[name] - 0.5 * left[name].view(p.shape) if name in left else common[name]
        for name, p in named(model).items()
    }
    pairs = [(p.detach(), wanted[name]) for name, p in named(model).items()]
    found: dict[str, Any] = {"as wanted": all(torch.allclose(p, w, atol=1e-7) for p, w in pairs)}
    found["own"] = digest(p.detach() for p in model.parameters())
    found["common"] = digest(common.values())
    with steps_taken:
        pass
    return found | {"end": digest(p.detach() for p in model.parameters())}


def test_what_was_not_sent_stays_with_its_rank_until_the_end() -> None:
    one, other = ranks.run(on_kept, ranks=2)
    assert one["as wanted"]
    assert other["as wanted"]
    assert one["own"] != other["own"]
    assert one["common"] == other["common"]
    assert one["end"] == other["end"]


def on_alone() -> bool:
    """A group of one: nothing changes."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model, reference = net(), net()
    steps_taken, optimizer = local(
        model, "topk:0.1", adam(model), every=2, group=groups[dist.get_rank()]
    )
    with steps_taken:
        go(model, optimizer, range(5))
    go(reference, adam(reference), range(5))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return all(torch.allclose(p, q, atol=1e-6) for p, q in pairs)


def test_a_rank_by_itself_trains_as_it_would_without() -> None:
    assert all(ranks.run(on_alone, ranks=2))


# Models


class Mixed(nn.Module):
    """Tied, frozen and unused parameters, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 20)
        self.norm = nn.BatchNorm1d(20)
        self.second = nn.Linear(20, 20)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.unused = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.second(self.norm(self.first(x)).relu()))
        return y


def on_mixed() -> dict[str, Any]:
    model = Mixed()
    frozen = model.frozen.weight.clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR, weight_decay=0.1)
    steps_taken, _ = local(model, "topk:0.2", optimizer, every=2)
    go(model, optimizer, range(3))
    assert model.norm.running_mean is not None
    means = [torch.zeros(20) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model.norm.running_mean)
    go(model, optimizer, range(3, 4))
    found = {
        "names": sorted(steps_taken.stats()["tensors"]),
        "apart before": not torch.equal(means[0], means[1]),
        "same": raised(lambda: tw.check_replicas(model, buffers=False)),
        "buffer": digest([model.norm.running_mean]),
        "frozen": torch.equal(frozen, model.frozen.weight),
        "batches": int(model.norm.num_batches_tracked or 0),
    }
    steps_taken.detach()
    return found


def test_tied_frozen_unused_and_batchnorm() -> None:
    one, other = ranks.run(on_mixed, ranks=2)
    assert one["names"].count("first.weight") == 1
    assert "second.weight" not in one["names"]
    assert not any("frozen" in name for name in one["names"])
    assert "unused.weight" in one["names"]
    assert "(buffer) norm.running_mean" in one["names"]
    assert one["apart before"]
    assert one["same"] == ""
    assert one["buffer"] == other["buffer"]
    assert one["frozen"]
    assert one["batches"] == 4


def on_half() -> dict[str, Any]:
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    steps_taken, _ = local(model, "quantize:8", optimizer, every=2)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step).bfloat16()).square().mean().backward()
        optimizer.step()
    state = steps_taken.state_dict()["local"]
    steps_taken.detach()
    return {
        "types": {str(t.dtype) for t in state["shared"].values()},
        "model": {str(p.dtype) for p in model.parameters()},
        "digest": digest(p.detach() for p in model.parameters()),
    }


def test_half_parameters_have_a_common_copy_in_full() -> None:
    one, other = ranks.run(on_half, ranks=2)
    assert one["types"] == {"torch.float32"}
    assert one["model"] == {"torch.bfloat16"}
    assert one["digest"] == other["digest"]


def on_different_start() -> str:
    model = net(seed=dist.get_rank())
    steps_taken, optimizer = local(model, every=2)
    go(model, optimizer, range(2))
    steps_taken.detach()
    return digest(p.detach() for p in model.parameters())


def test_ranks_that_come_with_different_parameters_start_alike() -> None:
    assert len(set(ranks.run(on_different_start, ranks=2))) == 1


class Untrained(nn.Module):
    """Frozen parameters, and buffers of types that are not averaged."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.trained = nn.Linear(20, 20)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.register_buffer("places", torch.arange(5) + own)
        self.register_buffer("turns", torch.full((3,), own, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(bool(own)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.trained(x))
        return y


def on_untrained() -> list[str]:
    torch.manual_seed(dist.get_rank())
    model = Untrained(dist.get_rank())
    steps_taken, optimizer = local(
        model, optimizer=torch.optim.SGD(model.trained.parameters(), lr=LR), every=2
    )
    with steps_taken:
        go(model, optimizer, range(2))
    return [raised(lambda: tw.check_replicas(model, buffers=True)), digest([model.places])]


def test_what_is_not_trained_is_that_of_the_first_rank() -> None:
    wanted = digest([torch.arange(5)])
    assert ranks.run(on_untrained, ranks=2) == [["", wanted]] * 2


class Ignored(nn.Module):
    """A parameter and a buffer that are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = dist.get_rank()
        self.common, self.own = nn.Linear(20, 20), nn.Module()
        self.own.expert = nn.Parameter(torch.full((3 + own,), float(own)))
        self.own.register_buffer("place", torch.full((2,), own))
        self.own.register_buffer("mean", torch.full((2 + own,), float(own)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.common(x) + self.own.expert.mean()
        return y


def on_ignored() -> list[Any]:
    inner = Ignored()
    told = ["own.expert", "own.place", "own.mean"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, told)
    model = nn.parallel.DistributedDataParallel(inner)
    steps_taken, optimizer = local(
        model, optimizer=torch.optim.SGD(inner.common.parameters(), lr=LR), every=2
    )
    with steps_taken:
        go(model, optimizer, range(3))
        inner.own.mean.add_(1.0)
    own = [inner.own.expert.tolist(), inner.own.place.tolist(), inner.own.mean.tolist()]
    return [own, raised(lambda: tw.check_replicas(model, buffers=True))]


def test_what_ddp_was_told_to_ignore_stays_with_each_rank() -> None:
    for own, found in enumerate(ranks.run(on_ignored, ranks=2)):
        assert found == [[[own] * (3 + own), [own] * 2, [own + 1.0] * (2 + own)], ""]


def on_steps_between() -> int:
    model = net()
    steps_taken, optimizer = local(model, every=100)
    go(model, optimizer, range(1))
    calls = []
    listed = local_module._parameters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_module, "_parameters", lambda o: calls.append(1) or listed(o))
        go(model, optimizer, range(1, 5))
    steps_taken.detach()
    return len(calls)


def test_steps_between_exchanges_do_not_look_at_each_parameter() -> None:
    assert ranks.run(on_steps_between, ranks=2) == [0, 0]


def on_thawed() -> dict[str, str]:
    model = net()
    model[0].requires_grad_(False)
    steps_taken, optimizer = local(model, every=2)
    go(model, optimizer, range(2))
    model[4].requires_grad_(False)
    found = {"frozen": raised(lambda: go(model, optimizer, range(2, 4)))}
    model[4].requires_grad_(True)
    found["thawed again"] = raised(lambda: go(model, optimizer, range(4, 6)))
    model[0].requires_grad_(True)
    found["thawed"] = raised(lambda: go(model, optimizer, range(6, 7)))
    steps_taken.detach()
    return found


def test_parameters_that_were_frozen_are_refused_when_they_are_trained() -> None:
    for found in ranks.run(on_thawed, ranks=2):
        assert found["frozen"] == found["thawed again"] == ""
        assert "trains 2 tensors that it did not train" in found["thawed"]


def on_compiled_step() -> tuple[int, int, bool]:
    model = net()
    steps_taken, optimizer = local(model, every=2)
    step = torch.compile(optimizer.step, backend="eager")
    with steps_taken:
        for i in range(4):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            step()
    reference = net()
    again, plain_sgd = local(reference, every=2)
    with again:
        go(reference, plain_sgd, range(4))
    return steps_taken.inner_steps, steps_taken.step, all_same(values(model), values(reference))


def test_a_compiled_step_is_one() -> None:
    assert ranks.run(on_compiled_step, ranks=2) == [(4, 3, True)] * 2


# Buffers


class Buffered(nn.Module):
    """A mask with infinities, and a mean that forward replaces from some step on."""

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.first.register_buffer("mask", torch.full((length, length), -torch.inf).triu(1))
        self.second.register_buffer("table", torch.tensor([torch.nan, torch.inf, 1.0]))
        self.second.register_buffer("mean", torch.zeros(20))
        self.moves = True

    def forward(self, x: Tensor) -> Tensor:
        if self.moves:
            self.second.mean = 0.5 * self.second.mean + 0.5 * x.detach().mean(0)
        y: Tensor = self.second(self.first(x - self.second.mean.to(x)))
        return y


def buffers_apart(model: nn.Module) -> str:
    return raised(lambda: tw.check_replicas(model, buffers=True))


def on_buffers(method: str, begins: int, steps: int) -> dict[str, Any]:
    """The mean begins to move on rank 1 alone, and there at some step."""
    model = Buffered()
    steps_taken, optimizer = local(model, method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            model.moves = dist.get_rank() == 1 and step >= begins
            go(model, optimizer, range(step, step + 1))
        steps_taken.finish()
    found = {
        "texts": [str(w.message) for w in caught if w.category is ThinwireWarning],
        "apart": buffers_apart(model),
        "skipped": steps_taken.stats()["skipped_rounds"],
        "sent": [n for n in steps_taken.stats()["tensors"] if n.startswith("(buffer) ")],
        "moved": bool(model.second.mean.any()),
        "mask": digest([model.first.mask]) == digest([Buffered().first.mask]),
    }
    steps_taken.detach()
    return found


@pytest.mark.parametrize(
    ("method", "begins", "steps"),
    [
        ("local-sgd:2", 0, 4),
        ("local-sgd:2", 4, 6),
        ("local-sgd:4", 2, 3),  # `finish` finds it
        ("post-local-sgd:2,warmup=3", 2, 3),
        ("streaming-diloco:every=4,fragments=2,overlap=1", 5, 6),
        ("streaming-diloco:every=4,fragments=2,overlap=1", 5, 9),
    ],
)
def test_only_buffers_that_change_are_averaged(method: str, begins: int, steps: int) -> None:
    for found in ranks.run(on_buffers, method, begins, steps, ranks=2):
        assert found == {
            "texts": [],
            "apart": "",
            "skipped": 0,
            "sent": ["(buffer) second.mean"],
            "moved": True,
            "mask": True,
        }


def on_constant(dtype: str) -> dict[str, Any]:
    """No buffer changes, but perhaps the type of all of them."""
    model = Buffered()
    model.moves = False
    steps_taken, optimizer = local(model, every=2)
    go(model, optimizer, range(2))
    model.first.mask = model.first.mask.to(getattr(torch, dtype))
    with steps_taken:
        go(model, optimizer, range(2, 4))
    tensors = steps_taken.stats()["tensors"]
    return {
        "sent": [name for name in tensors if name.startswith("(buffer) ")],
        "skipped": steps_taken.stats()["skipped_rounds"],
        "type": str(model.first.mask.dtype),
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_buffers_that_do_not_change_are_not_sent(dtype: str) -> None:
    for found in ranks.run(on_constant, dtype, ranks=2):
        assert found == {"sent": [], "skipped": 0, "type": f"torch.{dtype}"}


def on_broken_mask() -> dict[str, Any]:
    """Somebody changes a mask, which keeps its infinities."""
    model = Buffered()
    steps_taken, optimizer = local(model)
    go(model, optimizer, range(2))
    model.first.mask[0, 0] = 5.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go(model, optimizer, range(2, 8))
    (text,) = [str(w.message) for w in caught if w.category is ThinwireWarning]
    steps_taken.detach()
    return {
        "text": text[:50],
        "skipped": steps_taken.stats()["skipped_rounds"],
        "mask": float(model.first.mask[0, 0]),
    }


def test_a_mask_that_is_changed_costs_one_round() -> None:
    wanted = {
        "text": "LocalSteps: buffers (first.mask) of a rank hold Na",
        "skipped": 1,
        "mask": 0.0,
    }
    assert ranks.run(on_broken_mask, ranks=2) == [wanted] * 2


def on_range() -> dict[str, Any]:
    """Only rank 0 ever sees what a range is of: that of the others stays infinite."""
    model = net()
    model.register_buffer("low", torch.full((2,), torch.inf))
    steps_taken, optimizer = local(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            if step and dist.get_rank() == 0:
                model.low.clamp_(max=float(step))
            go(model, optimizer, range(step, step + 1))
    steps_taken.finish()
    found = {
        "texts": [str(w.message) for w in caught if w.category is ThinwireWarning],
        "skipped": steps_taken.stats()["skipped_rounds"],
        "low": model.low.tolist(),
    }
    steps_taken.detach()
    return found


def test_a_buffer_that_is_infinite_on_some_ranks_costs_one_round() -> None:
    one, other = ranks.run(on_range, ranks=2)
    assert (one["low"], other["low"]) == ([3.0] * 2, [torch.inf] * 2)
    for found in (one, other):
        (text,) = found["texts"]
        assert "low held infinity before, too: not averaged any more" in text
        assert found["skipped"] == 1


def on_other_type() -> str:
    model = Mixed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    steps_taken, _ = local(model, optimizer=optimizer, every=2)
    model.double()
    with steps_taken:
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step).double()).square().mean().backward()
            optimizer.step()
    return buffers_apart(model)


def test_buffers_of_a_type_that_came_later_are_averaged() -> None:
    assert ranks.run(on_other_type, ranks=2) == ["", ""]


def on_reshaped(when: int) -> dict[str, Any]:
    """Rank 1 replaces a mask by a longer one, and removes the mean; all go on."""
    model = Buffered()
    steps_taken, optimizer = local(model, every=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            if step == when and dist.get_rank() == 1:
                model.first.mask = torch.zeros(3)
            go(model, optimizer, range(step, step + 1))
    state = copy.deepcopy(steps_taken.state_dict())
    found = {
        "texts": [str(w.message) for w in caught if w.category is ThinwireWarning],
        "mask": list(model.first.mask.shape),
        "error": raised(steps_taken.finish),
        "mean": digest([model.second.mean]),
    }
    steps_taken.detach()
    fresh_model = Buffered()
    again, optimizer = local(fresh_model, every=2)
    again.load_state_dict(state)
    go(fresh_model, optimizer, range(6, 8))
    found["loaded"] = raised(again.finish)
    again.detach()
    return found


@pytest.mark.parametrize("when", [0, 3])
def test_a_buffer_of_another_shape_stays_with_each_rank(when: int) -> None:
    one, other = ranks.run(on_reshaped, when, ranks=2)
    assert (one["mask"], other["mask"]) == ([16, 16], [3])
    assert one["mean"] == other["mean"]
    for found in (one, other):
        assert found["error"] == found["loaded"] == ""
        assert [("first.mask" in text) for text in found["texts"]] == [True] * bool(when)


def on_nodes(inner: str) -> dict[str, Any]:
    """Many uncompressed bytes, which nodes divide and round."""
    model = nn.Sequential(nn.Linear(20, 4), nn.Linear(4, 40000))
    model.register_buffer("constant", torch.arange(5000.0))
    model.register_buffer("own", torch.zeros(5000))
    steps_taken, optimizer = local(
        model, "quantize:8", every=2, nodes=tw.Nodes(2, inner=inner), check_every=1
    )
    for step in range(4):
        model.own.fill_(1000.0 + dist.get_rank())
        go(model, optimizer, range(step, step + 1))
    before = steps_taken.step
    steps_taken.finish()
    found = {
        "exchanges": steps_taken.step - before,
        "constant": bool((model.constant == torch.arange(5000.0)).all()),
        "own": model.own.unique().tolist(),
    }
    next(model.parameters()).data[0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go(model, optimizer, range(4, 6))
    found["skipped"] = steps_taken.stats()["skipped_rounds"]
    steps_taken.detach()
    return found


@pytest.mark.parametrize("inner", ["cast:bf16", "quantize:8"])
def test_nodes_do_not_round_buffers_and_flags(inner: str) -> None:
    wanted = {"exchanges": 1, "constant": True, "own": [1001.5], "skipped": 1}
    assert ranks.run(on_nodes, inner, ranks=4) == [wanted] * 4


def on_first_change_skipped() -> dict[str, Any]:
    """A mean moves for the first time in a round that is left out."""
    model = Mixed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    steps_taken, _ = local(model, optimizer=optimizer, every=2)
    model.eval()
    go(model, optimizer, range(4))
    model.train()
    go(model, optimizer, range(4, 5))
    if dist.get_rank() == 1:
        model.norm.running_mean[0] = torch.nan  # type: ignore[index]
        model.first.bias.data[0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go(model, optimizer, range(5, 6))
    found: dict[str, Any] = {"back": [t.tolist() for t in (model.norm.running_mean,)]}
    go(model, optimizer, range(6, 8))
    steps_taken.finish()
    found["skipped"] = steps_taken.stats()["skipped_rounds"]
    found["apart"] = buffers_apart(model)
    steps_taken.detach()
    return found


def test_a_buffer_goes_back_with_the_round_in_which_it_first_changed() -> None:
    for found in ranks.run(on_first_change_skipped, ranks=2):
        assert found == {"back": [[0.0] * 20], "skipped": 1, "apart": ""}


class Cached(nn.Module):
    """Forward passes put something of another shape in a buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 20)
        self.register_buffer("cache", torch.zeros(1, 20))
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("angles", torch.arange(4.0).expand(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.detach()
        y: Tensor = self.layer(x)
        return y


def on_early_state() -> dict[str, str]:
    """Saved before the first step, by a rank that has replaced a buffer and one that has not."""
    model = Cached()
    steps_taken, _ = local(model, every=2)
    model.count.fill_(7.0)
    if dist.get_rank() == 1:
        model(batch(0))
    states = {
        "own": copy.deepcopy(steps_taken.state_dict()),
        "gathered": steps_taken.gathered_state_dict(everywhere=True),
    }
    each = copy.deepcopy(states["gathered"]["ranks"])
    three = [{**each[min(i, 1)], "rank": i, "world_size": 3} for i in range(3)]
    states["others"] = {"world_size": 3, "ranks": three}
    steps_taken.detach()
    found = {}
    for name, state in states.items():
        model = Cached()
        steps_taken, optimizer = local(model, every=2)
        found[name] = raised(lambda: steps_taken.load_state_dict(state))  # noqa: B023
        found[f"{name} count"] = "" if model.count.tolist() == [7.0] * 3 else "other"
        go(model, optimizer, range(2))
        found[f"{name} end"] = raised(steps_taken.finish)
        steps_taken.detach()
    return found


def test_a_state_from_before_the_first_step_needs_no_buffer_that_was_replaced() -> None:
    for found in ranks.run(on_early_state, ranks=2):
        assert set(found.values()) == {""}, found


def on_constants_of_others() -> list[Any]:
    """Constants that no mean of three brings back to the bit, an expanded one among them."""
    model = Cached()
    model.register_buffer("tenths", torch.arange(1, 2001, dtype=torch.float64) / 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    steps_taken, _ = local(model, optimizer=optimizer, every=2)
    go(model, optimizer, range(3))
    (own, _) = steps_taken.gathered_state_dict(everywhere=True)["ranks"]
    steps_taken.detach()
    three = [{**copy.deepcopy(own), "rank": rank, "world_size": 3} for rank in range(3)]
    steps_taken, _ = local(model, optimizer=optimizer, every=2)
    found = [
        raised(lambda: steps_taken.load_state_dict({"world_size": 3, "ranks": three})),
        torch.equal(model.tenths, torch.arange(1, 2001, dtype=torch.float64) / 10),
    ]
    go(model, optimizer, range(3, 6))
    sent = [n for n in steps_taken.stats()["tensors"] if n.startswith("(buffer) ")]
    steps_taken.detach()
    return [*found, sent]


def test_constants_stay_what_they_were_when_others_go_on() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ranks.run(on_constants_of_others, ranks=2) == [["", True, []]] * 2


def on_other_kinds() -> list[Any]:
    """Compressed as one, with a buffer in another type."""
    model = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20)).bfloat16()
    model.register_buffer("count", torch.zeros(3, dtype=torch.float64))
    steps_taken, optimizer = local(model, "topk:0.2", granularity="bucket", min_numel=0)
    for step in range(4):
        model.count.fill_(float(step // 2 * (1 + dist.get_rank())))
        optimizer.zero_grad()
        model(batch(step).bfloat16()).square().mean().backward()
        optimizer.step()
    steps_taken.finish()
    found = [buffers_apart(model), model.count.tolist()]
    steps_taken.detach()
    model[2].double()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    refused = raised(lambda: tw.LocalSteps(model, sgd, granularity="bucket"))
    return [*found, refused.split(", got")[0], len(sgd._optimizer_step_post_hooks)]


def test_buffers_of_any_type_go_with_parameters_that_are_compressed_as_one() -> None:
    text = "ValueError: granularity='bucket': tensors of one type and device"
    assert ranks.run(on_other_kinds, ranks=2) == [["", [1.5] * 3, text, 0]] * 2


# DDP


def on_ddp_model() -> dict[str, Any]:
    model = plain(find_unused_parameters=True)
    steps_taken, optimizer = local(model, every=3)
    found: dict[str, Any] = {}
    for step in range(2):
        model.require_backward_grad_sync = True  # as loops with accumulation do
        go(model, optimizer, range(step, step + 1))
    grad = next(iter(named(model).values())).grad
    assert grad is not None
    found["gradient"] = digest([grad])
    found["flag"] = model.require_backward_grad_sync
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss_of(twin, 9).backward()
    found["copy"] = digest([p.grad for p in twin.parameters() if p.grad is not None])
    go(model, optimizer, range(2, 3))
    found["parameters"] = digest(p.detach() for p in model.parameters())
    steps_taken.detach()
    model.zero_grad()
    loss_of(model, 3).backward()
    found["detached"] = digest([p.grad for p in model.parameters() if p.grad is not None])
    return found


def test_ddp_does_not_exchange_gradients_until_detached() -> None:
    one, other = ranks.run(on_ddp_model, ranks=2)
    assert one["gradient"] != other["gradient"]
    assert one["flag"]
    assert one["copy"] == other["copy"]  # a copy exchanges as DDP does
    assert one["parameters"] == other["parameters"]
    assert one["detached"] == other["detached"]


# Steps that not all ranks take


def on_scaler() -> dict[str, Any]:
    """Rank 1 overflows in the second step."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    steps_taken, optimizer = local(model, every=2, scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    found = {
        "steps": steps_taken.inner_steps,
        "rounds": steps_taken.step,
        "digest": digest(p.detach() for p in model.parameters()),
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
    }
    steps_taken.detach()
    found["undone"] = "step" not in vars(scaler)
    # Two models with one scaler, detached in either order.
    for order in (1, -1):
        both = [local(net(seed), scaler=scaler)[0] for seed in range(2)]
        for each in both[::order]:
            each.detach()
        steps = scaler.step
        found[f"passes on {order}"] = raised(lambda steps=steps: steps(None))  # type: ignore[misc]
    return found


def test_a_step_that_the_scaler_skips_is_a_step() -> None:
    one, other = ranks.run(on_scaler, ranks=2)
    assert one == other
    assert one["steps"] == 4
    assert one["rounds"] == 2
    assert one["finite"]
    assert one["undone"]
    assert one["passes on 1"] == one["passes on -1"] != ""


def on_uneven(method: str, counts: list[int]) -> dict[str, Any]:
    model = net()
    steps_taken, optimizer = local(model, method, adam(model))
    with steps_taken:
        go(model, optimizer, range(counts[dist.get_rank()]))
    return {
        "digest": digest(p.detach() for p in model.parameters()),
        "exchanges": steps_taken.step,
        "steps": steps_taken.inner_steps,
    }


@pytest.mark.parametrize(
    "method",
    [
        "local-sgd:3",
        "streaming-diloco:every=4,fragments=2,overlap=1",
        "post-local-sgd:3,warmup=4",
        "adam-update:0.1",
    ],
)
def test_ranks_with_uneven_data_end_together(method: str) -> None:
    found = ranks.run(on_uneven, method, [9, 2, 6], ranks=3)
    assert len({each["digest"] for each in found}) == 1
    assert len({each["exchanges"] for each in found}) == 1
    assert [each["steps"] for each in found] == [9, 2, 6]


def on_idle() -> float:
    """Rank 1 has no data: what rank 0 does counts in full."""
    model, reference = net(), net()
    steps_taken, optimizer = local(model, every=2)
    if dist.get_rank() == 0:
        go(model, optimizer, range(2))
    steps_taken.finish()
    steps_taken.detach()
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(reference, step, rank=0).backward()
        optimizer.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p - q).abs().max()) for p, q in pairs)


def test_ranks_that_did_nothing_do_not_slow_the_others() -> None:
    assert max(ranks.run(on_idle, ranks=2)) < 1e-6


def on_idle_fragments() -> list[float]:
    """Rank 0 takes four steps and rank 1 one; by how many the tensors of two fragments move."""
    model = net()
    start = values(model)
    steps_taken, optimizer = local(model, every=4, fragments=2)
    counts = [4, 1]
    for _ in range(counts[dist.get_rank()]):
        for p in model.parameters():
            p.grad = torch.full_like(p, 10.0)  # a step of 1
        optimizer.step()
    steps_taken.finish()
    steps_taken.detach()
    return [float((start[n] - p.detach()).mean()) for n, p in named(model).items()]


def test_each_fragment_counts_who_has_moved_it() -> None:
    for found in ranks.run(on_idle_fragments, ranks=2):
        # The first and the last layer: two steps and one, then two of rank 0 alone. The layer
        # between: four steps and one.
        assert found == pytest.approx([3.5, 3.5, 2.5, 2.5, 3.5, 3.5], abs=1e-5)


def on_bad(what: str) -> dict[str, Any]:
    """A buffer or a vector of rank 1 holds NaN once."""
    model = Mixed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    steps_taken, _ = local(model, "topk:0.2", optimizer, every=2)
    go(model, optimizer, range(2))
    before = residuals(steps_taken)
    assert model.norm.running_mean is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go(model, optimizer, range(2, 3))
        bad = model.norm.running_mean if what == "buffer" else model.first.bias.data
        if dist.get_rank() == 1:
            bad[0] = float("nan")
        if what == "buffer":
            model.eval()  # nobody reads it, nobody mends it
        go(model, optimizer, range(3, 4))
    found = {
        "skipped": steps_taken.stats()["skipped_rounds"],
        "residuals": all_same(before, residuals(steps_taken)),
        "texts": [str(w.message) for w in caught if w.category is ThinwireWarning],
    }
    go(model, optimizer, range(4, 6))
    found["later"] = steps_taken.stats()["skipped_rounds"]
    steps_taken.detach()
    return found


@pytest.mark.parametrize("what", ["buffer", "vector"])
def test_what_is_not_finite_costs_one_round_and_no_residual(what: str) -> None:
    bad = "norm.running_mean" if what == "buffer" else "norm.running_mean, norm.running_var"
    whose = f"parameters and buffers ({bad})"
    for found in ranks.run(on_bad, what, ranks=2):
        (text,) = found.pop("texts")
        assert f"LocalSteps: {whose} of a rank hold NaN or infinity" in text
        assert found == {"skipped": 1, "residuals": True, "later": 1}


class Interrupting:
    """Waiting is interrupted once."""

    def __init__(self, handle: Any) -> None:
        self._wait, self._done = handle.wait, False

    def __call__(self, timeout: float | None = None) -> None:
        if not self._done:
            self._done = True
            raise KeyboardInterrupt
        self._wait(timeout)


def on_interrupt() -> str:
    """Somebody presses Ctrl-C on rank 1, and goes on."""
    model = net()
    steps_taken, optimizer = local(model, "topk:0.2", every=2)
    average = steps_taken._average

    def interrupted(*args: Any, **options: Any) -> Any:
        handle = average(*args, **options)
        if steps_taken.step == 2 and dist.get_rank() == 1:
            handle.wait = Interrupting(handle)  # type: ignore[method-assign]
        return handle

    steps_taken._average = interrupted  # type: ignore[method-assign]
    for step in range(7):
        try:
            go(model, optimizer, range(step, step + 1))
        except KeyboardInterrupt:
            assert step == 3
    steps_taken.finish()
    steps_taken.detach()
    return digest(p.detach() for p in model.parameters())


def test_an_interrupted_exchange_is_taken_up_again() -> None:
    assert len(set(ranks.run(on_interrupt, ranks=2))) == 1


def on_mismatch() -> str:
    model = net()
    steps_taken, optimizer = local(model, every=1 + dist.get_rank())
    found = raised(lambda: go(model, optimizer, range(2)))
    steps_taken.detach()
    return found


def test_ranks_must_agree_in_their_rounds() -> None:
    for found in ranks.run(on_mismatch, ranks=2):
        assert found.startswith("MismatchError")
        assert "every 2" in found


def on_nan(compressor: str) -> dict[str, Any]:
    model = net()
    steps_taken, optimizer = local(model, compressor=compressor, every=2, min_numel=10)
    go(model, optimizer, range(2))
    before = values(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go(model, optimizer, range(2, 3))
        if dist.get_rank() == 1:
            next(model.parameters()).data[0, 0] = float("nan")
        go(model, optimizer, range(3, 4))
    texts = [str(w.message) for w in caught if w.category is ThinwireWarning]
    after = values(model)
    go(model, optimizer, range(4, 6))
    found = {
        "back": all_same(before, after),
        "texts": texts,
        "skipped": steps_taken.stats()["skipped_rounds"],
        "digest": digest(p.detach() for p in model.parameters()),
    }
    steps_taken.detach()
    return found


@pytest.mark.parametrize("compressor", ["none", "topk:0.5", "powersgd:1"])
def test_a_rank_with_nan_costs_a_round(compressor: str) -> None:
    """Who has finished is told all the same: uncompressed, in an exchange of its own."""
    one, other = ranks.run(on_nan, compressor, ranks=2)
    assert one == other
    assert one["back"]
    assert one["skipped"] == 1
    assert len(one["texts"]) == 1
    assert "NaN" in one["texts"][0]


# Figures


class Written:
    def __init__(self) -> None:
        self.tags: set[str] = set()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.tags.add(tag)


def on_figures() -> dict[str, Any]:
    model = net()
    steps_taken, optimizer = local(
        model, "diloco:4,compressor=(quantize:4)", measure_every=1, check_every=1
    )
    writer = Written()
    steps_taken.log_to(writer, every=1)
    before = repr(steps_taken)
    go(model, optimizer, range(8))
    found = {
        "stats": steps_taken.stats(),
        "summary": steps_taken.summary(),
        "explain": steps_taken.explain(),
        "tags": writer.tags,
        "before": before,
    }
    steps_taken.detach()
    return found | {"after": repr(steps_taken)}


def test_figures_are_by_step_and_by_round() -> None:
    found = ranks.run(on_figures, ranks=2)[0]
    stats = found["stats"]
    assert stats["inner_steps"] == 8
    assert stats["rounds"] == stats["step"] == 2
    sent = stats["total"]["bytes_sent"]
    assert stats["bytes_per_inner_step"] == sent / 8
    assert stats["bytes_per_round"] == sent / 2
    assert stats["tensors"]["0.weight"]["relative_error"] is not None
    assert PROGRESS in stats["tensors"]
    assert "8 optimizer steps, 2 rounds" in found["summary"]
    assert "4 optimizer steps of its own" in found["explain"]
    assert "OuterSGD(lr=0.7" in found["explain"]
    assert "thinwire/bytes_per_round" in found["tags"]
    assert "0 steps" in found["before"]
    assert "detached" in found["after"]


def on_common() -> dict[str, bool]:
    model = net()
    steps_taken, optimizer = local(model, every=2)
    start = values(model)
    go(model, optimizer, range(1))
    own = values(model)
    with steps_taken.common_parameters():
        inside = values(model)
    found = {"inside": all_same(inside, start), "outside": all_same(values(model), own)}
    found["moved"] = not all_same(start, own)
    steps_taken.detach()
    return found


def test_the_common_parameters_can_be_evaluated() -> None:
    assert all(all(each.values()) for each in ranks.run(on_common, ranks=2))


def on_outer() -> bool:
    """Any torch optimizer can be the outer one."""
    model, reference = net(), net()
    steps_taken, optimizer = local(
        model, every=2, outer=lambda tensors: torch.optim.Adam(tensors, lr=0.5), fragments=2
    )
    go_given(model, optimizer, range(4))
    outer = torch.optim.Adam(reference.parameters(), lr=0.5)
    assert len(steps_taken.outer) == 2
    # Two fragments, a step apart: both have had two rounds of two steps.
    size = dist.get_world_size()
    own = [[p.detach().clone() for p in reference.parameters()] for _ in range(size)]
    names = [name for name, _ in reference.named_parameters()]
    layers = [int(name[0]) // 2 for name in names]
    for step in range(4):
        for rank in range(size):
            for i, name in enumerate(names):
                own[rank][i] -= LR * torch.from_numpy(
                    given_gradient(name, own[rank][i].shape, step, rank)
                )
        for i, p in enumerate(reference.parameters()):
            p.grad = None
            if layers[i] % 2 == step % 2:
                p.grad = p.detach() - torch.stack([o[i] for o in own]).mean(0)
        outer.step()
        for i, p in enumerate(reference.parameters()):
            if layers[i] % 2 == step % 2:
                for o in own:
                    o[i] = p.detach().clone()
    steps_taken.detach()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    close_enough = [torch.allclose(p, q, atol=1e-4) for p, q in pairs]
    # After step 3 only the second fragment is the common one; the first has gone on.
    return all(ok for ok, layer in zip(close_enough, layers, strict=True) if layer % 2 == 1)


def test_any_optimizer_can_be_the_outer_one() -> None:
    assert all(ranks.run(on_outer, ranks=2))


# Gains


def noisy(common: float, noise: float, size: int, exchanges: int = 200) -> list[float]:
    """The gains that ranks measure whose gradients have so much in common, and so much not."""
    shapes = {"matrix": (50, 30), "vector": (7,), "element": ()}
    gain = NoiseGain(list(shapes), seed=3)
    drawn = torch.Generator().manual_seed(0)
    steady = {name: common * torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
    for step in range(exchanges):
        sketches = []
        for _ in range(size):
            parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
            for name, p in parameters.items():
                p.grad = steady[name] + noise * torch.randn(p.shape, generator=drawn)
            sketches.append(gain.sketch(parameters, step))
        gain.learn(torch.stack(sketches).mean(0))
    return [gain.gain(name, size) for name in shapes]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("common", "noise"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 2.0)])
def test_gains_are_the_roots_of_what_noise_adds(size: int, common: float, noise: float) -> None:
    wanted = ((common**2 + noise**2) / (common**2 + noise**2 / size)) ** 0.5
    found = noisy(common, noise, size)
    assert all(1 <= gain <= size**0.5 for gain in found)
    # The moving averages hold 8 sums of about 39 exchanges: each is right to a relative
    # sqrt(2 / 312) = 8 %, the root of their ratio to less; three of those.
    assert found[0] == pytest.approx(wanted, rel=0.24)


def test_a_sketch_is_linear_and_its_squares_are_those_of_the_gradient() -> None:
    p, q = torch.zeros(1000), torch.zeros(1000)
    p.grad, q.grad = torch.randn(1000), torch.randn(1000)
    both = torch.zeros(1000)
    both.grad = p.grad + q.grad
    gain = NoiseGain(["w"], seed=0)
    squares = []
    for step in range(400):
        a, b, c = (gain.sketch({"w": each}, step)[0] for each in (p, q, both))
        assert torch.allclose(a[:8] + b[:8], c[:8], atol=1e-4)
        squares.append(float(a[8]))
    # 3,200 squares, of which each has a relative deviation of sqrt(2): five times their mean's.
    assert sum(squares) / 400 == pytest.approx(float(p.grad.square().sum()), rel=0.125)


def test_gradients_that_are_not_finite_teach_nothing() -> None:
    gain, p = NoiseGain(["w", "v"], seed=0), {"w": torch.zeros(9), "v": torch.zeros(9)}
    p["w"].grad, p["v"].grad = torch.ones(9), torch.full((9,), torch.inf)
    sketch = gain.sketch(p, 0)
    assert torch.isfinite(sketch).all()
    gain.learn(sketch)
    gain.learn(torch.zeros(gain.shape))
    assert [gain.gain(name, 4) for name in p] == [1.0, 1.0]


def on_gain() -> dict[str, Any]:
    """Common steps are the average of the ranks' times the gains before them."""
    model = net()
    steps_taken, optimizer = local(model, "none", adam(model), gain=True)
    wrong = 0.0
    for step in range(8):
        start, gains, done = values(model), steps_taken.gains, {}

        def note(*_: Any, into: Any = done) -> None:
            into.update(values(model))

        hook = optimizer.register_step_post_hook(note)
        optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
        go(model, optimizer, range(step, step + 1))
        hook.remove()
        for name, p in named(model).items():
            moved = start[name] - done[name]
            dist.all_reduce(moved)
            common = start[name] - gains[name] * moved / dist.get_world_size()
            wrong = max(wrong, float((common - p.detach()).abs().max()))
    found = {"wrong": wrong, "gains": steps_taken.gains, "words": steps_taken.explain()}
    found["scalar"] = steps_taken.scalars()["thinwire/gain"]
    steps_taken.detach()
    return found


def test_common_steps_are_lengthened_by_what_was_measured() -> None:
    one, other = ranks.run(on_gain, ranks=2)
    assert one["gains"] == other["gains"]
    for found in (one, other):
        assert found["wrong"] < 1e-6
        assert all(1 <= gain <= 2**0.5 for gain in found["gains"].values())
        assert max(found["gains"].values()) > 1
        assert "noisier than their mean" in found["words"]
        assert 1 <= found["scalar"] <= 2**0.5


# Checkpoints


CASES = {
    "diloco": ("diloco:4,compressor=(topk:0.2)", {}),
    "streaming": ("streaming-diloco:every=6,fragments=2,overlap=2,mixing=0.25", {}),
    "update": ("adam-update:0.1,ramp=6", {}),
    "warm": ("post-local-sgd:3,warmup=4", {}),
    "kept": ("topk:0.1", {"every": 2, "keep": 0.5}),
    "gained": ("adam-update:0.1,gain=true", {}),
}


def fresh(case: str) -> tuple[nn.Module, tw.LocalSteps, Any]:
    method, options = CASES[case]
    model = Mixed()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return model, local(model, method, optimizer, **options)[0], optimizer


def on_resume(case: str, place: str) -> dict[str, bool]:
    import torch.distributed.checkpoint as dcp

    model, steps_taken, optimizer = fresh(case)
    go(model, optimizer, range(7))
    own = copy.deepcopy(steps_taken.state_dict())
    gathered = steps_taken.gathered_state_dict(everywhere=True)
    torch.save(own, f"{place}/{dist.get_rank()}.pt")
    dcp.save({"local": steps_taken.stateful()}, checkpoint_id=f"{place}/dcp")
    tw.save_checkpoint(f"{place}/ours", {"local": own}, step=7)
    go(model, optimizer, range(7, 14))
    steps_taken.finish()
    wanted = values(model)
    steps_taken.detach()
    found = {}
    for way in ("plain", "gathered", "dcp", "checkpoint"):
        model, steps_taken, optimizer = fresh(case)
        if way == "plain":
            state = torch.load(f"{place}/{dist.get_rank()}.pt", weights_only=True)
            steps_taken.load_state_dict(state)
        elif way == "gathered":
            steps_taken.load_state_dict(gathered)
        elif way == "dcp":
            path = f"{place}/dcp"
            dcp.load({"local": steps_taken.stateful(path)}, checkpoint_id=path)
        else:
            loaded = tw.load_checkpoint(f"{place}/ours")
            assert loaded is not None
            steps_taken.load_state_dict(loaded.state["local"])
        go(model, optimizer, range(7, 14))
        steps_taken.finish()
        found[way] = all_same(values(model), wanted)
        steps_taken.detach()
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_in_the_middle_of_a_round_goes_on_bit_for_bit(
    case: str, tmp_path: Path
) -> None:
    for found in ranks.run(on_resume, case, str(tmp_path), ranks=2):
        assert found == dict.fromkeys(("plain", "gathered", "dcp", "checkpoint"), True)


def on_overlap() -> list[bool]:
    """Rank 1 comes to its first exchange when rank 0 has gone on with its steps."""
    store = dist.distributed_c10d._get_default_store()
    model = net()
    steps_taken, optimizer = local(model, "topk:0.2", every=4, overlap=2)
    go(model, optimizer, range(3))
    if dist.get_rank() == 1:
        store.wait(["overlap: rank 0 has gone on"])
    under_way = []
    for step in range(3, 6):
        before = values(model)
        go(model, optimizer, range(step, step + 1))
        if dist.get_rank() == 0:
            under_way.append(steps_taken._round is not None and not all_same(before, values(model)))
            if step == 4:
                store.set("overlap: rank 0 has gone on", "")
    steps_taken.finish()
    tw.check_replicas(model)
    steps_taken.detach()
    return under_way


def test_steps_go_on_while_an_exchange_is_under_way() -> None:
    assert ranks.run(on_overlap, ranks=2) == [[True, True, False], []]


def on_saved(case: str, place: str) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    model, steps_taken, optimizer = fresh(case)
    go(model, optimizer, range(7))
    gathered = steps_taken.gathered_state_dict()
    dcp.save({"local": steps_taken.stateful()}, checkpoint_id=f"{place}/dcp")
    if dist.get_rank() == 0:
        torch.save(gathered, f"{place}/gathered.pt")
    steps_taken.detach()
    return values(model)


def on_other_size(case: str, place: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    found: dict[str, Any] = {}
    for way in ("gathered", "dcp"):
        model, steps_taken, optimizer = fresh(case)
        if way == "gathered":
            steps_taken.load_state_dict(torch.load(f"{place}/gathered.pt", weights_only=True))
        else:
            path = f"{place}/dcp"
            dcp.load({"local": steps_taken.stateful(path)}, checkpoint_id=path)
        found[way] = values(model)
        go(model, optimizer, range(7, 12))
        steps_taken.finish()
        found[f"{way} end"] = digest(p.detach() for p in model.parameters())
        steps_taken.detach()
    return found


@pytest.mark.parametrize("case", ["diloco", "streaming"])
def test_another_number_of_ranks_goes_on_from_the_mean(case: str, tmp_path: Path) -> None:
    saved = ranks.run(on_saved, case, str(tmp_path), ranks=3)
    found = ranks.run(on_other_size, case, str(tmp_path), ranks=2)
    for way in ("gathered", "dcp"):
        for name, tensor in found[0][way].items():
            mean = torch.stack([one[name].double() for one in saved]).mean(0)
            assert torch.allclose(tensor.double(), mean, atol=1e-6)
        assert found[0][f"{way} end"] == found[1][f"{way} end"]


def on_old_state(case: str) -> dict[str, Any]:
    """A state as older versions have saved it, which sent all buffers; numbers in another type."""
    model, steps_taken, optimizer = fresh(case)
    go(model, optimizer, range(7))
    state = copy.deepcopy(steps_taken.state_dict())
    go(model, optimizer, range(7, 14))
    steps_taken.finish()
    wanted = values(model)
    steps_taken.detach()
    own = state["local"]
    for key in ("sent_buffers", "apart_buffers"):
        del own[key]
    if own["round"] is not None:
        del own["round"]["tensors"][FLAGS]
    for key in ("shared", "bases"):
        own[key] = {name: tensor.double() for name, tensor in own[key].items()}
    model, steps_taken, optimizer = fresh(case)
    steps_taken.load_state_dict(state)
    copies = [*steps_taken._shared.values(), *steps_taken._bases.values()]
    go(model, optimizer, range(7, 14))
    steps_taken.finish()
    found = {
        "same": all_same(values(model), wanted),
        "types": {str(each.dtype) for each in copies},
        "buffers": buffers_apart(model),
    }
    steps_taken.detach()
    return found


@pytest.mark.parametrize("case", ["diloco", "streaming", "kept"])
def test_states_of_older_versions_are_taken_up(case: str) -> None:
    for found in ranks.run(on_old_state, case, ranks=2):
        assert found == {"same": True, "types": {"torch.float32"}, "buffers": ""}


def on_refused_states() -> dict[str, str]:
    model, steps_taken, optimizer = fresh("diloco")
    go(model, optimizer, range(5))
    state = steps_taken.state_dict()
    before = digest([*(p.detach() for p in model.parameters()), *residuals(steps_taken).values()])
    other = {**state, "rank": 1 - state["rank"]}
    fewer = copy.deepcopy(state)
    del fewer["local"]["parameters"]["first.weight"]
    longer = copy.deepcopy(state)
    longer["local"]["shared"]["first.weight"] = torch.zeros(3)
    wire = {key: value for key, value in state.items() if key != "local"}
    inner = copy.deepcopy(state)
    inner["local"]["inner"][0]["param_groups"][0]["params"].pop()
    found = {
        name: raised(lambda given=given: steps_taken.load_state_dict(given))  # type: ignore[misc]
        for name, given in (
            *(("other", other), ("fewer", fewer), ("longer", longer), ("wire", wire)),
            ("inner", inner),
        )
    }
    after = digest([*(p.detach() for p in model.parameters()), *residuals(steps_taken).values()])
    found["changed"] = "" if before == after else "changed"
    steps_taken.detach()
    return found


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    for found in ranks.run(on_refused_states, ranks=2):
        assert "the state of rank" in found["other"]
        assert "first.weight" in found["fewer"]
        assert "must be a tensor of [20, 20]" in found["longer"]
        assert "no 'local'" in found["wire"]
        assert "other parameters" in found["inner"]
        assert found["changed"] == ""


# Failures


def on_loss(how: str, options: dict[str, Any]) -> dict[str, Any]:
    model = net()
    steps_taken, optimizer = local(model, "topk:0.2", adam(model), every=2, **options)
    go(model, optimizer, range(3))
    before = None
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    kept = residuals(steps_taken)
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    hook = optimizer.register_step_post_hook(lambda *_: states.append(values(model)))
    states: list[dict[str, Tensor]] = []
    optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
    error = None
    try:
        optimizer.step()
    except PeerError as caught:
        error = str(caught)
    (before,) = states
    return {
        "error": error,
        "parameters": all_same(before, values(model)),
        "residuals": all_same(kept, residuals(steps_taken)),
        "common": steps_taken.step,
    }


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_lost_rank_is_an_error_and_parameters_are_as_before(how: str) -> None:
    with ranks.Ranks(3) as group:
        options = {"timeout": TIMEOUT if how == "dies" else 2.0}
        found = group.run(on_loss, how, options, dying=[2])
    for each in found[:2]:
        assert each["error"]
        assert each["parameters"]
        assert each["residuals"]


# What is refused


@pytest.mark.parametrize("name", ["local-sgd", "post-local-sgd", "diloco", "streaming-diloco"])
def test_an_error_of_a_recipe_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}:0: every must be a number of steps"):
        parse(f"{name}:every=0")


def on_refused() -> dict[str, str]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    attached = plain()
    wire = tw.attach(attached, "topk:0.1")
    sharded: Any = fully_shard(net())  # type: ignore[operator]
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR)
    static = plain(static_graph=True)
    other = torch.optim.SGD(net().parameters(), lr=LR)
    follower = plain()
    followed = torch.optim.SGD(follower.parameters(), lr=LR)
    follows = tw.LocalSteps(follower, followed)

    def added() -> None:
        loss_of(follower, 0).backward()
        followed.add_param_group({"params": [torch.zeros(3)]})
        followed.step()

    def exchanged() -> None:
        """Another in the place of one that was known: found with the next exchange."""
        follower.zero_grad()
        loss_of(follower, 0).backward()
        followed.param_groups.pop()
        followed.param_groups[0]["params"][0] = torch.zeros(3)
        followed.step()

    calls: dict[str, Callable[[], object]] = {
        "fsdp": lambda: tw.LocalSteps(sharded, torch.optim.SGD(sharded.parameters(), lr=LR)),
        "wire": lambda: tw.LocalSteps(attached, torch.optim.SGD(attached.parameters(), lr=LR)),
        "static": lambda: tw.LocalSteps(static, torch.optim.SGD(static.parameters(), lr=LR)),
        "zero": lambda: tw.LocalSteps(model, zero),
        "onebit": lambda: tw.LocalSteps(
            model, tw.optim.OneBitAdam(model.parameters(), freeze_step=9)
        ),
        "class": lambda: tw.LocalSteps(model, torch.optim.SGD),  # type: ignore[arg-type]
        "other": lambda: tw.LocalSteps(model, other),
        "outer": lambda: tw.LocalSteps(model, sgd, outer=sgd),  # type: ignore[arg-type]
        "outer word": lambda: tw.LocalSteps(model, sgd, outer="sgd"),  # type: ignore[arg-type]
        "dgc": lambda: tw.LocalSteps(model, sgd, "dgc:0.01"),
        "vote": lambda: tw.LocalSteps(model, sgd, "signsgd"),
        "every": lambda: tw.LocalSteps(model, sgd, every=0),
        "fragments": lambda: tw.LocalSteps(model, sgd, every=5, fragments=2),
        "many": lambda: tw.LocalSteps(model, sgd, every=50, fragments=50),
        "overlap": lambda: tw.LocalSteps(model, sgd, every=4, fragments=2, overlap=2),
        "mixing": lambda: tw.LocalSteps(model, sgd, every=4, mixing=1.0),
        "keep": lambda: tw.LocalSteps(model, sgd, "topk:0.1", keep=2.0),
        "keep overlap": lambda: tw.LocalSteps(model, sgd, "topk:0.1", every=4, overlap=1, keep=0.5),
        "gain": lambda: tw.LocalSteps(model, sgd, gain=True),
        "gain word": lambda: tw.LocalSteps(model, adam(model), gain="yes"),  # type: ignore[arg-type]
        "keep nothing": lambda: tw.LocalSteps(model, sgd, "topk:0.1", feedback="none", keep=0.5),
        "feedback": lambda: tw.LocalSteps(model, sgd, "sparseloco", feedback="none"),
        "exclude": lambda: tw.LocalSteps(model, sgd, exclude="x*"),
        "attach": lambda: tw.attach(plain(), "diloco"),
        "twice": lambda: tw.LocalSteps(model, followed),
        "attached": lambda: tw.attach(follower, "topk:0.1"),
        "scaler": lambda: tw.LocalSteps(model, sgd, scaler=torch.amp.GradScaler),  # type: ignore[arg-type]
        "average": lambda: tw.LocalSteps(model, sgd, "topk:0.1", average="some"),
        "added": added,
        "exchanged": exchanged,
    }
    found = {name: raised(call) for name, call in calls.items()}
    wire.detach()
    follows.detach()
    tw.attach(follower, "topk:0.1").detach()
    # Nothing that was refused has left a hook behind.
    found["hooks"] = str(len(sgd._optimizer_step_post_hooks))
    return found


def test_what_cannot_work_is_refused_with_a_reason() -> None:
    found = ranks.run(on_refused, ranks=2)[0]
    words = {
        "fsdp": "sharded",
        "wire": "detach it first",
        "static": "static_graph",
        "zero": "ZeroRedundancyOptimizer divides",
        "onebit": "exchanges by itself",
        "class": "the class SGD",
        "other": "of which 0 are parameters of the model",
        "outer": "a function that makes the optimizer",
        "outer word": "OuterSGD",
        "dgc": "momentum",
        "vote": "made for gradients",
        "every": "every must be a number of steps",
        "fragments": "multiple of the 2 fragments",
        "many": "50 fragments",
        "overlap": "overlap must be less",
        "mixing": "mixing must be in [0, 1)",
        "keep": "keep must be in [0, 1]",
        "keep overlap": "leave out overlap",
        "keep nothing": "remembers nothing of it",
        "gain": "SGD does not: leave it out",
        "gain word": "gain must be",
        "feedback": "feedback of its own",
        "exclude": "no parameter is named like",
        "attach": "tw.LocalSteps(model, optimizer, 'diloco')",
        "twice": "takes local steps already",
        "attached": "takes local steps, which exchange no gradients",
        "scaler": "the class GradScaler",
        "average": "average must be",
        "added": "nobody would exchange them",
        "exchanged": "nobody would exchange them",
    }
    for name, text in words.items():
        assert text in found[name], (name, found[name])
    assert found["hooks"] == "0"
