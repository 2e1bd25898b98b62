"""Parameters of sharded models that are gathered as compressed differences.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of sharded_nets.py.
"""

from itertools import pairwise
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import digest, raised
from sharded_nets import (
    MIN,
    Tower,
    adam,
    backward,
    distance,
    loss_of,
    meeting_bytes,
    modules,
    parameters,
    shard,
    train,
    uneven,
    wired,
)
from torch import Tensor

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels


def held(model: Any) -> dict[str, Tensor]:
    """The parameters that ranks compute with, gathered anew."""
    for module in modules(model):
        module.unshard()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for module in modules(model):
        module.reshard()
    return found


def errors(model: Any) -> dict[str, float]:
    """How far they are from the parameters that ranks hold shards of."""
    exact = parameters(model)
    return {name: float((p - exact[name]).abs().max()) for name, p in held(model).items()}


def own(model: Any) -> dict[str, Tensor]:
    """The shards of this rank."""
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def part_of(whole: Tensor) -> Tensor:
    """The same of a whole parameter."""
    parts, rank = whole.chunk(dist.get_world_size()), dist.get_rank()
    return parts[rank] if rank < len(parts) else whole[:0]


def alike(tensors: dict[str, Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest(tensors.values()))
    return len(set(everyone)) == 1


def on_errors(spec: str) -> tuple[bool, list[float], float, float]:
    """Whether ranks agree in every step, the largest error of each, that of what is excluded, and
    the largest change of an element."""
    model, _ = wired("none", uneven(), weights=spec, exclude="first*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    same, largest, excluded, change = True, [], 0.0, 0.0
    before = own(model)
    for step in range(30):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        found, truth = held(model), own(model)
        same = same and (step % 10 > 0 or alike(found))
        decoded = {name: part_of(p) for name, p in found.items()}
        largest.append(distance(decoded, truth))
        first = [name for name in truth if name.startswith("first")]
        excluded = max(
            excluded, distance({n: decoded[n] for n in first}, {n: truth[n] for n in first})
        )
        change = max(change, distance(truth, before))
        before = truth
    return same, largest, excluded, change


@pytest.mark.parametrize(("spec", "levels"), [("quantize:8", 127), ("quantize:4", 7)])
def test_all_ranks_compute_with_the_same_parameters_and_errors_do_not_grow(spec, levels):
    """What is left out of a difference e is at most half a level, so errors stay below that of a
    difference d + e, d being a step: e <= (d + e) / (2 levels). What is excluded is sent
    uncompressed; sums of differences round."""
    for same, largest, excluded, change in ranks.run(on_errors, spec, ranks=3):
        assert same
        assert 0 < max(largest) <= change / (2 * levels - 1) * 1.01
        assert excluded <= 2**-22


def on_resync() -> tuple[list[float], list[float]]:
    """The largest errors with every fourth gather whole; and of a model that others have changed,
    before and after the wire was reset."""
    model, wire = wired("none", weights="quantize:2", resync_every=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    largest = []
    for _ in range(9):
        largest.append(max(errors(model).values()))
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    changed = [max(errors(model).values())]
    wire.reset()
    changed.append(max(errors(model).values()))
    return largest, changed


def test_parameters_are_exact_when_they_are_sent_whole():
    for largest, changed in ranks.run(on_resync, ranks=2):
        assert [i for i, error in enumerate(largest) if error == 0.0] == [0, 4, 8]
        assert changed[0] > 0.0
        assert changed[1] == 0.0


def on_bytes() -> list[tuple[int, int, int]]:
    """Exchanges, messages of parameters and bytes of a forward pass and its backward pass."""
    model, wire = wired("cast:bf16", weights="quantize:8", fsdp={"reshard_after_forward": True})
    optimizer, found = adam(model), []
    for step in range(3):
        before = wire.stats()["total"]["exchanges"]
        loss = loss_of(model, step)
        between = wire.stats()
        loss.backward()
        after = wire.stats()["total"]["exchanges"]
        optimizer.step()
        rows = [r for n, r in between["tensors"].items() if n.endswith("(parameters)")]
        found.append(
            (
                between["total"]["exchanges"] - before,
                after - between["total"]["exchanges"],
                sum(row["bytes_sent"] for row in rows),
            )
        )
    return found


def test_nothing_is_sent_for_the_backward_pass():
    """Three modules; gradients of each go in one exchange, also those that are not compressed.
    A rank sends one frame of its half of each module: the parameters, then differences."""
    for found in ranks.run(on_bytes, ranks=2):
        assert [counts[:2] for counts in found] == [(3, 3)] * 3
        totals = [sent for _, _, sent in found]
        whole, differences = (
            sum(
                meeting_bytes(2) + compressor.encode(torch.ones(numel)).num_bytes
                for numel in halves()
            )
            for compressor in (tw.NoCompression(), tw.Quantize(8))
        )
        assert totals[0] == whole
        assert [after - before for before, after in pairwise(totals)] == [differences] * 2


def halves() -> list[int]:
    """Elements of a rank's part of each module, of two: the first dimension is cut, and padded."""
    model = Tower()
    parts = [dict(block.named_parameters()) for block in model.blocks]
    within = {id(p) for part in parts for p in part.values()}
    parts.append({n: p for n, p in model.named_parameters() if id(p) not in within})
    return [sum(-(-p.shape[0] // 2) * p[0].numel() for p in part.values()) for part in parts]


def on_evaluation() -> tuple[list[str], bool, float, float]:
    """Evaluations in inference mode after each step, but not before the first, which FSDP itself
    does not survive. Whether ranks agree in the end, the error, and the largest change of an
    element in a step."""
    model, _ = wired("none", weights="quantize:8", resync_every=5)
    optimizer, found, change = torch.optim.SGD(model.parameters(), lr=0.1), [], 0.0
    for step in range(4):
        before = own(model)
        found.append(raised(lambda step=step: train(model, range(step, step + 1), optimizer)))
        change = max(change, distance(own(model), before))
        with torch.inference_mode():
            found.append(raised(lambda step=step: loss_of(model, step)))
        for module in modules(model):
            module.reshard()
    return found, alike(held(model)), max(errors(model).values()), change


def test_evaluations_in_inference_mode_come_between_steps():
    """Errors are bounded as in training."""
    for found, same, error, change in ranks.run(on_evaluation, ranks=2):
        assert not any(found), found
        assert same
        assert 0 < error <= change / (2 * 127 - 1) * 1.01


def on_nan() -> tuple[bool, bool, float]:
    """Whether a NaN on one rank reaches all, whether other modules have none, and the largest error
    once it is mended."""
    model, _ = wired("none", weights="quantize:8")
    train(model, range(2), torch.optim.SGD(model.parameters(), lr=0.1))
    weight = model.blocks[0].up.weight
    local = weight.to_local()
    before = local.detach().clone()
    with torch.no_grad():
        if dist.get_rank() == 0:
            local[0, 0] = float("nan")
    seen = held(model)
    reached = bool(seen["blocks.0.up.weight"].isnan().any())
    others = [p for name, p in seen.items() if not name.startswith("blocks.0.")]
    finite = all(bool(p.isfinite().all()) for p in others)
    with torch.no_grad():
        local.copy_(before)
    return reached and alike(seen), finite, errors(model)["blocks.0.up.weight"]


def test_a_nan_reaches_all_ranks_and_is_gone_when_it_is_mended():
    for reached, finite, error in ranks.run(on_nan, ranks=2):
        assert reached
        assert finite
        assert error == 0.0


class Doubled(torch.Tensor):
    """A parameter that brings bytes of its own, as those of float8 do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Doubled":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride()
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(x: Any) -> Any:
            return x.inner if isinstance(x, Doubled) else x

        found = function(
            *torch.utils._pytree.tree_map(plain, args),
            **torch.utils._pytree.tree_map(plain, kwargs or {}),
        )
        kept = (
            torch.ops.aten.split.Tensor,
            torch.ops.aten.detach.default,
            torch.ops.aten.view.default,
            torch.ops.aten.as_strided.default,
            torch.ops.aten.slice.Tensor,
            torch.ops.aten.clone.default,
            torch.ops.aten.new_zeros.default,
            torch.ops.aten.copy_.default,
            torch.ops.aten.empty_like.default,
        )
        if function in kept:
            return torch.utils._pytree.tree_map(
                lambda x: Doubled(x) if isinstance(x, Tensor) else x, found
            )
        return found

    def fsdp_pre_all_gather(self, *_: Any) -> Any:
        return (self.inner.to(torch.float8_e4m3fn).view(torch.uint8),), ()

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None
    ) -> Any:
        whole = gathered[0].view(torch.float8_e4m3fn).float()
        if out is not None:
            return None
        return whole, ()


def on_bytes_of_their_own() -> tuple[str, bool]:
    """The error of parameters that bring bytes, and whether gradients alone can be compressed."""
    made = []
    for _ in range(2):
        model = Tower()
        block = model.blocks[0]
        block.up.weight = torch.nn.Parameter(Doubled(block.up.weight.detach()))
        block.up.bias.requires_grad_(False)
        made.append(shard(model))
    tw.attach(made[0], "quantize:4", min_numel=MIN, weights="quantize:8")
    error = ""
    try:
        loss_of(made[0], 0)
    except TypeError as caught:
        error = str(caught)
    wire = tw.attach(made[1], "quantize:4", min_numel=MIN)
    backward(made[1], 0)
    return error, wire.stats()["tensors"]["blocks.1.up.weight"]["compressor"] == "quantize:4"


def test_parameters_that_bring_bytes_of_their_own_are_refused():
    for error, works in ranks.run(on_bytes_of_their_own, ranks=2):
        assert "blocks.0 gathers torch.uint8" in error
        assert "weights=" in error
        assert works


def on_memory() -> tuple[str, str]:
    model, wire = wired("none", weights="quantize:8")
    said = wire.explain()
    wire.detach()
    numel = sum(p.numel() for p in model.parameters())
    tw.attach(model, "none", weights="quantize:8", max_bytes=4 * numel + 4 * 24).detach()
    try:
        tw.attach(model, "none", weights="quantize:8", max_bytes=4 * numel - 4)
    except tw.MemoryLimitError as error:
        return said, str(error)
    return said, ""


def test_a_copy_of_the_model_is_announced_and_limited():
    for said, error in ranks.run(on_memory, ranks=2):
        assert "a copy of the model takes" in said
        assert "quantize:8" in said
        assert "copy of the parameters" in error
