"""A book continued character by character by a small transformer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from thinwire.workloads import data
from thinwire.workloads.workload import Batch, Workload, evaluating

CHUNK = 64  # windows evaluated at once


@dataclass(frozen=True)
class Text(Workload):
    """Moby Dick: negative log-likelihood of a transformer with 427,865 parameters.

    Args:
        batch_size: windows of one rank in one step.
        context: characters in a window.
        test_windows: how many windows to test on, evenly spread over the test part.
        width, layers, heads: of the transformer; less makes a smaller and faster one, for tests.
        learning_rate: the highest that the schedule reaches.
    """

    batch_size: int = 16
    context: int = 64
    test_windows: int = 512
    width: int = 128
    layers: int = 2
    heads: int = 4
    learning_rate: float = 3e-3

    name: ClassVar[str] = "text"
    metric: ClassVar[str] = "test nll, nats a character"
    higher_is_better: ClassVar[bool] = False
    default_steps: ClassVar[int] = 600

    def build(self) -> nn.Module:
        symbols = len(data.book().alphabet)
        return Transformer(symbols, self.context, self.width, self.layers, self.heads)

    def shards(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Transformer)
        return list(model.blocks)

    def epoch(self, generator: torch.Generator) -> Batch:
        """The text cut into windows side by side; where the first begins changes each epoch."""
        start = int(torch.randint(self.context, (), generator=generator))
        return windows(data.book().train[start:], self.context)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))

    def evaluate(self, model: nn.Module) -> float:
        inputs, targets = windows(data.book().test, self.context)
        count = min(self.test_windows, len(inputs))
        chosen = torch.arange(count) * len(inputs) // count
        with evaluating(model):
            sums = [
                self.loss(model, (inputs[part], targets[part])).double() * len(part)
                for part in torch.split(chosen, CHUNK)
            ]
        return float(sum(sums)) / count


def windows(text: Tensor, context: int) -> Batch:
    """All whole windows of a text, and for each of its characters the one that follows."""
    count = (len(text) - 1) // context
    numbers = text[: count * context + 1].long()
    return numbers[:-1].view(count, context), numbers[1:].view(count, context)


class Transformer(nn.Module):
    """Numbers of shape (batch, length) to logits of shape (batch, length, symbols).

    Decoder only, normalised before each block.
    """

    def __init__(self, symbols: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        for embedding in (self.symbol, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.blocks(self.symbol(numbers) + self.place(places))
        logits: Tensor = self.head(self.last(x))
        return logits


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).flatten(2))
        y: Tensor = self.mlp(self.before_mlp(x))
        return x + y
