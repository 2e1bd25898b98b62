"""Generated tensors: always the same numbers, and never from torch's global generator."""

import torch
from torch import Tensor

SEED = 1


def generate(kind: str, numel: int) -> Tensor:
    """A flat float32 tensor of one of the kinds in `settings.DATA`."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(numel, generator=generator)
    return x if kind == "normal" else _student(x, generator)


def _student(x: Tensor, generator: torch.Generator, degrees: int = 3) -> Tensor:
    """Student's t: a normal number over the root of the mean of `degrees` squared ones."""
    squares = torch.zeros_like(x)
    draw = torch.empty_like(x)
    for _ in range(degrees):
        draw.normal_(generator=generator)
        squares.addcmul_(draw, draw)
    return x.div_(squares.div_(degrees).sqrt_())
