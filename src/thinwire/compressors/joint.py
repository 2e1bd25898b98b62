"""What no rank can compress alone: all ranks together find out what to send."""

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.compressors.base import Compressor
from thinwire.kernels import Key


class Seen(NamedTuple):
    """A tensor as a joint compressor sees it.

    Args:
        matrix: x + residual. In the end holds what this rank has not given to the result.
        key: to draw with, the same on all ranks.
        recall: what the compressor wants to find again in the next call, the same on all ranks.
    """

    matrix: Tensor
    key: Key
    recall: dict[str, Tensor]


Search = Generator[list[Tensor], list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class JointCompressor(Compressor):
    """Base of the compressors that talk while they compress.

    They have no payload: their own collective carries them, through `thinwire.all_reduce`, a
    `Reducer` or `attach`. What they describe is how a tensor is seen as a matrix, and how much of
    it travels.
    """

    @property
    def random(self) -> bool:
        return True

    @property
    def common_key(self) -> bool:
        return True

    @abstractmethod
    def matrix(self, shape: torch.Size) -> tuple[int, int] | None:
        """Rows and columns that a tensor of this shape is seen as; None if it goes uncompressed."""

    @property
    @abstractmethod
    def num_sums(self) -> int:
        """How often `find` asks for means."""

    @abstractmethod
    def find(self, seen: Sequence[Seen]) -> Search:
        """Yield what is to be averaged over ranks, get the means, return the ranks' mean as it is
        approximated, one matrix for each."""

    def recalls(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        """Shapes of what is found again in the next call."""
        return {}

    @abstractmethod
    def sent(self, shape: torch.Size) -> int:
        """How many values of a tensor of this shape go into the sums."""


def normal(rows: int, columns: int, key: Key, dtype: torch.dtype) -> Tensor:
    """Independent standard normal numbers, the same on every rank that has the same key."""
    seed = key.derive(key.step, key.tensor, key.stream).seed & ((1 << 63) - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=dtype)
