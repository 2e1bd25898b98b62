"""A picture of a report: what it is called, what it says and how it is drawn."""

from collections.abc import Callable
from typing import Any, NamedTuple

from markupsafe import Markup

from thinwire.compare.document import Document
from thinwire.report.figure import COLORS, INK, new_figure, on_page, png, settle, svg
from thinwire.report.words import labels

# Baseline apart, the methods take these in turn; together they repeat only after 36. Blue and sky
# blue stand apart.
_COLORS = (COLORS[0], *COLORS[:0:-1])
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", "*", ">")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
WIDTH = 4.6  # in inches: letters of 8 points are still legible on a phone
TITLE = 0.3  # height of a title, in inches
_NAME = 25  # letters of a name in a legend: two of them fill its width


class Look(NamedTuple):
    """How a method is drawn, in all pictures alike."""

    label: str
    color: str
    marker: str
    line: Any
    width: float


class Series(NamedTuple):
    """A line of a chart: points (x, y) or (x, y, lowest, highest); None where y is not finite."""

    name: str
    look: Look
    diverged: bool
    points: list[list[float | None]]

    def to_json(self) -> dict[str, Any]:
        dash = "" if self.look.line == "-" else " ".join(f"{2 * n:g}" for n in self.look.line[1])
        return {
            "name": self.name,
            "color": on_page(self.look.color),
            "dash": dash,
            "width": self.look.width,
            "diverged": self.diverged,
            "points": self.points,
        }


class Chart(NamedTuple):
    """What a picture of lines shows, as charts.js draws it."""

    x: str
    y: str
    log: tuple[bool, bool]  # of x and y, at first
    series: list[Series]

    def to_json(self) -> dict[str, Any]:
        series = [each.to_json() for each in self.series]
        return {"x": self.x, "y": self.y, "log": list(self.log), "series": series}


class Picture(NamedTuple):
    name: str  # of the file, without .png
    title: str
    text: str  # what a reader should know to read it
    height: float  # in inches
    draw: Callable[[Any], None]  # onto a figure
    chart: "Chart | None" = None  # the same for a reader with JavaScript
    scale: str = ""  # of its axes, which that reader can change

    def render(self, mark: str) -> tuple[Markup, bytes]:
        """For a page, which has the title as a heading, and for a file, with its title.

        `mark` is "projected", or nothing.
        """
        figure = self._laid_out()
        inline = self._inline(figure, mark, self.name)
        # Laid out once, which takes longest: the title goes onto more paper above it.
        title = self.marked(mark)
        above = {"ha": "center", "va": "center", "fontsize": 9.5, "fontweight": "bold"}
        figure.text(0.5, 1 + TITLE / 2 / self.height, title, color=INK, **above)
        return inline, png(figure, title, WIDTH, self.height + TITLE)

    def inline(self, mark: str, name: str) -> Markup:
        """For a page alone, under a name that no other picture on it has."""
        return self._inline(self._laid_out(), mark, name)

    def _laid_out(self) -> Any:
        figure = new_figure(WIDTH, self.height)
        self.draw(figure)
        settle(figure, [])
        return figure

    def _inline(self, figure: Any, mark: str, name: str) -> Markup:
        label = f"{self.marked(mark)}. {self.text} {self.scale}".strip()
        return svg(figure, label, salt=name)

    def marked(self, mark: str) -> str:
        return f"{self.title} ({mark})" if mark else self.title


def looks(document: Document) -> dict[str, Look]:
    """A look for each method that ran; that of the baseline is the page's ink."""
    names = [method.name for method in document.methods if method.runs]
    short = labels(names, _NAME)
    result, i = {}, 0
    for name in names:
        if name == document.baseline:
            result[name] = Look(short[name], INK, "o", "-", 2.2)
            continue
        marker, line = _MARKERS[i % len(_MARKERS)], _LINES[i % len(_LINES)]
        result[name] = Look(short[name], _COLORS[i % len(_COLORS)], marker, line, 1.5)
        i += 1
    return result


def legend_rows(chosen: list[Look]) -> int:
    """Lines that a legend of these methods takes."""
    return -(-len(chosen) // _columns(chosen))


def add_legend(figure: Any, chosen: list[Look]) -> None:
    """Below the axes: what the lines of these methods look like."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=k.color, marker=k.marker, ls=k.line, lw=k.width, ms=5) for k in chosen
    ]
    figure.legend(
        handles,
        [look.label for look in chosen],
        loc="outside lower center",
        ncols=_columns(chosen),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=3.2,
        columnspacing=1,
    )


def _columns(chosen: list[Look]) -> int:
    return 3 if all(len(look.label) <= 11 for look in chosen) else 2
