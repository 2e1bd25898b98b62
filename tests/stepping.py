"""Parameters and gradients for tests of optimizers, which follow from seeds: every rank can compute
what another one has."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from tensors import normal
from torch import Tensor, nn


class Given(NamedTuple):
    """What an optimizer is given on each rank, in each step.

    Args:
        shapes: of the parameters.
        lift: added to every gradient.
    """

    shapes: tuple[tuple[int, ...], ...]
    lift: float

    def parameters(self, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [
            nn.Parameter(normal(math.prod(shape), i).view(shape).to(dtype))
            for i, shape in enumerate(self.shapes)
        ]

    def gradient(self, i: int, rank: int, step: int) -> Tensor:
        """Half of it is the same on all ranks, so that there is something to agree on."""
        n = math.prod(self.shapes[i])
        both = normal(n, 1000 * step + i) + 0.5 * normal(n, 1000 * step + 100 * (rank + 1) + i)
        return (0.1 * both + self.lift).view(self.shapes[i])

    def give(self, params: list[nn.Parameter], rank: int, step: int) -> None:
        for i, p in enumerate(params):
            p.grad = self.gradient(i, rank, step).to(p.dtype)


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]
