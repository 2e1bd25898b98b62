"""Compression as strong as a validation metric bears."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from thinwire import check
from thinwire.compressors import Compressor
from thinwire.policies.base import (
    Choice,
    Chooser,
    Journal,
    Measured,
    Policy,
    PolicyContext,
    TensorInfo,
    how,
    inner_compressor,
)
from thinwire.policies.ladder import ladder_of

IN_A_ROW = 2  # values that reach the target before compression gets stronger


@dataclass(frozen=True)
class Accuracy(Policy):
    """Stronger while a metric is on track, lighter when it is not.

    After each validation tell `wire.observe(value)`. Ranks that tell something count with their
    mean. On track is a value at most `band` worse than the target at this step; without a target,
    than the best value so far. A value that is behind makes it lighter at once, by one strength, or
    by two if it lacks more than two bands: what was not sent takes steps to catch up with. Only two
    values in a row that reach the target make it stronger, by one: one of them may be luck. A value
    between the target and the band changes nothing.

    Args:
        then: where to begin; lighter versions of it can follow, and ten times stronger ones.
        band: how much worse than the target is still on track, in the metric's own unit.
        target: the value to hold, as a number; or a curve to follow, as pairs (step, value), or
            the path of a JSON file with such a list. Between its steps it is interpolated. In a
            spec, pairs are ``(0=50; 100=90)``.
        higher: whether higher values are better (accuracy) or lower ones (loss).

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Accuracy("topk:0.01", band=0.5, target=92.0))
        'accuracy:(topk:0.01),0.5,92.0'
    """

    then: Compressor
    band: float
    target: float | str | tuple[tuple[float, float], ...] | None = None
    higher: bool = True
    name: ClassVar[str] = "accuracy"

    if TYPE_CHECKING:

        def __init__(
            self,
            then: Compressor | str,
            band: float,
            target: float | str | Sequence[tuple[float, float]] | None = None,
            higher: bool = True,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", inner_compressor("Accuracy", self.then))
        check.positive("Accuracy", "band", self.band)
        check.flag("Accuracy", "higher", self.higher)
        if isinstance(self.target, list | tuple):
            object.__setattr__(self, "target", _curve(self.target))
        elif not (
            self.target is None or isinstance(self.target, str) or check.is_number(self.target)
        ):
            raise ValueError(
                "Accuracy: target must be a finite number, pairs (step, value) or the path of a "
                f"JSON file, got {self.target!r}"
            )

    @property
    def main(self) -> Compressor:
        return self.then

    def curve(self) -> tuple[tuple[float, float], ...] | None:
        """The target as pairs (step, value)."""
        if isinstance(self.target, str):
            try:
                return _curve(json.loads(Path(self.target).read_text()))
            except (OSError, ValueError) as error:
                raise ValueError(f"Accuracy: target {self.target!r}: {error}") from None
        if self.target is None or isinstance(self.target, tuple):
            return self.target
        return ((0.0, float(self.target)),)

    def begin(self, context: PolicyContext) -> Chooser:
        return _Watching(self, context.journal)


def _curve(pairs: object) -> tuple[tuple[float, float], ...]:
    try:
        found = tuple((float(step), float(value)) for step, value in pairs)  # type: ignore[attr-defined]
    except (OverflowError, TypeError, ValueError):
        raise ValueError("Accuracy: a curve is a list of pairs (step, value)") from None
    if not all(map(check.is_number, chain.from_iterable(found))):
        raise ValueError("Accuracy: a curve is a list of finite numbers")
    if not found or any(a[0] >= b[0] for a, b in pairwise(found)):
        raise ValueError("Accuracy: a curve has rising steps")
    return found


class _Watching(Chooser):
    num_reports = 2  # whether there is a value, and the value

    def __init__(self, policy: Accuracy, journal: Journal) -> None:
        self._policy, self._journal = policy, journal
        self._curve = policy.curve()
        self._rungs = ladder_of(policy.then, beyond=True)
        self._rung = self._rungs.index(policy.then)
        self._held = False
        self._reached = 0  # values in a row that reached the target
        self._told: float | None = None
        self._best: float | None = None
        self._value, self._wanted = 0.0, 0.0

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self._rungs[self._rung]

    def hold(self, held: bool) -> None:
        self._held = held

    def observe(self, value: float) -> None:
        self._told = float(value)

    def report(self, measured: Measured) -> list[float]:
        told, self._told = self._told, None
        return [0.0, 0.0] if told is None else [1.0, told]

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        values = [value for there, value in rows if there]
        if not values or self._held:
            return
        sign = 1.0 if self._policy.higher else -1.0
        value = sum(values) / len(values)
        # A training that broke down says so in either direction, and sets no mark.
        known = math.isfinite(value)
        if known and (self._best is None or sign * value > sign * self._best):
            self._best = value
        wanted = self._target_at(step)
        self._value, self._wanted = value, wanted
        ahead, band = (sign * (value - wanted) if known else math.nan), self._policy.band
        on_track = ahead >= 0 or (self._curve is None and ahead >= -0.5 * band)
        self._reached = self._reached + 1 if on_track else 0
        if self._reached == IN_A_ROW:
            move, self._reached = 1, 0
        elif on_track or ahead >= -band:
            move = 0
        else:
            move = -2 if ahead < -2 * band else -1  # NaN is not on track either
        rung = min(max(self._rung + move, 0), len(self._rungs) - 1)
        if rung != self._rung:
            place = "on track" if move > 0 else "behind"
            why = f"{value:.4g} is {place}, {wanted:.4g} is wanted within {self._policy.band:g}"
            self._rung = rung
            self._journal.note(step + 1, "all", self._rungs[rung], why)

    def _target_at(self, step: int) -> float:
        if self._curve is None:
            return math.nan if self._best is None else self._best
        before = [pair for pair in self._curve if pair[0] <= step]
        after = [pair for pair in self._curve if pair[0] > step]
        if not before or not after:
            return (before[-1] if before else after[0])[1]
        (a, low), (b, high) = before[-1], after[0]
        return low + (high - low) * (step - a) / (b - a)

    def explain(self) -> list[str]:
        words = how(self._rungs[self._rung])
        if self._best is None:
            return [f"Tensors are sent {words} until wire.observe(value) tells a finite one."]
        return [
            f"Tensors are sent {words}: the last value was {self._value:.4g}, wanted is "
            f"{self._wanted:.4g} within {self._policy.band:g}."
        ]

    def state(self) -> list[float]:
        known = (self._best is not None, self._best or 0.0)
        told = (self._told is not None, self._told or 0.0)
        numbers = (self._rung, *known, *told, self._value, self._wanted, self._reached)
        return list(map(float, numbers))

    def load(self, state: Sequence[float]) -> None:
        self._rung = int(state[0])
        self._best = state[2] if state[1] else None
        self._told = state[4] if state[3] else None
        self._value, self._wanted = state[5:7]
        self._reached = int(state[7])
