"""Per-tensor settings that make the fewest bytes for a given error."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire import check
from thinwire.compressors import Compressor, LocalCompressor
from thinwire.kernels import Key
from thinwire.policies.base import (
    Choice,
    Chooser,
    Measured,
    Policy,
    PolicyContext,
    TensorInfo,
    how,
    inner_compressor,
)
from thinwire.policies.ladder import knob, near
from thinwire.policies.layerwise import by_choice
from thinwire.spec import read_list

GRAIN = 2000  # parts that the error budget is divided in
FIRST = 3  # steps before profiling: residuals begin at nothing
EVERY = 2  # steps between two looks
_FACTORS = (8.0, 4.0, 2.0, 1.41, 1.0, 0.71, 0.5, 0.25, 0.125, 0.0625)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Solve(Policy):
    """Profiles some steps, then gives each tensor its own setting: fewest bytes at equal error.

    While profiling all tensors are sent with `uniform`; each look measures ||p - C(p)||^2 and the
    bytes of every candidate C for every tensor. Then a dynamic programme over (tensor, candidate)
    finds the choice with the fewest bytes among those whose total error is at most `error_budget`
    times that of `uniform`. ``wire.settings().save(path)`` writes it down for `Layerwise`.

    Args:
        uniform: the setting to be as good as.
        error_budget: the error allowed, in that of `uniform`.
        steps: of profiling, from the fourth that it chooses for.
        candidates: compressors or their specs; by default `uniform` at other ratios or bits. In a
            spec, ``(onebit; quantize:8)``.

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Layerwise.solve("topk:0.01", steps=50))
        'solve:(topk:0.01),steps=50'

    Reference: Alimohammadi et al., L-GreCo: Layerwise-Adaptive Gradient Compression, 2022.
    """

    uniform: LocalCompressor
    error_budget: float = 1.0
    steps: int = 20
    candidates: tuple[LocalCompressor, ...] = ()
    name: ClassVar[str] = "solve"

    if TYPE_CHECKING:

        def __init__(
            self,
            uniform: Compressor | str,
            error_budget: float = 1.0,
            steps: int = 20,
            candidates: str | Iterable[Compressor | str] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "uniform", _with_payload(self.uniform, "uniform"))
        check.positive("Solve", "error_budget", self.error_budget)
        check.steps("Solve", "steps", self.steps)
        given: Any = self.candidates
        if isinstance(given, str):
            given = read_list(given, Compressor)
        found = tuple(_with_payload(each, "candidates") for each in given)
        object.__setattr__(self, "candidates", found)
        self.choices()

    def choices(self) -> tuple[LocalCompressor, ...]:
        """The candidates, `uniform` among them."""
        if self.candidates:
            return tuple(dict.fromkeys([self.uniform, *self.candidates]))
        found = knob(self.uniform)
        if found is None:
            raise ValueError(f"Solve: {self.uniform} has no strength to vary: name candidates")
        name, value = found
        top = 0.5 if name == "ratio" else float("inf")
        values = [value * factor for factor in _FACTORS if value * factor <= top]
        others = [near(self.uniform, each) for each in values]
        return tuple(dict.fromkeys([self.uniform, *others]))

    @property
    def main(self) -> Compressor:
        return self.uniform

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        return self.choices()

    def begin(self, context: PolicyContext) -> Chooser:
        return Solving(self, context)


class Solving(Chooser):
    """Profiling, then what came out of it."""

    def __init__(self, policy: Solve, context: PolicyContext) -> None:
        self._policy, self._journal = policy, context.journal
        self._choices = policy.choices()
        self._tensors = list(context.tensors)
        self._place = {tensor.name: i for i, tensor in enumerate(self._tensors)}
        shape = (len(self._tensors), len(self._choices), 2)  # error and bytes
        self._own: Array = np.zeros(shape)
        self._all: Array = np.zeros(shape)
        self._chosen: list[int] | None = None
        self._first: int | None = None  # step that it chooses for, perhaps late in a training
        self._looks = 0  # that all ranks have heard of
        self.num_reports = self._own.size

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        if self._first is None:
            self._first = step
        if self._chosen is None:
            return self._policy.uniform
        return self._choices[self._chosen[self._place[tensor.name]]]

    def watches(self, step: int) -> bool:
        if self._first is None or self._chosen is not None:
            return False
        since = step - self._first + 1 - FIRST
        # Without an end: a step that fails tells nothing, and another takes its place.
        return since > 0 and (self._policy.steps - since) % EVERY == 0

    def due(self, step: int) -> bool:
        return self.watches(step)

    def watch(self, tensor: TensorInfo, step: int, x: Tensor, residual: Tensor | None) -> None:
        at = self._place[tensor.name]
        values = x.float() if residual is None else x + residual
        # Some scale what they send where nothing is remembered.
        zero = None if residual is None else torch.zeros_like(values)
        for i, compressor in enumerate(self._choices):
            payload = compressor.draft(values, residual=zero, key=Key(1, at, i))
            if payload.non_finite:
                return
            left = values.clone()
            payload.add_to(left, -1.0)
            self._own[at, i] = float(left.square().sum()), payload.num_bytes

    def report(self, measured: Measured) -> list[float]:
        numbers: list[float] = self._own.reshape(-1).tolist()
        self._own[:] = 0
        return numbers

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        self._all += np.mean(np.array(rows), 0).reshape(self._all.shape)
        self._looks += 1
        if EVERY * self._looks < self._policy.steps:
            return
        errors, sizes = self._all[..., 0], self._all[..., 1]
        budget = self._policy.error_budget * errors[:, 0].sum()
        self._chosen = solve(errors, sizes, budget)
        own = np.arange(len(self._tensors)), np.array(self._chosen, dtype=int)
        fewer = sizes[:, 0].sum() / max(1.0, sizes[own].sum())
        error = errors[own].sum() / max(errors[:, 0].sum(), 1e-300)
        self._journal.note(
            step + 1,
            "all",
            "a setting for each tensor",
            f"{fewer:.2f} times fewer bytes than {self._policy.uniform}, {error:.2f} of its error",
        )

    def explain(self) -> list[str]:
        if self._chosen is None:
            return [f"Profiling: all tensors are sent with {self._policy.uniform}."]
        found = [how(self._choices[i]) for i in self._chosen]
        return by_choice({t.name: w for t, w in zip(self._tensors, found, strict=True)})

    def state(self) -> list[float]:
        chosen = self._chosen or [-1] * len(self._tensors)
        known = (self._first or 0, self._looks, *chosen)
        return [*map(float, known), *self._all.reshape(-1).tolist()]

    def load(self, state: Sequence[float]) -> None:
        end = 2 + len(self._tensors)
        self._first, self._looks = int(state[0]) or None, int(state[1])
        chosen = [int(number) for number in state[2:end]]
        self._chosen = None if not chosen or chosen[0] < 0 else chosen
        self._all = np.array(state[end:]).reshape(self._all.shape)


def _with_payload(given: Any, field: str) -> LocalCompressor:
    compressor = inner_compressor("Solve", given, field)
    if not isinstance(compressor, LocalCompressor):
        raise ValueError(f"Solve: {field} must be a compressor with a payload, got {compressor}")
    return compressor


def solve(errors: Array, sizes: Array, budget: float) -> list[int]:
    """For each row the column that together have the smallest total size with total error within a
    budget. The first column of all rows is what is chosen if nothing better is found.

    Errors are rounded up to a grain of the budget, so what comes out never exceeds it.

    >>> errors = np.array([[4.0, 9.0, 1.0], [4.0, 5.0, 1.0]])
    >>> sizes = np.array([[10.0, 1.0, 30.0], [10.0, 9.0, 11.0]])
    >>> solve(errors, sizes, 10.0)
    [1, 2]
    """
    rows, columns = errors.shape
    if not budget > 0:
        return [0] * rows
    cost = np.minimum(np.ceil(errors / budget * GRAIN - 1e-9), GRAIN + 1).astype(np.int64)
    best: Array = np.zeros(GRAIN + 1)  # smallest size with at most that much error, so far
    taken = np.zeros((rows, GRAIN + 1), dtype=np.int64)
    for row in range(rows):
        found: Array = np.full((columns, GRAIN + 1), np.inf)
        for column in range(columns):
            used = cost[row, column]
            if used <= GRAIN:
                found[column, used:] = best[: GRAIN + 1 - used] + sizes[row, column]
        taken[row] = found.argmin(0)
        best = found.min(0)
    if not np.isfinite(best[GRAIN]):
        return [0] * rows
    chosen = [0] * rows
    left = GRAIN
    for row in reversed(range(rows)):
        chosen[row] = int(taken[row, left])
        left -= cost[row, chosen[row]]
    first = sizes[:, 0].sum()
    fits = errors[:, 0].sum() <= budget
    own = sizes[np.arange(rows), chosen].sum()
    return [0] * rows if fits and first < own else chosen
