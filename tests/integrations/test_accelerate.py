"""Accelerate with `tw.accelerate.Handler` and with `tw.attach`, on two real processes."""

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


def test_wrong_use_says_what_to_do():
    from torch import nn

    import thinwire as tw

    with pytest.raises(ValueError, match=r"use tw.LocalSteps\(model, optimizer"):
        tw.accelerate.Handler("diloco:10")
    with pytest.raises(ValueError, match=r"set accelerator.ddp_handler before it"):
        tw.accelerate.CheckpointedWire(nn.Linear(2, 2))
