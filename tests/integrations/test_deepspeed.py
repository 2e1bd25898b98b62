"""DeepSpeed's engine with `tw.deepspeed.attach`, on two real processes."""

from itertools import chain

import pytest
from programs import torchrun

pytest.importorskip("deepspeed", reason="make test-integrations brings the frameworks")
PROGRAM = "deepspeed_training.py"
LR, MOMENTUM, STEPS = 0.5, 0.5, 6

# What a parameter of this type near 1 is rounded to, in each of six steps.
ROUNDING = {"fp16": STEPS * 2**-11, "bf16": STEPS * 2**-8}


def distance(first, second):
    pairs = zip(chain(*first), chain(*second), strict=True)
    return max(abs(a - b) for a, b in pairs)


@pytest.fixture(scope="module")
def averages(tmp_path_factory):
    return torchrun(PROGRAM, tmp_path_factory.mktemp("averages"), "averages")


def test_an_uncompressed_wire_trains_as_deepspeed_does(averages):
    assert len(averages) == 14
    for name, found in averages.items():
        weights = found["weights"]
        # float32 sums of two ranks are the same in both; float16 ones are scaled down where they
        # could overflow.
        assert distance(weights["None"], weights["none"]) <= ROUNDING.get(name, 1e-6), name
        assert found["none steps"] == STEPS, f"{name}: an exchange for each step of the optimizer"


def test_a_quantized_wire_trains_almost_as_deepspeed_does(averages):
    # 8 bits have an error of 1/255 of the range of a gradient, here of about 0.1, which feedback
    # keeps from adding up; the momentum doubles it.
    limit = LR / (1 - MOMENTUM) * 0.1 / 255 * STEPS
    for name, found in averages.items():
        weights = found["weights"]
        assert (
            0 < distance(weights["None"], weights["quantize:8"]) <= limit + ROUNDING.get(name, 0)
        ), name
        halves = name in ("sent as fp16", "fp16", "bf16")
        assert found["quantize:8 ratio"] > (1.5 if halves else 3), name


def test_accumulation_and_clipping_do_something(averages):
    plain = averages["plain"]["weights"]["None"]
    for name in ("accumulate", "clipped", "summed", "experts"):
        assert averages[name]["weights"]["None"] != plain


def test_an_overflow_on_one_rank_is_skipped_by_all(tmp_path):
    for kind, found in torchrun(PROGRAM, tmp_path, "overflow").items():
        assert found["unchanged"], kind
        assert found["residual"] > 0
        assert found["remembered"], f"{kind}: what is remembered stays as it was"
        assert found["moved"], f"{kind}: and training goes on"
        assert found["steps"] == 6
        assert found["skipped"] == (0 if kind == "autocast" else 1)  # GradScaler tells nobody


def test_training_goes_on_bit_for_bit(tmp_path):
    found = torchrun(PROGRAM, tmp_path, "checkpoints")
    assert found["resumed"] == found["whole"][3:]
    assert found["equal"]
    assert not found["forgotten"], "without its state in the checkpoint it does not"
    assert found["steps"] == 6
    assert "hidden.weight" in found["summary"]
    assert "The optimizer is AdamW" in found["explained"]


def test_what_cannot_be_is_refused_with_what_to_do(tmp_path):
    found = torchrun(PROGRAM, tmp_path, "refusals")
    for stage in (1, 2, 3):
        assert f"ZeRO stage {stage} reduces gradients" in found[f"zero {stage}"]
        assert "ZeRO++" in found[f"zero {stage}"]
    assert "got Net: call deepspeed.initialize first" in found["model"]
    assert "got tuple: pass its first item" in found["tuple"]
    assert "got int: pass the engine" in found["number"]
    assert "tw.LocalSteps(engine.module, engine.optimizer, 'diloco:50')" in found["local"]
    assert "leave group= out" in found["group"]
    assert "no parameter is named like 'heads*'" in found["exclude"]
    assert "use `tw.deepspeed.attach(engine, ...)`" in found["attach"]
    assert "a wire is attached to this engine already" in found["twice"]
    assert "detach it, and attach anew" in found["new parameter"]
    assert "this engine averages no gradients" in found["no exchange"]
    assert "a pipeline engine" in found["pipeline"]


def test_local_steps_and_exchanging_optimizers_work_with_an_engine(tmp_path):
    found = torchrun(PROGRAM, tmp_path, "others")
    assert (found["inner steps"], found["exchanges"]) == (6, 3)  # every third, and at the end
    for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam"):
        assert found[name]["equal"], f"{name} goes on bit for bit"


def test_the_page_for_users_of_one_bit_optimizers_runs(tmp_path):
    found = torchrun(PROGRAM, tmp_path, "documented")
    assert found["blocks"] == 3
    assert found["steps"] == 6
    assert "OneBitAdam is not a supported DeepSpeed Optimizer" in found["error"]


def test_a_rank_that_dies_is_an_error_for_the_others(tmp_path):
    assert torchrun(PROGRAM, tmp_path, "killed")["error"].startswith("PeerError")


def test_one_process_gets_a_warning(tmp_path):
    found = torchrun(PROGRAM, tmp_path, "alone", ranks=1)
    assert found["sent"] == 0
    assert len(found["losses"]) == 6
    assert [text for text in found["warnings"] if "this training has one process" in text]
