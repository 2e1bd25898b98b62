"""Averages over replicas of shards (HSDP), with two replicas of two shards each.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of sharded_nets.py.
"""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import TIMEOUT
from sharded_nets import (
    MIN,
    Tower,
    adam,
    backward,
    columns,
    distance,
    gradients,
    parameters,
    shard,
    train,
    uneven,
)
from tensors import same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire as tw

# The first test of a new checkout compiles all kernels.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
ROUNDED = STEPS * 10 * 4 * 2**-23  # as in test_fsdp.py


def meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def replicated(
    mesh: DeviceMesh, compressor: Any, inner: Any = None, fsdp: Any = None, **options: Any
) -> tuple[Any, tw.Wire]:
    model = shard(Tower() if inner is None else inner, mesh=mesh["shard"], **(fsdp or {}))
    given = {"min_numel": MIN, "timeout": TIMEOUT, "replicate": mesh["replicate"]} | options
    return model, tw.attach(model, compressor, **given)


def on_native() -> dict[str, float]:
    """How far parameters are from those of native HSDP, and of plain FSDP over all ranks."""
    mesh, found = meshes(), {}
    for name, made, fsdp in (
        ("uneven", uneven, {}),
        ("columns", Tower, {"shard_placement_fn": columns}),
    ):
        model, _ = replicated(mesh, "none", made(), fsdp)
        native = shard(made(), mesh=mesh, **fsdp)
        for each in (model, native):
            train(each, range(STEPS), adam(each))
        found[name] = distance(parameters(model), parameters(native))
    return found


def test_without_compression_it_is_native_hsdp():
    for found in ranks.run(on_native, ranks=4):
        assert max(found.values()) <= ROUNDED, found


def on_spec(spec: str) -> tuple[float, dict[str, str]]:
    """How far averages of the first step are from native ones (over the largest), and how tensors
    were sent. Replicas are compared in every step, and here in the end."""
    mesh = meshes()
    inner = Tower()
    native = shard(Tower(), mesh=mesh)
    model = shard(inner, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options: dict[str, Any] = {"optimizer": optimizer} if spec.startswith("dgc") else {}
    wire = tw.attach(
        model,
        spec,
        min_numel=MIN,
        timeout=TIMEOUT,
        replicate=mesh["replicate"],
        check_every=1,
        **options,
    )
    backward(native, 0)
    backward(model, 0)
    plain = gradients(native)
    top = max(float(g.abs().max()) for g in plain.values())
    error = distance(gradients(model), plain) / top
    optimizer.step()
    train(model, range(1, 4), optimizer)
    assert wire.step == 4
    shards = [p.to_local().detach().clone() for p in model.parameters()]
    for p in shards:
        assert bool(p.isfinite().all())
        theirs = p.clone()
        dist.broadcast(theirs, dist.get_rank() % 2, group=mesh["replicate"].get_group())
        assert same(p, theirs)
    sent = {name: row["compressor"] for name, row in wire.stats()["tensors"].items()}
    assert wire.summary()
    assert wire.explain()
    wire.detach()
    return error, sent


SPECS = {
    "topk:0.1": 1.01,
    "quantize:8": 0.01,
    "powersgd:4": 1.5,
    "arc:0.2": 1.01,
    "dgc:0.1": 1.5,
}


@pytest.mark.parametrize("spec", SPECS)
def test_replicas_stay_alike_with_all_kinds_of_compressors(spec):
    joint = spec in ("powersgd:4", "arc:0.2")  # all that a module has goes in one exchange
    for error, sent in ranks.run(on_spec, spec, ranks=4):
        assert error < SPECS[spec]
        assert sent.keys() == dict(Tower().named_parameters()).keys()
        assert sent["blocks.0.up.bias"] == "none" or joint
        assert sent["blocks.0.up.weight"] != "none"


def on_difference() -> list[str]:
    """What replicas that begin differently are told, in the first step; and those that part later,
    when they are compared."""
    mesh, said = meshes(), []
    model, _ = replicated(mesh, "quantize:8", Tower(seed=mesh["replicate"].get_local_rank()))
    try:
        backward(model, 0)
        said.append("nothing")
    except tw.errors.ReplicaError as error:
        said.append(str(error))
    model, _ = replicated(mesh, "quantize:8", check_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, range(2), optimizer)
    if dist.get_rank() >= 2:  # all of a replica: shards compare theirs by themselves
        with torch.no_grad():
            model.blocks[1].up.weight.to_local()[0, 0] += 1.0
    backward(model, 2)
    try:
        backward(model, 3)
        said.append("nothing")
    except tw.errors.ReplicaError as error:
        said.append(str(error))
    return said


def test_replicas_that_differ_are_found():
    for first, later in ranks.run(on_difference, ranks=4):
        assert "parameters differ" in first
        assert "blocks.1.up.weight" in later
        assert "first" not in later
