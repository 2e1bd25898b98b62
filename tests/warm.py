"""Compiles all kernels, in the background while tests run that use none."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from thinwire.compressors.compiling import every_use
from thinwire.feedback.state import STORAGES, storage_uses
from thinwire.kernels.compiling import compile_kernels

NICENESS = 5  # tests come first
DTYPES = (torch.float32, torch.float64)


def start() -> subprocess.Popen[bytes]:
    """Begin, in a process of its own; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def warm() -> None:
    """Load, or compile, every kernel."""
    compile_kernels([*every_use(DTYPES), *storage_uses(STORAGES, DTYPES)])


if __name__ == "__main__":
    os.nice(NICENESS)
    warm()
