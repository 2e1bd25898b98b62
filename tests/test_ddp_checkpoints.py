"""Checkpoints of wires: training that was stopped goes on as if it had not been.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. Models and batches
are those of nets.py.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import (
    all_same,
    alone,
    backward,
    gradients,
    loss_of,
    memory,
    net,
    train,
    wired,
)
from torch import Tensor

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

# On another number of ranks


PARTS = {"ef14": ("residual",), "ef21m:0.5": ("v", "h", "mean")}


def means(wire: tw.Wire) -> dict[str, Tensor]:
    """Of all that the ranks remember."""
    found = {}
    for name, value in memory(wire).items():
        if not name.endswith(" steps"):
            found[name] = value.double()
            dist.all_reduce(found[name])
            found[name] /= dist.get_world_size()
    return found


def write(wire: tw.Wire, place: str) -> None:
    """In both ways."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"wire": wire.stateful()}, checkpoint_id=f"{place}/dcp")
    state = wire.gathered_state_dict()
    if dist.get_rank() == 0:
        torch.save(state, f"{place}/gathered.pt")
    dist.barrier()


def read(wire: tw.Wire, place: str, way: str) -> None:
    import torch.distributed.checkpoint as dcp

    if way == "dcp":
        path = f"{place}/dcp"
        dcp.load({"wire": wire.stateful(path)}, checkpoint_id=path)
    else:
        wire.load_state_dict(torch.load(f"{place}/gathered.pt", weights_only=True))


def on_first(feedback: str, place: str) -> dict[str, Tensor]:
    model, wire = wired(feedback=feedback)
    train(model, range(3))
    write(wire, place)
    return means(wire)


def on_next(feedback: str, old: str, new: str) -> dict[str, Any]:
    """What they remember in the mean, loaded in both ways, and whether a step conserves it."""
    found: dict[str, Any] = {}
    for way in ("dcp", "gathered"):
        model, wire = wired(feedback=feedback)
        read(wire, old, way)
        found[way] = means(wire)
        found[f"{way} step"] = wire.step
        alike = [None] * dist.get_world_size()
        dist.all_gather_object(alike, memory(wire))
        found[f"{way} alike"] = all(all_same(each, alike[0]) for each in alike)
    write(wire, new)
    if feedback == "ef14":
        own = [alone(model, 3, rank) for rank in range(dist.get_world_size())]
        backward(model, 3)
        after = means(wire)
        found["lost"] = 0.0
        for name, g in gradients(model).items():
            if f"{name} residual" in after:
                put = sum(each[name].double() for each in own) / len(own)
                came = g.double() + after[f"{name} residual"].view(g.shape)
                lost = put + found["gathered"][f"{name} residual"].view(g.shape) - came
                found["lost"] = max(found["lost"], float(lost.abs().max() / put.abs().max()))
    return found


@pytest.mark.parametrize("feedback", PARTS)
def test_the_mean_of_what_is_remembered_survives_any_number_of_ranks(feedback, tmp_path):
    places = [str(tmp_path / str(size)) for size in (4, 2, 3)]
    for place in places:
        Path(place).mkdir()
    wanted = ranks.run(on_first, feedback, places[0], ranks=4)[0]
    assert {name.split()[1] for name in wanted} == set(PARTS[feedback])
    for old, new, size in (*zip(places[:-1], places[1:], (2, 3), strict=True),):
        for found in ranks.run(on_next, feedback, old, new, ranks=size):
            for way in ("dcp", "gathered"):
                assert found[way].keys() == wanted.keys()
                for name, mean in wanted.items():
                    # Four sums and a division in float32, twice.
                    bound = 10 * 2.0**-24 * max(1e-3, float(mean.abs().max()))
                    error = (found[way][name] - mean).abs().max()
                    assert error <= bound, (way, name)
                assert found[f"{way} step"] == 3
                assert found[f"{way} alike"]
            assert found.get("lost", 0.0) < 1e-6  # a dozen roundings of float32


# As if nothing had happened


class Case(NamedTuple):
    """A wire, and after how many steps it is saved."""

    spec: str
    feedback: str
    granularity: str
    saved: int = 3


CASES = [
    *(Case("topk:0.1", feedback, "bucket") for feedback in ("ef14", "ef21m:0.5")),
    Case("topk:0.1", "ef21m:0.5", "tensor"),
    Case("topk:0.1", "ef14:storage=int8", "bucket"),
    Case("topk:0.1", "ef14:storage=bf16,reset=2", "bucket"),
    Case("randomk:0.1", "ef14", "bucket"),
    Case("randomk:0.1", "none", "tensor"),
    Case("randomk:0.1,shared=true", "ef14", "tensor"),
    Case("qsgd:7", "none", "bucket", 2),
    Case("topk:0.1", "ef14", "tensor", 1),
    Case("topk:0.1", "ef14", "bucket", 1),
]
REST = 3  # steps after it: two that follow the saved plan, and one of its own


class Run:
    """Training of one case."""

    def __init__(self, case: Case, seed: int = 7) -> None:
        self.case = case
        self.model, self.wire = wired(
            case.spec, feedback=case.feedback, granularity=case.granularity, seed=seed
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(self, steps: range) -> list[float]:
        return train(self.model, steps, self.optimizer)

    def rest(self) -> list[float]:
        return self.train(range(self.case.saved, self.case.saved + REST))


def on_whole(place: str) -> list[dict[str, Any]]:
    """Training that is saved on the way and goes on."""
    import torch.distributed.checkpoint as dcp

    found = []
    for i, case in enumerate(CASES):
        run = Run(case)
        run.train(range(case.saved))
        state = {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "wire": run.wire.state_dict(),
        }
        torch.save(state, f"{place}/{i}.{dist.get_rank()}.pt")
        dcp.save({"wire": run.wire.stateful()}, checkpoint_id=f"{place}/{i}")
        before = copy.deepcopy(state["wire"])
        rest = run.rest()
        found.append({"rest": rest, "copy": alike(before, state["wire"])})
    return found


def alike(a: Any, b: Any) -> bool:
    """The same values in the same places."""
    if isinstance(a, Tensor):
        return all_same({"": a}, {"": b})
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def ways(i: int) -> tuple[str, str]:
    """How the wire's state of a case is loaded."""
    return "torch", "dcp with path" if i % 2 else "dcp"


def on_resumed(place: str) -> list[dict[str, Any]]:
    """Training that goes on, with the wire's state from either kind of checkpoint."""
    import torch.distributed.checkpoint as dcp

    found = []
    for i, case in enumerate(CASES):
        state = torch.load(f"{place}/{i}.{dist.get_rank()}.pt", weights_only=True)
        each: dict[str, Any] = {}
        for way in ways(i):
            run = Run(case, seed=7 if way == "torch" else 8)
            run.model.load_state_dict(state["model"])
            run.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            if way == "torch":
                run.wire.load_state_dict(state["wire"])
            else:
                path = f"{place}/{i}"
                given = run.wire.stateful(path) if "path" in way else run.wire.stateful()
                dcp.load({"wire": given}, checkpoint_id=path)
            each[f"{way} again"] = alike(run.wire.state_dict(), state["wire"])
            each[way] = run.rest()
            each[f"{way} step"] = run.wire.step
        found.append(each)
    return found


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> list[tuple[dict, dict]]:
    """Each case as it went on, and as it was resumed by new processes; rank by rank."""
    place = str(tmp_path_factory.mktemp("checkpoints"))
    whole = ranks.run(on_whole, place, ranks=2)
    with ranks.Ranks(2) as group:
        resumed = group.run(on_resumed, place)
    return [(whole[rank][i], resumed[rank][i]) for rank in range(2) for i in range(len(CASES))]


@pytest.mark.parametrize("i", range(len(CASES)), ids=[" ".join(map(str, c)) for c in CASES])
def test_training_goes_on_bit_for_bit_in_new_processes(stopped, i):
    case = CASES[i]
    # After its first step DDP forms its final buckets, from the order in which gradients came: what
    # is compressed by buckets and was saved before that goes on with other buckets.
    same_buckets = case.granularity == "tensor" or case.saved > 1
    exact = REST if same_buckets else 1
    for whole, resumed in (stopped[i], stopped[len(CASES) + i]):
        assert whole["copy"], "later steps have changed a state that was taken before"
        for way in ways(i):
            assert resumed[way][:exact] == whole["rest"][:exact], way
            assert resumed[f"{way} step"] == case.saved + REST
        assert resumed["torch again"]


# What does not fit


def caught(function: Any) -> str:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        function()
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_scale() -> list[float]:
    """Residuals of scaled gradients, and those with which training without a scaler goes on."""
    model, wire = wired(scaler=SimpleNamespace(get_scale=lambda: 1024.0))
    for step in range(2):
        model.zero_grad()
        (1024 * loss_of(model, step)).backward()
    other, bare = wired()
    for step in range(2):
        backward(other, step)
    again, resumed = wired()
    resumed.load_state_dict(wire.state_dict())
    backward(other, 2)
    backward(again, 2)
    return [float(w.stats()["total"]["residual_norm"]) for w in (bare, resumed)]


def test_residuals_of_scaled_gradients_are_scaled_back_without_a_scaler():
    for wanted, found in ranks.run(on_scale, ranks=2):
        assert found == pytest.approx(wanted, rel=1e-5)


def on_thawed() -> tuple[bool, str]:
    """A layer is trained from now on that was not when the state was saved, and the reverse."""
    inner = net()
    inner[2].requires_grad_(False)
    model, wire = wired(inner=inner)
    train(model, range(3))
    state = wire.state_dict()
    wire.detach()
    inner[2].requires_grad_(True)
    model, wire = wired(inner=inner)
    wire.load_state_dict(state)
    backward(model, 3)
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, gradients(model))
    train(model, range(4, 7))
    state = wire.state_dict()
    wire.detach()
    inner[2].requires_grad_(False)
    model, wire = wired(inner=inner)
    error = caught(lambda: wire.load_state_dict(state))
    return all_same(*everyone), error


def test_layers_may_thaw_between_checkpoints():
    for equal, error in ranks.run(on_thawed, ranks=2):
        assert equal, "what the loaded plan does not know was not exchanged"
        assert error.startswith("ValueError: Wire: the state has a parameter '2.bias'")


def on_less_compressed(place: str) -> str:
    """Of a layer that is excluded from now on, the checkpoint remembers something."""
    import torch.distributed.checkpoint as dcp

    model, wire = wired()
    train(model, range(2))
    dcp.save({"wire": wire.stateful()}, checkpoint_id=f"{place}/dcp")
    model, wire = wired(exclude="2.*")
    return caught(lambda: dcp.load({"wire": wire.stateful()}, checkpoint_id=f"{place}/dcp"))


def test_a_checkpoint_that_remembers_more_is_refused_in_words(tmp_path):
    for error in ranks.run(on_less_compressed, str(tmp_path), ranks=2):
        assert "Wire: the checkpoint remembers a residual of 2.weight, which is sent unc" in error


def on_other_ranks(place: str, saved: int) -> dict[str, str]:
    import torch.distributed.checkpoint as dcp

    model, wire = wired()
    train(model, range(2))
    if dist.get_world_size() == saved:
        inner = {name: torch.ones(7) for name in ("ranks", "run", "tensors")}  # as in ours
        dcp.save({"model": inner, "wire": wire.stateful()}, checkpoint_id=f"{place}/dcp")
        return {}
    path = f"{place}/dcp"
    return {
        "no path": caught(lambda: dcp.load({"wire": wire.stateful()}, checkpoint_id=path)),
        "path": caught(lambda: dcp.load({"wire": wire.stateful(path)}, checkpoint_id=path)),
    }


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> dict[str, str]:
    place = str(tmp_path_factory.mktemp("moved"))
    ranks.run(on_other_ranks, place, 3, ranks=3)
    return ranks.run(on_other_ranks, place, 3, ranks=2)[0]


def test_a_checkpoint_of_other_ranks_is_refused_where_it_cannot_be_read(moved):
    assert "Size mismatch" in moved["no path"], moved


def test_names_of_parameters_do_not_confuse_it(moved):
    assert moved["path"] == ""
