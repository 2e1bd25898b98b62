"""Pictures of what training came to: final metric, parts of a step, layers, rates of the links."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from thinwire.compare.document import Document
from thinwire.formatting import in_words, show_number, show_rate
from thinwire.lab import parse_rate
from thinwire.report.figure import INK, PAPER, log_axis, style_axes
from thinwire.report.picture import WIDTH, Chart, Picture, Series, add_legend, legend_rows, looks
from thinwire.report.words import digits, labels

# Methods as rows

# Part of a step: colour, hatching, colour of the digits on it.
PARTS = {
    "compute": ("#999999", "", "#000000"),
    "encode": ("#E69F00", "////", "#000000"),
    "network": ("#0072B2", "", "#ffffff"),
    "decode": ("#009E73", "\\\\\\\\", "#000000"),
}
LEGIBLE = 0.09  # the share of a step that has room for its digits


def final_metric(document: Document) -> Picture | str:
    """The metric at the end, seed by seed, or why there is no picture of it."""
    settings = document.settings
    values: dict[str, list[float]] = {
        method.name: [r.final_metric for r in method.runs if r.final_metric is not None]
        for method in document.methods
    }
    values = {name: found for name, found in values.items() if found}
    metric = settings.metric
    if metric is None or not values:
        return "No final metric was reported."
    diverged = {method.name for method in document.methods if method.diverged}
    inside = [v for name, found in values.items() if name not in diverged for v in found]
    inside = inside or [v for found in values.values() for v in found]
    low, high = min(inside), max(inside)
    edge = 0.12 * (high - low) or 0.02 * abs(high) or 1.0
    low, high = low - edge, high + edge
    baseline = values.get(document.baseline or "")
    better = "Right is better." if settings.higher_is_better else "Left is better."
    text = "One marker per seed, a bar for their mean, which stands at the right too. "
    text += "The dashed line is the baseline's mean. " if baseline else ""
    text += f"{better} The axis is cut to the data and does not begin at zero."
    look = looks(document)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, (name, found) in enumerate(values.items()):
            mean = float(np.mean(found))
            color, marker = look[name].color, look[name].marker
            if low <= mean <= high:
                axes.plot([mean, mean], [i - 0.33, i + 0.33], color=color, lw=2.5, alpha=0.9)
                axes.plot(found, [i] * len(found), marker, color=color, ms=6, mec=PAPER, mew=0.6)
            else:
                x, arrow = (low, "◂") if mean < low else (high, "▸")
                side = "left" if mean < low else "right"
                words = f" {arrow} outside "
                axes.text(x, i, words, ha=side, va="center", fontsize=8, color=color)
            end = axes.get_yaxis_transform()
            axes.text(1.02, i, digits(mean), transform=end, va="center", fontsize=8, color=INK)
        if baseline:
            axes.axvline(float(np.mean(baseline)), color=INK, lw=1, ls="--", zorder=0)
        axes.set_xlim(low, high)
        _rows(axes, [look[name].label for name in values])
        style_axes(axes, metric)
        axes.grid(visible=False, axis="y")

    return Picture("final-metric", "Final metric", text, 0.8 + 0.31 * max(4, len(values)), draw)


def step_split(document: Document) -> Picture | str:
    """Seconds of a step, part by part, or why there is no picture of them."""
    return _split(document, share=False)


def step_share(document: Document) -> Picture | str:
    """The parts of a step in percent, or why there is no picture of them."""
    return _split(document, share=True)


def _split(document: Document, share: bool) -> Picture | str:
    splits = {
        method.name: {part: _mean([getattr(r.split, part) for r in method.runs]) for part in PARTS}
        for method in document.methods
        if method.runs
    }
    if not splits:
        return "No method took a step."
    look = looks(document)
    totals = {name: sum(split.values()) for name, split in splits.items()}
    longest = max(totals.values())
    unit, factor = ("s", 1.0) if longest >= 10 else ("ms", 1e3)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        left = np.zeros(len(splits))
        whole = np.array([(totals[n] or 1.0) / 100 if share else 1 / factor for n in splits])
        for part, (color, hatch, ink) in PARTS.items():
            widths = np.array([split[part] for split in splits.values()]) / whole
            rows = range(len(splits))
            style = {"color": color, "hatch": hatch, "edgecolor": PAPER, "lw": 0.6}
            axes.barh(rows, widths, 0.72, left=left, label=part, **style)
            for i, width in enumerate(widths):
                if share and width >= 100 * LEGIBLE:
                    place = left[i] + width / 2, i
                    around = {"boxstyle": "round,pad=0.15", "fc": color, "ec": "none"}
                    text = {"fontsize": 7.5, "color": ink, "bbox": around if hatch else None}
                    axes.text(*place, f"{width:.0f} %", ha="center", va="center", **text)
            left = left + widths
        if not share:
            for i, total in enumerate(left):
                axes.text(total, i, f" {digits(total)}", va="center", fontsize=8, color=INK)
        axes.set_xlim(0, 100 if share else 1.13 * (longest * factor or 1.0))
        _rows(axes, [look[name].label for name in splits])
        style_axes(axes, "percent of a step" if share else f"{unit} per step")
        axes.grid(visible=False, axis="y")
        figure.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(PARTS),
            frameon=False,
            fontsize=8,
            labelcolor=INK,
        )

    height = 1.0 + 0.31 * max(4, len(splits))
    if share:
        text = f"The same in percent; parts below {100 * LEGIBLE:.0f} % bear no number."
        return Picture("step-share", "Share of each part of a step", text, height, draw)
    text = "A typical step, as in the table, divided as all steps are on average; means over seeds."
    return Picture("step-split", "Where the time of a step goes", text, height, draw)


def _rows(axes: Any, names: list[str]) -> None:
    """Methods from top to bottom; few of them do not fill the picture."""
    axes.set_yticks(range(len(names)), labels=names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(len(names), 4) - 0.4, -0.6)


# Layer by layer

MOST = 20  # layers in a picture
NAME = 20  # letters of a name
LEVEL = 5  # more methods than this are named upright
NONE = "No method reported its tensors."


def layers_ratio(document: Document) -> Picture | str:
    """Compression ratio of each layer, or why there is no picture of it."""
    text = "Bytes of the gradient / bytes sent for it; brighter is smaller."
    return _heat(document, "ratio", ("layers-ratio", "Compression ratio by layer", text))


def layers_error(document: Document) -> Picture | str:
    """Relative error of each layer, or why there is no picture of it."""
    text = "||x - y|| / ||x|| of what was sent in a step, before feedback makes up for it; "
    text += "brighter is worse."
    about = ("layers-error", "Relative error by layer", text)
    return _heat(document, "relative_error", about)


def _heat(document: Document, field: str, about: tuple[str, str, str]) -> Picture | str:
    sizes: dict[str, int] = {}
    found: dict[str, dict[str, list[float]]] = {}
    for method in document.methods:
        for tensor in (tensor for run in method.runs for tensor in run.tensors):
            sizes[tensor.name] = max(tensor.numel, sizes.get(tensor.name, 0))
            values = found.setdefault(method.name, {}).setdefault(tensor.name, [])
            value = getattr(tensor, field)
            if value is not None:
                values.append(value)
    if not sizes:
        return NONE
    # Python's sort is stable: layers of one size stay in the model's order.
    rows = sorted(sizes, key=lambda name: -sizes[name])[:MOST]
    columns = list(found)
    means = [[_mean(found[method].get(row, [])) for method in columns] for row in rows]
    cells = np.array(means, dtype=np.float64)
    if not np.isfinite(cells).any():
        return f"No method reported a {field.replace('_', ' ')} by layer."
    name, title, text = about
    if len(sizes) > MOST:
        text += f" The {MOST} largest of {len(sizes)} tensors, largest first."

    if not np.isfinite(cells).all():
        text += " Blank: not measured."
    prefix = _prefix(rows)
    if prefix:
        text += f" All names begin with {prefix}…"

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _draw_cells(axes, cells, log=field == "ratio")
        short = labels(columns, NAME)
        turned = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
        if len(columns) > LEVEL:
            turned = {"rotation": 90, "ha": "center"}
        axes.set_xticks(range(len(columns)), labels=[short[c] for c in columns], **turned)
        names = labels([row.removeprefix(prefix) for row in rows], NAME)
        axes.set_yticks(
            range(len(rows)),
            labels=[f"{names[row.removeprefix(prefix)]}  {_size(sizes[row])}" for row in rows],
        )
        style_axes(axes, "")
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)

    return Picture(name, title, text, 1.1 + 0.24 * max(4, len(rows)), draw)


def _draw_cells(axes: Any, cells: Any, log: bool) -> None:
    import matplotlib
    from matplotlib.colors import LogNorm, Normalize

    known = cells[np.isfinite(cells) & ((cells > 0) | (not log))]
    low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)
    norm = LogNorm(low, max(high, 1.01 * low)) if log else Normalize(0.0, max(1.0, high))
    map_ = matplotlib.colormaps["cividis"]
    axes.set_xlim(-0.5, cells.shape[1] - 0.5)
    axes.set_ylim(cells.shape[0] - 0.5, -0.5)
    # About 0.62 of the width is left for cells, and four digits are 2.7 times as wide as high.
    size = min(7.5, 72 * WIDTH * 0.62 / cells.shape[1] / 2.7)
    for (i, j), value in np.ndenumerate(cells):
        if not np.isfinite(value):
            continue
        color = map_(norm(max(value, low) if log else value))
        axes.add_patch(
            matplotlib.patches.Rectangle((j - 0.5, i - 0.5), 1, 1, fc=color, ec=PAPER, lw=1)
        )
        # Luminance of sRGB, roughly: cividis grows evenly in it.
        dark = 0.2126 * color[0] + 0.7152 * color[1] + 0.0722 * color[2] < 0.5
        ink = "#ffffff" if dark else "#000000"
        note = axes.text(j, i, _cell(value), ha="center", va="center", fontsize=size, color=ink)
        note.set_in_layout(False)  # it is inside, and hundreds of them take their time


def _cell(value: float) -> str:
    """At most four letters: columns are narrow."""
    if value >= 9999.5:
        return _size(value)
    return f"{value:.{0 if value >= 9.95 else 1 if value >= 0.995 else 2}f}"


def _size(number: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.{0 if number >= 9.95 * factor else 1}f}{unit}"
    return f"{number:.0f}"


def _prefix(names: list[str]) -> str:
    """What all names begin with, up to a dot, where it takes the room of what tells them apart."""
    if len(names) < 2 or max(map(len, names)) <= NAME:
        return ""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return "".join(f"{level[0]}." for level in common)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


# By the rate of the links


class RatePoint(NamedTuple):
    bits: int
    seconds: dict[str, float]  # of a step, by method


def links(document: Document) -> Picture | str:
    """Step times at the rates of the sweep, or why there is no picture of them."""
    points = _points(document)
    if len(points) < 2:
        return "Only one rate was tried."
    known = {name for point in points for name in point.seconds}
    look = looks(document)
    names = [name for name in look if name in known]
    if not names:
        return "No step times at other rates are known."
    chosen = [look[name] for name in names]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name in names:
            here = [p for p in points if name in p.seconds]
            x, y = [p.bits / 1e6 for p in here], [p.seconds[name] for p in here]
            kind = look[name]
            style = {"color": kind.color, "ls": kind.line, "lw": kind.width}
            axes.plot(x, y, marker=kind.marker, ms=5.5, **style)
        log_axis(axes, "x")
        log_axis(axes, "y")
        axes.set_xticks([p.bits / 1e6 for p in points], labels=[show_rate(p.bits) for p in points])
        axes.set_xticks([], minor=True)
        style_axes(axes, "rate of the links", "seconds per step")
        add_legend(figure, chosen)

    text, scale = "A method pays where it is below the baseline.", "Both axes are logarithmic."
    if len(points) < len(document.sweep):
        text += " Links that are no single rate are left out."
    height = 3.4 + 0.19 * legend_rows(chosen)
    series = [
        Series(
            name,
            look[name],
            False,
            [[p.bits / 1e6, p.seconds[name]] for p in points if name in p.seconds],
        )
        for name in names
    ]
    chart = Chart("rate of the links, Mbit/s", "seconds per step", (True, True), series)
    return Picture("links", "Step time by rate of the links", text, height, draw, chart, scale)


def where_it_pays(document: Document) -> list[tuple[str, str]]:
    """Each method's name and a sentence on the rates at which it beats the baseline's step."""
    points, baseline = _points(document), document.baseline or ""
    sentences = []
    for method in document.methods:
        name = method.name
        here = [p for p in points if name in p.seconds and baseline in p.seconds]
        if name != baseline and len(here) > 1:
            gains = [(p, p.seconds[baseline] / p.seconds[name]) for p in here]
            sentences.append((name, _sentence(gains)))
    return sentences


def _sentence(gains: list[tuple[RatePoint, float]]) -> str:
    pays = [gain > 1 for _, gain in gains]
    (first, slow), (last, fast) = gains[0], gains[-1]
    ends = f"{_times(slow)} at {show_rate(first.bits)}, {_times(fast)} at {show_rate(last.bits)}"
    if all(pays):
        return f"pays at all rates tried: {ends}."
    if not any(pays):
        return f"pays at none of the rates tried: {ends}."
    turn = pays.index(False)
    if turn and not any(pays[turn:]):
        (a, gain_a), (b, gain_b) = gains[turn - 1], gains[turn]
        # The gain as a power of the rate between the two: straight on logarithmic axes.
        part = math.log(gain_a) / (math.log(gain_a) - math.log(gain_b))
        even = math.exp(math.log(a.bits) + part * math.log(b.bits / a.bits))
        return f"stops paying at about {show_rate(even)}: {ends}."
    good = in_words(show_rate(p.bits) for p, gain in gains if gain > 1)
    return f"pays at {good} and not at the other rates tried: {ends}."


def _times(factor: float) -> str:
    """With more digits than a ratio has elsewhere: these may be close to 1."""
    return f"{show_number(factor)}x"


def _points(document: Document) -> list[RatePoint]:
    """The sweep by rising rate; a link that is no rate has no place on the axis."""
    known = {method.name for method in document.methods}
    points: dict[int, RatePoint] = {}
    for entry in document.sweep:
        try:
            bits = parse_rate(entry.link)
        except ValueError:
            continue
        seconds = {n: s for n, s in entry.step_seconds.items() if n in known and s and s > 0}
        points[bits] = RatePoint(bits, seconds)
    return [points[bits] for bits in sorted(points)]
