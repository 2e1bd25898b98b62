"""Taking an optimizer's momentum over: it then acts before compression (`feedback.DGC`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.feedback import DGC

TAKEN = "thinwire_taken"  # in a parameter group: what was taken, to be given back
_OURS = "_thinwire_momentum"  # on an optimizer whose momentum is taken
_FOR_GOOD = ("momentum", "nesterov")  # until `undo`
_DECAY = "weight_decay"  # during a step


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


def take_momentum(
    optimizer: Optimizer, feedback: DGC, averaged: Sequence[Tensor] | None = None
) -> Callable[[], None]:
    """Switch an optimizer's momentum off, and see that it stays off; returns what undoes that.

    Weight decay stays outside compression: its momentum is added to the gradient just before the
    optimizer's step, so that without compression nothing changes. It is switched off for the time
    of the step alone, and otherwise stands in the parameter groups, where it can be changed.

    Args:
        averaged: all parameters that it acts on elsewhere; None for whatever the optimizer has.
    """

    def begin(*_: Any) -> None:
        # Groups may have been added, loaded or changed since.
        _check_averaged(optimizer, averaged)
        _switch_off(optimizer, feedback)
        _add_decay(optimizer)
        for group in optimizer.param_groups:
            group[TAKEN][_DECAY], group[_DECAY] = group[_DECAY], 0.0

    def end(*_: Any) -> None:
        _give_decay_back(optimizer)

    _check_averaged(optimizer, averaged)
    _switch_off(optimizer, feedback)
    handles = [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
    setattr(optimizer, _OURS, True)

    def undo() -> None:
        for handle in handles:
            handle.remove()
        delattr(optimizer, _OURS)
        for group in optimizer.param_groups:
            group.update(group.pop(TAKEN, {}))

    return undo


def _check_averaged(optimizer: Optimizer, averaged: Sequence[Tensor] | None) -> None:
    if averaged is None:
        return
    known = set(map(id, averaged))
    own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    others = sum(id(p) not in known for p in own)
    if others:
        raise ValueError(
            f"dgc takes over the momentum of all that the optimizer trains, but {others} of its "
            f"{len(own)} parameters are none that the attached model averages, and would train "
            "without momentum: give them an optimizer of their own"
        )


def _switch_off(optimizer: Optimizer, feedback: DGC) -> None:
    _give_decay_back(optimizer)  # of a step that was broken off
    for group in optimizer.param_groups:  # all are looked at before any is changed
        found = _momentum_of(group)
        if found != (feedback.momentum, feedback.nesterov):
            raise ValueError(
                f"dgc took over a momentum of {feedback.momentum}, but a parameter group has "
                f"{group.get('momentum')}: attach anew to change it"
            )
    for group in optimizer.param_groups:
        if TAKEN not in group or group["momentum"]:
            group[TAKEN] = {key: group[key] for key in _FOR_GOOD}
        group["momentum"], group["nesterov"] = 0.0, False


def _give_decay_back(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if _DECAY in group.get(TAKEN, {}):
            group[_DECAY] = group[TAKEN].pop(_DECAY)


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
        decay, m = group[_DECAY], group[TAKEN]["momentum"]
        for p in group["params"]:
            kept = optimizer.state.get(p, {})
            # What earlier decay has given momentum goes on when there is no more of it.
            if p.grad is None or not (decay or "thinwire_decay" in kept):
                continue
            w = optimizer.state[p].setdefault("thinwire_decay", torch.zeros_like(p))
            w.mul_(m).add_(p, alpha=decay)
            if group[TAKEN]["nesterov"]:
                p.grad.add_(p, alpha=decay).add_(w, alpha=m)
            else:
                p.grad.add_(w)
