"""The contract of every feedback.

A feedback is an immutable description. What it remembers of one flat tensor is a dictionary of
vectors (`parts`), made and kept by the reducer. For each exchange it makes a `Turn`, which says
what goes through the collective and brings the vectors up to date afterwards:

1. `before` fills `turn.tensor` and `turn.residual` from the gradient and the memory.
2. The collective averages `turn.tensor` and leaves in `turn.residual` what was not sent.
3. `after` writes the result to the gradient.
4. `commit` brings the memory up to date.

All of it is written in terms of the residual: for every compressor and collective, the ranks' x +
old residuals add up to the result and the new residuals. So every feedback works with all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.feedback.vector import STORAGES, Room, Vector
from thinwire.spec import spec_of

Memory = Mapping[str, Vector]


class Desk(NamedTuple):
    """Where a turn works.

    Args:
        room: memory shared with the turns that come before and after.
        name: for this turn's part of it.
        first: whether the memory is still zero.
        later: `commit` comes after other exchanges, or never: then the memory must be untouched and
            the desk its own.
        size: of the group.
    """

    room: Room
    name: str
    first: bool
    later: bool
    size: int = 1

    def take(self, name: str, like: Vector) -> Tensor:
        """A tensor to work in, with any content."""
        if self.later:
            return torch.empty(like.numel, dtype=like.dtype, device=like.device)
        return self.room.take(f"{self.name} {name}", like.numel, like.dtype, like.device)


class Turn(ABC):
    """One exchange of one flat tensor.

    Args:
        x: the gradient; holds the result in the end.
        tensor, residual: what the collective gets.
    """

    def __init__(self, x: Tensor, tensor: Tensor, residual: Tensor | None) -> None:
        self.x, self.tensor, self.residual = x, tensor, residual
        self.resting: list[tuple[int, int, Tensor]] = []  # stretches, and what waits there

    @abstractmethod
    def before(self) -> None:
        """Fill `tensor` and `residual`."""

    def rest(self, lo: int, hi: int) -> None:
        """Called after `before`: nothing of this stretch is to be sent, what waits goes on
        waiting."""
        if self.residual is not None:
            self.resting.append((lo, hi, self.residual[lo:hi].clone()))
            self.residual[lo:hi].zero_()

    def wake(self) -> None:
        """Called before `commit`."""
        for lo, hi, values in self.resting:
            assert self.residual is not None
            self.residual[lo:hi].copy_(values)

    @abstractmethod
    def after(self) -> None:
        """Write the result of a finite exchange to `x`."""

    def alone(self) -> None:
        """The same in a group of one, where all that there is to send is the result."""
        if self.residual is not None:
            self.tensor.add_(self.residual)
            self.residual.zero_()
        self.after()

    @abstractmethod
    def commit(self) -> None:
        """Bring the memory up to date."""


@dataclass(frozen=True)
class Feedback(ABC):
    """Base of all feedbacks; see the module for the contract."""

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ()  # names of the vectors remembered for a tensor
    dense_start: ClassVar[bool] = False  # whether the first exchange goes uncompressed

    def __str__(self) -> str:
        return spec_of(self)

    def resets(self, step: int) -> bool:
        """Whether the memory starts from zero after so many steps."""
        return False

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> dict[str, Vector]:
        """Zero vectors for a tensor of this size and type."""
        return {}

    @abstractmethod
    def turn(self, memory: Memory, x: Tensor, desk: Desk) -> Turn:
        """One exchange of x, which is flat and contiguous."""


@dataclass(frozen=True)
class Remembering(Feedback):
    """What feedbacks with a memory have in common."""

    storage: str = field(default="fp32", kw_only=True)
    reset: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        kind, storage, reset = type(self).__name__, self.storage, self.reset
        if storage not in STORAGES:
            known = ", ".join(STORAGES)
            raise ValueError(f"{kind}: storage must be one of {known}, got {storage!r}")
        if isinstance(reset, bool) or not isinstance(reset, int) or reset < 0:
            raise ValueError(f"{kind}: reset must be a number of steps, 0 for never, got {reset!r}")

    def resets(self, step: int) -> bool:
        return self.reset > 0 and step % self.reset == 0

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> dict[str, Vector]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return {part: Vector(numel, wide, device, self.storage) for part in self.parts}
