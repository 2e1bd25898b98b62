"""The contract of every feedback.

A feedback is an immutable description. Its state for one flat tensor is a dictionary of vectors
(`parts`), made and kept by the reducer. For each exchange it makes an `Update`, with the stages of
an exchange:

1. `prepare` fills `update.tensor` and `update.residual` from the gradient and the state.
2. The collective averages `update.tensor` and leaves in `update.residual` what was not sent.
3. `finish` writes the result to the gradient.
4. `commit` brings the state up to date.

All of it is written in terms of the residual: for every compressor and collective, the ranks' x +
old residuals add up to the result and the new residuals. So every feedback works with all of them.
An average over senders does not add up so, and leaves only each rank's own residual right: EF21,
which needs more, is refused with it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire import check
from thinwire.feedback.state import STORAGES, ScratchBuffers, StateVector
from thinwire.frames.code import wide_type
from thinwire.kernels import Key
from thinwire.spec import spec_of

State = Mapping[str, StateVector]


class Workspace(NamedTuple):
    """Where an update works.

    Args:
        buffers: shared with the updates that come before and after.
        name: for this update's part of them.
        first: whether the state is still zero.
        separate: `commit` comes after other exchanges, or never: then the state must be untouched
            and the memory the update's own.
        size: of the group.
        whole: whether everything will be sent, so that nothing but rounding is left out.
    """

    buffers: ScratchBuffers
    name: str
    first: bool
    separate: bool
    size: int = 1
    whole: bool = False

    def take(self, name: str, like: StateVector) -> Tensor:
        """A tensor to work in, with any content."""
        if self.separate:
            return torch.empty(like.numel, dtype=like.dtype, device=like.device)
        return self.buffers.take(f"{self.name} {name}", like.numel, like.dtype, like.device)


class Update(ABC):
    """One exchange of one flat tensor.

    Args:
        x: the gradient; holds the result in the end.
        tensor, residual: what the collective gets.
    """

    def __init__(self, x: Tensor, tensor: Tensor, residual: Tensor | None) -> None:
        self.x, self.tensor, self.residual = x, tensor, residual
        self.held_back: list[tuple[int, int, Tensor]] = []  # stretches, and their residual

    @abstractmethod
    def prepare(self) -> None:
        """Fill `tensor` and `residual`."""

    def hold_back(self, lo: int, hi: int) -> None:
        """Called after `prepare`: nothing of this stretch is to be sent, its residual stays."""
        if self.residual is not None:
            self.held_back.append((lo, hi, self.residual[lo:hi].clone()))
            self.residual[lo:hi].zero_()

    def release(self) -> None:
        """Called before `commit`: puts back what was held back."""
        for lo, hi, values in self.held_back:
            assert self.residual is not None
            self.residual[lo:hi].copy_(values)

    @abstractmethod
    def finish(self) -> None:
        """Write the result of a finite exchange to `x`."""

    def finish_alone(self) -> None:
        """The same in a group of one, where all that there is to send is the result."""
        if self.residual is not None:
            self.tensor.add_(self.residual)
            self.residual.zero_()
        self.finish()

    @abstractmethod
    def commit(self, key: Key) -> None:
        """Bring the state up to date.

        Args:
            key: of this unit and step, the same on all ranks: what a storage rounds, it rounds by.
        """


@dataclass(frozen=True)
class Feedback(ABC):
    """Base of all feedbacks; see the module for the contract."""

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ()  # names of the vectors that are the state of a tensor
    dense_start: ClassVar[bool] = False  # whether the first exchange is uncompressed

    def __str__(self) -> str:
        return spec_of(self)

    def resets(self, step: int) -> bool:
        """Whether the state starts from zero after so many steps."""
        return False

    def new_state(
        self, numel: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, StateVector]:
        """Zero vectors for a tensor of this size and type."""
        return {}

    @abstractmethod
    def update(self, state: State, x: Tensor, workspace: Workspace) -> Update:
        """One exchange of x, which is flat and contiguous."""


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Nothing is remembered: what a compressor leaves out is lost.

    Right for unbiased compressors (QSGD, Natural), for TernGrad, whose error would make a residual
    grow without bound, and for those that lose nothing.
    """

    name: ClassVar[str] = "none"

    def update(self, state: State, x: Tensor, workspace: Workspace) -> Update:
        return InPlaceUpdate(x, x, None)


class InPlaceUpdate(Update):
    """The collective works on the gradient and the residual themselves, or leaves them as they
    were."""

    def prepare(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def commit(self, key: Key) -> None:
        pass


@dataclass(frozen=True)
class Remembering(Feedback):
    """What feedbacks with a state have in common."""

    storage: str = field(default="fp32", kw_only=True)
    reset: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        kind, reset = type(self).__name__, self.reset
        check.one_of(kind, "storage", self.storage, STORAGES)
        if not check.is_whole(reset) or reset < 0:
            raise ValueError(f"{kind}: reset must be a number of steps, 0 for never, got {reset!r}")

    def resets(self, step: int) -> bool:
        return self.reset > 0 and step % self.reset == 0

    def new_state(
        self, numel: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, StateVector]:
        wide = wide_type(dtype)
        return {
            part: StateVector(numel, wide, device, self.storage, stream)
            for stream, part in enumerate(self.parts)
        }
