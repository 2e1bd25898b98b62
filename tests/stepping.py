"""Parameters and gradients for tests of optimizers, which follow from seeds: every rank can compute
what another one has."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from tensors import normal
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire as tw


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


AVERAGED = {"DDP": True, "no_sync": False, "same batches": True, "same batch once": False}


def warnings_of_averaged(
    make: Callable[[Iterable[nn.Parameter]], Optimizer],
) -> dict[str, list[str]]:
    """What each kind of training is warned of, on this rank: `AVERAGED` says who should be."""
    found = {}
    for case in AVERAGED:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        outer = nn.parallel.DistributedDataParallel(model)
        optimizer = make(model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                optimizer.zero_grad()
                same = case == "same batches" or (case == "same batch once" and not step)
                x = normal(20, 10 * step + (0 if same else dist.get_rank())).view(4, 5)
                with contextlib.nullcontext() if case == "DDP" else outer.no_sync():
                    outer(x).square().mean().backward()
                if step == 1:
                    optimizer.zero_grad()  # which says nothing
                optimizer.step()
        ours = [w for w in caught if issubclass(w.category, tw.errors.ThinwireWarning)]
        found[case] = [str(w.message) for w in ours]
    return found
