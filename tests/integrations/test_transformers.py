"""Hugging Face's Trainer with `tw.transformers.Compression`, on two real processes."""

import pytest
from programs import torchrun

pytest.importorskip("transformers", reason="make test-integrations brings the frameworks")
PROGRAM = "transformers_training.py"


def test_training_goes_on_bit_for_bit_and_the_log_has_figures(tmp_path):
    whole = torchrun(PROGRAM, tmp_path, "quantize")
    assert whole["steps"] == 8
    assert "thinwire.pt" in whole["files"]
    assert whole["logged"]["thinwire_ratio"] > 2
    resumed = torchrun(PROGRAM, tmp_path, "quantize-resumed")
    assert resumed["weights"] == whole["weights"]
    assert resumed["steps"] == 8


def test_local_steps(tmp_path):
    found = torchrun(PROGRAM, tmp_path, "local")
    assert found["steps"] == 5  # after every two of eight steps, and at the end


def test_settings_of_the_trainer_and_wrong_use(tmp_path):
    found = torchrun("transformers_checks.py", tmp_path)
    settings = found["settings"]
    assert settings["steps"] == [4, 4], "accumulation exchanges once a step; train() twice works"
    assert all(norm > 1e-3 for norm in settings["norms"]), "gradients are averaged, then clipped"
    assert settings["figures"] == [True, True], "for callbacks before and behind it"
    assert "has a wire already" in found["wrong"]["two"]
    assert "the Trainer's is `trainer.model_wrapped`" in found["wrong"]["early"]
    (warning,) = found["copied"]
    assert "compression starts anew" in warning
    for name, (chosen, steps) in {
        "whole": ("checkpoint-2", 8),
        "stopped": ("checkpoint-2", 4),
        "stopped after an epoch": ("checkpoint-4", 8),
    }.items():
        ended = found["best"][name]
        assert (ended["best"], ended["steps"], ended["finished"]) == (chosen, steps, True)
        assert ended["same"] == [True, True], f"{name}: the model is not the best checkpoint"
    assert found["search"] == ["search/run-3/checkpoint-2/thinwire.pt"]


def test_the_trainer_comes_first():
    import thinwire as tw

    with pytest.raises(TypeError, match="takes the Trainer first, got str"):
        tw.transformers.Compression("quantize:4")
