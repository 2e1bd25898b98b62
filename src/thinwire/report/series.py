"""Curves over training: smoothed, averaged over seeds, thinned for drawing."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.compare.analysis import window_of

Array = NDArray[np.float64]
POINTS = 240  # of a curve: more than a page has pixels between its bends


class Curve(NamedTuple):
    """A mean over seeds with the lowest and highest; NaN where a seed has no finite value."""

    x: Array
    middle: Array
    low: Array
    high: Array

    def at(self, chosen: Any) -> "Curve":
        return Curve(*(values[chosen] for values in self))


def window(document: dict[str, Any]) -> int:
    """Steps of the trailing mean over losses, the same for all methods: as results are taken."""
    steps = max((len(r["losses"]) for m in document["methods"] for r in m["runs"]), default=0)
    return window_of(steps)


def loss_curve(runs: list[dict[str, Any]], axis: str, window: int) -> Curve | None:
    """Training loss over `axis` ("seconds" or "megabytes"), step by step.

    Ends with the shortest run; runs of less than half the longest were cut off and do not count.
    """
    longest = max((len(run["losses"]) for run in runs), default=0)
    runs = [run for run in runs if len(run["losses"]) >= max(1, longest / 2)]
    if not runs:
        return None
    steps = min(len(run["losses"]) for run in runs)
    x = np.array([run[axis][:steps] for run in runs], dtype=np.float64).mean(axis=0)
    losses = [trailing_mean(_array(run["losses"][:steps]), window) for run in runs]
    return _over_seeds(x, np.stack(losses))


def metric_curve(runs: list[dict[str, Any]]) -> Curve | None:
    """The metric over seconds, at those steps at which all seeds were evaluated."""
    found = [{e["step"]: e for e in run["evaluations"]} for run in runs if run["evaluations"]]
    if not found:
        return None
    steps = sorted(set(found[0]).intersection(*found))
    if not steps:
        return None
    x = np.array([[one[step]["seconds"] for step in steps] for one in found], dtype=np.float64)
    values = [_array([one[step]["value"] for step in steps]) for one in found]
    return _over_seeds(x.mean(axis=0), np.stack(values))


def trailing_mean(values: Array, window: int) -> Array:
    """The mean of each value and those before it; NaN stays NaN and is left out of later means."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means = (sums[ends] - sums[starts]) / np.maximum(counts[ends] - counts[starts], 1)
    return np.where(known, means, np.nan)


def thin(curve: Curve, log: bool) -> Curve:
    """At most POINTS of a curve, even on its axis; the first and the last stay."""
    if log:
        curve = curve.at(curve.x > 0)
    if len(curve.x) <= POINTS:
        return curve
    x = np.log(curve.x) if log else curve.x
    chosen = np.searchsorted(x, np.linspace(x[0], x[-1], POINTS))
    # A step may be wider than its share of the axis: then it is chosen more than once.
    return curve.at(np.unique(np.clip([0, *chosen, len(x) - 1], 0, len(x) - 1)))


def _over_seeds(x: Array, values: Array) -> Curve:
    return Curve(x, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _array(values: list[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
