"""Tests of the Triton kernels on CPU tensors, in Triton's interpreter.

The interpreter takes the place of the compiler for every kernel that is defined while
TRITON_INTERPRET is set, so these tests have processes of their own: tests/test_triton.py starts
them. By hand: TRITON_INTERPRET=1 python -m pytest tests/interpreted
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small; what takes the time is Python."""
    import torch

    torch.set_num_threads(1)
