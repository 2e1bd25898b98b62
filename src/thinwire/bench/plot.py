"""Two panels a tensor: how much is saved at which error, and how fast."""

import math
from pathlib import Path
from typing import Any

from thinwire.bench.columns import machine_line, short, title_of
from thinwire.bench.family import FAMILIES
from thinwire.bench.labels import place
from thinwire.bench.result import Group, Report, speed
from thinwire.report.figure import (
    COLORS,
    INK,
    PAPER,
    Finish,
    new_figure,
    settle,
    style_axes,
)

MARKERS = ("o", "s", "^", "D", "P", "X")
SPEEDS = ("#0072B2", "#E69F00")  # encode, decode
WIDTH = 5.4  # of a panel, in inches
FEWEST = 6  # compressors that there is room for: one alone would have bars like walls


def height_of(group: Group) -> float:
    """Of a panel, in inches: room for the bars of all compressors."""
    return max(4.9, 1.3 + 0.22 * len(group.rows))


def write_picture(report: Report, path: Path) -> None:
    """All panels in one PNG, a row for each tensor."""
    rows = len(report.groups)
    heights = [height_of(group) + 0.4 for group in report.groups]
    figure = new_figure(2 * WIDTH, sum(heights) + 0.4)
    figure.suptitle(machine_line(report), fontsize=9, color=INK)
    last: list[Finish] = []
    for part, group in zip(
        figure.subfigures(rows, 1, squeeze=False, height_ratios=heights)[:, 0],
        report.groups,
        strict=True,
    ):
        part.suptitle(title_of(group), fontsize=10, fontweight="bold", color=INK)
        left, right = part.subplots(1, 2)
        last.append(draw_trade(left, group))
        draw_speed(right, group)
    settle(figure, last)
    figure.savefig(path, format="png", facecolor=PAPER)


def draw_trade(axes: Any, group: Group) -> Finish:
    """Compression ratio against relative error, both logarithmic; no error stands at the left."""
    rows = [row for row in group.rows if row.relative_error is not None]
    errors = [row.relative_error for row in rows if row.relative_error] or [1.0]
    decades = range(math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors))) + 1)
    edge = 10.0 ** (decades[0] - 0.7)
    points = [(row.relative_error or edge, row.compression_ratio) for row in rows]
    for family, color, marker in zip(FAMILIES, COLORS, MARKERS, strict=True):
        chosen = [point for point, row in zip(points, rows, strict=True) if row.family == family]
        for point in chosen:
            label = family if point is chosen[0] else ""
            axes.plot(*point, marker, color=color, ms=8, mec=PAPER, mew=0.6, label=label)
    axes.set(xscale="log", yscale="log")
    axes.set_xlim(edge / 4, max(10.0 ** decades[-1], 2 * max(errors)))
    axes.set_ylim(0.5, 3 * max([10.0, *(ratio for _, ratio in points)]))
    exact = any(error == edge for error, _ in points)
    axes.set_xticks(
        [*([edge] if exact else []), *(10.0**d for d in decades)],
        labels=[*(["0"] if exact else []), *(f"{10.0**d:g}" for d in decades)],
    )
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(which="minor", labelleft=False)
    if exact:
        axes.axvline(edge, color=INK, lw=0.8, ls=":", alpha=0.6, zorder=0)
    across = "relative error ||x - y|| / ||x||"
    _style(axes, "What is saved, at which error", across, "compression ratio")
    texts = [row.compressor for row in rows]
    return lambda: place(axes, points, texts, INK)


def draw_speed(axes: Any, group: Group) -> None:
    """Throughput of encode and decode, with that of one r += g as a line."""
    names = [row.compressor for row in group.rows]
    bars = {
        name: [speed(getattr(row, name), group.num_bytes) for row in group.rows]
        for name in ("encode", "decode")
    }
    line = speed(group.baseline, group.num_bytes) or 0.0
    top = max([line, *(value or 0.0 for values in bars.values() for value in values)]) or 1.0
    for shift, color, (name, values) in zip((-0.2, 0.2), SPEEDS, bars.items(), strict=True):
        places = [i + shift for i in range(len(names))]
        axes.barh(places, [value or 0 for value in values], 0.36, color=color, label=name)
        for y, value in zip(places, values, strict=True):
            x = value or 0.0
            # Beyond the line, where it would run through the digits.
            x = line if 0 <= line - x < 0.075 * top else x
            axes.text(x + 0.008 * top, y, short(value), va="center", fontsize=6.5, color=INK)
    if line:
        axes.axvline(line, color=INK, lw=1, ls="--", zorder=0, label="one r += g")
    axes.set_yticks(range(len(names)), labels=names, fontsize=8)
    axes.set_ylim(max(len(names), FEWEST) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * top)
    _style(axes, "Speed", "GB of tensor a second")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _style(axes: Any, title: str, x: str, y: str = "") -> None:
    axes.set_title(title, fontsize=9.5, color=INK)
    style_axes(axes, x, y)
    below = {"loc": "upper center", "bbox_to_anchor": (0.45, 0), "borderaxespad": 5, "ncols": 3}
    axes.legend(**below, frameon=False, fontsize=8, labelcolor=INK, handletextpad=0.4)
