"""The loops over elements, and the one place that decides which implementation runs.

Every kernel exists twice with the same signature: `reference` in plain PyTorch for any device, and
`cpu` in Numba. Kernels take flat contiguous tensors of float32 or float64 and know nothing of
ranks, shapes or frames. Encoding kernels read ``x`` and an optional residual ``r``, never write
them, and return ``None`` when ``x + r`` holds a NaN or an infinity.
"""

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch

from thinwire.kernels.key import Key

__all__ = ["Key", "are_compiled", "on", "use"]

_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("kernels", default=None)
_NAMES = ("reference", "cpu")


def on(device: torch.device) -> ModuleType:
    """The kernels for tensors of this device."""
    return _load(_forced.get() or ("cpu" if device.type == "cpu" else "reference"))


def are_compiled(device: torch.device) -> bool:
    """Whether the kernels for tensors of this device are compiled when they are first called."""
    return (_forced.get() or device.type) == "cpu"


@functools.cache
def _load(name: str) -> ModuleType:
    # Numba takes half a second to import, so not before the first kernel runs.
    return importlib.import_module(f"thinwire.kernels.{name}")


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Run everything inside the block on the named kernels ('reference' or 'cpu')."""
    if name not in _NAMES:
        raise ValueError(f"kernels: unknown implementation {name!r}, known: {', '.join(_NAMES)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
