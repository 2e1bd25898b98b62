from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire import check
from thinwire.collectives.options import Group, Timeout
from thinwire.compressors import Compressor
from thinwire.optim import adam
from thinwire.optim.adam import Slot
from thinwire.optim.base import ONE_BIT, ExchangingOptimizer, is_finite

LONGEST = 62  # doublings, far beyond any run


class Sum(NamedTuple):
    """What a parameter has accumulated since ranks last met: the sums of the class's formulas."""

    update: Tensor  # u
    weight: float  # w
    keep: float  # k


class ZeroOneAdam(ExchangingOptimizer):
    """Adam that sends one bit per element from the start, and later meets only now and then.

    **Until step var_freeze_step** ranks meet at every step. Where the variance is updated the
    gradient is sent uncompressed, and m and v are those of Adam. Such steps are one apart for
    var_update_scaler updates, then two apart for as many, then four, and so on. At all other steps
    the momentum is exchanged as in `OneBitAdam`, and v stays.

    **After it** v stays, and ranks move by themselves between meetings, which are H steps apart: 1
    at first, doubled every local_step_scaler steps, at most local_step_clipper. With
    a = lr / (1 - b1^t) and D = sqrt(v / (1 - b2^n)) + eps (n updates of v), rank i takes

        m_i = b1 m_i + (1 - b1) g_i
        p_i = p_i - a m_i / D;  u_i = u_i + a m_i;  w = w + a

    and where ranks meet, with p_0 the parameters of the last meeting,

        u = two-sided C of the mean of the u_i, with error feedback
        m = u / w;  p = p_0 - u / D;  u_i = w = 0

    so that after a meeting all ranks have the same parameters and momenta, bit for bit. With
    decoupled decay each local step also multiplies p_i, u_i, w and a factor k of p_0 by
    1 - lr weight_decay, which makes the same of both formulas. What is still to be sent at step
    var_freeze_step is multiplied by a, as momenta are from then on.

    Between meetings replicas differ: `sync()` before an evaluation or a checkpoint, or look at
    `synced`. A rank whose gradient is not finite between meetings leaves it out of its momentum.
    Elements whose variance is zero take no part in what is compressed, and wait for an update of
    the variance.

    Args:
        params, lr, betas, eps, weight_decay, decoupled, group, masks, compressor, max_bytes,
            timeout: as for `OneBitAdam`. Groups can be added until var_freeze_step.
        var_freeze_step: the last step that may update the variance; the end of the learning rate's
            warm-up or later.
        var_update_scaler: updates of the variance at each interval.
        local_step_scaler: steps after which the interval between meetings doubles.
        local_step_clipper: the longest interval; 1 for a meeting at every step.

    Example:
        >>> import torch, torch.distributed as dist, thinwire as tw
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = tw.optim.ZeroOneAdam(model.parameters(), lr=1e-2, var_freeze_step=2)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(2, 4)).square().mean().backward()
        ...     _ = optimizer.step()
        >>> optimizer.synced
        True
        >>> dist.destroy_process_group()

    Reference: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam,
    2022.
    """

    shared: ClassVar[tuple[str, ...]] = (
        *("var_freeze_step", "var_update_scaler"),
        *("local_step_scaler", "local_step_clipper"),
    )
    spread: ClassVar[tuple[str, ...]] = ("error", "exp_avg")
    vectors: ClassVar[tuple[str, ...]] = (*ExchangingOptimizer.vectors, "anchor", "update")
    numbers: ClassVar[tuple[str, ...]] = ("variance_steps", "weight", "keep")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32768,
        local_step_clipper: int = 16,
        decoupled: bool = False,
        group: Group = None,
        masks: Mapping[Tensor, Tensor] | None = None,
        compressor: Compressor | str = ONE_BIT,
        max_bytes: int | str | None = None,
        timeout: Timeout = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
            "decoupled": decoupled,
        }
        super().__init__(
            params,
            defaults,
            group=group,
            masks=masks,
            compressor=compressor,
            max_bytes=max_bytes,
            timeout=timeout,
        )

    @property
    def synced(self) -> bool:
        """Whether all ranks have the same parameters."""
        return not self._moved()

    def sync(self) -> None:
        """Meet now, so that all ranks have the same parameters; all of them call this together."""
        with torch.no_grad():
            moved = self._moved()
            if moved:
                self._meet(moved, list(map(_sum_so_far, moved)), max(s.steps for s in moved))

    def _moved(self) -> list[Slot]:
        """Parameters that differ between ranks; some may have been frozen since they last moved."""
        return [slot for slot in self._known() if slot.state.get("weight", 0.0)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        done = max((slot.steps for slot in self._slots()), default=0)
        if self.param_groups and done >= self._setting("var_freeze_step"):
            raise ValueError(
                "ZeroOneAdam: the variance is frozen: parameters that come now have none"
            )
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        check.flag("ZeroOneAdam", "decoupled", group["decoupled"])
        for key in self.shared:
            check.steps("ZeroOneAdam", key, group[key])

    def _setting(self, key: str) -> int:
        value: int = self.param_groups[0][key]
        return value

    def _advance(self, slots: list[Slot], step: int) -> None:
        # A parameter that has begun with local steps goes on with them, whoever is trained with it.
        begun = any("weight" in slot.state for slot in slots)
        if step <= self._setting("var_freeze_step") and not begun:
            self._together(slots, step)
            return
        if any(slot.updates and "weight" not in slot.state for slot in slots):
            self._begin()  # those that were trained without the others until now
        self._apart(slots, step)

    def _together(self, slots: list[Slot], step: int) -> None:
        """A step of the first stage."""
        due = variance_at(step, self._setting("var_update_scaler")).due
        tensors = self._gradients(slots, copy=due)
        if due:
            if not self._average(slots, tensors, step):
                return
            self._lives.clear()
        else:
            pairs = zip(slots, tensors, strict=True)
            tensors = [adam.ahead(slot, adam.decayed(slot, grad)) for slot, grad in pairs]
            if not self._compress(slots, tensors, step):
                return
        for slot, tensor in zip(slots, tensors, strict=True):
            state = slot.state
            if due:
                adam.track(slot, adam.decayed(slot, tensor))
            else:
                state["exp_avg"] = tensor
            state["step"] = slot.steps + 1
            state.setdefault("variance_steps", 0)
            if slot.updates:
                adam.move(slot)
        if step == self._setting("var_freeze_step"):
            self._begin()

    def _begin(self) -> None:
        """Be ready for local steps: all parameters that have a variance, also those that are not
        trained now, as they may be again."""
        for slot in self._known():
            if slot.updates and "weight" not in slot.state:
                slot.kept("error").mul_(adam.rate(slot, slot.steps))
                slot.state["anchor"] = slot.values().clone()
                slot.kept("update")
                slot.state["weight"], slot.state["keep"] = 0.0, 1.0

    def _apart(self, slots: list[Slot], step: int) -> None:
        """A step of the second stage."""
        self._check_known(slots, "weight")
        grads = self._gradients(slots, copy=False)
        finite = self._sound(all(map(is_finite, grads)), "this rank leaves it out")
        for slot in slots:
            if not slot.state["weight"]:  # since the meeting somebody may have set parameters
                slot.kept("anchor").copy_(slot.values())
        begin, scaler = self._setting("var_freeze_step"), self._setting("local_step_scaler")
        interval = interval_at(step, begin, scaler, self._setting("local_step_clipper"))
        alone = list(zip(slots, grads, strict=True))
        trained = {slot.p for slot in slots}
        if step % interval == 0:
            sums = [self._sum(slot, grad, finite) for slot, grad in alone]
            # Where the learning rate is zero nothing has moved, and there is nothing to say.
            met = [(s, found) for s, found in zip(slots, sums, strict=True) if found.weight]
            met += [(slot, _sum_so_far(slot)) for slot in self._moved() if slot.p not in trained]
            if met and not self._meet([s for s, _ in met], [found for _, found in met], step):
                return
            alone = [pair for pair, found in zip(alone, sums, strict=True) if not found.weight]
        for slot, grad in alone:
            self._move_alone(slot, grad, finite)
        for slot in slots:
            slot.state["step"] = slot.steps + 1

    def _sum(self, slot: Slot, grad: Tensor, finite: bool) -> Sum:
        """What this step adds up to; nothing is changed, as the meeting may fail."""
        if finite:
            momentum = adam.ahead(slot, adam.decayed(slot, grad))
        else:
            momentum = slot.kept("exp_avg").clone()
        live = self._live(slot)
        if live is not None:
            momentum.mul_(live)
        rate, keep = adam.rate(slot, slot.steps + 1), adam.shrink(slot)
        update = momentum.mul_(rate).add_(slot.kept("update"), alpha=keep)
        return Sum(update, slot.state["weight"] * keep + rate, slot.state["keep"] * keep)

    def _move_alone(self, slot: Slot, grad: Tensor, finite: bool) -> None:
        b1, _ = slot.group["betas"]
        momentum, update, values = slot.kept("exp_avg"), slot.kept("update"), slot.values()
        if finite:
            momentum.lerp_(adam.decayed(slot, grad), 1 - b1)
        live = self._live(slot)
        if live is not None:
            momentum.mul_(live)
        rate, keep = adam.rate(slot, slot.steps + 1), adam.shrink(slot)
        if keep != 1:
            update.mul_(keep)
            values.mul_(keep)
        update.add_(momentum, alpha=rate)
        values.addcdiv_(momentum, adam.own_divisor(slot), value=-rate)
        slot.write()
        slot.state["weight"] = slot.state["weight"] * keep + rate
        slot.state["keep"] *= keep

    def _meet(self, slots: list[Slot], sums: list[Sum], step: int) -> bool:
        """Exchange what ranks have accumulated, and set parameters and momenta to it."""
        updates = [found.update for found in sums]
        if not self._compress(slots, updates, step):
            return False
        for slot, found in zip(slots, sums, strict=True):
            values, anchor = slot.values(), slot.kept("anchor")
            anchor.mul_(found.keep).addcdiv_(found.update, adam.own_divisor(slot), value=-1.0)
            values.copy_(anchor)
            slot.write()
            slot.state["exp_avg"] = found.update.div_(found.weight)
            slot.kept("update").zero_()
            slot.state["weight"], slot.state["keep"] = 0.0, 1.0
        return True

    def _adopt(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.state.setdefault("variance_steps", slot.steps)

    def _check_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        if any(kept.get("weight") for state in states for kept in state["state"].values()):
            raise ValueError(
                "ZeroOneAdam: this is a state between two meetings, when the ranks' models differ: "
                "states of all ranks in one, or for another number of ranks, are taken after sync()"
            )


def _sum_so_far(slot: Slot) -> Sum:
    """What a parameter has accumulated, without a step more."""
    return Sum(slot.kept("update").clone(), slot.state["weight"], slot.state["keep"])


# When the variance is updated, and when ranks meet: functions of the number of the step.


class Variance(NamedTuple):
    """The variance at a step.

    Args:
        due: whether it is updated.
        updates: how many there have been, this one included.
    """

    due: bool
    updates: int


def variance_at(step: int, scaler: int) -> Variance:
    """The first `scaler` updates come one step apart, the next two, then four and so on."""
    begin, interval, before = 0, 1, 0
    while True:
        end = (begin // interval + scaler) * interval
        if step <= end:
            updates = before + step // interval - begin // interval
            return Variance(step % interval == 0, updates)
        begin, interval, before = end, 2 * interval, before + scaler


def interval_at(step: int, begin: int, scaler: int, longest: int) -> int:
    """Steps between two meetings: doubled every `scaler` steps after `begin`, up to `longest`."""
    doublings = min(max(0, step - begin - 1) // scaler, LONGEST)
    return min(longest, 1 << doublings)
