"""Who takes which samples of an epoch."""

from collections.abc import Iterator

import torch
from torch import Tensor


def check(size: int, rank: int, world: int) -> None:
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, got {size}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, world), got rank {rank} of {world}")


def epoch(
    count: int, size: int, rank: int, world: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """A rank's batches of sample numbers.

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
