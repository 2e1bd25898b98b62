"""Lightning's Trainer with `tw.lightning.Compression`, on two real processes."""

import pytest
from programs import torchrun

pytest.importorskip("lightning", reason="make test-integrations brings the frameworks")
PROGRAM = "lightning_training.py"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return torchrun(PROGRAM, tmp_path_factory.mktemp("plain"), "plain")


def test_training_goes_on_bit_for_bit_and_figures_are_logged(plain, tmp_path):
    whole = torchrun(PROGRAM, tmp_path, "whole")
    assert (whole["error"], whole["steps"]) == ("", 8)
    assert whole["ratio"] > 3
    assert "thinwire/bytes_sent" in whole["logged"]
    assert whole["losses"][0] == plain["losses"][0]
    assert whole["weights"] != plain["weights"]
    half = torchrun(PROGRAM, tmp_path, "half")
    resumed = torchrun(PROGRAM, tmp_path, "resumed", tmp_path / "half.ckpt")
    assert half["losses"] + resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["steps"] == 8


def test_accumulation_and_manual_optimisation_exchange_once_for_each_step(tmp_path):
    accumulated = torchrun(PROGRAM, tmp_path, "accumulate")
    assert (accumulated["error"], accumulated["steps"]) == ("", 4)
    assert len(accumulated["losses"]) == 8
    manual = torchrun(PROGRAM, tmp_path, "manual")
    assert (manual["error"], manual["steps"]) == ("", 8)


def test_sharded_models_are_compressed_and_go_on_bit_for_bit(tmp_path):
    whole = torchrun(PROGRAM, tmp_path, "fsdp")
    assert (whole["error"], whole["steps"]) == ("", 8)
    assert whole["ratio"] > 3
    torchrun(PROGRAM, tmp_path, "fsdp-half")
    resumed = torchrun(PROGRAM, tmp_path, "fsdp-resumed", tmp_path / "fsdp-half.ckpt")
    assert resumed["weights"] == whole["weights"]


def test_local_steps_end_with_the_same_parameters_and_go_on(tmp_path):
    whole = torchrun(PROGRAM, tmp_path, "local")
    assert whole["error"] == ""
    torchrun(PROGRAM, tmp_path, "local-half")
    resumed = torchrun(PROGRAM, tmp_path, "local-resumed", tmp_path / "local-half.ckpt")
    assert resumed["error"] == ""


def test_what_cannot_be_is_refused(tmp_path):
    hooked = torchrun(PROGRAM, tmp_path, "hooked")
    assert "the strategy has a ddp_comm_hook of its own" in hooked["error"]
    found = torchrun("lightning_checks.py", tmp_path)
    assert "more than one stateful callback of type `Compression`" in found["two"]
    assert "a wire is attached to this model" in found["two kinds"]
    assert "has a wire already" in found["attach"]
    assert "Lightning's is `trainer.strategy.model`" in found["early"]
    # A second fit with the same callback attaches anew.
    assert found["again"] == ""
    assert found["steps"] == [found["batches"]] * 2
    assert len(found["losses"]) == 2 * found["batches"]
    # In the middle of a round too, a checkpoint holds the parameters that were validated, and a
    # validation that comes after training is one of what it loads.
    local = found["local"]
    assert len(local["scores"]) == 8
    for again, before in local["scores"].values():
        assert again == pytest.approx(before, rel=1e-6)
    assert local["resumed"] == local["ended"]
    # So does one that is saved when an exception ends a fit, after which the model is the user's.
    failed = found["failed"]
    assert failed.pop("error") == "RuntimeError: in the middle of a round"
    assert failed == dict.fromkeys(("apart", "common", "tied", "frozen", "loaded"), True)
    # A method that takes over momentum has the optimizer that Lightning makes.
    assert found["momentum"] == ""
