"""A parameter as an optimizer's step sees it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
        return torch.float64 if self.p.dtype == torch.float64 else torch.float32

    @property
    def steps(self) -> int:
        return int(self.state.get("step", 0))

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
            room = torch.empty(self.p.shape, dtype=self.real, device=self.p.device)
            room.copy_(grad)
            return room if scale == 1 else room.div_(scale)
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
