"""The contract of the algorithms that carry out an all-reduce.

They have the stages of an exchange (`thinwire.collectives.exchange`): `prepare` drafts payloads,
`exchange` meets and moves them until all that came is opened and checked, `finish` writes tensors
and residuals. So a failure on any rank before `finish` has changed nothing.

To add one: a file with a subclass, a line in `thinwire.collectives.flat`, when it pays in `choose`,
its memory in `memory`, and a row in the tests of the laws.
"""

from abc import ABC, abstractmethod

import torch

from thinwire.collectives.reduction import Reduction
from thinwire.collectives.transport import Transport


class Algorithm(ABC):
    """One way to carry out a reduction among the members of a group.

    Args:
        reduction: what is to be summed.
        rank, size: this member's place in the group, and how many there are.

    Attributes:
        finite: whether all ranks' tensors are, known after `exchange`.
    """

    def __init__(self, reduction: Reduction, rank: int, size: int) -> None:
        self.reduction, self.rank, self.size = reduction, rank, size
        self.weight = reduction.weight
        self.finite = True

    @property
    def device(self) -> torch.device:
        return self.reduction.parts[0].x.device

    @abstractmethod
    def prepare(self) -> None:
        """Draft what is sent first."""

    @abstractmethod
    def exchange(self, transport: Transport) -> None:
        """Meet and move data; tensors and residuals are only read."""

    @abstractmethod
    def finish(self) -> None:
        """Write the results, and what was not sent to the residuals if all is finite."""

    def fill_with_nan(self) -> None:
        """The result when a value is not finite and nothing else is known."""
        for part in self.reduction.parts:
            part.x.fill_(torch.nan)
