"""Two stages: uncompressed until the variance is frozen, compressed momentum after that."""

from abc import abstractmethod
from typing import Any

from torch import Tensor

from thinwire.optim import adam, check
from thinwire.optim.base import ExchangingOptimizer
from thinwire.optim.slot import Slot


class Staged(ExchangingOptimizer):
    """Base of `OneBitAdam` and `OneBitLamb`: what travels, and when."""

    @property
    def frozen(self) -> bool:
        """Whether the next step is a compressed one."""
        return max((slot.steps for slot in self._slots()), default=0) >= self._freeze_step

    @property
    def _freeze_step(self) -> int:
        step: int = self.param_groups[0]["freeze_step"]
        return step

    @abstractmethod
    def _dense(self, slots: list[Slot], grads: list[Tensor], step: int) -> None:
        """Move the parameters, with averaged gradients."""

    @abstractmethod
    def _frozen(self, slots: list[Slot], momenta: list[Tensor], step: int) -> None:
        """Move the parameters, with the momenta that have come out of the exchange."""

    def _check(self, group: dict[str, Any]) -> None:
        who = type(self).__name__
        check.at_least(who, "lr", group["lr"], 0)
        check.betas(who, group["betas"])
        check.above_zero(who, "eps", group["eps"])
        check.at_least(who, "weight_decay", group["weight_decay"], 0)
        check.count(who, "freeze_step", group["freeze_step"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups and self.frozen:
            raise ValueError(
                f"{type(self).__name__}: the variance has been frozen since step "
                f"{self._freeze_step}: parameters that come now have none"
            )
        super().add_param_group(param_group)

    def _advance(self, slots: list[Slot], step: int) -> None:
        if step > self._freeze_step:
            self._check_known(slots, self._freeze_step)
        grads = self._gradients(slots, copy=step <= self._freeze_step)
        if step <= self._freeze_step:
            if self._average(slots, grads, step):
                self._lives.clear()
                self._dense(slots, grads, step)
                if step == self._freeze_step:
                    for slot in slots:
                        slot.kept("error")
            return
        momenta = [
            adam.ahead(slot, self._localized(slot, grad))
            for slot, grad in zip(slots, grads, strict=True)
        ]
        del grads
        if self._compress(slots, momenta, step):
            self._frozen(slots, momenta, step)

    def _localized(self, slot: Slot, grad: Tensor) -> Tensor:
        """This rank's gradient as it enters the momentum."""
        return adam.decayed(slot, grad)

    def _updates(self, slot: Slot, step: int) -> int:
        """How many updates the frozen variance of a parameter has seen."""
        return slot.steps - (step - self._freeze_step)
