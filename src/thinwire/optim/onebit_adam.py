from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from thinwire import check
from thinwire.collectives.options import Group, Timeout
from thinwire.compressors import Compressor
from thinwire.optim import adam
from thinwire.optim.adam import Slot
from thinwire.optim.base import ONE_BIT, Staged


class OneBitAdam(Staged):
    """Adam that exchanges one bit per element once its variance is frozen.

    Steps 1 to T = freeze_step are Adam on the averaged gradient, which is sent uncompressed. From
    then on v stays as it is, and each rank i of P sends its momentum:

        m_i = b1 m + (1 - b1) g_i
        m   = C(mean of C(m_i + e_i), plus the server's error), the same on all ranks
        p   = p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^T)) + eps)

    C(x) = (||x||_2 / sqrt(d)) sign(x) for each shard of each tensor by itself: rank j is the server
    of the elements from n j / P to n (j + 1) / P of a tensor of n, and d is the length of that
    shard. e_i takes what C leaves out, that of the ranks and, of the shard that a rank sums, that
    of the server: P times the change of m that is still missing is the sum of the e_i over ranks.

    Bias is corrected as in torch.optim.Adam, so that the first stage equals it to rounding; the
    correction of v is frozen with v. (The paper's second stage and DeepSpeed have none.)

    Elements whose variance is exactly zero after T steps (rows of an embedding that never came up)
    stay as they are from then on, but for decoupled decay. A parameter without a gradient on some
    rank counts as zero there.

    Args:
        params: as for every torch optimizer. Gradients must be each rank's own: train the plain
            module, or DDP inside `no_sync()`. Groups can be added until step T.
        lr, betas, eps, weight_decay: as for torch.optim.Adam; eps must not be zero.
        freeze_step: T, the number of steps before compression begins. The papers take 15 to 25 % of
            all steps, and no less than the learning rate's warm-up.
        decoupled: weight decay as in AdamW instead of L2.
        group: a process group; None is the default one.
        masks: bool tensors by parameter: elements that are False stay as they are after step T.
        compressor: C; "scaledsign" takes the mean magnitude, which has less error on tensors where
            few elements are large.
        max_bytes, timeout: as for `thinwire.all_reduce`.

    Example:
        >>> import torch, torch.distributed as dist, thinwire as tw
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = tw.optim.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(2, 4)).square().mean().backward()
        ...     _ = optimizer.step()
        >>> optimizer.stats()["steps"]
        4
        >>> dist.destroy_process_group()

    Reference: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed, 2021.
    """

    shared: ClassVar[tuple[str, ...]] = ("freeze_step",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
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
            "freeze_step": freeze_step,
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

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        check.flag("OneBitAdam", "decoupled", group["decoupled"])

    def _dense(self, slots: list[Slot], grads: list[Tensor], step: int) -> None:
        for slot, grad in zip(slots, grads, strict=True):
            adam.track(slot, adam.decayed(slot, grad))
            slot.state["step"] = slot.steps + 1
            adam.move(slot)

    def _frozen(self, slots: list[Slot], momenta: list[Tensor], step: int) -> None:
        for slot, momentum in zip(slots, momenta, strict=True):
            slot.state["exp_avg"] = momentum
            slot.state["step"] = slot.steps + 1
            adam.move(slot)
