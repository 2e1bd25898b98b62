"""What a workload is: a model, its data divided over ranks, and a measure of how well it went."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Batch = tuple[Tensor, Tensor]
SMALL = 0.01  # of a model: less is not worth a message of its own


class Workload(ABC):
    """A training task that a rank can take its share of.

    With one thread (`torch.set_num_threads(1)`) everything follows from the seeds, bit for bit; the
    global random generator is neither read nor moved.

    Example:
        >>> from thinwire.workloads import Images
        >>> task = Images(batch_size=8, width=4)
        >>> model = task.model(seed=0)
        >>> optimizer = task.optimizer(model)
        >>> schedule = task.schedule(optimizer, steps=2)
        >>> for _, batch in zip(range(2), task.batches(rank=0, world=4, seed=0)):
        ...     optimizer.zero_grad()
        ...     task.loss(model, batch).backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> 0 < task.evaluate(model) < 100
        True
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # what evaluate() returns, with its unit
    higher_is_better: ClassVar[bool]
    default_steps: ClassVar[int]
    rising: ClassVar[float] = 0.05  # share of the steps in which the learning rate rises
    falling: ClassVar[float] = 0.3  # and falls

    batch_size: int  # of one rank

    def model(self, seed: int = 0) -> nn.Module:
        """A fresh model: all ranks that give the same seed get the same one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def batches(self, rank: int = 0, world: int = 1, seed: int = 0) -> Iterator[Batch]:
        """Endless batches of a rank: an epoch after the other, each in a new order.

        In an epoch no sample comes twice, on whatever rank. What all ranks take in a step is what
        one rank of `world` times the batch size would: the world's size changes no average.
        """
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, world), got rank {rank} of {world}")
        generator = torch.Generator().manual_seed(seed)
        while True:
            inputs, targets = self.epoch(generator)
            for chosen in shards_of(len(inputs), self.batch_size, rank, world, generator):
                yield inputs[chosen], targets[chosen]

    def schedule(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        """A trapezium: straight up to the optimizer's learning rate, held, straight down to zero.

        Held, because what feedback delays would arrive at a lower rate than it was computed for.
        """
        rising, falling = max(1.0, steps * self.rising), max(1.0, steps * self.falling)

        def factor(step: int) -> float:
            return max(0.0, min(1.0, (step + 1) / rising, (steps - step) / falling))

        return LambdaLR(optimizer, factor)

    def shards(self, model: nn.Module) -> list[nn.Module]:
        """Parts of a model that FSDP gathers and reduces each by itself; what is left over belongs
        to the model as a whole. By default its children, but for small ones."""
        least = max(1, SMALL * _numel(model))
        return [child for child in model.children() if _numel(child) >= least]

    @abstractmethod
    def build(self) -> nn.Module:
        """A model whose weights come from the global generator; `model` seeds it."""

    @abstractmethod
    def epoch(self, generator: torch.Generator) -> Batch:
        """All inputs and targets of one epoch, not yet shuffled."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over a batch."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """What the task is trained with."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The metric over the test data."""


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, and the model in the mode for it; afterwards as it was."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)


def shards_of(
    count: int, size: int, rank: int, world: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """A rank's batches of the numbers of an epoch's samples.

    One shuffle for all, which they draw from equal generators; each step takes the next
    `world * size` of it, and the rank its part of those. What is left at the end is not used.
    """
    each = size * world
    if each > count:
        raise ValueError(
            f"{world} ranks with batches of {size} need {each} samples, the epoch has {count}: "
            "take a smaller batch_size"
        )
    order = torch.randperm(count, generator=generator)
    for start in range(0, count - each + 1, each):
        yield order[start + rank * size : start + (rank + 1) * size]
