"""The function that docs/guides/integrations.md gives for torchtitan, with torchtitan's own parts.

Only where torchtitan is installed, which `make test-integrations` does not do. Without it the
function is tested in tests/test_integrations.py.
"""

import pytest
from programs import torchrun

pytest.importorskip("torchtitan.models.llama3", reason="pip install torchtitan")


def test_the_model_that_torchtitan_makes_is_compressed():
    found = torchrun("torchtitan_training.py")
    assert found["steps"] == 5
    assert found["ratio"] > 5
    assert found["losses"][-1] < found["losses"][0]
