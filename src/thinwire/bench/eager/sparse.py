"""Some elements with their positions."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.bench.eager.contract import Eager, Parts, generator
from thinwire.compressors import Bernoulli, RandomK, Threshold, TopK
from thinwire.compressors.sparsifiers import kept


def top_k(compressor: TopK) -> Eager:
    def choose(p: Tensor) -> Tensor:
        return p.abs().topk(kept(p.numel(), compressor.ratio), sorted=False).indices

    return _sparse(choose)


def random_k(compressor: RandomK) -> Eager:
    numbers = generator()

    def choose(p: Tensor) -> Tensor:
        n = p.numel()
        return torch.randperm(n, generator=numbers)[: kept(n, compressor.ratio)]

    return _sparse(choose)


def bernoulli(compressor: Bernoulli) -> Eager:
    numbers = generator()

    def choose(p: Tensor) -> Tensor:
        chance = torch.rand(p.numel(), generator=numbers)
        return (chance < compressor.p).nonzero().squeeze(1)

    return _sparse(choose)


def threshold(compressor: Threshold) -> Eager:
    return _sparse(lambda p: (p.abs() >= compressor.value).nonzero().squeeze(1))


def _sparse(choose: Callable[[Tensor], Tensor]) -> Eager:
    def encode(x: Tensor, r: Tensor) -> Parts:
        r += x
        at = choose(r)
        values = r[at]
        r[at] = 0
        return at.int(), values

    def decode(parts: Parts, n: int) -> Tensor:
        at, values = parts
        return torch.zeros(n, dtype=values.dtype).index_copy_(0, at.long(), values)

    return Eager(encode, decode)
