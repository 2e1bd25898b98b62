"""Ray Train with `tw.attach`: two workers on this machine, and a run whose worker fails once."""

import pytest
from programs import python

pytest.importorskip("ray.train.torch", reason="pip install 'ray[train]'")
pytestmark = pytest.mark.timeout(420)


def test_workers_train_alike_and_a_failed_run_goes_on_bit_for_bit(tmp_path):
    found = python("ray_training.py", tmp_path)
    whole, other = found["whole"]
    assert whole["weights"] == other["weights"]
    assert whole["steps"] == 6
    assert whole["ratio"] > 3
    failed = found["failed"]
    assert [each["begin"] for each in failed] == [3, 3], "both went on from the checkpoint"
    assert [each["weights"] for each in failed] == [whole["weights"]] * 2
