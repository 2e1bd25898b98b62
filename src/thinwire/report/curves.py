"""Loss and metric over the course of training: smoothed, averaged over seeds, drawn."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.compare.analysis import window_of
from thinwire.compare.document import Document, TrainingRun
from thinwire.report.figure import log_axis, style_axes
from thinwire.report.picture import Chart, Look, Picture, Series, add_legend, legend_rows, looks

Array = NDArray[np.float64]
Axis = Literal["seconds", "megabytes"]
POINTS = 240  # of a curve: more than a page has pixels between its bends


class Curve(NamedTuple):
    """A mean over seeds with the lowest and highest; NaN where a seed has no finite value."""

    x: Array
    middle: Array
    low: Array
    high: Array

    def at(self, chosen: Any) -> "Curve":
        return Curve(*(values[chosen] for values in self))


def window(document: Document) -> int:
    """Steps of the trailing mean over losses, the same for all methods: as results are taken."""
    steps = max((len(r.losses) for m in document.methods for r in m.runs), default=0)
    return window_of(steps)


def loss_curve(runs: list[TrainingRun], axis: Axis, window: int) -> Curve | None:
    """Training loss over `axis` ("seconds" or "megabytes"), step by step.

    Ends with the shortest run; runs of less than half the longest were cut off and do not count.
    """
    longest = max((len(run.losses) for run in runs), default=0)
    runs = [run for run in runs if len(run.losses) >= max(1, longest / 2)]
    if not runs:
        return None
    steps = min(len(run.losses) for run in runs)
    x = np.array([getattr(run, axis)[:steps] for run in runs], dtype=np.float64).mean(axis=0)
    losses = [trailing_mean(_array(run.losses[:steps]), window) for run in runs]
    return _over_seeds(x, np.stack(losses))


def metric_curve(runs: list[TrainingRun]) -> Curve | None:
    """The metric over seconds, at those steps at which all seeds were evaluated."""
    found = [{e.step: e for e in run.evaluations} for run in runs if run.evaluations]
    if not found:
        return None
    steps = sorted(set(found[0]).intersection(*found))
    if not steps:
        return None
    x = np.array([[one[step].seconds for step in steps] for one in found], dtype=np.float64)
    values = [_array([one[step].value for step in steps]) for one in found]
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


# The pictures

WIDE = 10  # methods that differ by this factor need a logarithmic axis
STEEP = 30  # and so do values
MARKS = 7  # markers on a curve


def loss_seconds(document: Document) -> Picture | str:
    """Training loss against time, or why there is no picture of it."""
    return _loss(document, "seconds", "seconds of training")


def loss_megabytes(document: Document) -> Picture | str:
    """Training loss against what a host has sent, or why there is no picture of it."""
    return _loss(document, "megabytes", "megabytes sent by a host")


def metric_seconds(document: Document) -> Picture | str:
    """The metric against time, or why there is no picture of it."""
    metric = document.settings.metric
    if metric is None:
        return "The workload reported no metric."
    curves = _curves(document, metric_curve)
    if not curves:
        return "No method was evaluated during training."
    text = _Band(document).text("Each marker is an evaluation.")
    return _picture(
        document,
        curves,
        ("metric-seconds", "Metric over time", text),
        ("seconds of training", metric),
        marks=None,
    )


def _loss(document: Document, axis: Axis, x: str) -> Picture | str:
    steps = window(document)
    curves = _curves(document, lambda runs: loss_curve(runs, axis, steps))
    if not curves:
        return "No method took a step."
    if not any(np.any(curve.x > 0) for curve in curves.values()):
        return f"All {axis} are zero: there is nothing to draw the loss against."
    smooth = f"The loss is a trailing mean of {steps} steps." if steps > 1 else ""
    text = _Band(document).text(smooth)
    title = "Training loss over time" if axis == "seconds" else "Training loss over bytes sent"
    name = f"loss-{axis}"
    return _picture(document, curves, (name, title, text), (x, "training loss"), marks=MARKS)


class _Band:
    """What a curve with its band is, in words."""

    def __init__(self, document: Document) -> None:
        self.seeds = max((len(method.runs) for method in document.methods), default=0)

    def text(self, more: str) -> str:
        line = "Lines are means over seeds, bands reach from the lowest to the highest of them."
        return " ".join(filter(None, [line if self.seeds > 1 else "One seed.", more]))


def _curves(
    document: Document, curve_of: Callable[[list[TrainingRun]], Curve | None]
) -> dict[str, Curve]:
    found = {method.name: curve_of(method.runs) for method in document.methods}
    return {name: curve for name, curve in found.items() if curve is not None}


def _picture(
    document: Document,
    curves: dict[str, Curve],
    about: tuple[str, str, str],
    axes_names: tuple[str, str],
    marks: int | None,
) -> Picture:
    name, title, text = about
    look = looks(document)
    log = _is_wide([float(curve.x[-1]) for curve in curves.values()], WIDE)
    scale = "The horizontal axis is logarithmic." if log else ""
    low, high, outside = _limits(document, curves)
    if outside:
        text += " The vertical axis is fitted to the methods that did not diverge."
    steep = low > 0 and _is_wide([low, high], STEEP)
    thinned = {name: thin(curve, log) for name, curve in curves.items()}
    chosen = [look[name] for name in curves]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, (name, curve) in enumerate(thinned.items()):
            _line(axes, curve, look[name], marks, shift=i / len(thinned))
        if log:
            log_axis(axes, "x")
        elif not any(np.any(curve.x > 0) for curve in thinned.values()):
            axes.set_xlim(-1, 1)
        else:
            axes.set_xlim(left=0)
        axes.set_ylim(low, high)
        if steep:
            log_axis(axes, "y")
        style_axes(axes, *axes_names)
        add_legend(figure, chosen)

    diverged = {method.name for method in document.methods if method.diverged}
    series = [
        Series(name, look[name], name in diverged, _points(curve))
        for name, curve in thinned.items()
    ]
    chart = Chart(*axes_names, (log, steep), series)
    return Picture(name, title, text, 3.4 + 0.19 * legend_rows(chosen), draw, chart, scale)


def _points(curve: Curve) -> list[list[float | None]]:
    """Five digits: more than a screen has pixels. Without a band where there is one seed."""
    banded = bool(np.any(curve.high > curve.low))
    columns = curve if banded else (curve.x, curve.middle)
    return [[_digits(value) for value in row] for row in zip(*columns, strict=True)]


def _digits(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _line(axes: Any, curve: Curve, look: Look, marks: int | None, shift: float) -> None:
    if not len(curve.x):
        return
    every: Any = 1
    if marks is not None and len(curve.x) > marks:
        stride = len(curve.x) // marks
        every = (int(shift * stride), stride)
    if np.any(curve.high > curve.low):
        axes.fill_between(curve.x, curve.low, curve.high, color=look.color, alpha=0.11, lw=0)
    axes.plot(
        curve.x,
        curve.middle,
        color=look.color,
        ls=look.line,
        lw=look.width,
        marker=look.marker,
        ms=4.5,
        markevery=every,
    )


def _limits(document: Document, curves: dict[str, Curve]) -> tuple[float, float, bool]:
    """Of the vertical axis, from methods that did not diverge; may others lie outside."""
    diverged = {m.name for m in document.methods if m.diverged and m.name in curves}
    steady = [curve for name, curve in curves.items() if name not in diverged]
    outside = bool(steady) and bool(diverged)
    steady = steady or list(curves.values())
    values = np.concatenate([np.concatenate([c.low, c.high]) for c in steady])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0, outside
    low, high = float(values.min()), float(values.max())
    if low > 0 and _is_wide([low, high], STEEP):
        return low / 1.2, high * 1.2, outside
    edge = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return low - edge, high + edge, outside


def _is_wide(values: list[float], factor: float) -> bool:
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) >= factor * min(positive)
