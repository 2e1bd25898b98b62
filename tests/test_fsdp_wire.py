"""What a wire of a sharded model tells, takes and refuses.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of sharded_nets.py.
"""

import re
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import all_same
from sharded_nets import (
    MIN,
    Tower,
    adam,
    backward,
    meeting_bytes,
    parameters,
    shard,
    train,
    wired,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.collectives.message import bundled_bytes

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels


def on_detach() -> tuple[list[bool], list[str], bool]:
    """Whether models find their wires, what a second wire is told, and whether a model without its
    wire is a plain one, also one that got another wire afterwards."""
    model, wire = wired("onebit", weights="quantize:8")
    other = shard(Tower())
    found = [
        tw.wire_of(model) is wire,
        tw.wire_of(torch.compile(model, backend="eager")) is wire,
        tw.wire_of(other) is None,
        tw.wire_of(nn.Linear(2, 2)) is None,
    ]
    refused = []
    for options in ({}, {"weights": "quantize:8"}):
        try:
            tw.attach(model, "none", **options)
        except ValueError as error:
            refused.append(str(error))
    wire.detach()
    found += [tw.wire_of(model) is None, "detached" in repr(wire)]
    optimizers = [adam(each) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        train(each, range(2), optimizer)
    plain = all_same(parameters(model), parameters(other)) and wire.step == 0
    again = tw.attach(model, "none", min_numel=MIN)
    for each, optimizer in zip((model, other), optimizers, strict=True):
        train(each, range(2, 4), optimizer)
    found.append(tw.wire_of(model) is again and again.step == 2)
    return found, refused, plain and all_same(parameters(model), parameters(other))


def test_a_model_has_one_wire_and_is_plain_without():
    for found, refused, plain in ranks.run(on_detach, ranks=2):
        assert found == [True] * 7
        assert len(refused) == 2
        assert "detach()" in refused[0]
        assert plain


class Writer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.rows.append((tag, global_step))


def on_figures(spec: str, options: dict[str, Any]) -> tuple[dict[str, Any], str, str, list[Any]]:
    model, wire = wired(spec, Tower(24, 48, 24), **options)
    writer = Writer()
    wire.log_to(writer, every=2)
    train(model, range(4), torch.optim.SGD(model.parameters(), lr=0.1))
    return dict(wire.stats()), wire.summary(), wire.explain(), writer.rows


def test_bytes_are_those_of_what_is_sent_to_others():
    """Of P shards P - 1 leave a rank: of two bytes for each element of a matrix, with frames and
    the lengths of messages besides."""
    for stats, summary, explained, rows in ranks.run(on_figures, "cast:bf16", {}, ranks=3):
        row = stats["tensors"]["blocks.0.up.weight"]
        assert row["steps"] == 4
        assert row["bytes_in"] == 4 * 4 * 24 * 48
        frame = tw.Cast("bf16").encode(torch.ones(24 * 48 // 3)).num_bytes
        # Two matrices of one size and their biases share a meeting, and a message to each of two
        # other ranks; what these come to is theirs in the proportion of their frames.
        biases = [tw.NoCompression().encode(torch.ones(n // 3)).num_bytes for n in (48, 24)]
        frames = [frame, frame, *biases]
        sent = 4 * (meeting_bytes(3) + 2 * bundled_bytes(frames)) * frame / sum(frames)
        assert abs(row["bytes_sent"] - sent) <= 0.5 + 1e-6, "a whole number"
        assert row["collective"] == "reduce_scatter"
        assert stats["tensors"]["blocks.0.up.bias"]["compressor"] == "none"
        assert stats["total"]["bytes_sent"] >= sum(
            each["bytes_sent"] for each in stats["tensors"].values()
        )
        assert {"waiting", "network"} <= stats["seconds"].keys()
        assert "blocks.0.up.weight" in summary
        assert "cast:bf16" in explained
        assert {step for _, step in rows} == {2, 4}
        assert "thinwire/bytes_sent" in {tag for tag, _ in rows}


def test_small_and_excluded_tensors_are_sent_uncompressed():
    options = {"exclude": ["first*"], "min_numel": 24 * 24 + 1}
    for stats, *_ in ranks.run(on_figures, "topk:0.1", options, ranks=2):
        sent = {name: row["compressor"] for name, row in stats["tensors"].items()}
        small = {name: spec for name, spec in sent.items() if "blocks" not in name}
        assert set(small.values()) == {"none"}
        assert sent["blocks.0.up.weight"] == "topk:0.1"
        assert sent["blocks.0.up.bias"] == "none"


def on_policies() -> tuple[list[str], dict[str, str], list[str], str]:
    """The compressors of a warm-up; of rules; what an optimizer like Adam is told; and what "auto"
    has chosen."""
    model, wire = wired("warmup:2,(quantize:4)")
    warm = []
    for step in range(4):
        backward(model, step)
        warm.append(str(wire.settings()))
    model, wire = wired("layerwise:(blocks.0.*=quantize:8; *=cast:bf16)")
    backward(model, 0)
    ruled = {name: row["compressor"] for name, row in wire.stats()["tensors"].items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, wire = wired("topk:0.1")
        train(model, range(2), adam(model))
    told = [str(w.message) for w in caught if issubclass(w.category, tw.errors.ThinwireWarning)]
    model, wire = wired("auto")
    train(model, range(3), adam(model))
    by_name, function = wired(lambda name: "quantize:4" if "up" in name else None)
    backward(by_name, 0)
    ruled |= {f"function {n}": r["compressor"] for n, r in function.stats()["tensors"].items()}
    return warm, ruled, told, wire.explain()


def test_policies_choose_for_shards():
    for warm, ruled, told, explained in ranks.run(on_policies, ranks=2):
        assert "quantize:4" in warm[-1]
        assert "quantize:4" not in warm[0]
        assert ruled["blocks.0.up.weight"] == "quantize:8"
        assert ruled["blocks.1.up.weight"] == "cast:bf16"
        assert ruled["function blocks.1.up.weight"] == "quantize:4"
        assert ruled["function blocks.1.down.weight"] == "none"
        assert len(told) == 1
        assert "quantize:4" in told[0]
        assert "AdamW" in explained


class ScaledOnce:
    """What `attach` takes for a GradScaler."""

    def __init__(self) -> None:
        self.scale = 4.0

    def get_scale(self) -> float:
        return self.scale


def on_scaler() -> tuple[bool, bool, float]:
    """Whether a step that is not finite leaves residuals as they were, whether residuals follow the
    scale, and how far averages without compression are from plain ones."""
    scaler = ScaledOnce()
    model, wire = wired("topk:0.1", scaler=scaler)
    model.zero_grad()
    backward(model, 0)
    before = wire.state_dict()["reducer"]["tensors"]["blocks.0.up.weight"]["residual"]
    loss = model(torch.full((2, 12), float("inf") if dist.get_rank() else 1.0)).sum()
    loss.backward()
    after = wire.state_dict()["reducer"]["tensors"]["blocks.0.up.weight"]["residual"]
    scaler.scale = 8.0
    wire._begin_step()
    scaled = wire.state_dict()["reducer"]["tensors"]["blocks.0.up.weight"]["residual"]
    return bool((before == after).all()), bool((scaled == 2 * after).all()), float(before.norm())


def test_residuals_follow_a_scaler():
    for kept, scaled, norm in ranks.run(on_scaler, ranks=2):
        assert kept
        assert scaled
        assert norm > 0


def on_refused() -> dict[str, str]:
    """What attach says to what it does not take."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    two = fully_shard(nn.Linear(4, 4), mesh=mesh)
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    one = fully_shard(nn.Linear(4, 4))
    still = fully_shard(nn.Linear(4, 4).requires_grad_(False))
    own = fully_shard(nn.Linear(4, 4))
    own.set_all_reduce_hook(lambda reduced: None)
    several = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(several[0], mesh=mesh["shard"])
    fully_shard(several)
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "two dimensions": (two, {}),
        "replicate and DDP": (ddp, {"replicate": mesh["replicate"]}),
        "weights and DDP": (ddp, {"weights": "quantize:8"}),
        "both": (one, {"weights": "quantize:8", "replicate": mesh["replicate"]}),
        "a class": (FSDPModule, {}),
        "a module": (nn.Linear(4, 4), {}),
        "nothing trained": (still, {}),
        "a hook of others": (own, {}),
        "several meshes": (several, {}),
        "no group": (one, {"replicate": 2}),
        "a mesh of two dimensions": (one, {"replicate": mesh}),
        "a pattern": (one, {"exclude": "nothing*"}),
        "resync_every": (one, {"weights": "quantize:8", "resync_every": -1}),
        "joint weights": (one, {"weights": "powersgd:2"}),
    }
    said = {}
    for name, (model, options) in given.items():
        try:
            tw.attach(model, "quantize:4", **options)
            said[name] = "taken"
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    tw.attach(one, "quantize:4").detach()
    return said


REFUSED = {
    "two dimensions": 'ValueError.*mesh=mesh\\["shard"\\].*\\n.*replicate=mesh\\["replicate"\\]',
    "replicate and DDP": "ValueError.*fully_shard was applied to",
    "weights and DDP": "ValueError.*fully_shard was applied to",
    "both": "ValueError.*without replicate=",
    "a class": "TypeError.*is a class",
    "a module": "TypeError.*fully_shard.*got Linear",
    "nothing trained": "ValueError.*no parameter of this model is trained",
    "a hook of others": "ValueError.*all-reduce hook of its own",
    "several meshes": "ValueError.*one mesh throughout",
    "no group": "TypeError.*mesh\\['replicate'\\].*got int",
    "a mesh of two dimensions": "ValueError.*one dimension",
    "a pattern": "ValueError.*exclude",
    "resync_every": "ValueError.*resync_every",
    "joint weights": "(Type|Value)Error.*powersgd",
}


def test_what_cannot_be_attached_to_is_told_why_and_what_can():
    for said in ranks.run(on_refused, ranks=2):
        for name, pattern in REFUSED.items():
            assert re.search(pattern, said[name], re.DOTALL | re.IGNORECASE), (name, said[name])
