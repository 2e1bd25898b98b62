"""`tw.horovod`: what Horovod's users rely on, on torch.distributed.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here.
"""

import copy
import io
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import TIMEOUT, all_same, alone, loss_of, named, net, plain, raised
from torch import Tensor, nn

import thinwire as tw

pytestmark = pytest.mark.timeout(600)
hvd = tw.horovod
PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "from-horovod.md"


def sgd(model: nn.Module, momentum: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def distributed(model: nn.Module, compression: Any = hvd.Compression.none, **options: Any) -> Any:
    given = {"min_numel": 10, "timeout": TIMEOUT} | options
    return hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression=compression, **given
    )


def steps(model: nn.Module, optimizer: Any, count: range, passes: int = 1) -> None:
    for step in count:
        optimizer.zero_grad()
        for each in range(passes):
            loss_of(model, passes * step + each).backward()
        optimizer.step()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named(model).items()}


# The same as DDP


def on_averages() -> dict[str, bool]:
    """Whether training comes to the bits of DDP's."""
    theirs = plain()
    steps(theirs, sgd(theirs), range(4))
    found = {}
    model = net()
    steps(model, distributed(model), range(4))
    found["average"] = all_same(weights(model), weights(theirs))

    model = net()
    optimizer = distributed(model, op=hvd.Sum)
    for group in optimizer.param_groups:
        group["lr"] /= dist.get_world_size()  # a power of two: no rounding
    steps(model, optimizer, range(4))
    found["sum"] = all_same(weights(model), weights(theirs))

    model, theirs = net(), plain()
    steps(model, distributed(model, backward_passes_per_step=2), range(3), passes=2)
    other = sgd(theirs)
    for step in range(3):
        other.zero_grad()
        with theirs.no_sync():
            loss_of(theirs, 2 * step).backward()
        loss_of(theirs, 2 * step + 1).backward()
        other.step()
    found["accumulated"] = all_same(weights(model), weights(theirs))
    return found


def test_without_compression_it_is_what_ddp_computes():
    wanted = {"average": True, "sum": True, "accumulated": True}
    assert ranks.run(on_averages, ranks=2) == [wanted] * 2


class Halves:
    """Compression as Horovod's users write it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


COMPRESSIONS: dict[str, Any] = {
    "quantize": "quantize:4",
    "policy": "warmup:2,(topk:0.1)",
    "method": "dgc:0.1",
    "object": tw.TopK(0.1) | tw.Quantize(8),
    "powersgd": "powersgd:2",
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
    "in Horovod's style": Halves,
    "an object of it": Halves(),
}


def on_compressed(name: str) -> tuple[dict[str, Tensor], float, float]:
    model = net()
    optimizer = distributed(model, COMPRESSIONS[name])
    first = float(loss_of(model, 0))
    steps(model, optimizer, range(12))
    return weights(model), first, float(loss_of(model, 0))


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_every_compression_trains_all_replicas_alike(name):
    (one, first, last), (other, _, _) = ranks.run(on_compressed, name, ranks=2)
    assert all_same(one, other)
    assert last < first


def on_same_as_a_reducer() -> bool:
    """A step is one call of a Reducer with all gradients."""
    model = net()
    optimizer = distributed(model, "topk:0.2")
    reducer = tw.Reducer("topk:0.2", min_numel=10, timeout=TIMEOUT)
    right = True
    for step in range(4):
        own = alone(model, step)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        reducer.average(own)
        right &= all_same(own, {name: p.grad for name, p in named(model).items()})
        with optimizer.skip_synchronize():
            optimizer.step()
    return right and optimizer.wire.stats()["total"] == reducer.stats()["total"]


def test_gradients_are_those_of_a_reducer():
    assert ranks.run(on_same_as_a_reducer, ranks=2) == [True, True]


def on_missing_gradients() -> tuple[bool, bool]:
    """A layer that only rank 0 uses."""
    model = net()
    optimizer = distributed(model)
    extra = nn.Linear(20, 3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.1), timeout=TIMEOUT
    )
    loss = loss_of(model, 0)
    if dist.get_rank() == 0:
        loss = loss + extra(torch.ones(1, 20)).sum()
    loss.backward()
    optimizer.synchronize()
    expected = torch.full((3, 20), 1 / dist.get_world_size())
    return torch.equal(extra.weight.grad, expected), optimizer.wire.step == 1


def test_a_gradient_that_a_rank_lacks_counts_as_zeros():
    assert ranks.run(on_missing_gradients, ranks=2) == [(True, True)] * 2


# What else belongs to an optimizer


def on_company() -> dict[str, Any]:
    model = net()
    optimizer = sgd(model)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    made = hvd.DistributedOptimizer(optimizer, model.named_parameters(), timeout=TIMEOUT)
    late = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, made, range(1))
        early.step()
        late.step()
    theirs = plain()
    steps(theirs, sgd(theirs), range(1))
    return {
        "same": made is optimizer and isinstance(made, torch.optim.SGD),
        "name": type(made).__name__,
        "lr": made.param_groups[0]["lr"],
        "moved": not all_same(before, weights(model)),
        "averaged": all_same(weights(model), weights(theirs)),
    }


def test_schedules_made_before_and_after_work_and_no_step_passes_the_exchange_by():
    wanted = {"same": True, "name": "SGD", "lr": 0.025, "moved": True, "averaged": True}
    assert ranks.run(on_company, ranks=2) == [wanted] * 2


def on_scaler() -> tuple[str, bool, float]:
    """One rank's gradients overflow: no rank takes the step."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = distributed(model, "topk:0.2", scaler=scaler)
    loss = scaler.scale(loss_of(model, 0))
    loss.backward()
    refused = raised(lambda: scaler.step(optimizer))
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = distributed(model, "topk:0.2", scaler=scaler)
    before = weights(model)
    loss = loss_of(model, 0)
    if dist.get_rank() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    return refused, all_same(before, weights(model)), scaler.get_scale()


def test_a_scaler_sees_averages_and_all_ranks_skip_together():
    for refused, still, scale in ranks.run(on_scaler, ranks=2):
        assert "call optimizer.synchronize() before" in refused
        assert still
        assert scale == 4.0


def on_checkpoint(through: str) -> bool:
    """Training that stops in the middle goes on bit for bit, in new objects."""
    whole = net()
    steps(whole, distributed(whole, "topk:0.1"), range(6))
    model = net()
    optimizer = distributed(model, "topk:0.1")
    steps(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["wire"] = optimizer.wire.state_dict()
    if through == "gathered":
        state["wire"] = optimizer.wire.gathered_state_dict(everywhere=True)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    model = net(seed=7)
    optimizer = distributed(model, "topk:0.1")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.wire.load_state_dict(state["wire"])
    steps(model, optimizer, range(3, 6))
    return all_same(weights(model), weights(whole))


@pytest.mark.parametrize("through", ["own", "gathered"])
def test_checkpoints_go_on_bit_for_bit(through):
    assert ranks.run(on_checkpoint, through, ranks=2) == [True, True]


def on_broadcast() -> tuple[list[Tensor], dict[str, Any]]:
    rank = dist.get_rank()
    model = net(seed=rank)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # not contiguous
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1), betas=(0.5, 0.9))
    if rank == 1:
        loss_of(model, 0).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    hvd.broadcast_parameters(model.parameters(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


def test_parameters_and_state_are_those_of_the_root():
    (one, state), (other, wanted) = ranks.run(on_broadcast, ranks=2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert state["param_groups"] == wanted["param_groups"]
    assert state["param_groups"][0]["lr"] == 0.2
    assert len(state["state"]) == 6
    for place, entry in wanted["state"].items():
        for name, value in entry.items():
            assert torch.equal(state["state"][place][name], value)


# Failures


def on_death(dying: int) -> tuple[str, bool]:
    model = net()
    optimizer = distributed(model, "quantize:4", timeout=30.0)
    steps(model, optimizer, range(2))
    before = weights(model)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(optimizer.step), all_same(before, weights(model))


def test_a_killed_rank_is_an_error_of_step_and_nothing_moves():
    with ranks.Ranks(3) as processes:
        for error, still in processes.run(on_death, 1, dying=[1])[::2]:
            assert error.startswith("PeerError: ")
            assert still


# Wrong use


def alone_in_the_world(call: Callable[[], Any]) -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return call()
    finally:
        dist.destroy_process_group()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adasum": ({"op": hvd.Adasum}, "Adasum is not there"),
    "op": ({"op": "max"}, "op must be"),
    "predivide": ({"gradient_predivide_factor": 2.0}, "leave it out"),
    "groups": ({"groups": 2}, "exchanged together"),
    "num_groups": ({"num_groups": 2}, "exchanged together"),
    "sparse": ({"sparse_as_dense": True}, "sparse=False"),
    "process set": ({"process_set": object()}, "group="),
    "passes": ({"backward_passes_per_step": 0}, "whole number from 1"),
    "local steps": ({"compression": "diloco:10"}, r"tw.LocalSteps\(model, optimizer"),
    "twice": ({"named_parameters": [("a", torch.zeros(1)), ("a", torch.ones(1))]}, "twice"),
    "unnamed": ({"named_parameters": [("a", torch.zeros(1))]}, "6 of the optimizer's 6"),
    "no pairs": ({"named_parameters": [torch.zeros(1)]}, "pairs of name and parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_with_a_reason(name):
    options, why = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=why):
        alone_in_the_world(lambda: hvd.DistributedOptimizer(sgd(net()), **options))


def on_wrong_use() -> dict[str, str]:
    model = net()
    optimizer = distributed(model)
    found = {"again": raised(lambda: hvd.DistributedOptimizer(optimizer))}
    found["none"] = raised(lambda: hvd.DistributedOptimizer(model))
    exchanging = tw.optim.OneBitAdam(net().parameters(), lr=0.1, freeze_step=5)
    found["own"] = raised(lambda: hvd.DistributedOptimizer(exchanging))
    found["copy"] = raised(lambda: copy.deepcopy(optimizer))
    group = {"params": [nn.Parameter(torch.ones(2))]}
    found["group"] = raised(lambda: optimizer.add_param_group(group))
    found["closure"] = raised(lambda: optimizer.step(lambda: loss_of(model, 0)))
    loss_of(model, 0).backward()
    found["zero_grad"] = raised(optimizer.zero_grad)
    found["passes"] = raised(lambda: loss_of(model, 1).backward())

    def skip() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    found["skip"] = raised(skip)
    optimizer.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found["twice"] = raised(optimizer.step)
    return found


def test_wrong_use_says_what_to_do():
    found = alone_in_the_world(on_wrong_use)
    assert "distributed already" in found["again"]
    assert "takes a torch.optim.Optimizer, got Sequential" in found["none"]
    assert "exchanges by itself" in found["own"]
    assert "copy it before" in found["copy"]
    assert "before tw.horovod.DistributedOptimizer" in found["group"]
    assert "takes no closure" in found["closure"]
    assert "Call it before backward() or after step()" in found["zero_grad"]
    assert "computed 2 times before optimizer.step()" in found["passes"]
    assert "these gradients are this rank's own" in found["skip"]
    assert found["twice"].startswith("ThinwireWarning: ")


# For Horovod itself


def summed(style: Any, tensors: list[Tensor]) -> list[Tensor]:
    """What Horovod does with the gradients of one tensor on several ranks: op=Sum."""
    made = [style[i].compress(tensor) for i, tensor in enumerate(tensors)]
    total = torch.stack([values for values, _ in made]).sum(0)
    return [style[i].decompress(total.clone(), ctx) for i, (_, ctx) in enumerate(made)]


def gradients_of(count: int) -> list[nn.Module]:
    found = []
    for rank in range(count):
        model = net()
        loss_of(model, 0, rank).backward()
        found.append(model)
    return found


def test_casts_are_summed_by_horovod():
    models = gradients_of(2)
    for name in ("fp16", "bf16", "none"):
        style = getattr(hvd.Compression, name)
        own = [model[0].weight.grad for model in models]
        results = summed([style, style], own)
        assert torch.equal(results[0], results[1])
        # Two values are rounded and then their sum: three roundings of numbers of that size.
        kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "none": torch.float32}[name]
        bound = 3 / 2 * torch.finfo(kind).eps * (own[0].abs() + own[1].abs())
        bound += torch.finfo(kind).smallest_normal
        assert bool(((results[0] - own[0] - own[1]).abs() <= bound).all())


def test_random_positions_are_those_of_the_tensor_whatever_the_order_of_calls():
    models = gradients_of(2)
    styles = [
        hvd.SummableCompression("randomk:0.1,shared=true", model.named_parameters())
        for model in models
    ]
    for _ in range(2):
        pairs = [list(model.parameters()) for model in models]
        order = list(range(len(pairs[0])))
        made: list[dict[int, Any]] = [{}, {}]
        for rank, places in enumerate((order, order[::-1])):  # another order on each
            for place in places:
                made[rank][place] = styles[rank].compress(pairs[rank][place].grad)
        for place in order:
            (one, context), (other, _) = made[0][place], made[1][place]
            result = styles[0].decompress(one + other, context)
            a, b = pairs[0][place].grad, pairs[1][place].grad
            sent = result != 0
            scale = a.numel() / one.numel()  # d/k: unbiased
            # Products and a sum on either side: four roundings of numbers of that size.
            bound = 2 * torch.finfo(a.dtype).eps * scale * (a.abs() + b.abs())
            assert bool(((result - scale * (a + b)).abs() <= bound)[sent].all())
            assert int(sent.sum()) <= one.numel()
    again = styles[0].compress(models[0][0].weight.grad)[1]
    assert not torch.equal(again.held()[0], made[0][0][1].held()[0]), "every step draws anew"


def test_values_that_are_not_finite_reach_all_ranks():
    style = [hvd.Compression.fp16] * 2
    bad = torch.tensor([1.0, float("inf")])
    for result in summed(style, [bad, torch.ones(2)]):
        assert bool(result.isnan().any())
    assert hvd.Compression.fp16.compress(torch.tensor([1, 2]))[1] is None


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("topk:0.01", "cannot be added up"),
        ("quantize:4", "cannot be added up"),
        ("randomk:0.01", "cannot be added up"),
        ("randomk:0.01,shared=true", "pass named_parameters"),
    ],
)
def test_what_horovod_cannot_sum_is_refused(spec, why):
    with pytest.raises(ValueError, match=why):
        hvd.SummableCompression(spec)


def test_a_gradient_of_another_model_is_refused():
    style = hvd.SummableCompression("randomk:0.1,shared=true", net().named_parameters())
    with pytest.raises(ValueError, match="the gradient of none of the named_parameters"):
        style.compress(torch.ones(3))


# The page


def on_page(program: str, port: int) -> str:
    os.environ |= ranks.leave_for_torchrun(port)
    scope: dict[str, Any] = {}
    exec(compile(program, "from-horovod.md", "exec"), scope)
    return repr([p.detach().sum().item() for p in scope["model"].parameters()])


def test_the_program_of_the_page_runs():
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with ranks.Ranks(2) as processes:
        one, other = processes.run(on_page, program, ranks.free_port())
    assert one == other
