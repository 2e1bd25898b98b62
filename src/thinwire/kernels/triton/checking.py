"""Never wrong, never silently: a kernel is trusted once it has agreed with the reference.

Before a kernel first runs for a type and setting, it is compared with the reference on small inputs
of that type and setting (`thinwire.kernels.contract`). One that differs, or that cannot be compiled
for the device, is not used there any more: the reference takes its place, and a warning says so.
"""

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ThinwireWarning
from thinwire.kernels import reference
from thinwire.kernels.contract import KernelCall, difference, small_calls
from thinwire.kernels.key import Key
from thinwire.kernels.triton.launch import MOST, rows_of

WRITES_HALF = ("round_to_bfloat16",)  # what others have of half precision, they only read
HALF = (torch.float16, torch.bfloat16)


class Checked:
    """A kernel that is compared with the reference before it is used for the first time.

    Args:
        kernel: of a name that the reference has, too.
    """

    def __init__(self, kernel: Callable[..., Any]) -> None:
        functools.update_wrapper(self, kernel)
        self.kernel = kernel
        self.name = kernel.__name__
        self.reference: Callable[..., Any] = getattr(reference, self.name)
        self._agreed: set[tuple[Any, ...]] = set()
        self._refused: set[torch.device] = set()
        self._lock = threading.RLock()

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        if self.name not in WRITES_HALF:
            arguments = tuple(map(_widened, arguments))
            settings = {name: _widened(value) for name, value in settings.items()}
        device = _device([*arguments, *settings.values()])
        variant = (device, *_kinds([*arguments, *sorted(settings.items())]))
        if variant not in self._agreed:
            self._check(variant, KernelCall(self.name, arguments, settings))
        run = self.reference if device in self._refused else self.kernel
        return run(*arguments, **settings)

    def _check(self, variant: tuple[Any, ...], call: KernelCall) -> None:
        with self._lock:
            device = variant[0]
            if variant in self._agreed or device in self._refused:
                return
            wrong = _trouble(call, self.kernel)
            if wrong is None:
                self._agreed.add(variant)
                return
            self._refused.add(device)
        warnings.warn(
            f"the Triton kernel {self.name!r} is not used on {_called(device)}: {wrong}. Plain "
            "PyTorch takes its place, which gives the right results and takes longer. Please "
            "report it: run `thinwire selftest --device cuda` and paste what it prints into an "
            "issue (docs/gpu.md)",
            ThinwireWarning,
            stacklevel=3,
        )


def _trouble(call: KernelCall, kernel: Callable[..., Any]) -> str | None:
    try:
        for each in small_calls(call):
            wrong = difference(each, kernel)
            if wrong is not None:
                return f"it differs from the reference, {wrong}"
    except torch.cuda.OutOfMemoryError:
        raise  # not the kernel's fault
    except Exception as error:  # Triton raises what its compiler, the driver or LLVM come up with
        text = " ".join(str(error).split())
        return f"it cannot be run, {type(error).__name__}: {text[:300]}"
    return None


def _widened(value: Any) -> Any:
    """Half precision in float32, which kernels of this package read."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def _device(values: list[Any]) -> torch.device:
    """Where a call takes place."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, torch.device):
            return value
        if isinstance(value, list) and value:
            return _device([each for item in value for each in item])
    return torch.device("cpu")


def _called(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _kinds(values: list[Any]) -> list[Any]:
    """What code is compiled for, or a little more: types, and settings that are constants."""
    return [_kind(value) for value in values]


def _kind(value: Any) -> Any:
    match value:
        case Tensor():
            return value.dtype
        case ("block" | "chunk", int() as length):
            return rows_of(length) if length <= MOST else "long"
        case (str() as name, each):  # a setting
            return name, each if name == "width" else _kind(each)
        case Key():
            return Key
        case list():
            return tuple(_kind(each) for item in value[:1] for each in item)
        case bool() | str() | None:
            return value
        case _:
            return type(value)
