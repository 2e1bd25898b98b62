from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import check
from thinwire.collectives.options import Group, Timeout
from thinwire.compressors import Compressor
from thinwire.optim import adam
from thinwire.optim.adam import Slot
from thinwire.optim.base import ONE_BIT, Staged


class OneBitLamb(Staged):
    """LAMB that exchanges one bit per element once its variance is frozen.

    With u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p for each tensor, steps
    1 to T = freeze_step are LAMB on the averaged gradient, which is sent uncompressed:

        c = clip(||p|| / ||u||, min_coeff, max_coeff), 1 where either is zero
        p = p - lr c u

    and a moving average of c is kept (weight of the old: coeff_beta). From then on v and that
    average stay as they are, and momenta are exchanged as in `OneBitAdam`. How much the variance
    has changed since is estimated from the momenta, g' = (m - b1 m_old) / (1 - b1), as a second
    variance w of g' that goes on from v:

        f = max over elements of (sqrt(v) + eps) / (sqrt(w) + eps), both corrected for bias
        p = p - lr c f u

    where f is first mixed with 1 by the share of decay in u, then kept in [factor_min, factor_max]
    and within a share factor_threshold of what it was one step before.

    Each tensor is compressed with a scale of its own, which takes the place of the paper's common
    scale for momenta that are sent as one. Norms are summed in float64; that their last bit rounds
    alike on all ranks holds for ranks of one kind: `tw.check_replicas` tells.

    Args:
        params, lr, betas, eps, freeze_step, group, masks, compressor, max_bytes, timeout: as for
            `OneBitAdam`.
        weight_decay: added to the update, so that it counts in the trust ratio.
        min_coeff, max_coeff: bounds of the trust ratio c.
        coeff_beta: weight of the old in the average of c; 1 / (1 - coeff_beta) should be well below
            freeze_step.
        factor_min, factor_max: bounds of f.
        factor_threshold: the largest relative change of f in one step.

    Example:
        >>> import torch, torch.distributed as dist, thinwire as tw
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = tw.optim.OneBitLamb(model.parameters(), lr=1e-2, freeze_step=2)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(2, 4)).square().mean().backward()
        ...     _ = optimizer.step()
        >>> optimizer.frozen
        True
        >>> dist.destroy_process_group()

    Reference: Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with
    LAMB's Convergence Speed, 2021.
    """

    shared: ClassVar[tuple[str, ...]] = ("freeze_step",)
    vectors: ClassVar[tuple[str, ...]] = (*Staged.vectors, "exp_avg_sq_fresh")
    numbers: ClassVar[tuple[str, ...]] = (*Staged.numbers, "coeff", "factor")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
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
            "freeze_step": freeze_step,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "coeff_beta": coeff_beta,
            "factor_min": factor_min,
            "factor_max": factor_max,
            "factor_threshold": factor_threshold,
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

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        who = "OneBitLamb"
        check.below(who, "coeff_beta", group["coeff_beta"], 1)
        check.below(who, "factor_threshold", group["factor_threshold"], 1)
        for low, high in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            check.positive(who, low, group[low])
            check.at_least(who, high, group[high], group[low])
        if not group["factor_min"] <= 1 <= group["factor_max"]:
            raise ValueError(f"{who}: the factor starts from 1, so its bounds must contain it")

    def _localized(self, slot: Slot, grad: Tensor) -> Tensor:
        return grad  # decay is part of the update

    def _dense(self, slots: list[Slot], grads: list[Tensor], step: int) -> None:
        for slot, grad in zip(slots, grads, strict=True):
            adam.track(slot, grad)
            slot.state["step"] = slot.steps + 1
            _, update = _update(slot, adam.own_divisor(slot))
            found = _trust(slot, update)
            if found is not None:
                before, weight = slot.state.get("coeff"), slot.group["coeff_beta"]
                mixed = found if before is None else weight * before + (1 - weight) * found
                slot.state["coeff"] = mixed
            _move(slot, update, 1.0 if found is None else found)

    def _frozen(self, slots: list[Slot], momenta: list[Tensor], step: int) -> None:
        for slot, momentum in zip(slots, momenta, strict=True):
            b1, b2 = slot.group["betas"]
            live = self._live(slot)
            if "factor" not in slot.state:  # its first compressed step, whenever that comes
                slot.state["exp_avg_sq_fresh"] = slot.kept("exp_avg_sq").clone()
                slot.state["factor"] = 1.0
            fresh = slot.kept("exp_avg_sq_fresh")
            rebuilt = momentum.sub(slot.kept("exp_avg"), alpha=b1).div_(1 - b1)
            fresh.mul_(b2).addcmul_(rebuilt, rebuilt, value=1 - b2)
            slot.state["exp_avg"] = momentum
            slot.state["step"] = slot.steps + 1
            divisor = adam.own_divisor(slot)
            ratio = divisor / adam.divisor(slot, fresh, slot.steps)
            plain, update = _update(slot, divisor)
            slot.state["factor"] = _factor(slot, ratio, live, plain, update)
            coeff = slot.state.get("coeff")
            _move(slot, update, (1.0 if coeff is None else coeff) * slot.state["factor"])


def _update(slot: Slot, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Adam's own update, and that with decay."""
    b1, _ = slot.group["betas"]
    plain = (slot.kept("exp_avg") / divisor).div_(1 - b1**slot.steps)
    decay = slot.group["weight_decay"]
    return plain, plain.add(slot.values(), alpha=decay) if decay else plain


def _trust(slot: Slot, update: Tensor) -> float | None:
    """||p|| / ||update|| within its bounds; None where it says nothing."""
    own, theirs = _norm(slot.values()), _norm(update)
    if own == 0 or theirs == 0:
        return None
    return _rounded(min(max(own / theirs, slot.group["min_coeff"]), slot.group["max_coeff"]))


def _factor(slot: Slot, ratio: Tensor, live: Tensor | None, plain: Tensor, update: Tensor) -> float:
    chosen = ratio if live is None else ratio[live]
    last: float = slot.state["factor"]
    if not chosen.numel():
        return last
    factor = float(chosen.max())
    whole = _norm(update)
    if slot.group["weight_decay"] and whole:
        share = min(1.0, _norm(plain) / whole)
        factor = factor * share + (1 - share)
    factor = min(max(factor, slot.group["factor_min"]), slot.group["factor_max"])
    most = slot.group["factor_threshold"]
    return _rounded(min(max(factor, last * (1 - most)), last * (1 + most)))


def _move(slot: Slot, update: Tensor, coeff: float) -> None:
    slot.values().add_(update, alpha=-float(slot.group["lr"]) * coeff)
    slot.write()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _rounded(value: float) -> float:
    """To float32, so that sums in another order give the same number."""
    return float(torch.tensor(value, dtype=torch.float32))
