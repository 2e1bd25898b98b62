"""What all pictures share: ink and paper, the look of axes, and the way onto a page or into a file.

The palette is that of Okabe and Ito, which colour-blind people can tell apart; what differs in
colour differs in marker, line or hatching too. Without pyplot, so without its global state.
"""

import io
import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup, escape

from thinwire.errors import MissingExtraError

COLORS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
# Of all that is not data; a page puts its own colours in the place of these.
INK, PAPER = "#3b3a39", "#fefefd"
_ON_PAGE = {INK: "currentColor", PAPER: "var(--paper)", "#0072b2": "var(--blue)"}

Finish = Callable[[], None]  # to be called when the layout has settled

_NUMBER = re.compile(r"-?\d+\.\d+")
_GLYPH = re.compile(r'<path id="(DejaVu[^"]*)"[^>]*/>\n?')


def require_matplotlib(what: str) -> None:
    """Raise MissingExtraError if matplotlib, which `what` needs, is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtraError("matplotlib", "plot", what) from None


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this many inches."""
    require_matplotlib("drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=150)
    FigureCanvasAgg(figure)
    return figure


def settle(figure: Any, last: list[Finish]) -> None:
    """Lay the figure out, then do what depends on it.

    Once and here: a figure with a layout engine of its own is laid out, and drawn for that, again
    whenever it is saved.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ConstrainedLayoutEngine().execute(figure)
    for finish in last:
        finish()


def style_axes(axes: Any, x: str, y: str = "") -> None:
    """Axes that leave the eye to the data. The labels are plain text: a "$" begins no formula."""
    axes.set_xlabel(x, fontsize=9, color=INK, parse_math=False)
    axes.set_ylabel(y, fontsize=9, color=INK, parse_math=False)
    axes.tick_params(which="both", colors=INK, labelsize=8)
    axes.patch.set_alpha(0)
    axes.grid(visible=True, color=INK, alpha=0.15, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)


def log_axis(axes: Any, which: str) -> None:
    """A logarithmic axis with plain numbers, several of them where it spans few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    low, high = getattr(axes, f"get_{which}lim")()
    axis = getattr(axes, f"{which}axis")
    few = high / low < 1500
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def on_page(color: str) -> str:
    """A colour in the words of a page, which may be dark."""
    return _ON_PAGE.get(color, _ON_PAGE.get(color.lower(), color))


def svg(figure: Any, label: str, salt: str) -> Markup:
    """The figure as an <svg> element whose ink is the colour of the text around it.

    Args:
        label: what a screen reader says.
        salt: makes names of clip paths the same in every run, and different between figures.
    """
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Letters as outlines: labels keep the width that they were placed for.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)  # what letters are drawn, once more
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # named after figure and axes: not unique here
    text = re.sub(r"\s*\n\s*", "\n", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    # A hundredth of a point is enough for a path, and makes a page of curves half as large.
    text = re.sub(r' d="[^"]*"', lambda path: _NUMBER.sub(_hundredths, path[0]), text)
    for color, name in _ON_PAGE.items():
        text = text.replace(color, name)
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))


def share_glyphs(page: str) -> str:
    """Keep the outline of each letter once: all pictures of a page find it by its name."""
    seen: set[str] = set()

    def keep_first(glyph: re.Match[str]) -> str:
        if glyph[1] in seen:
            return ""
        seen.add(glyph[1])
        return glyph[0]

    return _GLYPH.sub(keep_first, page)


def png(figure: Any, title: str, width: float, height: float) -> bytes:
    """The figure on paper of this many inches, with the title in the file's metadata."""
    from matplotlib.transforms import Bbox

    buffer = io.BytesIO()
    paper = Bbox.from_bounds(0, 0, width, height)
    metadata = {"Title": title, "Software": None}
    figure.savefig(buffer, format="png", facecolor=PAPER, bbox_inches=paper, metadata=metadata)
    return buffer.getvalue()


def _hundredths(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
