"""torchft with `tw.torchft.CompressedGroup`: three real replicas, of which one is killed.

Only where torchft is installed, which `make test-integrations` does not do: it comes as a nightly
build.
"""

import pytest
from programs import python

pytest.importorskip("torchft", reason="pip install torchft-nightly")
pytestmark = pytest.mark.timeout(420)


def test_replicas_that_are_left_go_on_with_the_same_weights(tmp_path):
    first, second, killed = python("torchft_training.py", tmp_path)["replicas"]
    assert killed is None
    assert first["weights"] == second["weights"]
    for each in (first, second):
        assert 3 in each["sizes"], "all three have trained together"
        assert each["sizes"][-1] == 2, "the step without the third counts"
        assert each["calls"] >= len(each["sizes"]), "every step was compressed"
