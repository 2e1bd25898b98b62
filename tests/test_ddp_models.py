"""Models of all kinds with a wire: what DDP can train, it can still train, and nothing is lost.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of nets.py.
"""

import contextlib
import logging
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import (
    MIN,
    Books,
    all_same,
    alone,
    backward,
    digest,
    gradients,
    loss_of,
    net,
    plain,
    raised,
    residuals,
    train,
    wired,
)
from tensors import same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels


class Frozen(nn.Module):
    """One layer is frozen, one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = net(), nn.Linear(10, 10), nn.Linear(30, 40)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x))


class Tied(nn.Module):
    """Two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, 30, bias=False), nn.Linear(20, 30)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.last(x)


class Mixed(nn.Module):
    """Layers of three types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        types = (torch.bfloat16, torch.float32, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(20, 20, dtype=dtype) for dtype in types)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Odd(nn.Module):
    """Parameters that do not lie in memory as usual, a number, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(8, 5).t())
        self.number = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(8, 2, 2, 5).repeat(1, 1, 2, 1)).mean((2, 3))
        return self.number * x @ self.turned.t() + self.nothing.sum()


class Recomputed(nn.Module):
    """Keeps no activations; reentrant, so that backward passes run inside of backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = net(), nn.Linear(10, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return self.head(checkpoint(self.inner, x, use_reentrant=True))


KINDS = {
    "frozen": (Frozen, {"find_unused_parameters": True}),
    "tied": (Tied, {}),
    "mixed": (Mixed, {}),
    "odd": (Odd, {}),
    "odd views": (Odd, {"gradient_as_bucket_view": True}),
    "recomputed": (Recomputed, {}),
}


def on_kind(kind: str, spec: str) -> tuple[bool, dict[str, float], dict]:
    make, ddp = KINDS[kind]
    model, wire = wired(spec, make(), ddp=ddp)
    other, books = plain(make(), **ddp), Books(model, wire)
    other.load_state_dict(model.state_dict())
    for step in range(4):
        books.put(alone(model, step))
        backward(model, step)
        backward(other, step)
        books.take()
    tensors = wire.stats()["tensors"]
    types = {name: residuals(wire)[name].dtype for name in residuals(wire)}
    found = {"names": sorted(tensors), "steps": wire.step, "types": types}
    return all_same(gradients(model), gradients(other)), books.balance(), found


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_all_kinds(kind):
    for equal, _, found in ranks.run(on_kind, kind, "none", ranks=2):
        assert equal
        names = [name for name, p in KINDS[kind][0]().named_parameters() if p.requires_grad]
        assert found["names"] == sorted(names)
        assert found["steps"] == 4
    for _, balance, found in ranks.run(on_kind, kind, "topk:0.1", ranks=2):
        assert max(balance.values()) <= 1, balance
        if kind == "mixed":
            wide = {torch.float32, torch.float64}
            assert set(found["types"].values()) == wide


def on_several() -> list[bool]:
    """Two models in one backward pass, and one after the other, against each by itself."""
    specs, found = ("topk:0.1", "quantize:4"), []
    for together in (True, False):
        models = [wired(spec, net(i))[0] for i, spec in enumerate(specs)]
        single = [wired(spec, net(i))[0] for i, spec in enumerate(specs)]
        for step in range(3):
            for model in models:
                model.zero_grad()
            losses = [loss_of(model, step) for model in models]
            for loss in [sum(losses)] if together else losses:
                loss.backward()
        for model, other in zip(models, single, strict=True):
            for step in range(3):
                backward(other, step)
            found.append(all_same(gradients(model), gradients(other)))
    return found


def test_several_models_do_not_disturb_each_other():
    for found in ranks.run(on_several, ranks=2):
        assert found == [True] * 4


def on_compile(where: str, backend: str) -> tuple[bool, list[str], str]:
    torch._dynamo.reset()
    other, _ = wired(ddp={"bucket_cap_mb": None})  # torch.compile refuses small ones
    inner = torch.compile(net(), backend=backend) if where == "inside" else net()
    model = DistributedDataParallel(inner)
    model = torch.compile(model, backend=backend) if where == "around" else model
    wire = tw.attach(model, "topk:0.1", min_numel=MIN)
    for step in range(3):
        backward(model, step)
        backward(other, step)
    tw.check_replicas(model)
    mine, theirs = gradients(getattr(model, "_orig_mod", model)), gradients(other)
    close = all(torch.allclose(mine[name], theirs[name], rtol=1e-4) for name in theirs)
    return close, sorted(wire.stats()["tensors"]), digest(mine.values())


@pytest.mark.parametrize(
    ("where", "backend"), [("inside", "eager"), ("around", "aot_eager"), ("around", "eager")]
)
def test_compiled_models_keep_their_names(where, backend):
    found = ranks.run(on_compile, where, backend, ranks=2)
    for close, names, bits in found:
        assert close
        assert names == sorted(dict(net().named_parameters()))
        assert bits == found[0][2]


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(200, 20, sparse=True), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((40 * x[:, 0]).long().abs() % 200))


@contextlib.contextmanager
def logged():
    """Warnings of thinwire."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def on_sparse(spec: str) -> tuple[list[bool], list[bool], list[str]]:
    model, _ = wired(spec, Sparse())
    other, layouts, equal = plain(Sparse()), [], []
    with logged() as warnings:
        for step in range(3):
            backward(model, step)
            backward(other, step)
            mine, theirs = (m.module.embed.weight.grad for m in (model, other))
            layouts.append(mine.is_sparse)
            equal.append(same(mine.to_dense(), theirs.to_dense()))
    return layouts, equal, [w for w in warnings if "sparse" in w]


@pytest.mark.parametrize("spec", ["none", "topk:0.002"])
def test_sparse_gradients_travel_as_they_are_and_stay_sparse(spec):
    for layouts, equal, warnings in ranks.run(on_sparse, spec, ranks=2):
        assert layouts == [True] * 3
        assert len(warnings) == 1
        assert warnings[0].startswith("embed.weight has sparse gradients: it is sent dense")
        assert equal == [True] * 3


class Complex(nn.Module):
    """A layer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(20, 4, dtype=torch.complex64))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(torch.complex64) @ self.weight).abs())


def on_complex() -> str:
    try:
        other = plain(Complex())
    except RuntimeError as error:
        return f"not possible with plain DDP: {error}"
    try:
        model, _ = wired("none", Complex())
    except (TypeError, ValueError):
        return "refused"
    for step in range(2):
        backward(model, step)
        backward(other, step)
    return "as plain DDP" if all_same(gradients(model), gradients(other)) else "wrong"


def test_complex_parameters_are_averaged_or_refused():
    for outcome in ranks.run(on_complex, ranks=2):
        if outcome.startswith("not possible"):
            pytest.skip(f"gloo of this torch has no complex numbers, {outcome}")
        assert outcome in ("refused", "as plain DDP")


class Branches(nn.Module):
    """Two layers, of which each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 10, bias=False) for _ in range(2))
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.which](x)


def on_branches(granularity: str) -> dict[str, float]:
    model, wire = wired(
        inner=Branches(), granularity=granularity, ddp={"find_unused_parameters": True}
    )
    books = Books(model, wire)
    for step, which in enumerate((0, 1, 1, 0, 1, 0)):
        model.module.which = which
        books.put(alone(model, step))
        backward(model, step)
        books.take()
    return books.balance()


@pytest.mark.parametrize("granularity", ["bucket", "tensor"])
def test_nothing_is_lost_of_parameters_that_are_used_now_and_then(granularity):
    for balance in ranks.run(on_branches, granularity, ranks=2):
        assert max(balance.values()) <= 1, balance


def on_frozen_later(spec: str, how: str) -> tuple[list[str], bool, list[str], bool]:
    """A layer is frozen between DDP and attach, and trained again after a state was loaded."""
    models = [plain(net(), **{how: True}) for _ in range(3)]
    for each in models:
        each.module[2].requires_grad_(False)
    model, loaded, other = models
    feedback = "ef21" if spec == "quantize:4" else "auto"  # which remembers what is frozen, too
    wire = tw.attach(model, spec, feedback=feedback, min_numel=MIN)
    errors, alike = [], True
    for step in range(7):
        errors.append(raised(lambda step=step: backward(model, step)))
        backward(other, step)
        alike = alike and (spec != "none" or all_same(gradients(model), gradients(other)))
    tw.check_replicas(model)
    state = wire.state_dict()
    again = tw.attach(loaded, spec, feedback=feedback, min_numel=MIN)
    again.load_state_dict(state)
    for step in range(7, 12):
        if how == "find_unused_parameters":  # what is used does not change otherwise
            for each in (loaded, other):
                each.module[2].requires_grad_(True)
        errors.append(raised(lambda step=step: backward(loaded, step)))
        backward(other, step)
        for name in {"2.weight", "2.bias"} & gradients(other).keys():
            # EF21 adds up differences of values below 1, which rounds each time: by 2^-24.
            ours, theirs = gradients(loaded)[name], gradients(other)[name]
            alike = alike and torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    assert (again.step, wire.step) == (12, 7)
    return (
        errors,
        alike,
        sorted(name for names in state["layout"] for name in names),
        len(gradients(loaded)) == 6,
    )


@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("spec", ["none", "auto", "topk:0.1", "quantize:4"])
def test_a_layer_may_be_frozen_after_ddp_was_made(spec, how):
    """DDP goes on sending it: uncompressed, and no loaded plan knows of it."""
    for errors, alike, names, thawed in ranks.run(on_frozen_later, spec, how, ranks=2):
        assert not any(errors), errors
        assert alike
        assert names == ["0.bias", "0.weight", "4.bias", "4.weight"]
        assert thawed == (how == "find_unused_parameters")


def on_ignored() -> tuple[str, list[str], Any, str]:
    """DDP was told to leave a parameter as each rank has it."""
    inner = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight"])
    torch.nn.init.constant_(inner[0].weight, dist.get_rank() + 1.0)
    model, wire = wired(inner=inner, check_every=2)
    error = raised(lambda: train(model, range(5)))
    error = error or raised(lambda: tw.check_replicas(model))
    state = wire.state_dict()
    wire.load_state_dict(state)
    wire.detach()
    inner.requires_grad_(False)[0].weight.requires_grad_(True)
    refused = raised(lambda: tw.attach(model, "none"))
    return error, sorted(wire.stats()["tensors"]), wire._layout == state["layout"] != [], refused


def test_parameters_that_ddp_ignores_are_left_alone():
    for error, names, replayed, refused in ranks.run(on_ignored, ranks=2):
        assert not error
        assert "0.weight" not in names
        assert len(names) == 5
        assert replayed
        assert refused.startswith("ValueError: no parameter of this model is trained by DDP")


def on_delayed() -> tuple[str, list[str], str]:
    """DDP averages the gradient of a parameter by itself."""
    model = net(seed=dist.get_rank())
    delayed = {name: p for name, p in model.named_parameters() if name.startswith("4.")}
    ddp = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=list(delayed.items()),
        param_to_hook_all_reduce=delayed["4.weight"],
    )
    before = raised(lambda: tw.check_replicas(ddp))
    wire = tw.attach(ddp, "none")
    names = sorted(wire._parameters)
    wire.detach()
    with torch.no_grad():
        delayed["4.bias"].add_(dist.get_rank())
    return before, names, raised(lambda: tw.check_replicas(ddp))


def test_what_ddp_averages_by_itself_is_compared():
    for before, names, after in ranks.run(on_delayed, ranks=2):
        assert before == ""
        assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert "4.bias" in after
