from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import check
from thinwire.feedback.base import Remembering, State, Update, Workspace
from thinwire.kernels import Key


@dataclass(frozen=True)
class EF21(Remembering):
    """What is sent is the change since the last step.

    c = C(g - h); h = h + c; H = H + mean(c); the step is taken with H, which is the mean of the
    ranks' h at all times. The first step is uncompressed: h = g, H = mean(g). Nothing piles up
    when the ranks' gradients cancel each other out, where the residuals of EF14 do.

    Args:
        storage: how vectors are kept between steps: "fp32", "bf16", "int8" or "host". Other than
            fp32, rounding lets H and the mean of h drift apart: use `reset` with it.
        reset: steps after which it starts anew with an uncompressed step; 0 for never.

    Example:
        >>> import thinwire as tw
        >>> tw.feedback.parse("ef21:reset=1000")
        EF21(storage='fp32', reset=1000)

    Reference: Richtárik, Sokolov and Fatkhullin, EF21: A New, Simpler, Theoretically Better, and
    Practically Faster Error Feedback, 2021.
    """

    name: ClassVar[str] = "ef21"
    parts: ClassVar[tuple[str, ...]] = ("h", "mean")
    dense_start: ClassVar[bool] = True

    @property
    def _eta(self) -> float:
        return 1.0

    def update(self, state: State, x: Tensor, workspace: Workspace) -> Update:
        return _EF21Update(state, x, workspace, 1.0 if workspace.first else self._eta)


@dataclass(frozen=True)
class EF21M(EF21):
    """EF21 of a moving average of the gradient, for noisy gradients.

    v = (1 - eta) v + eta g; c = C(v - h); h = h + c; H = H + mean(c); the step is taken with H. The
    first step is uncompressed: v = h = g, H = mean(g). Eta 1 is EF21. As H is smoothed already,
    an optimizer needs less momentum of its own.

    Args:
        eta: weight of the new gradient; smaller is smoother.
        storage, reset: as for EF21.

    Example:
        >>> import thinwire as tw
        >>> tw.feedback.parse("ef21m:0.2")
        EF21M(storage='fp32', reset=0, eta=0.2)

    Reference: Fatkhullin, Tyurin and Richtárik, Momentum Provably Improves Error Feedback!, 2023.
    """

    eta: float = 0.1
    name: ClassVar[str] = "ef21m"
    parts: ClassVar[tuple[str, ...]] = ("v", "h", "mean")

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fraction("EF21M", "eta", self.eta)

    @property
    def _eta(self) -> float:
        return self.eta


class _EF21Update(Update):
    """t = v - h goes through the collective with a zero residual r: h + c is v - r then.

    t is float32 whatever the gradient is: H is a long sum, and rounding would pile up in it.
    """

    def __init__(self, state: State, x: Tensor, workspace: Workspace, eta: float) -> None:
        h = state["h"]
        super().__init__(x, workspace.take("change", h), workspace.take("residual", h))
        self._state, self._eta = state, eta
        self._v = workspace.take("v", h)
        self._mean = workspace.take("mean", h)

    def prepare(self) -> None:
        assert self.residual is not None
        if self._eta == 1:
            self._v.copy_(self.x)
        else:
            self._state["v"].read(self._v)
            self._v.mul_(1 - self._eta).add_(self.x, alpha=self._eta)
        torch.sub(self._v, self._state["h"].read(), out=self.tensor)
        self.residual.zero_()

    def finish(self) -> None:
        torch.add(self._state["mean"].read(), self.tensor, out=self._mean)
        self.x.copy_(self._mean)

    def finish_alone(self) -> None:
        self._mean.copy_(self._v)  # what h + (v - h) is but for rounding
        self.x.copy_(self._mean)

    def commit(self, key: Key) -> None:
        assert self.residual is not None
        self._state["mean"].write(self._mean, key)
        self._state["h"].write(torch.sub(self._v, self.residual, out=self.residual), key)
        if "v" in self._state:
            self._state["v"].write(self._v, key)
