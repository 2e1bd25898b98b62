"""The contract of the algorithms that carry out an all-reduce.

They have the stages of an exchange (`thinwire.collectives.exchange`): `prepare` drafts payloads,
`exchange` meets and moves them until all that came is opened and checked, `finish` writes tensors
and residuals. So a failure on any rank before `finish` has changed nothing.

To add one: a file with a subclass, a line in `thinwire.collectives.flat`, when it pays in `choose`,
its memory in `memory`, and a row in the tests of the laws.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

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


class ToEach(ABC):
    """The half of an algorithm in which each member sends every other a message."""

    @abstractmethod
    def max_bytes_to(self, place: int) -> int:
        """The longest message to a member that there can be."""

    @abstractmethod
    def messages(self) -> tuple[list[Tensor], bool]:
        """What was drafted for each member, nothing for oneself, and whether it is finite."""

    @abstractmethod
    def take(self, received: list[Tensor], finite: bool) -> None:
        """What the others have sent here, in their order, and whether all was finite."""


class ToAll(ABC):
    """The half of an algorithm in which each member sends a message to all."""

    @abstractmethod
    def max_bytes_to_all(self) -> int:
        """The longest message that there can be."""

    @abstractmethod
    def message(self) -> tuple[Tensor, bool]:
        """What goes to all, and whether what this member knows of is finite."""

    @abstractmethod
    def take_all(self, received: list[Tensor], finite: bool) -> None:
        """What all have sent, this member included, and whether all was finite: opened and
        checked here."""


class StreamAlgorithm(Algorithm):
    """One that consists of such halves, or of one of them: slices of large tensors can go through
    them one behind the other (`thinwire.collectives.stream`)."""

    @property
    @abstractmethod
    def to_each(self) -> ToEach | None:
        """The first half, once it is prepared."""

    @property
    @abstractmethod
    def to_all(self) -> ToAll | None:
        """The second half."""

    @property
    def in_one(self) -> bool:
        """Whether this member's own memory allows no slices: then all members go in one."""
        return False

    def sliced(self, count: int) -> "Sequence[StreamAlgorithm]":
        """The same for each of so many slices of the tensors, or for fewer: as many on all members,
        whatever `in_one` says on some of them."""
        return [type(self)(each, self.rank, self.size) for each in self.reduction.sliced(count)]
