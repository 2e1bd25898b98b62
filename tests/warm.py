"""Compiles all kernels, or loads those that are compiled already."""

import torch

from thinwire.compressors.compiling import every_use
from thinwire.feedback.state import STORAGES, storage_uses
from thinwire.kernels.compiling import compile_kernels

DTYPES = (torch.float32, torch.float64)


def warm() -> None:
    """Load, or compile, every kernel."""
    compile_kernels([*every_use(DTYPES), *storage_uses(STORAGES, DTYPES)])
