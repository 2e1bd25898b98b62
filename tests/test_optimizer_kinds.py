"""Optimizers like Adam: how they are known, what is said of what does not suit them, and where
`auto` goes under them."""

import gc
import re
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from links import SimulatedLink
from nets import MANY, TIMEOUT, net
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)

import thinwire as tw
from thinwire.collectives.options import Options
from thinwire.compare.method import read
from thinwire.compare.training import equip
from thinwire.feedback import parse as parse_feedback
from thinwire.parallel.optimizers import KnownOptimizer, objection
from thinwire.policies import (
    Journal,
    Measured,
    OptimizerKind,
    PolicyContext,
    TensorInfo,
    policy_of,
)
from thinwire.policies.bandwidth import _Following
from thinwire.policies.ladder import steady_ladder

OTHER, ADAM_LIKE = OptimizerKind.OTHER, OptimizerKind.ADAM_LIKE


# How they are known.


class Own(torch.optim.SGD):
    """Not one of torch's own."""


class FusedAdam(Own):
    pass


class Lion8bit(Own):
    pass


class LambdaSGD(Own):
    pass


class SOAP(Own):
    """Has a second moment, as its state shows."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exp_avg_sq"] = torch.ones_like(p)
        return loss


class Wrapped:
    """As Accelerate and others do it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def parameter() -> list[nn.Parameter]:
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.ones(2, 2)
    return [p]


def on_optimizers() -> None:
    torch_own = [
        *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam"),
        *("Adagrad", "Adadelta", "Adafactor", "RMSprop"),
    ]
    for name in torch_own:
        found = KnownOptimizer.of(getattr(torch.optim, name)(parameter(), lr=0.1))
        assert found == (name, ADAM_LIKE)
    for name in ("SGD", "ASGD", "Rprop", "LBFGS", "Muon"):
        found = KnownOptimizer.of(getattr(torch.optim, name)(parameter(), lr=0.1))
        assert found == (name, OTHER)
    for kind, expected in ((FusedAdam, ADAM_LIKE), (Lion8bit, OTHER), (LambdaSGD, OTHER)):
        assert KnownOptimizer.of(kind(parameter(), lr=0.1)) == (kind.__name__, expected)
        wrapped = Wrapped(Wrapped(kind(parameter(), lr=0.1)))
        assert KnownOptimizer.of(wrapped) == (kind.__name__, expected)
    soap = SOAP(parameter(), lr=0.1)
    assert KnownOptimizer.of(soap).kind == OTHER
    soap.step()
    assert KnownOptimizer.of(soap).kind == ADAM_LIKE


def test_optimizers_like_adam_are_known_by_class_name_and_state():
    ranks.run(on_optimizers, ranks=1)  # where all that torch's optimizers import is loaded


# What does not suit them.


def said_of(spec: str, feedback: str = "ef14") -> str | None:
    return objection(policy_of(spec), parse_feedback(feedback))


@pytest.mark.parametrize(
    ("spec", "feedback", "words"),
    [
        ("topk:0.01", "ef14", "arrives in bursts.* sqrt.density.*, 0.1 times with topk:0.01"),
        ("topk:0.01|quantize:4", "ef14", "bursts"),
        ("topk:0.01", "none", "bursts"),
        ("threshold:0.5", "ef14", "bursts"),
        ("randomk:0.1", "ef14", "bursts"),
        ("arc:0.2", "ef14", "bursts"),
        ("onebit", "ef14", "same few magnitudes"),
        ("onebit|lossless", "ef14", "same few magnitudes"),
        ("scaledsign", "ef14", "same few magnitudes"),
        ("tiered:0.01,small=(onebit)", "ef14", "same few magnitudes"),
        ("quantize:4", "ef21", "ef21 hands it parts of old gradients"),
        ("quantize:4", "ef21m:0.2", "ef21m:0.2 hands it"),
        ("topk:0.01", "dgc:0.9", "DGC's momentum"),
        ("scaledsign", "vote:0.9", "majority of signs"),
        ("warmup:5,(topk:0.01)", "ef14", "bursts"),
        ("layerwise:(a=quantize:4; *=topk:0.1)", "ef14", "bursts"),
        ("magnitude:0.01", "ef14", "bursts"),
        ("bandwidth:(topk:0.01)", "ef14", "bursts"),
    ],
)
def test_what_does_not_suit_adam_is_known(spec, feedback, words):
    said = said_of(spec, feedback)
    assert said is not None
    assert re.search(words, said)


@pytest.mark.parametrize(
    "spec",
    [
        *("none", "cast:bf16", "quantize:8", "quantize:2", "powersgd:4", "qsgd:7", "natural"),
        *("tiered:0.01", "magnitude:0.1,small=(quantize:2)", "topk:1.0", "auto"),
        "auto:low_rank=true",
        *("warmup:9,(auto)", "layerwise:(a=auto; *=quantize:4)", "bandwidth:(powersgd:4)"),
    ],
)
def test_what_suits_adam_is_not_objected_to(spec):
    assert said_of(spec) is None


# Where `auto` goes.

LARGE, SMALL = TensorInfo("large", torch.Size([512, 512])), TensorInfo("small", torch.Size([64, 8]))


def context(size: int = 4, **options: Any) -> PolicyContext:
    return PolicyContext([LARGE, SMALL], size, True, Journal(), Options.of(**options))


def test_low_ranks_are_for_tensors_of_which_they_are_smaller():
    assert len(steady_ladder(context(), low_rank=False)) == 4
    ladder = steady_ladder(context(), low_rank=True)
    assert [str(rung.choose(SMALL)) for rung in ladder] == [
        *("None", "cast:bf16", "quantize:8", "quantize:4", "quantize:4", "quantize:4", "quantize:4")
    ]
    assert [str(rung.choose(LARGE)) for rung in ladder[4:]] == [
        *("powersgd:16", "powersgd:8", "powersgd:4")
    ]
    sizes = [rung.num_bytes(context()) for rung in ladder]
    assert sizes == sorted(sizes, reverse=True)


class SlowLink(SimulatedLink):
    """A link that no strength is enough for."""

    def sends(self, *kinds: OptimizerKind) -> tuple[str, str]:
        """What is sent with, when ranks know so much of their optimizers."""
        self.kinds = kinds
        self.go(1e6)
        return str(self.sent[0]), str(self.sent[1])


def explained(chooser: Any) -> str:
    return "\n".join(chooser.explain())


def test_auto_goes_by_the_optimizer():
    unknown = OptimizerKind.UNKNOWN
    steady, sparse = ("quantize:4", "powersgd:4"), ("topk:0.01|quantize:4",) * 2
    for kinds, strongest, words in (
        ((ADAM_LIKE, ADAM_LIKE), steady, "divides by a second moment, which bursts"),
        ((OTHER, ADAM_LIKE), steady, "divides by a second moment, which bursts"),
        ((OTHER, unknown), sparse, "does not divide by a second moment"),
        ((unknown, unknown), steady, "not known"),
    ):
        for low_rank in (False, True):
            link = SlowLink(f"auto:4,low_rank={str(low_rank).lower()}", context())
            sent = [link.sends(*kinds) for _ in range(30)]
            assert set(sent[:4]) == {("None", "None")}
            used = strongest[low_rank].partition(":")[0]
            assert all(one.startswith(used) for one, _ in sent[10:]), sent
            assert {other for _, other in sent[10:] if used == "powersgd"} <= {"quantize:4"}
            assert words in explained(link.chooser)
            assert f"up to {strongest[low_rank]}" in explained(link.chooser)


def test_auto_changes_its_ladder_when_the_optimizer_becomes_known_late():
    link = SlowLink("auto:2", context())
    for _ in range(10):
        link.sends(OptimizerKind.UNKNOWN)
    for _ in range(10):
        last = link.sends(OTHER)
    assert last[0].startswith("topk")
    said = [d for d in link.where.journal.decisions if d.why == "the optimizer became known"]
    # Compressed steps have no room for doubts: the others hear of it in the next report.
    assert [(d.step, d.compressor) for d in said] == [(12, "uncompressed")]
    for _ in range(33):  # ranks do not report after every step any more
        last = link.sends(OTHER, ADAM_LIKE)
    assert "topk" not in last[0]


def test_a_rank_that_learns_of_its_optimizer_asks_for_a_report():
    chooser = policy_of("auto").begin(context())
    nothing = Measured(0.1, 0.05, 0.0, 0.01, 0.0, 1.0, 2.0)
    assert not chooser.doubts(nothing)
    chooser.note_optimizer(OTHER)
    assert chooser.doubts(nothing)
    chooser.learn(1, [chooser.report(nothing)] * 4)
    assert not chooser.doubts(nothing)


def test_the_ladder_is_part_of_autos_state_which_fits_any_number_of_ranks():
    link = SlowLink("auto:2", context())
    for _ in range(20):
        used = link.sends(ADAM_LIKE)
    for size in (2, 64):
        other = SlowLink("auto:2", context(size))
        other.load(link.chooser.state())
        assert str(other.chooser.choose(LARGE, 21)) == used[0]
        assert "divides by a second moment, which bursts" in explained(other.chooser)
        other.sends(OptimizerKind.UNKNOWN)  # not seen yet in this process
        assert "divides by a second moment, which bursts" in explained(other.chooser)


@pytest.mark.parametrize(
    ("options", "strongest"),
    [
        ({"collective": "gather"}, "quantize:4"),
        ({"nodes": 2}, "quantize:4"),
        ({"collective": "sparse"}, "uncompressed"),
        ({}, "powersgd:4 (quantize:4 where that is smaller)"),
    ],
)
def test_auto_leaves_out_what_the_collective_does_not_carry(options, strongest):
    link = SlowLink("auto:2,low_rank=true", context(**options))
    used = {choice for _ in range(30) for choice in link.sends(ADAM_LIKE)}
    assert f"up to {strongest}, and off" in explained(link.chooser)
    assert all(c == "None" or link.where.options.carries(tw.parse(c)) for c in used)


# Training.


def steps(model: Any, optimizers: list[Any], count: int = 2) -> list[str]:
    """Train; what was said about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(count):
            draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model.zero_grad()
            width = next(model.parameters()).shape[1]
            model(torch.randn(8, width, generator=draw)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    return [str(w.message) for w in caught if issubclass(w.category, tw.errors.ThinwireWarning)]


def wired(spec: str, inner: Any = None, **options: Any) -> tuple[DistributedDataParallel, tw.Wire]:
    model = DistributedDataParallel(inner or net(), bucket_cap_mb=MANY)
    return model, tw.attach(model, spec, **{"min_numel": 10, "timeout": TIMEOUT} | options)


def on_warnings() -> dict[str, Any]:
    found: dict[str, Any] = {}
    before = set(_global_optimizer_post_hooks)
    cases: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "topk": ("topk:0.1", torch.optim.AdamW, {}),
        "by its state": ("topk:0.1", SOAP, {}),
        "ef21": ("quantize:4", torch.optim.Adam, {"feedback": "ef21"}),
        "signum": ("signum", torch.optim.Adam, {}),
        "sgd": ("topk:0.1", torch.optim.SGD, {}),
        "quantize": ("quantize:4", torch.optim.AdamW, {}),
        "powersgd": ("powersgd:2", torch.optim.AdamW, {}),
        "auto": ("auto:1", torch.optim.AdamW, {}),
    }
    for case, (spec, kind, options) in cases.items():
        model, wire = wired(spec, **options)
        optimizer = kind(model.parameters(), lr=1e-3)
        found[case] = steps(model, [Wrapped(optimizer)])
        found[f"{case} explained"] = wire.explain()
    # One of two optimizers, that of vectors, which are not compressed.
    model, _ = wired("topk:0.1")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    both = [torch.optim.SGD(matrices, lr=1e-3), torch.optim.Adam(vectors, lr=1e-3)]
    found["adam of vectors"] = steps(model, both)
    model, _ = wired("topk:0.1")
    first, *rest = model.parameters()
    both = [torch.optim.SGD([first], lr=1e-3), torch.optim.Adam(rest, lr=1e-3)]
    found["adam of some"] = steps(model, both)
    found["hooks"] = len(set(_global_optimizer_post_hooks) - before)
    # Told of before the first step.
    inner = net()
    optimizer = torch.optim.AdamW(inner.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, wire = wired("topk:0.1", inner, optimizer=optimizer)
    found["given"] = [str(w.message) for w in caught] + steps(model, [optimizer])
    found["given explained"] = wire.explain()
    return found


def test_sparse_gradients_under_adam_are_warned_of_once():
    first, second = ranks.run(on_warnings, ranks=2)
    for found in (first, second):
        for case in ("topk", "by its state", "ef21", "signum", "adam of some", "given"):
            (said,) = found.pop(case)
            assert 'tw.LocalSteps(model, optimizer, "adam-update") or "quantize:4"' in said, case
            assert "docs/guides/which-method.md" in said
        assert "The optimizer is AdamW, which divides by a running" in found["topk explained"]
        assert "The optimizer is SGD.\n" in found["sgd explained"]
        assert "The optimizer is AdamW" in found["given explained"]
        assert found.pop("hooks") == 0
        assert not any(said for case, said in found.items() if not case.endswith("explained"))


def on_reducers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, optimizer in (
        ("adam", torch.optim.Adam(parameter())),
        ("sgd", torch.optim.SGD(parameter(), lr=0.1)),
        ("unknown", None),
    ):
        for spec in ("topk:0.1", "auto:1"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                reducer = tw.Reducer(spec, optimizer=optimizer, timeout=TIMEOUT)
                for step in range(4):
                    names = "ab" if step < 3 else "abc"  # it learns of more
                    reducer.average({name: torch.randn(30, 40) for name in names})
            found[f"{case} {spec}"] = len(caught), reducer.explain()
    # A low rank that a policy chooses in the middle of a training, `together` or not.
    reducer = tw.Reducer("warmup:1,(powersgd:1)", timeout=TIMEOUT)
    for _ in range(2):
        reducer.average({name: torch.randn(30, 40) for name in "ab"}, together=True)
    found["together"] = {row["compressor"] for row in reducer.stats()["tensors"].values()}
    try:
        tw.Reducer("topk:0.1", optimizer=torch.optim.Adam)  # type: ignore[arg-type]
    except TypeError as error:
        found["class"] = str(error)
    return found


def test_a_reducer_goes_by_the_optimizer_that_it_is_given():
    for found in ranks.run(on_reducers, ranks=2):
        assert found.pop("class") == "optimizer must be an optimizer, got the class Adam"
        assert found.pop("together") == {"powersgd:1"}
        counts = {case: count for case, (count, _) in found.items()}
        assert counts.pop("adam topk:0.1") == 1
        assert not any(counts.values())
        assert "which bursts would inflate" in found["adam auto:1"][1]
        assert "does not divide by a second moment" in found["sgd auto:1"][1]
        assert "optimizer= tells" in found["unknown auto:1"][1]


def wide() -> nn.Module:
    """One matrix that is worth a low rank, and one that is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 16))


def climb(self: _Following, step: int) -> None:
    """A rung in every step, whatever the clock says."""
    above = [i for i in self._usable if i > self._rung]
    if above:
        self._rung = above[0]
        self.begin_at(step + 1, "a test")


def sent_with(wire: tw.Wire) -> tuple[str, ...]:
    tensors = wire.stats()["tensors"]
    return tuple(tensors[name]["compressor"] for name in ("0.weight", "2.weight"))


def on_a_climb(kind: str) -> dict[str, Any]:
    """Train up the ladder; go on from a state in the middle of it."""
    whole, surprised = _Following._decide, _Following._surprised
    _Following._decide = climb  # type: ignore[method-assign]
    _Following._surprised = lambda *_: False  # type: ignore[method-assign]
    try:
        found: dict[str, Any] = {"used": []}
        model, wire = wired("auto:1,low_rank=true", wide())
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
        for step in range(14):
            found["said"] = steps(model, [optimizer], 1)
            found["used"].append(sent_with(wire))
            if step == 10:
                state = wire.state_dict()
                other, again = wired("auto:1,low_rank=true", wide())
                other.module.load_state_dict(model.module.state_dict())
                second = getattr(torch.optim, kind)(other.parameters(), lr=1e-3)
                second.load_state_dict(optimizer.state_dict())
                again.load_state_dict(state)
        tw.check_replicas(model)
        found["explained"] = wire.explain()
        found["again"] = again.explain().partition("Automatic")[2]
        steps(other, [second], 1)
        found["resumed"] = sent_with(again)
        tw.check_replicas(other)
        return found
    finally:
        _Following._decide = whole  # type: ignore[method-assign]
        _Following._surprised = surprised  # type: ignore[method-assign]


def test_auto_climbs_another_ladder_under_adam_and_goes_on_with_it():
    first, second = ranks.run(on_a_climb, "AdamW", ranks=2)
    assert first["used"] == second["used"]
    assert list(dict.fromkeys(first["used"])) == [
        ("none", "none"),
        ("cast:bf16", "cast:bf16"),
        ("quantize:8", "quantize:8"),
        ("quantize:4", "quantize:4"),
        ("powersgd:8", "quantize:4"),
        ("powersgd:4", "quantize:4"),
    ]
    assert "The optimizer is AdamW" in first["explained"]
    assert "which bursts would inflate" in first["again"]
    assert first["resumed"] == first["used"][11]
    for found in ranks.run(on_a_climb, "SGD", ranks=2):
        assert found["used"][-1] == ("topk:0.01|quantize:4",) * 2
        assert not found["said"]
        assert "The optimizer is SGD.\n" in found["explained"]
        assert "does not divide by a second moment" in found["again"]


def on_compare() -> str:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    wire = equip(model, read("auto"), optimizer=optimizer, seed=0, timeout=TIMEOUT)
    assert wire is not None
    steps(model, [optimizer], 2)
    return wire.explain()


def test_a_comparison_tells_auto_of_the_optimizer():
    (said,) = ranks.run(on_compare, ranks=1)
    assert "The optimizer is AdamW" in said


def on_a_model_that_is_collected() -> int:
    """In the middle of another optimizer's step; who is watched then."""
    held: list[Any] = []

    def collect(*_: Any) -> None:
        held.clear()
        gc.collect()

    handle = register_optimizer_step_post_hook(collect)
    try:
        model = DistributedDataParallel(net())
        held.append(DistributedDataParallel(net()))
        for each in (held[0], model):
            tw.attach(each, "quantize:4")
        del each
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 20)).sum().backward()
            optimizer.step()
    finally:
        handle.remove()
    return len(held)


def test_a_model_may_be_collected_while_an_optimizer_goes_through_its_hooks() -> None:
    assert ranks.run(on_a_model_that_is_collected, ranks=2) == [0, 0]
