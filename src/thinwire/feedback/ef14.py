from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire import check
from thinwire.feedback.base import InPlaceUpdate, Remembering, State, Update, Workspace
from thinwire.feedback.state import StateVector
from thinwire.kernels import Key


@dataclass(frozen=True)
class EF14(Remembering):
    """What was left out is added to the next gradient.

    p = g + decay e; c = C(p); e = p - c; the step is taken with the mean of c. With decay 1, all
    that was sent plus the residual is all gradients there ever were: nothing is lost, only delayed.
    (In the mean over all ranks; with average="senders" the steps add up to more.)

    Args:
        decay: less than 1 forgets, for residuals that have become stale.
        storage: how residuals are kept between steps: "fp32", "bf16", "int8" or "host". bf16 and
            int8 round up or down at random, right on average.
        reset: steps after which residuals start from zero again (what they hold is dropped); 0 for
            never. LoCo does so every 1024 steps, with int8.

    Example:
        >>> import thinwire as tw
        >>> str(tw.feedback.EF14(storage="int8", reset=1024))
        'ef14:storage=int8,reset=1024'

    Reference: Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs, 2014; Karimireddy et al., Error Feedback Fixes SignSGD and
    other Gradient Compression Schemes, 2019; Xie et al., LoCo: Low-Bit Communication Adaptor for
    Large-scale Model Training, 2024.
    """

    decay: float = 1.0
    name: ClassVar[str] = "ef14"
    parts: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not check.is_number(self.decay) or not 0 <= self.decay <= 1:
            raise ValueError(f"EF14: decay must be in [0, 1], got {self.decay!r}")

    def update(self, state: State, x: Tensor, workspace: Workspace) -> Update:
        kept = state["residual"]
        if kept.direct is not None and self.decay == 1 and not workspace.separate:
            return InPlaceUpdate(x, x, kept.direct)
        return _CopyUpdate(x, workspace.take("residual", kept), kept, self.decay)


class _CopyUpdate(Update):
    """The residual is worked on in a copy."""

    def __init__(self, x: Tensor, copy: Tensor, kept: StateVector, decay: float) -> None:
        super().__init__(x, x, copy)
        self._copy, self._kept, self._decay = copy, kept, decay

    def prepare(self) -> None:
        self._kept.read(self._copy)
        if self._decay != 1:
            self._copy.mul_(self._decay)

    def finish(self) -> None:
        pass

    def commit(self, key: Key) -> None:
        self._kept.write(self._copy, key)
