"""A Reducer is a wire that a loop of one's own drives: whatever `attach` does, it does too.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. What feedbacks and collectives do in a Reducer is in test_feedback.py.
"""

import io
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import MIN, TIMEOUT, all_same, alone, backward, gradients, net, raised, wired
from tensors import normal
from torch import Tensor, nn

import thinwire as tw
from thinwire.parallel.model import described
from thinwire.policies import Chooser, Policy, PolicyContext, TensorInfo
from thinwire.reducer.exchange import UnitExchange

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels


def make(compressor: Any = "topk:0.1", **options: Any) -> tw.Reducer:
    return tw.Reducer(compressor, **{"timeout": TIMEOUT, **options})


def some(step: int, names: str = "abc") -> dict[str, Tensor]:
    """Matrices a and b and whatever else, which are vectors, of this rank."""
    seed = 100 * step + 10 * dist.get_rank()
    shapes = {"a": (40, 30), "b": (32, 40)}
    return {
        name: normal(1200 if name == "a" else 1280 if name == "b" else 90, seed + ord(name)).view(
            shapes.get(name, (90,))
        )
        for name in names
    }


# The same as with DDP


def by_layer(name: str) -> Any:
    return {"0": tw.TopK(0.2), "2": None, "4": "quantize:8"}[name[0]]


SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "min_numel": ("topk:0.1", {"min_numel": 600}),
    "exclude": ("topk:0.1", {"exclude": ["2.*"]}),
    "function": (by_layer, {}),
    "none": ("none", {}),
    "senders": ("topk:0.1", {"average": "senders"}),
    "ef21": ("topk:0.1", {"feedback": "ef21"}),
    "powersgd": ("powersgd:2", {}),
    "arc": ("arc:0.2", {}),
    "dgc": ("dgc:0.1", {}),
    "dgc warmup": ("dgc:0.05,1", {}),
    "signsgd": ("signsgd", {}),
    "signum": (tw.methods.parse("signum:0.5"), {}),
    "1bit-sgd": ("1bit-sgd", {}),
    "warmup": ("warmup:2,(topk:0.1)", {}),
    "ramp": (tw.policies.Ramp(4, "topk:0.05", 0.5), {}),
    "layerwise": ("layerwise:(0.*=topk:0.1; 2.*=warmup:3,(quantize:4); *=dense)", {}),
    "solve": ("solve:(topk:0.1),steps=2", {}),
    "magnitude": ("magnitude:0.1", {}),
    "measured": ("topk:0.1", {"measure_every": 1, "check_every": 2}),
}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def on_both_ways(name: str) -> list[str]:
    """Where a loop with a Reducer differs from DDP with a wire, step by step."""
    compressor, options = SAME[name]
    given, theirs = ({"min_numel": MIN, **options} for _ in range(2))
    inner = net()
    if name.startswith("dgc"):
        given["optimizer"], theirs["optimizer"] = optimizer(net()), optimizer(inner)
    ddp = {"bucket_cap_mb": 25}
    model, wire = wired(compressor, inner, ddp=ddp, granularity="tensor", **theirs)
    reducer, wrong = make(compressor, **given), []
    for step in range(7):
        own = alone(model, step)
        backward(model, step)
        (names,) = wire.state_dict()["layout"]
        averages = {each: own[each] for each in names}
        reducer.average(averages)
        if not all_same(averages, {each: gradients(model)[each] for each in names}):
            wrong.append(f"gradients of step {step}")
    stats, wanted = reducer.stats(), wire.stats()
    for each in (stats, wanted) if name == "none" else ():
        for line in each["tensors"].values():  # DDP's sums are direct, without records
            del line["bytes_sent"], line["ratio"]
    for key in ("step", "tensors", "policy", "decisions"):
        if stats[key] != wanted[key]:
            wrong.append(f"{key}: {stats[key]}, not {wanted[key]}")
    if stats["seconds"].keys() != wanted["seconds"].keys():
        wrong.append(f"seconds: {stats['seconds'].keys()}")
    if set(reducer.settings().rules) != set(wire.settings().rules):
        wrong.append(f"{reducer.settings()}, not {wire.settings()}")
    if reducer.explain().splitlines()[0] != wire.explain().splitlines()[0]:
        wrong.append(f"{reducer.explain()}, not {wire.explain()}")
    return wrong


@pytest.mark.parametrize("name", SAME)
def test_a_loop_of_ones_own_computes_what_ddp_does(name):
    assert ranks.run(on_both_ways, name, ranks=2) == [[], []]


def on_clocks() -> list[Any]:
    """Policies that go by the clock, on ranks of which one gets larger tensors than the others."""
    found = []
    for spec in ("bandwidth:(topk:0.01)", "auto:2", "accuracy:(topk:0.1),1,5"):
        reducer, used = make(spec), []
        reducer.observe(3.5)  # before any tensor is known: behind
        for step in range(8):
            xs = some(step)
            handle = reducer.average(xs, async_op=step % 3 == 0)
            if dist.get_rank() or step % 3:
                handle.wait()
            if step == 4:
                reducer.observe(3.0 + 0.1 * dist.get_rank())
            used.append(handle)
        tw.wait_all(used)
        decisions = [decision._replace(why="") for decision in reducer.decisions]
        found.append((decisions, reducer.state_dict()["policy"]))
    return found


def test_ranks_decide_alike():
    first, *others = ranks.run(on_clocks, ranks=3)
    assert all(other == first for other in others)
    assert [decision.step for decision in first[2][0]] == [2, 7]


# What it tells


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def on_figures() -> dict[str, Any]:
    reducer, writer = make(min_numel=100, measure_every=1), Writer()
    reducer.log_to(writer, every=2)
    found = {"before": [reducer.explain(), reducer.summary(), raised(reducer.settings)]}
    for step in range(5):
        reducer.average(some(step), async_op=step == 2).wait()
    kept = reducer.state_dict()["reducer"]["tensors"]
    found["norms"] = {name: float(state["residual"].norm()) for name, state in kept.items()}
    return found | {
        "stats": reducer.stats(),
        "summary": reducer.summary(),
        "explain": reducer.explain(),
        "steps": sorted({step for _, _, step in writer.scalars}),
    }


def test_it_tells_what_a_wire_tells():
    for found in ranks.run(on_figures, ranks=2):
        assert "No tensor is known yet" in found["before"][0]
        assert "nothing yet" in found["before"][1]
        assert found["before"][2].startswith("ValueError: no tensor is known yet")
        rows, total = found["stats"]["tensors"], found["stats"]["total"]
        assert found["stats"]["step"] == 5
        assert {name: row["compressor"] for name, row in rows.items()} == {
            **{"a": "topk:0.1", "b": "topk:0.1"},
            "c": "none",
        }
        assert all(row["steps"] == 5 for row in rows.values())
        assert {n: row["residual_norm"] for n, row in rows.items()} == {**found["norms"], "c": None}
        assert all((rows[name]["relative_error"] is None) == (name == "c") for name in rows)
        assert total["exchanges"] == 5, "what is uncompressed rides along"
        assert found["stats"]["seconds"].keys() == {"encode", "network", "decode", "waiting"}
        assert "total of 5 steps" in found["summary"]
        assert "topk:0.1 decides on 2 tensors with 2,480 elements" in found["explain"]
        assert found["steps"] == [2, 4]


# States


SAVED = [
    *("topk:0.1", "powersgd:2", "ramp:9,(topk:0.1),0.9", "magnitude:0.1"),
    *("solve:(topk:0.1),steps=4", "layerwise:(a=magnitude:0.1; *=topk:0.1)"),
    lambda name: "topk:0.1" if name == "a" else "onebit",
]


def on_state(i: int, place: str) -> list[str]:
    """A state goes on as if nothing had happened, whether tensors are known when it is loaded."""
    import torch.distributed.checkpoint as dcp

    def fresh(**options: Any) -> tw.Reducer:
        return make(SAVED[i], min_numel=100, **options)

    reducer, found = fresh(seed=3), []
    for step in range(4):
        reducer.average(some(step))
    file = io.BytesIO()
    torch.save(reducer.state_dict(), file)
    dcp.save({"reducer": reducer.stateful()}, checkpoint_id=place)
    early, late, third = fresh(), fresh(), fresh()
    file.seek(0)
    early.load_state_dict(torch.load(file, weights_only=True))
    if early.stats()["total"]["residual_norm"] != reducer.stats()["total"]["residual_norm"]:
        found.append(f"norms: {early.stats()}")
    again = early.state_dict()  # before any tensor has come
    for each in (late, third):
        each.average(some(99))
    late.load_state_dict(again)
    dcp.load({"reducer": third.stateful(place)}, checkpoint_id=place)
    for step in range(4, 9):
        results = [some(step) for _ in range(4)]
        for each, xs in zip((reducer, early, late, third), results, strict=True):
            each.average(xs)
        if not all(all_same(results[0], other) for other in results[1:]):
            found.append(f"step {step}")
    return found + [f"{each.step} steps" for each in (early, late, third) if each.step != 9]


@pytest.mark.parametrize("i", range(len(SAVED)))
def test_a_state_goes_on_as_if_nothing_had_happened(i, tmp_path):
    assert ranks.run(on_state, i, str(tmp_path), ranks=2) == [[], []]


def on_wrong_states() -> dict[str, str]:
    reducer = make("magnitude:0.1")
    reducer.average(some(0))
    state, found = reducer.state_dict(), {}
    other = make("topk:0.1")
    other.load_state_dict(state)  # whose numbers belong to tensors that are not known yet
    found["policy"] = raised(lambda: other.average(some(1)))
    fewer = make("magnitude:0.1")
    fewer.load_state_dict(state)
    found["tensors"] = raised(lambda: fewer.average(some(1, "ab")))
    found["step"] = str(fewer.step)
    found["then"] = raised(lambda: fewer.average(some(1)))
    found["function"] = raised(lambda: make(by_letter, feedback="ef21").load_state_dict(state))
    found["dcp"] = raised(make().stateful)
    for key in ("no state", {"version": 1}):
        found[str(key)] = raised(lambda key=key: make().load_state_dict(key))
    return found


def test_a_state_that_does_not_fit_is_refused_when_that_is_known():
    for found in ranks.run(on_wrong_states, ranks=2):
        said = "ValueError: the state is not one of policy"
        assert found["policy"] == f"{said} topk:0.1: it has 6 numbers, not 0"
        assert found["tensors"] == f"{said} magnitude:0.1: it has 6 numbers, not 4"
        assert found["step"] == "1"
        assert found["then"] == ""
        said = "the state is that of feedback 'ef14', this is"
        assert found["function"] == f"ValueError: Reducer: {said} 'ef21'"
        assert found["dcp"].startswith("ValueError: this reducer does not know its tensors yet")
        assert found["no state"].startswith("TypeError: Reducer: expected a state_dict()")
        assert "it does not say of which rank it is" in found["{'version': 1}"]


# Calls with other names


def by_letter(name: str) -> str:
    return {"a": "topk:0.1", "b": "onebit"}[name]


CHANGING = [
    *("topk:0.1", by_letter, "warmup:4,(topk:0.1)", "magnitude:0.1", "auto:2"),
    *("solve:(topk:0.1),steps=3", "layerwise:(a=magnitude:0.1; *=quantize:4)"),
]


def on_other_names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for spec in CHANGING:
        reducer, used, sums = make(spec), [], {}
        for step, names in enumerate(["a", "b", "ab", "a", "ba", "b", "ab", "ab"]):
            xs = some(step, names)
            reducer.average(xs, together=step == 2, async_op=step % 2 == 0).wait()
            used.append({n: reducer.stats()["tensors"][n]["compressor"] for n in names})
        for name, x in xs.items():
            sums[name] = float(x.double().sum())
        policy = reducer.state_dict()["policy"]
        found[str(spec).split(" at ")[0]] = (used, sums, [] if spec == "auto:2" else policy)
    told = make("accuracy:(topk:0.1),1,5")
    told.average(some(0, "a"))
    told.observe(3.5)
    told.average(some(1, "a"))
    told.average(some(2, "ab"))  # what it knows is not of single tensors, and stays
    return found | {"kept": (told.decisions, told.state_dict()["policy"])}


def test_calls_may_have_other_names_also_with_a_policy():
    first, second = ranks.run(on_other_names, ranks=2)
    assert first == second
    used = first["warmup:4,(topk:0.1)"][0]
    assert [set(row.values()) for row in used] == [{"none"}] * 4 + [{"topk:0.1"}] * 4
    assert len(first["magnitude:0.1"][2]) == 4
    assert all(level > 0 for level in first["magnitude:0.1"][2])
    ((decision,), policy) = first["kept"]
    assert decision.step == 3
    assert policy[0] > 0


# What is refused, and what goes wrong


def on_refusals() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    detached = make("dgc:0.1", optimizer=(taken := optimizer(net())))
    detached.average(some(0))
    off = taken.param_groups[0]["momentum"]
    detached.detach()
    return {
        "dtensor": raised(lambda: make().average({"w": sharded})),
        "local": raised(lambda: make().average({"w": sharded.to_local()})),
        "exclude": raised(lambda: make(exclude="d*").average(some(0))),
        "min_numel": raised(lambda: make(min_numel=False)),
        "check_every": raised(lambda: make(check_every=0.5)),
        "scaler": raised(lambda: make(scaler=2.0)),
        "feedback": raised(lambda: make("dgc:0.1", feedback="ef14", optimizer=optimizer(net()))),
        "optimizer": raised(lambda: make("dgc:0.1")),
        "function": raised(lambda: make(lambda name: 3).average(some(0))),
        "collective": raised(lambda: make(by_letter, collective="sparse").average(some(0, "ab"))),
        "together": raised(lambda: make("powersgd").average(some(0), together=True)),
        "detached": raised(lambda: detached.average(some(1))),
        "momentum": f"{off} {taken.param_groups[0]['momentum']}",
    }


def test_what_makes_no_sense_is_refused_with_a_reason():
    for found in ranks.run(on_refusals, ranks=2):
        assert found["dtensor"].startswith("TypeError: w: a DTensor")
        assert ".to_local()" in found["dtensor"]
        assert found["local"] == ""
        assert found["exclude"].startswith("ValueError: exclude: no tensor is named like 'd*'")
        assert found["min_numel"].startswith("ValueError: min_numel must be a number of elements")
        assert found["check_every"].startswith("ValueError: check_every must be a number of steps")
        assert found["scaler"].startswith("TypeError: scaler must be a GradScaler")
        assert found["feedback"].startswith("ValueError: dgc:0.1 has a feedback of its own")
        assert "pass it, optimizer=optimizer" in found["optimizer"]
        assert found["function"].startswith("TypeError: expected a compressor or a spec")
        assert found["collective"].startswith("ValueError: onebit cannot go through 'sparse'")
        assert found["together"].startswith("ValueError: powersgd sees each tensor by itself")
        assert found["detached"].startswith("ValueError: this reducer is detached")
        assert found["momentum"] == "0.0 0.9"


class Breaking(Policy):
    """Fails to choose in step 2, on rank 1."""

    name = "breaking"

    def begin(self, context: PolicyContext) -> Chooser:
        return BreakingChooser()

    @property
    def main(self) -> tw.Compressor:
        return tw.TopK(0.1)


class BreakingChooser(Chooser):
    broken = False

    def choose(self, tensor: TensorInfo, step: int) -> tw.Compressor:
        if step == 2 and dist.get_rank() == 1 and not self.broken:
            self.broken = True
            raise ArithmeticError("no choice today")
        return tw.TopK(0.1) if tensor.name == "a" else tw.Quantize(4)


def on_failures() -> dict[str, Any]:
    me, found = dist.get_rank(), {}
    # Two exchanges, the first of which ranks disagree in: the second is not sent by anybody.
    reducer = make(lambda name: ("topk:0.3" if me else "topk:0.2") if name == "a" else "powersgd:1")
    xs = some(0, "ab")
    found["disagree"] = raised(lambda: reducer.average(xs))
    found["as before"] = all_same(xs, some(0, "ab"))
    found["exchanges"] = reducer.ledger.exchanges
    reducer._choices._choices = {"a": tw.TopK(0.2), "b": tw.PowerSGD(1)}
    found["together again"] = raised(lambda: reducer.average(some(1, "ab")))
    reducer = make(Breaking())
    reducer.average(some(0, "ab"))
    found["policy"] = raised(lambda: reducer.average(some(1, "ab")))
    handle = reducer.average(some(2, "ab"), async_op=True)
    handle.wait()
    found["handle"] = (repr(handle), handle.collective, handle.is_completed())
    accounted = handle.bytes_sent, sum(e.bytes_sent for e in reducer.ledger.lines.values())
    found["bytes"] = 0 < accounted[0] < accounted[1]
    found["future"] = len(handle.get_future().wait())
    # Non-finite numbers reach all tensors of their exchange, and the account of the call.
    xs = some(3, "ab")
    xs["b"][0, 0] = torch.nan
    found["finite"] = reducer.average(xs).account.finite
    found["step"] = reducer.step
    return found


def test_a_call_of_several_exchanges_fails_as_one():
    for rank, found in enumerate(ranks.run(on_failures, ranks=2)):
        assert found["disagree"].startswith("MismatchError")
        assert found["as before"]
        assert found["exchanges"] == 0
        assert found["together again"] == ""
        assert found["policy"].startswith("ArithmeticError" if rank else "PeerError")
        assert found["handle"] == ("<average of 2 tensors, done>", "gather", True)
        assert found["bytes"]
        assert found["future"] == 2
        assert not found["finite"]
        assert found["step"] == 4


def on_averages_that_differ() -> list[str]:
    reducer, finish, found = make(check_every=2), UnitExchange.finish, []

    def wrong(self: Any) -> None:
        finish(self)
        self.updates[-1].unit.pieces[0].view(-1)[0] += 1

    for step in range(4):
        if step == 3 and dist.get_rank() == 1:
            UnitExchange.finish = wrong
        try:
            found.append(raised(lambda step=step: reducer.average(some(step))))
        finally:
            UnitExchange.finish = finish
    return found


def test_averages_that_differ_are_noticed():
    for found in ranks.run(on_averages_that_differ, ranks=2):
        assert found[:3] == ["", "", ""]
        said = "ReplicaError: averages differ between ranks: rank 1 in c, from rank 0"
        assert found[3].startswith(said), found[3]


class FakeScaler:
    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def on_a_scaler() -> dict[str, bool]:
    scaler = FakeScaler()
    reducer, plain = make(min_numel=100, scaler=scaler), make(min_numel=100)
    found = {}
    for step in range(2):
        xs, ys = some(step), some(step)
        reducer.average(xs, async_op=step == 1).wait()
        plain.average(ys)
        found[f"as without {step}"] = all_same(xs, ys)
    before = residuals(reducer)
    xs = some(2)
    xs["c"][dist.get_rank()] = torch.inf  # uncompressed, in another exchange than a and b
    reducer.average(xs)
    found["skipped"] = all_same(residuals(reducer), before)
    scaler.scale = 4.0
    xs, ys = some(3), some(3)
    reducer.average({name: x.mul_(4) for name, x in xs.items()})
    plain.average(ys)
    found["scaled"] = all_same(xs, {name: 4 * y for name, y in ys.items()})
    return found


def on_polled() -> list[int]:
    """A state is taken when a call has ended, which nobody has waited for."""
    reducer, found = make(scaler=FakeScaler()), []
    for step in range(3):
        handle = reducer.average(some(step), async_op=True)
        handle.wait_until_ended()
        found.append(reducer.state_dict()["reducer"]["tensors"]["a"]["steps"])
        handle.wait()
    return found


def test_a_state_holds_the_last_call_whoever_has_waited_for_it():
    assert ranks.run(on_polled, ranks=2) == [[1, 2, 3]] * 2


def residuals(reducer: tw.Reducer) -> dict[str, Tensor]:
    kept = reducer.state_dict()["reducer"]["tensors"]
    return {name: state["residual"] for name, state in kept.items()}


def test_residuals_follow_a_scaler():
    for found in ranks.run(on_a_scaler, ranks=2):
        assert all(found.values()), found


def on_what_tensors_are() -> dict[str, Any]:
    layers = nn.Sequential(nn.Linear(40, 30), nn.Embedding(32, 40))
    names = {"a": "0.weight", "b": "1.weight"}
    known = described(layers, {each: layers.get_parameter(name) for each, name in names.items()})
    reducer = make("layerwise:((kind=embedding)=topk:0.1; *=quantize:4)")
    reducer._learn_tensors(known, some(0, "ab"))  # as a driver does that knows of modules
    for step in range(2):
        reducer.average(some(step, "ab"))
    used = {name: row["compressor"] for name, row in reducer.stats()["tensors"].items()}
    other, sizes = make("quantize:4", feedback="none", min_numel=1000), []
    for shape in ((40, 30), (20, 30), (50, 60)):
        other.average({"a": torch.ones(shape)})
        sizes.append(other.ledger.lines["a"].compressor)
    return {"used": used, "sizes": sizes}


def test_what_is_known_of_tensors_decides():
    for found in ranks.run(on_what_tensors_are, ranks=2):
        assert found["used"] == {"a": "quantize:4", "b": "topk:0.1"}
        assert found["sizes"] == ["quantize:4", "none", "quantize:4"]


def on_inference(spec: str, feedback: str) -> tuple[bool, list[str]]:
    """A Reducer that is first used in inference mode, and one that never is."""
    first, other = (make(spec, feedback=feedback) for _ in range(2))
    found, expected = some(0), some(0)
    errors = []
    for step in range(4):
        with torch.inference_mode(step % 3 == 0):
            errors.append(raised(lambda: first.average(found)))
        other.average(expected)
    return all_same(found, expected), errors


@pytest.mark.parametrize(
    ("spec", "feedback"),
    [("topk:0.1", "ef14"), ("topk:0.1", "ef14:storage=int8"), ("topk:0.1", "ef21")],
)
def test_inference_mode_changes_nothing(spec, feedback):
    """What is remembered outlives it."""
    for same, errors in ranks.run(on_inference, spec, feedback, ranks=2):
        assert not any(errors), errors
        assert same
