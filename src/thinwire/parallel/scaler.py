"""Is there a GradScaler that `attach` was not told of?

A GradScaler multiplies the loss, and leaves out steps whose gradients are not finite. What is
remembered of gradients is then of another scale than the next ones, and belongs in part to steps
that were never taken. Nothing in a gradient shows it, but the first step of the optimizer does: a
GradScaler calls it.
"""

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.errors import ThinwireWarning
from thinwire.reducer.units import UnitReducer

DEPTH = 12  # frames between a hook of an optimizer and the GradScaler: decorators of its step


class ScalerWatch:
    """Looks once who calls the step of the optimizer that trains these parameters.

    Args:
        parameters: of a model that was attached without a scaler.
        reducer: of its gradients; if it remembers nothing, a GradScaler does no harm.

    Attributes:
        done: nothing more to see: `stop` can be called.
    """

    def __init__(self, parameters: Iterable[Tensor], reducer: UnitReducer) -> None:
        self.done = False
        self._parameters = {id(p): weakref.ref(p) for p in parameters}
        self._reducer = reducer
        look = weakref.WeakMethod(self._look)

        def hook(optimizer: Optimizer, *_: Any) -> None:
            # Frames mean nothing to a compiler; the hook must not keep the model alive.
            method = None if torch.compiler.is_compiling() else look()
            if method is not None:
                method(optimizer)

        handle = register_optimizer_step_pre_hook(hook)
        self._finalizer = weakref.finalize(self, handle.remove)

    def stop(self) -> None:
        """Not to be called by an optimizer's step, which goes through its hooks."""
        self.done = True
        self._finalizer()

    def _look(self, optimizer: Optimizer) -> None:
        if self.done or not any(map(self._knows, _parameters_of(optimizer))):
            return
        self.done = True
        scaler = _calling_scaler()
        if scaler is None or not scaler.is_enabled() or not self._reducer.states.names():
            return
        warnings.warn(
            "this model is trained with a GradScaler that attach does not know of: what is "
            "remembered of gradients will not follow its scale, and holds parts of steps that it "
            "skips. Pass it: tw.attach(model, ..., scaler=scaler)",
            ThinwireWarning,
            stacklevel=2,
        )

    def _knows(self, parameter: Tensor) -> bool:
        found = self._parameters.get(id(parameter))
        return found is not None and found() is parameter


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _calling_scaler() -> GradScaler | None:
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        found = frame.f_locals.get("self")
        if isinstance(found, GradScaler):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
