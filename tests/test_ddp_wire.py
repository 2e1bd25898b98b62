"""The wire of a model: what is compressed and how, what is refused, on and off.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of nets.py.
"""

import contextlib
import copy
import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from nets import (
    MIN,
    all_same,
    alone,
    backward,
    gradients,
    net,
    plain,
    raised,
    residuals,
    wired,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels


# What is compressed, and with what


def by_layer(name: str) -> Any:
    return {"0": tw.TopK(0.2), "2": None, "4": "quantize:8"}[name[0]]


CHOICES = {  # arguments of attach, and the compressors of the matrices
    "one": (("topk:0.1", {}), {"0": "topk:0.1", "2": "topk:0.1", "4": "topk:0.1"}),
    "min_numel": (("topk:0.1", {"min_numel": 600}), {"0": "topk:0.1", "2": "topk:0.1"}),
    "exclude": (("topk:0.1", {"exclude": "2.*"}), {"0": "topk:0.1", "4": "topk:0.1"}),
    "exclude two": (("topk:0.1", {"exclude": ["0.weight", "[4]*"]}), {"2": "topk:0.1"}),
    "function": ((by_layer, {}), {"0": "topk:0.2", "4": "quantize:8"}),
    "nothing": (("topk:0.1", {"min_numel": 10**6}), {}),
}


def on_choices() -> dict[str, tuple[dict[str, str], list[str]]]:
    """Each tensor's compressor, and which tensors have the dense mean."""
    found = {}
    for choice, ((compressor, options), _) in CHOICES.items():
        model, wire = wired(compressor, **options)
        own = [alone(model, 0, rank) for rank in range(2)]
        backward(model, 0)
        dense = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
        used = {name: row["compressor"] for name, row in wire.stats()["tensors"].items()}
        mean = [n for n, g in gradients(model).items() if all_same({"": g}, {"": dense[n]})]
        found[choice] = used, sorted(mean)
    return found


def test_each_tensor_travels_as_was_asked_for():
    """With two ranks, what travels as it is has the bits of the mean."""
    names = dict(net().named_parameters())
    for found in ranks.run(on_choices, ranks=2):
        for choice, (used, mean) in found.items():
            matrices = {f"{i}.weight": spec for i, spec in CHOICES[choice][1].items()}
            assert used == dict.fromkeys(names, "none") | matrices, choice
            assert mean == sorted(names.keys() - matrices.keys()), choice


def on_collectives() -> list[dict[str, str]]:
    found = []
    for spec, collective in (("topk:0.1", "gather"), ("topk:0.1", "twoshot"), ("none", "gather")):
        model, wire = wired(spec, collective=collective)
        for step in range(2):
            backward(model, step)
        found.append({n: row["collective"] for n, row in wire.stats()["tensors"].items()})
    return found


def test_the_collective_is_the_one_asked_for():
    for gathered, twoshot, dense in ranks.run(on_collectives, ranks=2):
        assert {gathered[f"{i}.weight"] for i in (0, 2, 4)} == {"gather"}
        assert {twoshot[f"{i}.weight"] for i in (0, 2, 4)} == {"twoshot"}
        assert {dense[f"{i}.weight"] for i in (0, 2, 4)} == {"gather"}


def on_sparse_collective(feedback: str) -> dict[str, str]:
    model, wire = wired(collective="sparse", feedback=feedback)
    for step in range(3):
        backward(model, step)
    tw.check_replicas(model)
    return {name: row["collective"] for name, row in wire.stats()["tensors"].items()}


@pytest.mark.parametrize("feedback", ["ef14", "ef21"])
def test_a_collective_for_sparsifiers_does_not_hinder_what_travels_as_it_is(feedback):
    for used in ranks.run(on_sparse_collective, feedback, ranks=2):
        assert {used[f"{i}.weight"] for i in (0, 2, 4)} == {"sparse"}


# What is refused


def other_version(wire: tw.Wire) -> None:
    wire.load_state_dict(wire.state_dict() | {"version": 7})


def hooked() -> DistributedDataParallel:
    model = plain()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def with_python_reducer() -> DistributedDataParallel:
    model = plain()
    model._use_python_reducer = True
    return model


def of_package(module: str, name: str, base: type = object, **attributes: Any) -> Any:
    """An object as a framework has it: a class of this module, or one that derives from it."""
    theirs = type(name, (base,), {"__module__": module})
    made = type("Mine", (theirs,), {})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


class Reluctant:
    """Like a LightningModule without a trainer."""

    @property
    def trainer(self) -> Any:
        raise RuntimeError("not attached to a Trainer")


FRAMEWORKS = {
    "Lightning": (("lightning.pytorch.trainer.trainer", "Trainer"), "`trainer.strategy.model`"),
    "Lightning's module": (
        ("pytorch_lightning.core.module", "LightningModule", Reluctant),
        "`trainer.strategy.model`",
    ),
    "Fabric": (("lightning.fabric.fabric", "Fabric"), "`fabric.setup(model, optimizer)[0]._forw"),
    "Trainer": (("transformers.trainer", "Trainer"), "`trainer.model_wrapped`"),
    "Accelerate": (("accelerate.accelerator", "Accelerator"), "`accelerator.prepare(model)`"),
    "DeepSpeed": (("deepspeed.runtime.engine", "DeepSpeedEngine"), "DeepSpeed has none"),
    "a namesake": (("deepspeedy.engine", "Engine"), "wrap it, or average gradients in a loop"),
}


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_attach_says_where_a_framework_keeps_the_ddp_model(kind):
    given, hint = FRAMEWORKS[kind]
    with pytest.raises(TypeError, match="DistributedDataParallel model, got Mine") as caught:
        tw.attach(of_package(*given), "none")
    assert hint in str(caught.value)


WRITER = SimpleNamespace(add_scalar=print)
TAKES = "TypeError: attach takes a sharded (fully_shard) or DistributedDataParallel"
REFUSED = {
    "twice": (lambda: tw.attach(wired()[0], "none"), "ValueError: this model has a wire already"),
    "hook": (
        lambda: tw.attach(hooked(), "none"),
        "ValueError: this model has a communication hook",
    ),
    "python reducer": (
        lambda: tw.attach(with_python_reducer(), "none"),
        "ValueError: this model was made with torch._dynamo.config.optimize_ddp",
    ),
    "bare": (
        lambda: tw.attach(net(), "none"),
        TAKES,
    ),
    "module inside": (
        lambda: tw.attach(SimpleNamespace(strategy=SimpleNamespace(model=plain())), "none"),
        f"{TAKES} model, got SimpleNamespace, whose DDP "
        "model is its .strategy.model: attach to that",
    ),
    "compiled inside": (
        lambda: tw.attach(SimpleNamespace(module=SimpleNamespace(_orig_mod=plain())), "none"),
        f"{TAKES} model, got SimpleNamespace, whose DDP model is its .module: attach to that",
    ),
    "class": (
        lambda: tw.attach(DistributedDataParallel, "none"),
        f"{TAKES} model, DistributedDataParallel is a c",
    ),
    "class of a compressor": (lambda: wired(tw.TopK), "TypeError: expected a policy, a compress"),
    "class of a feedback": (
        lambda: wired(feedback=tw.feedback.EF14),
        "TypeError: EF14 is a class, give an object: EF14(...)",
    ),
    "class of a scaler": (
        lambda: wired(scaler=torch.amp.GradScaler),
        "TypeError: scaler must be a GradScaler, got the class GradScaler",
    ),
    "list": (
        lambda: tw.attach([], "none"),
        TAKES,
    ),
    "spec": (lambda: wired("topq:0.1"), "ValueError: "),
    "number": (lambda: wired(0.1), "TypeError: expected a policy, a compressor or a s"),
    "function": (
        lambda: wired(lambda name: 3),
        "TypeError: expected a compressor or a spec",
    ),
    "feedback": (lambda: wired(feedback="ef22"), "ValueError: "),
    "granularity": (lambda: wired(granularity="layer"), "ValueError: granularity must be 'bucket'"),
    "collective": (lambda: wired(collective="ring"), "ValueError: collective must be one of auto"),
    "exclude": (
        lambda: wired(exclude=["0.*", "embed*"]),
        "ValueError: exclude: no parameter is named like 'embed*' (there are 0.weight, 0.bias, ",
    ),
    "min_numel": (lambda: wired(min_numel=0.5), "ValueError: min_numel must be a number of elem"),
    "scaler": (lambda: wired(scaler=2.0), "TypeError: scaler must be a GradScaler, got float"),
    "seed": (lambda: wired(seed=-1), "ValueError: "),
    "max_bytes": (lambda: wired(max_bytes="much"), "ValueError: "),
    "timeout": (lambda: wired(timeout=0), "ValueError: timeout must be a positive number"),
    "check_every": (lambda: wired(check_every=-1), "ValueError: check_every must be a number of"),
    "measure_every": (lambda: wired(measure_every=True), "ValueError: measure_every must be a num"),
    "every": (lambda: wired()[1].log_to(WRITER, 0), "ValueError: every must be at least 1"),
    "writer": (lambda: wired()[1].log_to([]), "TypeError: list has no add_scalar"),
    "no state": (lambda: wired()[1].load_state_dict([]), "TypeError: Wire: expected a state_dict"),
    "empty": (lambda: wired()[1].load_state_dict({}), "ValueError: Wire: the state is empty"),
    "version": (
        lambda: other_version(wired()[1]),
        "ValueError: Wire: not a state of this version: version 7, not 2",
    ),
    "other feedback": (
        lambda: wired()[1].load_state_dict(wired(feedback="ef21")[1].state_dict()),
        "ValueError: Wire: the state is that of feedback 'ef21', this is 'ef14'",
    ),
}


def on_refusals() -> dict[str, str]:
    found = {}
    for name, (attempt, _) in REFUSED.items():
        try:
            attempt()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_makes_no_sense_is_refused_with_a_reason():
    for found in ranks.run(on_refusals, ranks=2):
        for name, (_, wanted) in REFUSED.items():
            assert found[name].startswith(wanted), name
        assert "wrap it, or average gradients in a loop of your own" in found["bare"]
        assert "call its detach() first" in found["twice"]


# On and off


def on_detach() -> dict[str, Any]:
    model, wire = wired()
    other, ours = plain(), wired()[0]
    found: dict[str, Any] = {"shown": [repr(wire)]}
    for step in range(3):
        backward(model, step)
        backward(ours, step)
    wire.detach()
    wire.detach()  # once more does no harm
    found["shown"].append(repr(wire))
    for step in range(3):
        backward(model, step)
        backward(other, step)
        found[f"plain {step}"] = all_same(gradients(model), gradients(other))
    found["still"] = wire.step == 3 and len(residuals(wire)) == 3
    again = tw.attach(model, "topk:0.1", min_numel=MIN)
    again.load_state_dict(wire.state_dict())
    for step in range(3, 6):
        backward(model, step)
        backward(ours, step)
        found[f"again {step}"] = all_same(gradients(model), gradients(ours))
    again.reset()
    found["forgotten"] = residuals(again) == {}
    return found


def test_a_wire_can_be_detached_and_another_one_attached():
    for found in ranks.run(on_detach, ranks=2):
        shown = found.pop("shown")
        assert "6 tensors, step 0" in shown[0]
        assert "detached" in shown[1]
        assert all(found.values()), found


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # a module: weights alone would not show it


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved_and_loaded,
    "AveragedModel": lambda model: AveragedModel(model).module,
}


def on_copies() -> dict[str, bool]:
    """Of a model that trains with a wire."""
    found = {}
    for kind, copied in COPIES.items():
        (model, wire), (ours, _), other = wired(), wired(), plain()
        for step in range(3):
            for each in (model, ours, other):
                backward(each, step)
        twin = copied(model)
        for step in range(3, 6):
            for each in (model, ours, other, twin):
                backward(each, step)
            found[f"{kind}, original {step}"] = all_same(gradients(model), gradients(ours))
            found[f"{kind}, copy {step}"] = all_same(gradients(twin), gradients(other))
        found[f"{kind}, wire"] = wire.step == 6
        fresh, _ = wired(granularity="tensor")  # its first buckets are others
        tw.attach(twin, "topk:0.1", min_numel=MIN, granularity="tensor")
        for step in range(6, 8):
            backward(twin, step)
            backward(fresh, step)
            found[f"{kind}, attached {step}"] = all_same(gradients(twin), gradients(fresh))
    return found


def test_a_copy_of_a_model_is_one_without_a_wire():
    for found in ranks.run(on_copies, ranks=2):
        assert all(found.values()), [name for name, good in found.items() if not good]


def on_one_rank() -> dict[str, bool]:
    """There is nobody to talk to."""
    found = {}
    for feedback in ("ef14", "ef21"):
        model, wire = wired(feedback=feedback, check_every=1)
        for step in range(3):
            own = alone(model, step)
            backward(model, step)
            found[f"{feedback} {step}"] = all_same(gradients(model), own)
        wire.summary()
        tw.check_replicas(model)
    return found


def test_a_single_rank_keeps_its_gradients():
    assert all(ranks.run(on_one_rank, ranks=1)[0].values())


class Breaking(logging.Filter):
    """A log that cannot be written to."""

    def filter(self, record: logging.LogRecord) -> bool:
        raise OSError("the disk is full")


def on_failed_attach() -> dict[str, Any]:
    found: dict[str, Any] = {}
    log = logging.getLogger("thinwire")
    for name, model in (("log", plain()), ("hook", hooked())):
        breaking = Breaking() if name == "log" else logging.Filter()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = copy.deepcopy(optimizer.param_groups[0])
        level = log.level
        log.setLevel(logging.INFO)
        log.addFilter(breaking)
        try:
            tw.attach(model, "dgc:0.1", optimizer=optimizer, min_numel=MIN)
        except (OSError, ValueError) as error:
            found[f"{name} error"] = type(error) is (OSError if name == "log" else ValueError)
        finally:
            log.removeFilter(breaking)
            log.setLevel(level)
        found[f"{name} optimizer"] = optimizer.param_groups[0].keys() == before.keys() and (
            optimizer.param_groups[0]["momentum"] == 0.9
        )
        found[f"{name} hooks"] = not optimizer._optimizer_step_pre_hooks
        found[f"{name} wire"] = tw.wire_of(model) is None
    model = plain()
    with contextlib.suppress(ValueError):
        tw.attach(model, "dgc:0.1", optimizer=optimizer, granularity="layer")
    model.register_comm_hook(None, default_hooks.allreduce_hook)  # there is none yet
    return found


def on_other_parameters() -> tuple[str, Any, str]:
    """An optimizer of "dgc" that trains another module too, from the beginning and later."""
    model, other = plain(), net()
    model.module[0].requires_grad_(False)  # which is no reason to refuse it
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    refused = raised(lambda: tw.attach(model, "dgc:0.1", optimizer=optimizer, min_numel=MIN))
    momentum = optimizer.param_groups[0]["momentum"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tw.attach(model, "dgc:0.1", optimizer=optimizer, min_numel=MIN)
    optimizer.step()
    optimizer.add_param_group({"params": list(other[:2].parameters()), "momentum": 0.9})
    return refused, momentum, raised(optimizer.step)


def test_dgc_takes_no_momentum_from_parameters_that_it_does_not_average():
    ((refused, momentum, later),) = ranks.run(on_other_parameters, ranks=1)
    words = "parameters are none that the attached model averages, and would train without momentum"
    assert f"6 of its 10 {words}" in refused
    assert momentum == 0.9
    assert f"2 of its 6 {words}" in later


def test_an_attach_that_fails_changes_nothing():
    (found,) = ranks.run(on_failed_attach, ranks=1)
    assert len(found) == 8
    assert all(found.values()), found


def on_wire_of() -> dict[str, Any]:
    model, wire = wired()
    found = {
        "wired": tw.wire_of(model) is wire,
        "compiled": tw.wire_of(torch.compile(model)) is wire,
        "another": tw.wire_of(plain()) is None,
        "bare": tw.wire_of(net()) is None,
    }
    try:
        tw.attach(model, "none")
    except ValueError as error:
        found["named"] = repr(wire) in str(error) and "tw.wire_of(model)" in str(error)
    wire.detach()
    found["detached"] = tw.wire_of(model) is None
    return found


def test_the_wire_of_a_model_is_found():
    (found,) = ranks.run(on_wire_of, ranks=1)
    assert len(found) == 6
    assert all(found.values()), found
