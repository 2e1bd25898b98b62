"""How much less noise the mean gradient of all ranks has than that of each: what `gain` goes by.

Adam divides by the root of the second moment of the gradients that it sees. Those of one rank are
noisier than the mean over P ranks, up to sqrt(P) times as large, so each rank's steps, and with
them their average, are up to sqrt(P) times shorter than those of an optimizer that sees the mean.
How much is measured for each tensor,

    gain = sqrt(mean over ranks of |g_i|^2 / |mean over ranks of g_i|^2),   within [1, sqrt(P)],

from a few sums of each gradient with random signs, the same signs on all ranks: a linear sketch,
whose squares have |g|^2 as their mean, so that the sketch of the mean gradient is the mean of the
sketches. Numerator and denominator come from the same sketches and are moving averages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import Key
from thinwire.kernels.reference.random import random_words

BUCKETS = 8  # sums of each tensor in an exchange
WIDTH = 256  # columns that a gradient is laid out in, a multiple of BUCKETS
MEMORY = 0.95  # of the moving averages, from exchange to exchange
PRIOR = 3.0  # exchanges that count as "no noise" at the beginning, when little is known
STREAM = 0x6E6F6973  # sets these random signs apart from others with the same seed


class NoiseGain:
    """The gain of each tensor, the same on all ranks.

    Args:
        names: of the tensors.
        seed: of the random signs, the same on all ranks.
    """

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._places = {name: i for i, name in enumerate(names)}
        self._seed = seed
        self._own = torch.zeros(len(names), dtype=torch.float64)  # mean of |g_i|^2
        self._mean = torch.zeros(len(names), dtype=torch.float64)  # |mean of g_i|^2

    @property
    def shape(self) -> tuple[int, int]:
        """Of what ranks average: for each tensor its sums, the squares of them, and whether they
        are finite."""
        return len(self._places), BUCKETS + 2

    def sketch(self, parameters: Mapping[str, Tensor], step: int) -> Tensor:
        """What this rank's gradients come to, to be averaged over the ranks."""
        device = next(iter(parameters.values())).device
        found = torch.zeros(self.shape, device=device)
        for name, place in self._places.items():
            gradient = parameters[name].grad
            key = Key(self._seed, step, place).derive(STREAM)
            if gradient is not None and gradient.numel() and not gradient.is_sparse:
                found[place, :BUCKETS] = _sums(gradient.detach().reshape(-1), key)
        sums = found[:, :BUCKETS]
        found[:, BUCKETS] = sums.square().sum(1)
        finite = torch.isfinite(found).all(1)
        # The exchange of parameters must not fail for what they do not need.
        return torch.where(finite.unsqueeze(1), found.index_fill(1, _last(device), 1.0), 0.0)

    def learn(self, averaged: Tensor) -> None:
        """What the sketches of all ranks came to."""
        numbers = averaged.double().cpu()
        known = numbers[:, BUCKETS + 1] == 1  # finite on all ranks
        own = torch.where(known, numbers[:, BUCKETS], 0.0)
        mean = torch.where(known, numbers[:, :BUCKETS].square().sum(1), 0.0)
        first = (self._own == 0) & known
        self._own += torch.where(first, PRIOR * own, 0.0)
        self._mean += torch.where(first, PRIOR * own, 0.0)
        memory = torch.where(known, MEMORY, 1.0)
        self._own.mul_(memory).add_(own)
        self._mean.mul_(memory).add_(mean)

    def gain(self, name: str, size: int) -> float:
        """How many times as far as the average of ranks' steps the common step of a tensor goes."""
        place = self._places[name]
        own, mean = float(self._own[place]), float(self._mean[place])
        most = size**0.5
        return min(max((own / mean) ** 0.5, 1.0), most) if own and mean else most if own else 1.0

    def state(self) -> dict[str, Any]:
        return {"own": self._own.clone(), "mean": self._mean.clone()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._own = state["own"].double().clone()
        self._mean = state["mean"].double().clone()


def _last(device: torch.device) -> Tensor:
    return torch.tensor([BUCKETS + 1], device=device)


def _signs(count: int, key: Key, device: torch.device) -> Tensor:
    return (random_words(count, key, device) & 1).float().mul_(2).sub_(1)


def _sums(gradient: Tensor, key: Key) -> Tensor:
    """Sums with random signs: that of an element is its column's times its row's, so any two
    elements have independent ones."""
    rows = -(-gradient.numel() // WIDTH)
    whole = gradient.numel() // WIDTH
    signs = _signs(rows + WIDTH, key, gradient.device)
    by_column = gradient.new_zeros(WIDTH, dtype=torch.float32)
    if whole:
        by_column += signs[:whole] @ gradient[: whole * WIDTH].view(whole, WIDTH).float()
    rest = gradient[whole * WIDTH :].float()
    by_column[: rest.numel()] += signs[rows - 1] * rest
    return (by_column * signs[rows:]).view(BUCKETS, -1).sum(1)
