from collections.abc import Sequence
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import check
from thinwire.collectives.options import Group, Timeout
from thinwire.compressors import Compressor, LocalCompressor, Quantize, TopK, compressor_of
from thinwire.kernels import Key
from thinwire.optim.adam import Slot
from thinwire.optim.base import ExchangingOptimizer, is_finite
from thinwire.optim.dct import BlockDCT

RATIO, CHUNK = 1 / 128, 4096
VALUES = Quantize(4)
ROUNDINGS = 16  # of what a rank has sent, found as a difference


class DeMo(ExchangingOptimizer):
    """Sign descent on the largest elements of each rank's own momentum.

    Every rank i keeps a momentum d_i that is never averaged. A step sends its largest elements and
    takes them out of it:

        d_i = decay d_i + lr g_i
        s_i = C(d_i);  d_i = d_i - s_i
        p   = p (1 - lr weight_decay) - lr sign(mean of the s_i)

    C takes the k = ceil(ratio * chunk) elements of largest magnitude of each chunk of a tensor and
    packs their values with `compressor`; whatever it leaves out stays in d_i. Elements that nobody
    sent do not move. All ranks add the same s_i in the same order, so that replicas are equal.

    With `dct` d_i is transformed first: the largest are those of the coefficients of an orthonormal
    DCT-II of each block of sqrt(chunk) times sqrt(chunk) elements, and the sign is that of the mean
    of coefficients transformed back. Then a few coefficients move every element of their block. The
    paper divides each coefficient by the number of ranks that sent it, here all are divided by the
    number of ranks: what several ranks agree in counts for more. (Without `dct` both have the same
    sign.)

    Args:
        params: as for every torch optimizer. Gradients must be each rank's own: train the plain
            module, or DDP inside `no_sync()`.
        lr: each element that somebody sent moves by so much, so about what Adam would get. It is
            part of d_i too: a schedule changes how much what was left out counts.
        decay: of the momentum, in [0, 1).
        weight_decay: decoupled, as in AdamW.
        ratio: share of elements sent per step.
        chunk: elements of which the largest are sent; with `dct` a square number.
        dct: send coefficients of a cosine transform. SparseLoCo found no use in it.
        compressor: of the values that are sent: "quantize:4", "twobit", "scaledsign" (one bit), or
            "none" for their own type.
        group: a process group; None is the default one.
        max_bytes, timeout: as for `thinwire.all_reduce`.

    Example:
        >>> import torch, torch.distributed as dist, thinwire as tw
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = tw.optim.DeMo(model.parameters(), lr=1e-2, ratio=0.25)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(2, 4)).square().mean().backward()
        ...     _ = optimizer.step()
        >>> optimizer.stats()["steps"]
        4
        >>> dist.destroy_process_group()

    Reference: Peng et al., DeMo: Decoupled Momentum Optimization, 2024.
    """

    shared: ClassVar[tuple[str, ...]] = ("dct",)
    vectors: ClassVar[tuple[str, ...]] = ("error", "master")  # the error is the momentum
    collective: ClassVar[str] = "gather"
    usual: ClassVar[Compressor] = TopK(RATIO, chunk=CHUNK) | VALUES

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        *,
        ratio: float = RATIO,
        chunk: int = CHUNK,
        dct: bool = False,
        compressor: Compressor | str = VALUES,
        group: Group = None,
        max_bytes: int | str | None = None,
        timeout: Timeout = None,
    ) -> None:
        check.fraction("DeMo", "ratio", ratio)
        check.whole("DeMo", "chunk", chunk, 1)
        self._chunk, self._side = chunk, isqrt(chunk)
        chain = TopK(ratio, chunk=chunk) | compressor_of(compressor)
        self._local: LocalCompressor = chain
        super().__init__(
            params,
            {"lr": lr, "decay": decay, "weight_decay": weight_decay, "dct": dct},
            group=group,
            masks=None,
            compressor=chain,
            max_bytes=max_bytes,
            timeout=timeout,
        )

    def _check(self, group: dict[str, Any]) -> None:
        self._check_rates(group)
        check.below("DeMo", "decay", group["decay"], 1)
        check.flag("DeMo", "dct", group["dct"])
        if group["dct"] and self._side**2 != self._chunk:
            raise ValueError(
                f"DeMo: with dct=True chunk must be a square number such as 4096, for blocks of 64 "
                f"times 64 elements, got {self._chunk}"
            )

    def _advance(self, slots: list[Slot], step: int) -> None:
        grads = self._gradients(slots, copy=True)
        live = any(bool(grad.any()) for grad in grads)
        transforms = [_transform(slot, self._side) for slot in slots]
        sent = []
        for slot, grad, transform in zip(slots, grads, transforms, strict=True):
            momentum = grad.mul_(float(slot.group["lr"]))
            if "error" in slot.state:
                momentum.add_(slot.state["error"], alpha=slot.group["decay"])
            sent.append(momentum if transform is None else transform.forward(momentum))
        del grads
        left = [torch.zeros_like(tensor) for tensor in sent]
        if not self._exchange(slots, sent, left, step, live):
            return
        for slot, mean, rest, transform in zip(slots, sent, left, transforms, strict=True):
            if transform is not None:
                mean, rest = transform.inverse(mean, clear=True), transform.inverse(rest)
            slot.state["error"] = rest
            slot.state["step"] = slot.steps + 1
            lr, values = float(slot.group["lr"]), slot.values()
            if slot.group["weight_decay"]:
                values.mul_(1 - lr * slot.group["weight_decay"])
            values.add_(mean.sign_(), alpha=-lr)
            slot.write()

    def _exchange(
        self, slots: Sequence[Slot], sent: list[Tensor], left: list[Tensor], step: int, live: bool
    ) -> bool:
        """Make the mean over ranks of what they send of their tensors, and what is left of this
        rank's own; whether all of it is finite.

        Args:
            live: whether this rank has a gradient other than zero.
        """
        alone = self._size == 1
        looked = live and not alone and self._alike is not None
        before = [tensor.clone() for tensor in sent] if looked else []
        if alone:
            finite = self._send_to_nobody(sent, left, step)
        else:
            finite = self._carry(slots, sent, left, self._compressor, step)
        if not self._sound(finite):
            return False
        if looked:
            own = [whole.sub_(rest) for whole, rest in zip(before, left, strict=True)]
            self._compare(sent, own, ROUNDINGS)
        return True

    def _send_to_nobody(self, sent: list[Tensor], left: list[Tensor], step: int) -> bool:
        """What `_carry` does, without other ranks: taking the largest is part of the method."""
        if not all(map(is_finite, sent)):
            return False
        for i, (tensor, rest) in enumerate(zip(sent, left, strict=True)):
            key = Key(step=step % (1 << 32), tensor=i)
            payload = self._local.encode(tensor, residual=rest, key=key)
            self._local.decode(payload, out=tensor)
        return True

    def _check_foreign(self, state: Any) -> None:
        raise ValueError(
            "DeMo: this is the state of another optimizer, which has no momentum that DeMo could "
            "go on with: begin without one"
        )


def _transform(slot: Slot, side: int) -> BlockDCT | None:
    return BlockDCT(slot.p.shape, side) if slot.group["dct"] else None
