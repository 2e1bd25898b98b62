"""Taking an optimizer's momentum over: it then acts before compression, see `thinwire.DGC`."""

from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from thinwire.feedback import DGC

TAKEN = "thinwire_taken"  # in a parameter group: what was taken, to be given back


def take_momentum(optimizer: Any, feedback: DGC) -> tuple[DGC, Any]:
    """Switch an optimizer's momentum off; the feedback that has it now, and how to undo that.

    Weight decay stays outside compression: its momentum is added to the gradient just before the
    optimizer's step, so that without compression nothing changes.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    groups = optimizer.param_groups
    kinds = {_momentum_of(group) for group in groups}
    if None in kinds or len(kinds) > 1:
        raise ValueError(
            f"dgc needs an optimizer with one momentum for all parameters, such as SGD, without "
            f"dampening and maximize; got {type(optimizer).__name__}"
        )
    momentum, nesterov = next(kind for kind in kinds if kind is not None)
    for group in groups:
        if TAKEN not in group:
            group[TAKEN] = {key: group[key] for key in ("momentum", "nesterov", "weight_decay")}
        group["momentum"], group["nesterov"], group["weight_decay"] = 0.0, False, 0.0
    handle = optimizer.register_step_pre_hook(_add_decay)

    def undo() -> None:
        handle.remove()
        for group in groups:
            group.update(group.pop(TAKEN, {}))

    return replace(feedback, momentum=momentum, nesterov=nesterov), undo


def _momentum_of(group: dict[str, Any]) -> tuple[float, bool] | None:
    settings = {**group, **group.get(TAKEN, {})}
    wrong = settings.get("dampening", 0) or settings.get("maximize", False)
    if "momentum" not in settings or "nesterov" not in settings or wrong:
        return None
    return float(settings["momentum"]), bool(settings["nesterov"])


@torch.no_grad()
def _add_decay(optimizer: Optimizer, args: Any, options: Any) -> None:
    """w = m w + decay p, added to the gradient (with Nesterov momentum decay p + m w)."""
    for group in optimizer.param_groups:
        taken = group.get(TAKEN, {})
        decay, m = taken.get("weight_decay", 0.0), taken.get("momentum", 0.0)
        if not decay:
            continue
        for p in group["params"]:
            if p.grad is None:
                continue
            state = optimizer.state[p]
            w = state.setdefault("thinwire_decay", torch.zeros_like(p))
            w.mul_(m).add_(p, alpha=decay)
            if taken["nesterov"]:
                p.grad.add_(p, alpha=decay).add_(w, alpha=m)
            else:
                p.grad.add_(w)
