"""Thresholds that follow the distribution of each tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from thinwire import check
from thinwire.compressors import Cast, Compressor, LocalCompressor, Threshold, Tiered
from thinwire.compressors.registry import local_of
from thinwire.policies.base import (
    Choice,
    Chooser,
    Measured,
    Policy,
    PolicyContext,
    TensorInfo,
)

SAMPLE = 1 << 16  # elements of a large tensor that are looked at
BLOCK = 1 << 10
FIRST = 8  # steps after each of which thresholds move: residuals build up
GAIN = 0.3  # of a threshold's logarithm, for a share that is off by its own size


@dataclass(frozen=True)
class Magnitude(Policy):
    """A threshold for each tensor: what is larger in many bits, what is smaller in few or none.

    Top-K without the search for the k-th largest: each tensor has a threshold, and the ranks move
    it so that the share above it stays at `density`. Compression is then one pass, and tensors send
    more in steps in which they have more to say.

    Args:
        density: share of elements above the threshold.
        large: compressor of those.
        small: compressor of the rest; None leaves them to the next step.
        every: steps after which thresholds move; in the first eight after each.

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Magnitude(0.05, small="quantize:2"))
        'magnitude:0.05,small=(quantize:2)'
    """

    density: float = 0.01
    large: LocalCompressor = field(default=Cast("fp16"))
    small: LocalCompressor | None = None
    every: int = 2
    name: ClassVar[str] = "magnitude"

    if TYPE_CHECKING:

        def __init__(
            self,
            density: float = 0.01,
            large: Compressor | str = ...,
            small: Compressor | str | None = None,
            every: int = 2,
        ) -> None: ...

    def __post_init__(self) -> None:
        check.fraction("Magnitude", "density", self.density)
        check.steps("Magnitude", "every", self.every)
        for name in ("large", "small"):
            value = getattr(self, name)
            if value is not None or name == "large":
                object.__setattr__(self, name, _inner(value))
        self.at(1.0)  # refuses what cannot be made

    def at(self, threshold: float) -> LocalCompressor:
        """The compressor with a threshold."""
        if self.small is not None:
            return Tiered(above=threshold, large=self.large, small=self.small)
        return Threshold(threshold) if self.large.lossless else Threshold(threshold) | self.large

    @property
    def main(self) -> LocalCompressor:
        return self.at(1.0)

    def begin(self, context: PolicyContext) -> Chooser:
        return _Levels(self, context)


class _Levels(Chooser):
    """Integral control: the share above a threshold moves the threshold's logarithm in proportion
    to its relative error.

    The quantile of the moment would not do: what is left out waits just below the threshold, so a
    threshold that is right for one step is too high for the next ones.
    """

    def __init__(self, policy: Magnitude, context: PolicyContext) -> None:
        self._policy, self._journal = policy, context.journal
        self._place = {tensor.name: i for i, tensor in enumerate(context.tensors)}
        count = len(self._place)
        self._levels = [0.0] * count  # thresholds; 0 until something is known
        self._densities = [0.0] * count
        # Of a step: elements above, elements seen, log of the threshold to begin with.
        self._own = [[0.0, 0.0, 0.0] for _ in self._place]
        self.num_reports = 3 * count

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        level = self._levels[self._place[tensor.name]]
        return self._policy.at(level) if level else None

    def watches(self, step: int) -> bool:
        return self.due(step)

    def due(self, step: int) -> bool:
        return step <= FIRST or step % self._policy.every == 0

    def watch(self, tensor: TensorInfo, step: int, x: Tensor, residual: Tensor | None) -> None:
        at = self._place[tensor.name]
        sample = _some(x).float()
        if residual is not None:
            sample = sample + _some(residual)
        sample = sample.abs()
        if not bool(torch.isfinite(sample).all()):
            return
        own, level = self._own[at], self._levels[at]
        own[1] += sample.numel()
        if level:
            own[0] += float((sample >= level).sum())
        else:
            own[2] = _quantile(sample, self._policy.density)

    def report(self, measured: Measured) -> list[float]:
        numbers = [number for own in self._own for number in own]
        self._own = [[0.0, 0.0, 0.0] for _ in self._place]
        return numbers

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        for name, at in self._place.items():
            told = [row[3 * at : 3 * at + 3] for row in rows if row[3 * at + 1]]
            if not told:
                continue
            above, seen, start = (sum(numbers) for numbers in zip(*told, strict=True))
            level = self._levels[at]
            if not level:
                if math.isfinite(start):
                    self._levels[at] = _rounded(math.exp(start / len(told)))
                    self._note(step, name, at, "first seen")
                continue
            density = self._densities[at] = above / seen
            error = max(-0.7, min(2.0, density / self._policy.density - 1))
            self._levels[at] = _rounded(level * math.exp(GAIN * error))
            if not 0.5 < density / self._policy.density < 2 and step > FIRST:
                self._note(step, name, at, f"density was {density:.3g}")

    def _note(self, step: int, name: str, at: int, why: str) -> None:
        self._journal.note(step + 1, name, f"threshold {self._levels[at]:.3g}", why)

    def scale(self, factor: float) -> None:
        self._levels = [_rounded(factor * level) for level in self._levels]

    def explain(self) -> list[str]:
        known = [density for density in self._densities if density]
        if not known:
            return ["No tensor has been seen yet: all are sent uncompressed."]
        mean = sum(known) / len(known)
        return [
            f"Each tensor has its own threshold; {mean:.3g} of the elements were above it when "
            f"last seen (wanted: {self._policy.density:g})."
        ]

    def state(self) -> list[float]:
        return [*self._levels, *self._densities]

    def load(self, state: Sequence[float]) -> None:
        count = len(self._levels)
        self._levels, self._densities = list(state[:count]), list(state[count:])


def _inner(given: Compressor | str) -> LocalCompressor:
    try:
        return local_of(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Magnitude: {error}") from None


def _some(values: Tensor) -> Tensor:
    """A sample: blocks of neighbours, as single elements at equal distances may all be at the same
    place of a kernel or a row."""
    count = values.numel() // BLOCK
    if values.numel() <= 2 * SAMPLE:
        return values
    return values[: count * BLOCK].view(count, BLOCK)[:: count * BLOCK // SAMPLE].reshape(-1)


def _quantile(sample: Tensor, share: float) -> float:
    """The logarithm of the magnitude that this share of a sample is above."""
    count = max(1, min(sample.numel(), round(sample.numel() * share)))
    found = float(torch.kthvalue(sample, sample.numel() - count + 1)[0])
    return math.log(found) if found > 0 else -math.inf


def _rounded(level: float) -> float:
    """Short enough for a spec."""
    return float(f"{level:.5g}")
