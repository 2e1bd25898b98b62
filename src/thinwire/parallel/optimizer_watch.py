"""Which optimizer trains the parameters, and who calls its step?

`attach` need not be told of the optimizer, but two things about it matter. A GradScaler multiplies
the loss, and leaves out steps whose gradients are not finite. What is remembered of gradients is
then of another scale than the next ones, and belongs in part to steps that were never taken. And
an optimizer like Adam does not go with what arrives in bursts (`optimizers`). Nothing in a gradient
shows either, but the first step of the optimizer does: all optimizers of torch have hooks on it,
and a GradScaler calls it.
"""

import sys
import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from thinwire.errors import ThinwireWarning
from thinwire.parallel.optimizers import trained_by

if TYPE_CHECKING:
    from thinwire.parallel.wire import Wire

DEPTH = 12  # frames between a hook of an optimizer and the GradScaler: decorators of its step


class OptimizerWatch:
    """Looks at the first steps of the optimizers that train these parameters.

    There may be several, each with some of the parameters; all of them step before the next
    backward pass, which ends the watch.

    Args:
        parameters: of an attached model, by name.
        wire: of the model, which is told.

    Attributes:
        done: an optimizer has been seen: `stop` can be called by the next backward pass.
    """

    def __init__(self, parameters: Mapping[str, Tensor], wire: "Wire") -> None:
        self.done = False
        self._parameters = {name: weakref.ref(p) for name, p in parameters.items()}
        self._wire = wire
        self._scaler_sought = wire._configuration.scaler is None
        _watch(self)

    def stop(self) -> None:
        """Not to be called by an optimizer's step, which goes through its hooks."""
        self.done = True
        _watches.discard(self)
        if not _watches:
            _stop_watching()

    def _look(self, optimizer: Optimizer) -> None:
        known = {name: p for name, found in self._parameters.items() if (p := found()) is not None}
        names = trained_by(optimizer, known)
        if not names:
            return
        self.done = True
        self._wire._note_optimizer(optimizer, names)
        if self._scaler_sought:
            self._scaler_sought = False
            self._look_for_scaler()

    def _look_for_scaler(self) -> None:
        scaler = calling_scaler()
        # What remembers nothing is not harmed.
        if scaler is None or not scaler.is_enabled() or not self._wire._reducer.states.names():
            return
        warnings.warn(
            "this model is trained with a GradScaler that attach does not know of: what is "
            "remembered of gradients will not follow its scale, and holds parts of steps that it "
            "skips. Pass it: tw.attach(model, ..., scaler=scaler)",
            ThinwireWarning,
            stacklevel=2,
        )


# One hook for all watches. A watch may be collected as garbage at any time, also while an optimizer
# goes through its hooks: that must not take one of them away.
_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
_hooks: list[RemovableHandle] = []


def _watch(watch: OptimizerWatch) -> None:
    _watches.add(watch)
    if not _hooks:
        # After a step and not before: an optimizer is known by its state, too.
        _hooks.append(register_optimizer_step_post_hook(_stepped))


def _stop_watching() -> None:
    while _hooks:
        _hooks.pop().remove()


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # to which frames mean nothing
        return
    for watch in list(_watches):
        watch._look(optimizer)


def calling_scaler() -> GradScaler | None:
    """The GradScaler that calls the optimizer's step inside of which this is called."""
    frame = sys._getframe(1)
    for _ in range(DEPTH):
        found = frame.f_locals.get("self")
        if isinstance(found, GradScaler):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
