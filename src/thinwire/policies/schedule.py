"""Policies that go by the step alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from thinwire import check
from thinwire.compressors import Compressor
from thinwire.policies.base import (
    Around,
    Choice,
    Chooser,
    Journal,
    Policy,
    PolicyContext,
    TensorInfo,
    how,
    inner_compressor,
    inner_policy,
)
from thinwire.policies.ladder import knob, ladder_of, near, turned

DGC_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)  # of the first four epochs, Lin et al., 2018
_SHAPES = ("exponential", "linear", "dgc")


@dataclass(frozen=True)
class Warmup(Policy):
    """Uncompressed for the first steps, then what another policy or compressor says.

    Args:
        steps: to wait.
        then: a compressor, a policy, or the spec of one.

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Warmup(500, "topk:0.01"))
        'warmup:500,(topk:0.01)'
    """

    steps: int
    then: Policy
    name: ClassVar[str] = "warmup"

    if TYPE_CHECKING:

        def __init__(self, steps: int, then: Policy | Compressor | str) -> None: ...

    def __post_init__(self) -> None:
        check.steps("Warmup", "steps", self.steps)
        object.__setattr__(self, "then", inner_policy("Warmup", self.then))

    @property
    def main(self) -> Compressor:
        return self.then.main

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        return self.then.compressors

    @property
    def under_adam(self) -> tuple[Compressor, ...]:
        return self.then.under_adam

    def begin(self, context: PolicyContext) -> Chooser:
        return WarmingUp(self.then.begin(context), self.steps, context.journal)


class WarmingUp(Around):
    """Uncompressed until a step has passed; what is inside learns, and decides from then on."""

    def __init__(self, inner: Chooser, until: int, journal: Journal) -> None:
        super().__init__(inner)
        self._until, self._journal = until, journal
        self._step = 0

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        if step == self._until + 1 != self._step:
            self._journal.note(step, "all", "the policy decides from here on", "warm-up over")
        if step == self._until:
            self.inner.ask(step)  # what is decided next should know of this one
        self._step = step
        return None if step <= self._until else self.inner.choose(tensor, step)

    def idle(self, step: int) -> bool:
        return step > self._until + 1 and super().idle(step)  # the first is noted when it is chosen

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        self.hold(step < self._until)
        super().learn(step, rows)

    def explain(self) -> list[str]:
        if self._step > self._until:
            return self.inner.explain()
        left = self._until - self._step
        return [f"Warm-up: all is sent uncompressed for {left} more steps.", *self.inner.explain()]


@dataclass(frozen=True)
class Ramp(Policy):
    """Weak compression at first, growing to a given one.

    The share of elements sent (or bits, or rank) goes from `start` to that of `then`.

    Args:
        steps: that it takes.
        then: the compressor in the end; one with a ratio, bits, levels or a rank.
        start: where it begins.
        shape: "exponential" (by equal factors), "linear" (by equal amounts), or "dgc": in four
            stages, 0.25, 0.0625, 0.015625 and 0.004 as far as they are above the end.

    Example:
        >>> import thinwire as tw
        >>> chooser = tw.policies.Ramp(8, "topk:0.01", shape="dgc")
        >>> str(chooser)
        'ramp:8,(topk:0.01),shape=dgc'
    """

    steps: int
    then: Compressor
    start: float = 0.25
    shape: str = "exponential"
    name: ClassVar[str] = "ramp"

    if TYPE_CHECKING:

        def __init__(
            self,
            steps: int,
            then: Compressor | str,
            start: float = 0.25,
            shape: str = "exponential",
        ) -> None: ...

    def __post_init__(self) -> None:
        check.steps("Ramp", "steps", self.steps)
        compressor = inner_compressor("Ramp", self.then)
        found = knob(compressor)
        if found is None:
            raise ValueError(f"Ramp: {compressor} has no strength that could grow")
        object.__setattr__(self, "then", compressor)
        check.one_of("Ramp", "shape", self.shape, _SHAPES)
        if self.shape == "dgc" and found[0] != "ratio":
            raise ValueError(f"Ramp: 'dgc' is a list of ratios, {compressor} has {found[0]}")
        most = 1 if found[0] == "ratio" else check.LARGEST
        if not check.is_number(self.start) or not 0 < self.start <= most:
            raise ValueError(f"Ramp: start is not a value for {compressor}: {self.start!r}")

    @property
    def main(self) -> Compressor:
        return self.then

    def begin(self, context: PolicyContext) -> Chooser:
        return _Scheduled(self._at, context.journal)

    def _at(self, step: int) -> Compressor:
        found = knob(self.then)
        assert found is not None
        end = found[1]
        if self.shape == "dgc":
            stages = [density for density in DGC_DENSITIES if density > end]
            stage = (step - 1) * len(DGC_DENSITIES) // self.steps
            return turned(self.then, stages[stage]) if stage < len(stages) else self.then
        if step > self.steps or self.start <= end:
            return self.then
        share = (step - 1) / self.steps
        if self.shape == "linear":
            value = self.start + share * (end - self.start)
        else:
            value = self.start * (end / self.start) ** share
        return near(self.then, value)


@dataclass(frozen=True)
class Progressive(Policy):
    """More compression as training goes on: through lighter versions of a compressor, to itself.

    Args:
        steps: at which the compressor itself is reached; its lighter versions share them evenly.
        then: the strongest.
        dense: begin uncompressed.

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Progressive(10000, "topk:0.001"))
        'progressive:10000,(topk:0.001)'
    """

    steps: int
    then: Compressor
    dense: bool = False
    name: ClassVar[str] = "progressive"

    if TYPE_CHECKING:

        def __init__(self, steps: int, then: Compressor | str, dense: bool = False) -> None: ...

    def __post_init__(self) -> None:
        check.steps("Progressive", "steps", self.steps)
        object.__setattr__(self, "then", inner_compressor("Progressive", self.then))
        check.flag("Progressive", "dense", self.dense)

    @property
    def main(self) -> Compressor:
        return self.then

    def begin(self, context: PolicyContext) -> Chooser:
        rungs = ladder_of(self.then)
        rungs = rungs if self.dense or len(rungs) < 3 else rungs[1:]

        def at(step: int) -> Choice:
            return rungs[min((step - 1) * (len(rungs) - 1) // self.steps, len(rungs) - 1)]

        return _Scheduled(at, context.journal)


class _Scheduled(Chooser):
    """A choice for each step."""

    def __init__(self, at: Callable[[int], Choice], journal: Journal) -> None:
        self._at, self._journal = at, journal
        self._step = 0
        self._now: Choice = None

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        if step != self._step:
            found = self._at(step)
            if found != self._now or not self._step:
                self._journal.note(step, "all", found, "by schedule")
            self._step, self._now = step, found
        return self._now

    def explain(self) -> list[str]:
        return [f"By schedule, tensors are now sent {how(self._now)}."]
