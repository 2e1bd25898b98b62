"""Thresholds that follow the distribution of each tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compressors import Compressor, Threshold, Tiered, check, parse
from thinwire.policies.base import Choice, Chooser, Measured, Policy, Setting, Target
from thinwire.policies.check import steps

SAMPLE = 1 << 16  # elements of a tensor that are looked at
FIRST = 8  # steps in which all are watched: residuals build up
FOLLOWED = 0.5  # of the way to the threshold that would have been right
STRIDE = 4.0  # a threshold changes by at most that factor at a time


@dataclass(frozen=True)
class Magnitude(Policy):
    """What is large in many bits, what is small in few or not at all, by a threshold for each
    tensor.

    Top-K without the search for the k-th largest: each tensor has a threshold, and the ranks move
    it so that the share above it stays at `density`. Compression is then one pass, and tensors send
    more in steps in which they have more to say.

    Args:
        density: share of elements above the threshold.
        large: compressor of those.
        small: compressor of the rest; None leaves them to the next step.
        every: steps between two looks at the tensors, after the first eight.

    Example:
        >>> import thinwire as tw
        >>> str(tw.Magnitude(0.01, small="quantize:2"))
        'magnitude:0.01,small=(quantize:2)'
    """

    density: float = 0.01
    large: Compressor = field(default=parse("cast:fp16"))
    small: Compressor | None = None
    every: int = 4
    name: ClassVar[str] = "magnitude"

    def __post_init__(self) -> None:
        check.fraction("Magnitude", "density", self.density)
        steps("Magnitude", "every", self.every)
        for name in ("large", "small"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, parse(value))
        self.at(1.0)  # refuses what cannot be made

    def at(self, threshold: float) -> Compressor:
        """The compressor with a threshold."""
        if self.small is not None:
            return Tiered(above=threshold, large=self.large, small=self.small)
        return Threshold(threshold) if self.large.lossless else Threshold(threshold) | self.large

    @property
    def main(self) -> Compressor:
        return self.at(1.0)

    def begin(self, setting: Setting) -> Chooser:
        return _Levels(self, setting)


class _Levels(Chooser):
    def __init__(self, policy: Magnitude, setting: Setting) -> None:
        self._policy, self._journal = policy, setting.journal
        self._place = {tensor.name: i for i, tensor in enumerate(setting.tensors)}
        count = len(self._place)
        self._levels = [0.0] * count  # thresholds; 0 until something is known
        self._densities = [0.0] * count
        self._own = [0.0] * (3 * count)  # seen, log of the right threshold, density at the present
        self.num_reports = 3 * count

    def choose(self, tensor: Target, step: int) -> Choice:
        level = self._levels[self._place[tensor.name]]
        return self._policy.at(level) if level else None

    def watches(self, step: int) -> bool:
        return step <= FIRST or step % self._policy.every == 0

    def due(self, step: int) -> bool:
        return self.watches(step)

    def watch(self, tensor: Target, values: Tensor) -> None:
        at = self._place[tensor.name]
        stride = max(1, values.numel() // SAMPLE) | 1  # odd: rows are of even length
        sample = values[::stride].abs()
        if not bool(torch.isfinite(sample).all()):
            return
        count = max(1, round(sample.numel() * self._policy.density))
        right = float(torch.kthvalue(sample, sample.numel() - count + 1)[0])
        if right > 0:
            level = self._levels[at]
            density = float((sample >= level).float().mean()) if level else self._policy.density
            self._own[3 * at : 3 * at + 3] = 1.0, math.log(right), density

    def report(self, measured: Measured) -> list[float]:
        own, self._own = self._own, [0.0] * len(self._own)
        return own

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        for name, at in self._place.items():
            told = [row[3 * at : 3 * at + 3] for row in rows if row[3 * at]]
            if not told:
                continue
            right = sum(log for _, log, _ in told) / len(told)
            density = sum(share for _, _, share in told) / len(told)
            level, self._densities[at] = self._levels[at], density
            if not level:
                self._levels[at] = math.exp(right)
                self._note(step, name, at, "first seen")
                continue
            # Half of the way that the distribution asks for, or all of it if far off.
            off = abs(math.log(max(density, 1e-9) / self._policy.density))
            share = 1.0 if off > 0.5 else FOLLOWED
            change = share * (right - math.log(level))
            change = max(-math.log(STRIDE), min(math.log(STRIDE), change))
            self._levels[at] = float(f"{level * math.exp(change):.6g}")
            if off > 0.5:
                self._note(step, name, at, f"density was {density:.3g}")

    def _note(self, step: int, name: str, at: int, why: str) -> None:
        self._journal.note(step + 1, name, f"threshold {self._levels[at]:.3g}", why)

    def explain(self) -> list[str]:
        known = [density for density in self._densities if density]
        if not known:
            return ["No tensor has been seen yet: all travel as they are."]
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
