from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import check
from thinwire.feedback.base import Remembering, State, Update, Workspace
from thinwire.kernels import Key


@dataclass(frozen=True)
class Vote(Remembering):
    """Every rank gives the sign of each element, and the majority wins: signSGD and Signum.

    m = momentum * m + (1 - momentum) * g; what is sent is sign(m); the step is taken with the sign
    of the sum of all ranks' signs, ties (and zeros) counting as +1. Without momentum that is
    signSGD, with it Signum. The size of gradients is lost: choose a learning rate for steps of
    +-1, some hundred times smaller than that of SGD. What is left out is not remembered.

    Args:
        momentum: in [0, 1); 0 remembers nothing.
        storage, reset: as for EF14.

    Example:
        >>> import thinwire as tw
        >>> tw.feedback.parse("vote:0.9")
        Vote(storage='fp32', reset=0, momentum=0.9)

    Reference: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018;
    Bernstein et al., signSGD with Majority Vote is Communication Efficient And Fault Tolerant,
    2019.
    """

    momentum: float = 0.0
    name: ClassVar[str] = "vote"
    parts: ClassVar[tuple[str, ...]] = ("m",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.below("Vote", "momentum", self.momentum, 1)

    def update(self, state: State, x: Tensor, workspace: Workspace) -> Update:
        return _VoteUpdate(self.momentum, state, x, workspace)


class _VoteUpdate(Update):
    def __init__(self, momentum: float, state: State, x: Tensor, workspace: Workspace) -> None:
        kept = state["m"]
        super().__init__(x, workspace.take("signs", kept), None)
        self._momentum, self._kept, self._size = momentum, kept, workspace.size
        self._m = workspace.take("m", kept)
        self._sound = True

    def prepare(self) -> None:
        if self._momentum:
            self._kept.read(self._m).mul_(self._momentum)
            self._m.add_(self.x, alpha=1 - self._momentum)
        else:
            self._m.copy_(self.x)
        # Of the group's size, so that an average is the whole number by which a side has won. A NaN
        # keeps being one: all ranks must hear of it.
        signs(self._m, self.tensor).mul_(self._size).add_(self._m - self._m)

    def finish(self) -> None:
        # Uncompressed tensors were not looked at on the way; all ranks see the same here.
        broken = self.tensor - self.tensor  # zero, or NaN
        self._sound = not bool(broken.isnan().any())
        self.x.copy_(signs(self.tensor, self.tensor).add_(broken))

    def commit(self, key: Key) -> None:
        if self._momentum and self._sound:
            self._kept.write(self._m, key)


def signs(values: Tensor, out: Tensor) -> Tensor:
    """+1 for what is not negative, -1 for the rest."""
    torch.ge(values, 0, out=out)
    return out.mul_(2).sub_(1)
