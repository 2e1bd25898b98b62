"""Tiny models for tests of training. Weights and batches follow from seeds, so that every rank can
compute what another one has, without DDP."""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensors import bits, real_of, same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

MANY = 0.001  # MB: after its first step DDP forms a bucket for every layer of `net`
MIN = 10  # elements: all matrices of `net` are compressed, all vectors are not
TIMEOUT = 600.0  # seconds, of exchanges that should not wait for anybody: ranks.py ends them first


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 10)
    )


def batch(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 20, generator=generator)


def loss_of(model: Any, step: int, rank: int | None = None) -> Tensor:
    return model(batch(step, rank)).square().mean()


def backward(model: Any, step: int) -> None:
    model.zero_grad()
    loss_of(model, step).backward()


def train(model: Any, steps: range, optimizer: Any = None) -> list[float]:
    """Losses of some steps of SGD."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wired(
    compressor: Any = "topk:0.1", inner: nn.Module | None = None, ddp: Any = None, **options: Any
) -> tuple[DistributedDataParallel, tw.Wire]:
    """A model with a wire; `ddp` are options of DDP, all others of attach."""
    given = {"bucket_cap_mb": MANY} | (ddp or {})
    model = DistributedDataParallel(net() if inner is None else inner, **given)
    return model, tw.attach(model, compressor, **{"min_numel": MIN, "timeout": TIMEOUT} | options)


def plain(inner: nn.Module | None = None, **ddp: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net() if inner is None else inner, bucket_cap_mb=MANY, **ddp)


def named(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of what DDP or torch.compile were given."""
    inner = getattr(model, "module", model)
    return {name.replace("_orig_mod.", ""): p for name, p in inner.named_parameters()}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in named(model).items() if p.grad is not None}


def alone(model: Any, step: int, rank: int | None = None, loss: Any = loss_of) -> dict[str, Tensor]:
    """The gradients of one rank, without DDP."""
    inner = copy.deepcopy(getattr(model, "module", model))
    inner.zero_grad()
    loss(inner, step, rank).backward()
    return gradients(inner)


def residuals(wire: tw.Wire) -> dict[str, Tensor]:
    """What this rank has left out so far."""
    kept = wire.state_dict()["reducer"]["tensors"]
    return {name: state["residual"] for name, state in kept.items() if "residual" in state}


def memory(wire: tw.Wire) -> dict[str, Tensor]:
    """A copy of all that is remembered."""
    kept = copy.deepcopy(wire.state_dict()["reducer"]["tensors"])
    return {
        f"{name} {part}": torch.as_tensor(value)
        for name, state in kept.items()
        for part, value in state.items()
    }


def raised(call: Callable[[], object]) -> str:
    """The error of a call, in words; empty if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def digest(tensors: Any) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bits(tensor).numpy().tobytes())
    return found.hexdigest()


def all_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """The same names, and the same bits under them."""
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


class Books:
    """What ranks put in and what came out of it: with EF14, all that went in came out or waits."""

    def __init__(self, model: Any, wire: tw.Wire) -> None:
        self._model, self._wire, self._steps = model, wire, 0
        sizes = {name: p.shape for name, p in named(model).items()}
        self._put = {name: torch.zeros(s, dtype=torch.float64) for name, s in sizes.items()}
        self._mass = {name: zero.clone() for name, zero in self._put.items()}
        self._out = {name: zero.clone() for name, zero in self._put.items()}

    def put(self, gradient: dict[str, Tensor]) -> None:
        """This rank's, before it is exchanged."""
        for name, g in gradient.items():
            self._put[name] += g.double()
            self._mass[name] += g.double().abs()

    def take(self) -> None:
        """The averages, which are the same on all ranks."""
        self._steps += 1
        for name, g in gradients(self._model).items():
            self._out[name] += g.to_dense().double()

    def balance(self) -> dict[str, float]:
        """For each tensor, the difference over what rounding explains; on all ranks the same.

        Each rank's x, residual and what it sends are at most the sum of all magnitudes so far. A
        step rounds (10 + ranks) / 2 times in the type of residuals (see test_all_reduce) and the
        result once in the tensor's own; sums of what travels as it is are rounded for each rank.
        """
        found, kept, size = {}, residuals(self._wire), dist.get_world_size()
        for name, p in named(self._model).items():
            put, mass = self._put[name].clone(), self._mass[name].clone()
            left = torch.zeros_like(put)
            if name in kept:
                left += kept[name].as_strided(p.shape, p.stride()).double()  # as p lies in memory
            for tensor in (put, mass, left):
                dist.all_reduce(tensor)
            own = torch.finfo(p.dtype).eps * (1 if name in kept else size)
            each = (10 + size) / 2 * torch.finfo(real_of(p.dtype)).eps + own / 2
            error = (put - size * self._out[name] - left).abs()
            bound = self._steps * each * mass + torch.finfo(p.dtype).tiny
            found[name] = float((error / bound).max()) if error.numel() else 0.0
        return found
