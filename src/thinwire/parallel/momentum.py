"""Taking an optimizer's momentum over: it then acts before compression (`feedback.DGC`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from thinwire.feedback import DGC

TAKEN = "thinwire_taken"  # in a parameter group: what was taken, to be given back
_OURS = "_thinwire_momentum"  # on an optimizer whose momentum is taken
_SETTINGS = ("momentum", "nesterov", "weight_decay")


def with_momentum(feedback: DGC, optimizer: Optimizer) -> DGC:
    """The feedback with the momentum that an optimizer has."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if getattr(optimizer, _OURS, False):
        raise ValueError("the momentum of this optimizer is taken over already: detach() first")
    kinds = {_momentum_of(group) for group in optimizer.param_groups}
    if None in kinds or len(kinds) > 1:
        raise ValueError(
            f"dgc needs an optimizer with one momentum for all parameters, such as SGD, without "
            f"dampening and maximize; got {type(optimizer).__name__}"
        )
    momentum, nesterov = next(kind for kind in kinds if kind is not None)
    return replace(feedback, momentum=momentum, nesterov=nesterov)


def take_momentum(optimizer: Optimizer, feedback: DGC) -> Callable[[], None]:
    """Switch an optimizer's momentum off, and see that it stays off; returns what undoes that.

    Weight decay stays outside compression: its momentum is added to the gradient just before the
    optimizer's step, so that without compression nothing changes.
    """

    def step(*_: Any) -> None:
        # Groups may have been added or loaded since.
        _switch_off(optimizer, feedback)
        _add_decay(optimizer)

    _switch_off(optimizer, feedback)
    handle = optimizer.register_step_pre_hook(step)
    setattr(optimizer, _OURS, True)

    def undo() -> None:
        handle.remove()
        delattr(optimizer, _OURS)
        for group in optimizer.param_groups:
            group.update(group.pop(TAKEN, {}))

    return undo


def _switch_off(optimizer: Optimizer, feedback: DGC) -> None:
    for group in optimizer.param_groups:  # all are looked at before any is changed
        found = _momentum_of(group)
        if found != (feedback.momentum, feedback.nesterov):
            raise ValueError(
                f"dgc took over a momentum of {feedback.momentum}, but a parameter group has "
                f"{group.get('momentum')}: attach anew to change it"
            )
    for group in optimizer.param_groups:
        if TAKEN not in group or group["momentum"]:
            group[TAKEN] = {key: group[key] for key in _SETTINGS}
        group["momentum"], group["nesterov"], group["weight_decay"] = 0.0, False, 0.0


def _momentum_of(group: dict[str, Any]) -> tuple[float, bool] | None:
    settings = group if group.get("momentum") else {**group, **group.get(TAKEN, {})}
    wrong = settings.get("dampening", 0) or settings.get("maximize", False)
    if "momentum" not in settings or "nesterov" not in settings or wrong:
        return None
    return float(settings["momentum"]), bool(settings["nesterov"])


@torch.no_grad()
def _add_decay(optimizer: Optimizer) -> None:
    """w = m w + decay p, added to the gradient (with Nesterov momentum decay p + m w)."""
    for group in optimizer.param_groups:
        taken = group[TAKEN]
        decay, m = taken["weight_decay"], taken["momentum"]
        if not decay:
            continue
        for p in group["params"]:
            if p.grad is None:
                continue
            w = optimizer.state[p].setdefault("thinwire_decay", torch.zeros_like(p))
            w.mul_(m).add_(p, alpha=decay)
            if taken["nesterov"]:
                p.grad.add_(p, alpha=decay).add_(w, alpha=m)
            else:
                p.grad.add_(w)
