"""States of sharded models' wires: training goes on where it was, also on other numbers of ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of sharded_nets.py.
"""

import copy
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_nets import Tower, adam, backward, columns, parameters, residuals, train, uneven, wired
from tensors import same
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

OPTIONS = {"compressor": "topk:0.1", "feedback": "ef14", "weights": "quantize:8"}


def local(model: Any) -> list[Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]


def on_resumed(path: str) -> list[bool]:
    """Whether a run that goes on from a state has the bits of one that was not interrupted: from
    states of ranks, a gathered state, and one of torch.distributed.checkpoint."""
    model, wire = wired(inner=uneven(), **OPTIONS)
    optimizer = adam(model)
    train(model, range(3), optimizer)
    weights = copy.deepcopy(get_model_state_dict(model))
    moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    states: list[Any] = [copy.deepcopy(wire.state_dict())]
    states.append(wire.gathered_state_dict(everywhere=True))
    dcp.save({"wire": wire.stateful()}, checkpoint_id=path)
    train(model, range(3, 6), optimizer)
    wanted, left = local(model), residuals(wire)
    found = []
    for state in [*states, None]:
        model, wire = wired(inner=uneven(seed=1), **OPTIONS)
        optimizer = adam(model)
        set_model_state_dict(model, copy.deepcopy(weights))
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(moments))
        if state is None:
            dcp.load({"wire": wire.stateful(path)}, checkpoint_id=path)
        else:
            wire.load_state_dict(state)
        train(model, range(3, 6), optimizer)
        found.append(all(same(a, b) for a, b in zip(local(model), wanted, strict=True)))
        own = residuals(wire)
        found.append(all(same(own[name], left[name]) for name in left))
    return found


def test_training_resumes_bit_for_bit(tmp_path):
    for found in ranks.run(on_resumed, str(tmp_path / "checkpoint"), ranks=2):
        assert found == [True] * 6


def made(kind: str) -> tuple[Any, tw.Wire]:
    if kind == "columns":
        return wired("topk:0.1", Tower(), {"shard_placement_fn": columns}, weights="quantize:8")
    return wired("topk:0.1", uneven(), weights="quantize:8")


def on_saved(kind: str, path: str) -> tuple[Any, dict[str, Tensor]]:
    """A gathered state, and the mean of what ranks have left out."""
    model, wire = made(kind)
    train(model, range(3), torch.optim.SGD(model.parameters(), lr=0.1))
    dcp.save({"wire": wire.stateful()}, checkpoint_id=path)
    return wire.gathered_state_dict(), mean(residuals(wire))


def mean(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: t.clone() for name, t in tensors.items()}
    for t in found.values():
        dist.all_reduce(t)
        t /= dist.get_world_size()
    return found


def on_loaded(kind: str, state: Any, path: str) -> list[tuple[dict[str, Tensor], bool]]:
    """The mean of what ranks go on with, and whether they can."""
    found = []
    for given in (state, None):
        model, wire = made(kind)
        if given is None:
            dcp.load({"wire": wire.stateful(path)}, checkpoint_id=path)
        else:
            wire.load_state_dict(given)
        left = mean(residuals(wire))
        backward(model, 3)
        finite = all(bool(p.isfinite().all()) for p in parameters(model).values())
        found.append((left, finite and wire.step == 4))
    return found


@pytest.mark.parametrize(("kind", "before", "after"), [("uneven", 4, 2), ("columns", 2, 4)])
def test_another_number_of_ranks_goes_on_with_what_is_yet_to_be_sent(kind, before, after, tmp_path):
    """The mean of what ranks have left out stays the same, as parameters lie."""
    path = str(tmp_path / "checkpoint")
    saved = ranks.run(on_saved, kind, path, ranks=before)
    state, wanted = saved[0]
    for found in ranks.run(on_loaded, kind, state, path, ranks=after):
        for left, works in found:
            assert works
            assert left.keys() == wanted.keys()
            for name, values in wanted.items():
                torch.testing.assert_close(left[name], values, rtol=1e-6, atol=1e-7)


def on_wrong() -> list[str]:
    """States that are refused, after which all is as before."""
    model, wire = wired(inner=uneven(), **OPTIONS)
    backward(model, 0)
    good = wire.state_dict()
    other = copy.deepcopy(good)
    other["rank"] = 1 - other["rank"]
    longer = copy.deepcopy(good)
    longer["reducer"]["tensors"]["blocks.0.up.weight"]["residual"] = torch.zeros(3)
    row = copy.deepcopy(good)
    row["weights"]["blocks.0"]["row"] = torch.zeros(3)
    words = []
    before = residuals(wire)
    for state in (other, longer, row):
        try:
            wire.load_state_dict(state)
            words.append("was loaded")
        except ValueError as error:
            words.append(str(error))
    after = residuals(wire)
    words.append(str(all(same(before[name], after[name]) for name in before)))
    wire.load_state_dict(good)
    backward(model, 1)
    return words


def test_states_that_do_not_fit_are_refused():
    for rank, longer, row, untouched in ranks.run(on_wrong, ranks=2):
        assert "the state of rank" in rank
        assert "blocks.0.up.weight" in longer
        assert "blocks.0" in row
        assert "changed" in row
        assert untouched == "True"
