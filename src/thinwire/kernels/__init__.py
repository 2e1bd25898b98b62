"""The loops over elements, and the one place that decides which implementation runs.

Every kernel exists three times with the same signature: `reference` in plain PyTorch for any
device, `cpu` in Numba, and `triton` for CUDA. Kernels take flat contiguous tensors of float32 or
float64 and know nothing of ranks, shapes or frames. Encoding kernels read ``x`` and an optional
residual ``r``, never write them, and return ``None`` when ``x + r`` holds a NaN or an infinity.
"""

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch

from thinwire.errors import MissingExtraError, ThinwireWarning
from thinwire.kernels.key import Key

__all__ = ["Key", "are_compiled", "on", "use"]

_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("kernels", default=None)
_NAMES = ("reference", "cpu", "triton")


def on(device: torch.device) -> ModuleType:
    """The kernels for tensors of this device."""
    return _load(_forced.get() or name_on(device))


def name_on(device: torch.device) -> str:
    """Which kernels run on this device unless `use` says otherwise."""
    if device.type == "cpu":
        return "cpu"
    return "triton" if device.type == "cuda" and _has_triton() else "reference"


@functools.cache
def _has_triton() -> bool:
    """Whether Triton is there, and our kernels can be read by it."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        _load("triton")
    except Exception as error:  # whatever a release of Triton that we do not know raises
        warnings.warn(
            f"the Triton kernels cannot be loaded ({type(error).__name__}: {error}). Plain PyTorch "
            "takes their place on CUDA, which gives the right results and takes longer; "
            "docs/gpu.md says how to report it",
            ThinwireWarning,
            stacklevel=4,
        )
        return False
    return True


def are_compiled(device: torch.device) -> bool:
    """Whether the kernels for tensors of this device are compiled when they are first called."""
    return (_forced.get() or device.type) == "cpu"


@functools.cache
def _load(name: str) -> ModuleType:
    # Numba takes half a second to import, so not before the first kernel runs.
    return importlib.import_module(f"thinwire.kernels.{name}")


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Run everything inside the block on the named kernels ('reference', 'cpu' or 'triton').

    Those of Triton run on CPU tensors too if TRITON_INTERPRET=1 was set before Triton was imported.
    """
    if name not in _NAMES:
        raise ValueError(f"kernels: unknown implementation {name!r}, known: {', '.join(_NAMES)}")
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise MissingExtraError("triton", "triton", "kernels.use('triton')")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
