"""The laws of `attach` for models that `fully_shard` was applied to, with two to four real ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of sharded_nets.py.
"""

from typing import Any

import pytest
import ranks
import torch
from nets import all_same
from sharded_nets import (
    MIN,
    Books,
    Tower,
    adam,
    backward,
    columns,
    distance,
    gradients,
    loss_of,
    modules,
    parameters,
    shard,
    train,
    uneven,
    wired,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import thinwire as tw

# The first test of a new checkout compiles all kernels.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# What it computes

LAYOUTS: dict[str, Any] = {
    "nested": (Tower, {}),
    "uneven": (uneven, {}),
    "tied": (lambda: Tower(tied=True), {}),
    "columns": (lambda: Tower(24, 24, 12), {"shard_placement_fn": columns}),
}
STEPS = 3
# A sum of four in another order rounds otherwise, by 4 eps of elements below 1; AdamW's epsilon of
# 1e-3 makes at most lr / 1e-3 of that in each step.
ROUNDED = STEPS * 10 * 4 * 2**-23


def on_none() -> dict[str, tuple[float, bool]]:
    """How far parameters are from those of plain FSDP, and whether all bits are the same."""
    found = {}
    for name, (made, fsdp) in LAYOUTS.items():
        model, _ = wired("none", made(), fsdp)
        other = shard(made(), **fsdp)
        for each in (model, other):
            train(each, range(STEPS), adam(each))
        mine, plain = parameters(model), parameters(other)
        found[name] = distance(mine, plain), all_same(mine, plain)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_without_compression_it_is_plain_fsdp(size):
    """With two ranks in every bit: there is one way to add two numbers."""
    for found in ranks.run(on_none, ranks=size):
        for layout, (error, same) in found.items():
            assert error <= ROUNDED, layout
            assert same or size > 2, layout


PRECISIONS = {
    "float32 sums": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bfloat16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "bfloat16 parameters": {"param_dtype": torch.bfloat16},
    "float16 sums": {"reduce_dtype": torch.float16},
}


def on_precision() -> dict[str, tuple[float, float, str]]:
    """How far gradients are from those of plain FSDP: without compression, with eight bits (over
    the largest), and how the gradients of a block are sent."""
    found = {}
    for name, given in PRECISIONS.items():
        fsdp = {"mp_policy": MixedPrecisionPolicy(**given)}
        exact, _ = wired("none", fsdp=fsdp)
        close, wire = wired("quantize:8", fsdp=fsdp)
        other = shard(Tower(), **fsdp)
        for each in (exact, close, other):
            backward(each, 0)
        plain = gradients(other)
        top = max(float(g.abs().max()) for g in plain.values())
        found[name] = (
            distance(gradients(exact), plain),
            distance(gradients(close), plain) / top,
            wire.stats()["tensors"]["blocks.0.up.weight"]["compressor"],
        )
    return found


def test_mixed_precision_reduces_what_plain_fsdp_does():
    """With two ranks, where a mean rounds as a sum does; half precision's smallest numbers aside,
    which a mean halves."""
    for found in ranks.run(on_precision, ranks=2):
        for name, (exact, close, sent) in found.items():
            assert exact <= (2**-23 if name == "float16 sums" else 0.0), name
            assert close < 0.02, name
            assert sent == "quantize:8", name


def on_divided() -> tuple[str, float, float]:
    """The error of a divide factor, and how far gradients are from plain FSDP's when FSDP divides
    by itself, without compression and (over the largest) with eight bits."""
    exact, _ = wired("none")
    close, _ = wired("quantize:8")
    other = shard(Tower())
    every = (exact, close, other)
    for module in (m for model in every for m in modules(model)):
        module.set_gradient_divide_factor(3.0)
    error = ""
    try:
        backward(exact, 0)
    except ValueError as caught:
        error = str(caught)
        exact.reset_iter_state()
    for module in (m for model in every for m in modules(model)):
        module.set_force_sum_reduction_for_comms(True)
    for each in every:
        backward(each, 0)
    plain = gradients(other)
    top = max(float(g.abs().max()) for g in plain.values())
    return (
        error,
        distance(gradients(exact), plain),
        distance(gradients(close), plain) / top,
    )


def test_a_divide_factor_is_fsdps_own_affair():
    for error, exact, close in ranks.run(on_divided, ranks=2):
        assert "set_force_sum_reduction_for_comms(True)" in error
        assert exact == 0.0
        assert close < 0.02


def in_parts(model: Any, step: int, synced: bool) -> None:
    """Two micro-batches; the first is exchanged only if synced."""
    model.zero_grad()
    for part in range(2):
        model.set_requires_gradient_sync(synced or part == 1)
        (loss_of(model, 2 * step + part) / 2).backward()


def on_accumulation() -> dict[bool, tuple[bool, int, float]]:
    """For each way: whether gradients, norms and parameters have the bits of plain FSDP's, the
    steps of the wire, and how far gradients with eight bits are (over the largest)."""
    found = {}
    for synced in (False, True):
        model, wire = wired("none")
        close, _ = wired("quantize:8")
        other = shard(Tower())
        optimizers = [adam(each) for each in (model, other)]
        alike = True
        for step in range(2):
            in_parts(close, step, synced)
            norms = []
            for each, optimizer in zip((model, other), optimizers, strict=True):
                in_parts(each, step, synced)
                if step == 0:
                    plain, near = gradients(each), gradients(close)
                norm: Any = nn.utils.clip_grad_norm_(each.parameters(), 0.05)
                norms.append(float(norm.full_tensor()))
                optimizer.step()
            alike = alike and norms[0] == norms[1]
            alike = alike and all_same(gradients(model), gradients(other))
        alike = alike and all_same(parameters(model), parameters(other))
        top = max(float(g.abs().max()) for g in plain.values())
        found[synced] = alike, wire.step, distance(near, plain) / top
    return found


def test_accumulated_gradients_and_their_norms_are_those_of_plain_fsdp():
    """Whether every micro-batch is exchanged, or only the last one."""
    for found in ranks.run(on_accumulation, ranks=2):
        for synced, (alike, steps, close) in found.items():
            assert alike
            assert steps == (4 if synced else 2)
            assert close < 0.02


# What models and FSDP may be like


class Checkpointed(Tower):
    """Computes its blocks again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        y: Tensor = self.last(h)
        return y


class Nested(Tower):
    """Blocks whose layers are sharded by themselves, and that are computed again."""

    forward = Checkpointed.forward

    def sharded(self, **fsdp: Any) -> Any:
        for block in self.blocks:
            fully_shard(block.up, **fsdp)
        model = shard(self, **fsdp)
        # Not what is next in backward: that is then gathered when it is computed again.
        model.set_modules_to_backward_prefetch([self.blocks[1]])
        self.blocks[1].set_modules_to_backward_prefetch([self.blocks[0]])
        return model


def wrapped() -> Tower:
    model = Tower()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


def compiled(backend: str, inside: bool) -> Any:
    torch._dynamo.reset()
    model = Tower()
    for i, block in enumerate(model.blocks):
        if inside:
            block.compile(backend=backend)
        else:
            model.blocks[i] = torch.compile(block, backend=backend)
    return shard(model)


def frozen() -> Tower:
    model = Tower()
    for part in (model.blocks[0], model.first, model.blocks[1].up):
        part.requires_grad_(False)
    return model


class Choosing(Tower):
    """Leaves out a layer of its second block in every other pass, and the first block in every
    third."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        h = torch.tanh(self.first(x))
        if self.passes % 3:
            h = self.blocks[0](h)
        # Through the block itself, or FSDP would not know of it.
        self.blocks[1].left_out = self.passes % 2 == 0
        y: Tensor = self.last(self.blocks[1](h))
        return y


class PartlyUsed(nn.Module):
    """A block that can do without its second layer."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.up, self.down = block.up, block.down
        self.left_out = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        y: Tensor = x + (h[:, : x.shape[1]] if self.left_out else self.down(h))
        return y


def choosing() -> Choosing:
    model = Choosing()
    model.blocks[1] = PartlyUsed(model.blocks[1])
    return model


def together() -> Any:
    """The first and last layers as one group of FSDP's, as models with tied weights have it."""
    model = Tower()
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.first, model.last])
    return fully_shard(model)


def looked_at() -> Any:
    """Used before it is attached: FSDP leaves the root's parameters whole after a forward pass."""
    model = shard(Tower())
    with torch.no_grad():
        loss_of(model, 0)
    return model


SETUPS: dict[str, Any] = {
    "kept after forward": lambda: shard(Tower(), reshard_after_forward=False),
    "cut after forward": lambda: shard(Tower(), reshard_after_forward=True),
    "checkpointed": lambda: shard(Checkpointed()),
    "nested and checkpointed": lambda: Nested().sharded(),
    "wrapped": lambda: shard(wrapped()),
    "compiled blocks": lambda: compiled("aot_eager", inside=False),
    "compiled in place": lambda: compiled("eager", inside=True),
    "frozen": lambda: shard(frozen()),
    "choosing": lambda: shard(choosing()),
    "two modules as one": together,
    "used before": looked_at,
}


def unwrapped(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same by the names that they have in the module that the user wrote."""
    return {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): tensor
        for name, tensor in tensors.items()
    }


def on_setup(setup: str) -> tuple[float, float, bool, list[str]]:
    """How far parameters are from plain FSDP's after some steps: without compression, and with
    parameters in eight bits; whether tensors are sent under the names of what is trained; and how
    often parameters were gathered."""
    models = [SETUPS[setup]() for _ in range(3)]
    wire = tw.attach(models[0], "none", min_numel=MIN)
    other = tw.attach(models[1], "none", min_numel=MIN, weights="quantize:8")
    found = []
    for model in models:
        for module in modules(model):
            module.reshard()  # the optimizer must not see whole parameters
        train(model, range(STEPS), adam(model))
        found.append(unwrapped(parameters(model)))
    sent = {name for name in wire.stats()["tensors"] if not name.endswith(")")}
    trained = {name: p for name, p in models[0].named_parameters() if p.requires_grad}
    gathered = [
        f"{name}: {row['steps']}"
        for name, row in other.stats()["tensors"].items()
        if name.endswith("(parameters)")
    ]
    exact, close = (distance(each, found[2]) for each in found[:2])
    return exact, close, sent == unwrapped(trained).keys(), sorted(gathered)


@pytest.mark.parametrize("setup", SETUPS)
def test_models_of_all_kinds_train_as_with_plain_fsdp(setup):
    """With parameters in eight bits nearly so, which are sent once for each pass. A step of 0.01 is
    rounded, and AdamW makes steps of what that changes."""
    for exact, close, named, gathered in ranks.run(on_setup, setup, ranks=2):
        assert exact == 0.0
        assert close < 0.01
        assert named
        counts = dict.fromkeys(("(root)", "blocks.0", "blocks.1"), STEPS)
        if setup == "nested and checkpointed":
            counts |= dict.fromkeys(("blocks.0.up", "blocks.1.up"), STEPS)
        elif setup == "two modules as one":
            counts["first"] = counts.pop("(root)")
        elif setup == "choosing":
            counts["blocks.0"] -= 1
        assert gathered == sorted(f"{title} (parameters): {n}" for title, n in counts.items())


def on_part() -> tuple[list[str], bool, bool]:
    """How a pass without all parameters is sent, whether the residual of the one that is left out
    stays, and whether the next pass is compressed again."""
    model, wire = wired("topk:0.1", choosing())
    backward(model, 0)
    before = wire.state_dict()["reducer"]["tensors"]["blocks.1.down.weight"]["residual"]
    backward(model, 1)
    rows = wire.stats()["tensors"]
    odd = [f"{n}: {r['compressor']}" for n, r in rows.items() if "some of" in n]
    after = wire.state_dict()["reducer"]["tensors"]["blocks.1.down.weight"]["residual"]
    backward(model, 2)
    again = wire.stats()["tensors"]["blocks.1.down.weight"]["steps"] == 2
    return odd, bool((before == after).all()), again


def test_a_pass_that_leaves_out_parameters_of_a_module_sends_it_uncompressed():
    for odd, kept, again in ranks.run(on_part, ranks=2):
        assert odd == ["blocks.1 (some of its parameters): none"]
        assert kept
        assert again


def on_fewer(weights: str | None) -> float:
    model, _ = wired("none", fsdp={"reshard_after_forward": 2}, weights=weights)
    other = shard(Tower(), reshard_after_forward=2)
    for each in (model, other):
        train(each, range(STEPS), adam(each))
    return distance(parameters(model), parameters(other))


def test_parameters_may_be_cut_over_fewer_ranks_after_forward():
    assert max(ranks.run(on_fewer, None, ranks=4)) <= ROUNDED
    assert max(ranks.run(on_fewer, "quantize:8", ranks=4)) < 0.01


def on_one() -> tuple[bool, int]:
    model, wire = wired("topk:0.1", weights="quantize:8")
    other = shard(Tower())
    for each in (model, other):
        train(each, range(2), adam(each))
    wire.load_state_dict(wire.state_dict())
    assert wire.summary()
    assert wire.explain()
    return all_same(parameters(model), parameters(other)), wire.stats()["total"]["bytes_sent"]


def test_one_rank_alone_exchanges_nothing():
    assert ranks.run(on_one, ranks=1) == [(True, 0)]


# What is remembered


def on_conservation(spec: str, feedback: str, layout: str) -> float:
    made, fsdp = LAYOUTS[layout]
    model, wire = wired(spec, made(), fsdp, feedback=feedback)
    books = Books(made(), model, wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        books.put(step)
        backward(model, step)
        books.take()
        optimizer.step()
    return books.balance()


@pytest.mark.parametrize(
    ("spec", "feedback", "layout", "size"),
    [
        ("topk:0.1", "ef14", "uneven", 3),
        ("onebit", "auto", "nested", 2),
        ("quantize:2", "auto", "tied", 2),
        ("topk:0.05|quantize:4", "auto", "columns", 2),
        ("quantize:4", "ef14:storage=host", "uneven", 4),
    ],
)
def test_what_was_left_out_is_sent_later(spec, feedback, layout, size):
    """All that ranks put in has come out, or waits in their residuals: to the rounding of some
    sums, over the magnitudes of all that went in."""
    for error in ranks.run(on_conservation, spec, feedback, layout, ranks=size):
        assert error < 32 * 2**-23


STORAGES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256, "host": 4.0}


def on_feedback() -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """What "auto" is for compressors; what is said of memory for each storage, and that so much is
    just allowed; what is refused."""
    auto = {}
    for spec in (
        "quantize:4",
        "quantize:8",
        "cast:bf16",
        "none",
        "topk:0.1",
        "onebit",
        "quantize:2",
    ):
        model, wire = wired(spec)
        auto[spec] = str(wire._reducer.feedback).partition(":")[0]
        wire.detach()
    said = {}
    for storage, width in STORAGES.items():
        model, wire = wired("topk:0.1", feedback=f"ef14:storage={storage}")
        train(model, range(2), torch.optim.SGD(model.parameters(), lr=0.1))
        finite = all(bool(g.isfinite().all()) for g in gradients(model).values())
        said[storage] = [wire.explain(), str(finite)]
        wire.detach()
        matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        try:
            tw.attach(
                model,
                "topk:0.1",
                feedback=f"ef14:storage={storage}",
                min_numel=MIN,
                max_bytes=int(matrices * width) - 8,
            )
        except tw.MemoryLimitError as error:
            said[storage].append(str(error))
    refused = []
    model = shard(Tower())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for spec, given in (
        ("topk:0.1", {"feedback": "ef21"}),
        ("dgc:0.1", {"optimizer": sgd}),
        ("signsgd", {}),
        ("powersgd:2", {}),
        ("topk:0.1", {"average": "senders"}),
        ("quantize:4", {"nodes": 2}),
        ("quantize:4", {"collective": "summable"}),
        ("quantize:4", {"granularity": "layer"}),
    ):
        try:
            tw.attach(model, spec, **given)
            refused.append(f"{spec} was taken")
        except ValueError as error:
            refused.append(str(error))
    return auto, said, refused


def test_feedback_suits_what_is_scattered_and_says_what_it_takes():
    for auto, said, refused in ranks.run(on_feedback, ranks=2):
        assert {spec for spec, feedback in auto.items() if feedback == "ef14"} == {
            *("topk:0.1", "onebit", "quantize:2")
        }
        for storage, (explained, finite, error) in said.items():
            assert finite == "True"
            assert "Residuals are those of whole gradients" in explained
            assert ("the host's memory" in explained) == (storage == "host")
            assert "max_bytes" in error
        assert "was taken" not in "".join(refused), refused
        for text, word in zip(
            refused,
            ("ef21", "dgc", "vote", "powersgd", "senders", "nodes", "summable", "granularity"),
            strict=True,
        ):
            assert word in text.lower(), text
