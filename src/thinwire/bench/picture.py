"""Pictures of a report: how much is saved at which error, and how fast. A PNG, or a page.

The page has the tables below the pictures. It is light or dark as the reader's system is, shows one
panel above the other where the screen is narrow, and loads nothing from anywhere.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from thinwire.bench.measure import FAMILIES
from thinwire.bench.results import BenchReport, TensorResults, speed
from thinwire.bench.table import COLUMNS, LEGEND, machine_line, parts, title_of
from thinwire.formatting import show_decimals
from thinwire.report.figure import (
    COLORS,
    INK,
    PAPER,
    Finish,
    new_figure,
    settle,
    share_glyphs,
    style_axes,
    svg,
)
from thinwire.report.template import environment

MARKERS = ("o", "s", "^", "D", "P", "X")
SPEEDS = ("#0072B2", "#E69F00")  # encode, decode
WIDTH = 5.4  # of a panel, in inches
FEWEST = 6  # compressors that there is room for: one alone would have bars like walls
STEPS = (7, 11, 16, 23, 32, 44)  # distances of a label from its point, in typographical points
FAR = 3  # of these steps: from there on a line leads to the point
ANGLES = 16
Point = tuple[float, float]


def write_picture(report: BenchReport, path: Path) -> None:
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


def write_page(report: BenchReport, path: Path) -> None:
    """The page, self-contained."""
    text = (
        environment("thinwire.bench")
        .get_template("bench.html.j2")
        .render(
            title="thinwire bench",
            report=report,
            machine=machine_line(report),
            groups=[
                {
                    "title": title_of(group),
                    "pictures": [
                        _svg(draw_trade, group, "Compression ratio against relative error"),
                        _svg(draw_speed, group, "Throughput of encode and decode"),
                    ],
                    "rows": [[column.cell(row, group) for column in COLUMNS] for row in group.rows],
                }
                for group in report.groups
            ],
            headings=list(zip(parts(COLUMNS), (column.heading for column in COLUMNS), strict=True)),
            legend=LEGEND,
        )
    )
    path.write_text(share_glyphs(text), encoding="utf-8")


def _svg(
    draw: Callable[[Any, TensorResults], Finish | None], group: TensorResults, what: str
) -> Markup:
    figure = new_figure(WIDTH, height_of(group))
    finish = draw(figure.subplots(), group)
    settle(figure, [finish] if finish else [])
    return Markup(svg(figure, what, salt=f"{what}{group}"))


def height_of(group: TensorResults) -> float:
    """Of a panel, in inches: room for the bars of all compressors."""
    return max(4.9, 1.3 + 0.22 * len(group.rows))


def draw_trade(axes: Any, group: TensorResults) -> Finish:
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
    return lambda: place_labels(axes, points, texts, INK)


def draw_speed(axes: Any, group: TensorResults) -> None:
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
            axes.text(
                x + 0.008 * top, y, show_decimals(value), va="center", fontsize=6.5, color=INK
            )
    if line:
        axes.axvline(line, color=INK, lw=1, ls="--", zorder=0, label="one r += g")
    axes.set_yticks(range(len(names)), labels=names, fontsize=8)
    axes.set_ylim(max(len(names), FEWEST) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * top)
    _style(axes, "Speed", "GB of tensor per second")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _style(axes: Any, title: str, x: str, y: str = "") -> None:
    axes.set_title(title, fontsize=9.5, color=INK)
    style_axes(axes, x, y)
    below = {"loc": "upper center", "bbox_to_anchor": (0.45, 0), "borderaxespad": 5, "ncols": 3}
    axes.legend(**below, frameon=False, fontsize=8, labelcolor=INK, handletextpad=0.4)


# Labels beside points that cover neither points nor each other


def place_labels(
    axes: Any, points: list[Point], texts: list[str], color: str, **style: Any
) -> None:
    """Write each text near its point (in data coordinates), with a line to it where it is far.

    Each label in turn takes the nearest place among some hundred that costs least: area in common
    with points, with labels already there, and with what lies outside the axes.
    """
    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    pixel = figure.dpi / 72
    frame = LabelBox(*axes.get_window_extent(renderer).extents)
    at = [tuple(axes.transData.transform(point)) for point in points]
    taken = [LabelBox(x - 5 * pixel, y - 5 * pixel, x + 5 * pixel, y + 5 * pixel) for x, y in at]
    # The most crowded first: later ones have more room to give way.
    order = sorted(range(len(at)), key=lambda i: sum(math.dist(at[i], other) for other in at))
    style = {"textcoords": "offset points", "ha": "center", "va": "center", "color": color, **style}
    for i in order:
        note = axes.annotate(texts[i], points[i], (0, 0), fontsize=7.5, **style)
        size = note.get_window_extent(renderer)
        others = [point for point in at if point != at[i]]
        # A little more than it takes: letters are drawn on whole pixels.
        room = (size.width + pixel, size.height + pixel)
        dx, dy, box, far = _best(at[i], others, room, taken, frame, pixel)
        note.remove()
        line = {"arrowstyle": "-", "lw": 0.6, "color": color, "shrinkA": 0, "shrinkB": 4}
        arrow = {"arrowprops": line} if far else {}
        axes.annotate(texts[i], points[i], (dx, dy), fontsize=7.5, **style, **arrow)
        taken.append(box)


class LabelBox(NamedTuple):
    """A rectangle on the canvas, in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "LabelBox") -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return width * height if width > 0 and height > 0 else 0.0

    def distance(self, point: Point) -> float:
        """From a point to the nearest edge; zero inside."""
        dx = max(self.left - point[0], 0.0, point[0] - self.right)
        dy = max(self.bottom - point[1], 0.0, point[1] - self.top)
        return math.hypot(dx, dy)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def _best(
    point: Point,
    others: list[Point],
    size: tuple[float, float],
    taken: list[LabelBox],
    frame: LabelBox,
    pixel: float,
) -> tuple[float, float, LabelBox, bool]:
    """(dx, dy) from point to label's centre, in typographical points; its box; is it far."""
    width, height = size
    best: tuple[float, float, float, LabelBox, bool] | None = None
    for i, step in enumerate(STEPS):
        for turn in range(ANGLES):
            angle = 2 * math.pi * turn / ANGLES
            # The nearest edge of the label, not its centre, is `step` away.
            dx = math.cos(angle) * (step * pixel + width / 2)
            dy = math.sin(angle) * (step * pixel + height / 2)
            x, y = point[0] + dx, point[1] + dy
            box = LabelBox(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            cost = 4 * sum(box.overlap(other) for other in taken)
            if any(box.distance(other) < box.distance(point) for other in others):
                cost += box.area / 4  # a reader would take it for the other's label
            cost += 4 * (box.area - box.overlap(frame)) + 0.5 * step * pixel
            if best is None or cost < best[0]:
                best = (cost, dx / pixel, dy / pixel, box, i >= FAR)
    assert best is not None
    return best[1:]
