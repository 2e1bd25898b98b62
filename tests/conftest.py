"""What all tests share: two threads, repeatable Hypothesis examples, no network."""

import os
import socket

import hypothesis
import pytest

# Threads of torch that wait for each other in a loop take the processor from the one they wait for
# when the machine has other work: tests with two of them took three times as long. Read when torch
# is loaded, so set before.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

hypothesis.settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=12,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# Fresh examples, many more: pytest --hypothesis-profile=thorough
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("default"), derandomize=False,
    max_examples=1000,
)  # fmt: skip
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def two_threads():
    """Every test starts with two threads, whatever the machine has or the last test left."""
    torch.set_num_threads(2)


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Tests reach this machine only."""
    connect = socket.socket.connect

    def local(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("localhost", "127.0.0.1", "::1"):
            pytest.fail(f"a test tried to reach {address}: tests use no network")
        return connect(self, address)

    socket.socket.connect = local
    yield
    socket.socket.connect = connect


def pytest_collection_modifyitems(items):
    """Tests with many processes come last: one process has then compiled the kernels for all."""
    several = {"Ranks", "ranks", "torchrun"}
    items.sort(key=lambda item: bool(several & vars(item.module).keys()))
