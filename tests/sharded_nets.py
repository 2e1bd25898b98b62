"""Tiny models that `fully_shard` was applied to. Weights and batches follow from seeds, so that
every rank can compute what another one has, without FSDP."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from nets import TIMEOUT
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

import thinwire as tw
from thinwire.collectives.message import aligned
from thinwire.collectives.transport import FIELDS, HEADER

MIN = 10  # elements: all matrices are compressed, all vectors are not
IN = 12  # features of a batch


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Tower(nn.Module):
    """Two blocks that are sharded by themselves, and layers that the root is left with.

    Args:
        width, inner, outputs: odd ones are cut unevenly.
        tied: whether the last layer has the weight of the first.
    """

    def __init__(
        self, width: int = 16, inner: int = 24, outputs: int = 8, tied: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(IN, width)
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(2)])
        self.last = nn.Linear(IN, width) if tied else nn.Linear(width, outputs)
        self.tied = tied
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = block(h)
        y: Tensor = h @ self.last.weight + self.last.bias[:1] if self.tied else self.last(h)
        return y


def uneven(**options: Any) -> Tower:
    """Nothing of it can be divided by two, three or four; some have fewer rows than ranks."""
    return Tower(17, 13, 1, **options)


def columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def shard(model: Any, **options: Any) -> Any:
    """Each block by itself, and what remains with the root."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wired(
    compressor: Any = "topk:0.1", inner: nn.Module | None = None, fsdp: Any = None, **options: Any
) -> tuple[Any, tw.Wire]:
    """A sharded model with a wire; `fsdp` are options of fully_shard, all others of attach."""
    model = shard(Tower() if inner is None else inner, **(fsdp or {}))
    return model, tw.attach(model, compressor, **{"min_numel": MIN, "timeout": TIMEOUT} | options)


def batch(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, IN, generator=generator)


def loss_of(model: Any, step: int, rank: int | None = None) -> Tensor:
    x = batch(step, rank).to(next(model.parameters()).dtype)
    loss: Tensor = model(x).float().square().mean()
    return loss


def backward(model: Any, step: int) -> None:
    model.zero_grad()
    loss_of(model, step).backward()


def adam(model: Any) -> torch.optim.Optimizer:
    """Whose epsilon keeps the rounding of a gradient near zero from becoming a step."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def train(
    model: Any, steps: range, optimizer: Any, backward: Callable[..., None] = backward
) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """What ranks hold parts of."""
    return {name: t.full_tensor().detach().clone() for name, t in tensors.items()}


def parameters(model: Any) -> dict[str, Tensor]:
    return whole(dict(model.named_parameters()))


def gradients(model: Any) -> dict[str, Tensor]:
    return whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def alone(inner: nn.Module, values: dict[str, Tensor], step: int, rank: int) -> dict[str, Tensor]:
    """The gradients of one rank with these parameters, without FSDP."""
    model = copy.deepcopy(inner)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])
    loss_of(model, step, rank).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of an element; infinite if names differ."""
    if a.keys() != b.keys():
        return float("inf")
    gaps = [(a[name].double() - b[name].double()).abs() for name in a]
    return max((float(gap.max()) for gap in gaps if gap.numel()), default=0.0)


def modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Books:
    """What ranks put in and what came out of it: with EF14, all that went in came out or waits.

    Args:
        inner: a model like the one that was sharded, to compute gradients with.
    """

    def __init__(self, inner: nn.Module, model: Any, wire: tw.Wire) -> None:
        self._inner, self._model, self._wire = inner, model, wire
        shapes = {name: p.shape for name, p in inner.named_parameters()}
        self._put = {name: torch.zeros(s, dtype=torch.float64) for name, s in shapes.items()}
        self._mass = {name: zero.clone() for name, zero in self._put.items()}
        self._out = {name: zero.clone() for name, zero in self._put.items()}

    def put(self, step: int) -> None:
        """This rank's gradients of a step that is about to be taken."""
        own = alone(self._inner, parameters(self._model), step, dist.get_rank())
        for name, g in own.items():
            self._put[name] += g.double()
            self._mass[name] += g.double().abs()

    def take(self) -> None:
        """The averages."""
        for name, g in gradients(self._model).items():
            self._out[name] += g.double()

    def balance(self) -> float:
        """The largest difference, over all that went into the tensor that it is in."""
        size, worst = dist.get_world_size(), 0.0
        kept = residuals(self._wire)
        for name, put in self._put.items():
            left = torch.zeros_like(put)
            if name in kept:
                left += kept[name].view(put.shape).double()
            mass = self._mass[name].clone()
            put = put.clone()
            for tensor in (put, mass, left):
                dist.all_reduce(tensor)
            error = (put - size * self._out[name] - left).abs().max()
            worst = max(worst, float(error / mass.max()))
        return worst


def residuals(wire: tw.Wire) -> dict[str, Tensor]:
    """What this rank has left out so far, as it lies in parameters."""
    kept = wire.state_dict()["reducer"]["tensors"]
    return {name: state["residual"] for name, state in kept.items() if "residual" in state}


def meeting_bytes(ranks: int) -> int:
    """That a rank sends to compare calls and lengths with the others, once."""
    return (ranks - 1) * aligned(8 * (HEADER + FIELDS + ranks))
