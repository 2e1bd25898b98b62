"""A parameter as an optimizer's step sees it, and the arithmetic of Adam on it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.frames.code import wide_type


@dataclass(frozen=True)
class Slot:
    """A parameter with its state and the settings of its group.

    State and arithmetic are float32, or float64 for a float64 parameter. A half-precision parameter
    has a `master` in its state, of which it is the rounded copy.

    Args:
        name: for errors and statistics.
        p: the parameter.
        group: the param_group it is in.
        state: what the optimizer keeps of it; goes into `state_dict`.
        mask: given by the user: False where nothing is ever exchanged.
    """

    name: str
    p: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    mask: Tensor | None = None

    @property
    def real(self) -> torch.dtype:
        """The type of state and arithmetic."""
        return real_of(self.p)

    @property
    def steps(self) -> int:
        return int(self.state.get("step", 0))

    @property
    def updates(self) -> int:
        """How many of its steps have updated the variance."""
        return int(self.state.get("variance_steps", 0))

    def kept(self, key: str) -> Tensor:
        """A tensor of the state, zero at first."""
        if key not in self.state:
            self.state[key] = torch.zeros(self.p.shape, dtype=self.real, device=self.p.device)
        kept: Tensor = self.state[key]
        return kept

    def gradient(self, scale: float, copy: bool) -> Tensor:
        """This rank's gradient over `scale`; zero where there is none, so that ranks agree.

        It is a tensor of its own if `copy`, or if it has to be.
        """
        grad = self.p.grad
        if grad is None:
            return torch.zeros(self.p.shape, dtype=self.real, device=self.p.device)
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if copy or scale != 1 or grad.dtype != self.real:
            copied = torch.empty(self.p.shape, dtype=self.real, device=self.p.device)
            copied.copy_(grad)
            return copied if scale == 1 else copied.div_(scale)
        return grad

    def values(self) -> Tensor:
        """The parameter in full precision, to be changed in place; `write` then rounds it."""
        if self.p.dtype == self.real:
            return self.p.detach()
        master = self.state.get("master")
        if master is None or not torch.equal(master.to(self.p.dtype), self.p):
            # The first step, or somebody else has set the parameter since.
            master = self.state["master"] = self.p.detach().to(self.real)
        return master

    def write(self) -> None:
        """Bring a half-precision parameter up to date with its master."""
        if self.p.dtype != self.real:
            self.p.copy_(self.state["master"])

    def live(self) -> Tensor | None:
        """Where the variance is not zero and the mask allows it; None for everywhere.

        An element whose gradient has always been zero has no variance to divide by, and one bit
        cannot say zero: its update would be the noise of compression over eps.
        """
        live = self.kept("exp_avg_sq") != 0
        if self.mask is not None:
            live &= self.mask.to(live.device)
        return None if bool(live.all()) else live


def real_of(p: Tensor) -> torch.dtype:
    """The type of a parameter's state."""
    return wide_type(p.dtype)


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
    slot.state["variance_steps"] = slot.updates + 1


def ahead(slot: Slot, grad: Tensor) -> Tensor:
    """b1 m + (1 - b1) g as a new tensor: what the momentum would be with this gradient."""
    b1, _ = slot.group["betas"]
    return slot.kept("exp_avg").lerp(grad, 1 - b1)


def own_divisor(slot: Slot) -> Tensor:
    """That of the parameter's own variance."""
    return divisor(slot, slot.kept("exp_avg_sq"), slot.updates)


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


def move(slot: Slot) -> None:
    """p <- shrink p - rate m / divisor."""
    values = slot.values()
    keep = shrink(slot)
    if keep != 1:
        values.mul_(keep)
    values.addcdiv_(slot.kept("exp_avg"), own_divisor(slot), value=-rate(slot, slot.steps))
    slot.write()
