from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import check
from thinwire.feedback.base import Remembering, State, Update, Workspace
from thinwire.kernels import Key


@dataclass(frozen=True)
class DGC(Remembering):
    """Momentum before compression: what is left out gathers momentum while it waits.

    u = m u + g; v = v + u; what C chooses of v is sent, and both u and v start from zero there
    (momentum factor masking: what was sent late must not go on with old momentum). With Nesterov
    momentum u = m (u + g); v = v + u + g. It takes the place of the optimizer's own momentum, which
    must be off: `attach(..., optimizer=)` sees to that. Where everything is sent by design
    (uncompressed, Top-K of all elements, a group of one rank), u is kept, and this is momentum SGD.

    Made for compressors that send single elements (Top-K) through "gather".

    Args:
        momentum: m, in [0, 1).
        nesterov: whether momentum looks ahead.
        clip: before all this, the gradient of each unit is scaled down to a norm of at most
            clip / sqrt(ranks); 0 for not at all.
        storage, reset: as for EF14.

    Example:
        >>> import thinwire as tw
        >>> tw.feedback.parse("dgc:0.9,nesterov=true")
        DGC(storage='fp32', reset=0, momentum=0.9, nesterov=True, clip=0.0)

    Reference: Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for
    Distributed Training, 2018.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0
    name: ClassVar[str] = "dgc"
    parts: ClassVar[tuple[str, ...]] = ("u", "residual")

    def __post_init__(self) -> None:
        super().__post_init__()
        check.below("DGC", "momentum", self.momentum, 1)
        check.below("DGC", "clip", self.clip, float("inf"))
        check.flag("DGC", "nesterov", self.nesterov)

    def update(self, state: State, x: Tensor, workspace: Workspace) -> Update:
        return _DGCUpdate(self, state, x, workspace)


class _DGCUpdate(Update):
    """The collective gets u (with g for Nesterov) and v as the residual."""

    def __init__(self, settings: DGC, state: State, x: Tensor, workspace: Workspace) -> None:
        kept = state["residual"]
        super().__init__(x, workspace.take("tensor", kept), workspace.take("residual", kept))
        self._settings, self._state = settings, state
        self._size, self._whole = workspace.size, workspace.whole
        self._u = workspace.take("u", kept)
        self._v = workspace.take("v", kept)  # all that could have been sent

    def prepare(self) -> None:
        assert self.residual is not None
        m, u = self._settings.momentum, self._state["u"].read(self._u)
        gradient = self._clipped(self.tensor.copy_(self.x))
        if self._settings.nesterov:
            u.add_(gradient).mul_(m)
            gradient.add_(u)
        else:
            u.mul_(m).add_(gradient)
            gradient.copy_(u)
        self._state["residual"].read(self.residual)
        torch.add(self.residual, self.tensor, out=self._v)

    def _clipped(self, gradient: Tensor) -> Tensor:
        if self._settings.clip:
            most = self._settings.clip / sqrt(self._size)
            norm = float(torch.linalg.vector_norm(gradient))
            if norm > most:
                gradient.mul_(most / norm)
        return gradient

    def hold_back(self, lo: int, hi: int) -> None:
        super().hold_back(lo, hi)
        self.tensor[lo:hi].zero_()

    def finish(self) -> None:
        self.x.copy_(self.tensor)

    def commit(self, key: Key) -> None:
        assert self.residual is not None
        for lo, hi, waiting in self.held_back:
            self._u[lo:hi].copy_(self._state["u"].read()[lo:hi])
            self._v[lo:hi].copy_(waiting)
        if not self._whole:
            self._u.masked_fill_(self.residual != self._v, 0.0)
        self._state["u"].write(self._u, key)
        self._state["residual"].write(self.residual, key)
