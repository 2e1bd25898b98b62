"""The arithmetic of Adam that the optimizers of this room share."""

import math

from torch import Tensor

from thinwire.optim.slot import Slot


def decayed(slot: Slot, grad: Tensor) -> Tensor:
    """The gradient with L2 decay, where the group asks for it."""
    decay = slot.group["weight_decay"]
    if decay and not slot.group.get("decoupled", False):
        return grad.add(slot.values(), alpha=decay)
    return grad


def track(slot: Slot, grad: Tensor) -> None:
    """m <- b1 m + (1 - b1) g, and v <- b2 v + (1 - b2) g^2."""
    b1, b2 = slot.group["betas"]
    slot.kept("exp_avg").lerp_(grad, 1 - b1)
    slot.kept("exp_avg_sq").mul_(b2).addcmul_(grad, grad, value=1 - b2)


def ahead(slot: Slot, grad: Tensor) -> Tensor:
    """b1 m + (1 - b1) g as a new tensor: what the momentum would be with this gradient."""
    b1, _ = slot.group["betas"]
    return slot.kept("exp_avg").lerp(grad, 1 - b1)


def divisor(slot: Slot, variance: Tensor, updates: int) -> Tensor:
    """sqrt(v / (1 - b2^n)) + eps for a variance of n updates."""
    _, b2 = slot.group["betas"]
    root = math.sqrt(1 - b2**updates)
    return variance.sqrt().div_(root).add_(slot.group["eps"])


def rate(slot: Slot, step: int) -> float:
    """lr / (1 - b1^t): the learning rate, with the correction of the momentum."""
    b1, _ = slot.group["betas"]
    return float(slot.group["lr"]) / (1 - float(b1) ** step)


def shrink(slot: Slot) -> float:
    """What a step of decoupled decay multiplies the parameter with."""
    if not slot.group.get("decoupled", False):
        return 1.0
    return 1.0 - float(slot.group["lr"]) * float(slot.group["weight_decay"])


def move(slot: Slot, updates: int) -> None:
    """p <- shrink p - rate m / divisor; `updates` is the number of those of the variance."""
    values = slot.values()
    keep = shrink(slot)
    if keep != 1:
        values.mul_(keep)
    divided = divisor(slot, slot.kept("exp_avg_sq"), updates)
    values.addcdiv_(slot.kept("exp_avg"), divided, value=-rate(slot, slot.steps))
    slot.write()
