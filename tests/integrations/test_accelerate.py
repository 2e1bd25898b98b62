"""Accelerate with `tw.accelerate.compress` and with `tw.attach`, on two real processes."""

import pytest
from programs import torchrun

pytest.importorskip("accelerate", reason="make test-integrations brings the frameworks")
PROGRAM = "accelerate_training.py"


@pytest.mark.parametrize("mode", ["handler", "attach"])
def test_training_goes_on_bit_for_bit(mode, tmp_path):
    whole = torchrun(PROGRAM, tmp_path, mode)
    assert whole["steps"] == 8
    assert whole["ratio"] > 3
    resumed = torchrun(PROGRAM, tmp_path, f"{mode}-resumed")
    assert resumed["losses"] == whole["losses"][4:]
    assert resumed["weights"] == whole["weights"]
    assert resumed["steps"] == 8


def test_accumulated_gradients_are_exchanged_once(tmp_path):
    assert torchrun(PROGRAM, tmp_path, "accumulate")["steps"] == 8


def test_wrong_use_is_refused_and_fsdp2_and_local_steps_go():
    found = torchrun("accelerate_checks.py")
    wrong = found["wrong"]
    assert "takes a sharded (fully_shard) or DistributedDataParallel model" in wrong["early"]
    assert "call compress before prepare" in wrong["late"]
    assert "has comm_hook=FP16, and DDP takes one hook" in wrong["hooked"]
    assert "has a communication hook already" in wrong["hooked, attach"]
    assert "compresses already, with quantize:4" in wrong["twice"]
    assert "has a wire already" in wrong["twice, attach"]
    assert "takes an Accelerator, got DistributedDataParallel" in wrong["no accelerator"]
    assert "comm_hook: DDP takes one communication hook" in wrong["hook in options"]
    assert found["options"], "what DDP was to be made with stays"
    assert found["scaler"]
    one, other = found["local"]["apart"]
    assert one != other
    one, other = found["local"]["together"]
    assert one == other
    sharded = found["sharded"]
    assert "tw.attach(model, ...) with the model that prepare" in sharded["refused"]
    assert (sharded["sharded"], sharded["steps"]) == (True, 4)
    assert sharded["losses"][-1] < sharded["losses"][0]
    assert sharded["ratio"] > 3


def test_what_needs_no_ranks_says_what_to_do():
    from accelerate import Accelerator
    from torch import nn

    import thinwire as tw

    with pytest.raises(ValueError, match=r"use tw.LocalSteps\(model, optimizer"):
        tw.accelerate.Handler("diloco:10")
    with pytest.warns(tw.errors.ThinwireWarning, match="this training has one process"):
        tw.accelerate.compress(Accelerator(cpu=True))
    with pytest.raises(ValueError, match=r"call tw.accelerate.compress before it"):
        tw.accelerate.CheckpointedWire(nn.Linear(2, 2))
