"""The report as a folder: one self-contained page, its pictures as PNG, and the data."""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from thinwire.compare.document import Document, DocumentSettings, MethodResult, Spread
from thinwire.compare.settings import BASELINE, PARALLELISMS, distance_in_words
from thinwire.formatting import (
    NOTHING,
    in_words,
    one_line,
    plural,
    show_bytes,
    show_number,
    show_ratio,
)
from thinwire.report.charts import (
    final_metric,
    layers_error,
    layers_ratio,
    links,
    step_share,
    step_split,
    where_it_pays,
)
from thinwire.report.curves import loss_megabytes, loss_seconds, metric_seconds
from thinwire.report.figure import require_matplotlib, share_glyphs
from thinwire.report.picture import Picture
from thinwire.report.template import environment
from thinwire.report.words import day, digits, link

PAGE, DATA = "report.html", "data.json"
SECTIONS: dict[str, tuple[Callable[[Document], Picture | str], ...]] = {
    "Training loss": (loss_seconds, loss_megabytes),
    "Metric": (metric_seconds, final_metric),
    "Time per step": (step_split, step_share),
    "Layers": (layers_ratio, layers_error),
    "Links": (links,),
}
SHOWN = 200  # letters of an error that stand open on the page
# None means that nobody asked for it.
_NOT_SET = ("weights", "steps", "seconds", "target", "delay", "jitter", "loss", "inter")


class DrawnReport(NamedTuple):
    """A page, and PNGs by the names of their files, in the order of the page."""

    html: str
    pictures: dict[str, bytes]


class PageFigure(NamedTuple):
    """A picture on the page, under a name that no other has there."""

    name: str
    picture: Picture
    svg: Markup


class PageSection(NamedTuple):
    """A heading with its pictures, and why others are missing."""

    heading: str
    figures: list[PageFigure]
    missing: list[str]


class ResultCell(NamedTuple):
    """A cell of the table of results; `detail` stands below in small letters."""

    text: str
    detail: str = ""


class ResultRow(NamedTuple):
    """A method in the table of results."""

    parts: list[str]  # of its name, which may be broken between them on a narrow screen
    title: str
    is_baseline: bool
    cells: list[ResultCell]
    state: str


class FailedMethod(NamedTuple):
    """A method that failed: its error on one line, and the whole text if that says more."""

    name: str
    seeds: int  # that it finished
    line: str
    text: str
    output: str  # of the hosts that failed


def write(document: Document, folder: Path) -> list[Path]:
    """Write report.html, a PNG for each of its pictures and data.json; the paths, page first.

    The data, which took minutes to measure, is written first, and the page last, when all that it
    links to is there. A file is replaced as a whole or not at all. The same document gives the same
    bytes.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: a field of the document is not of its type; nothing is written.
    """
    require_matplotlib("a report")
    text = document.to_json()
    folder.mkdir(parents=True, exist_ok=True)
    data = put(folder / DATA, text.encode())
    drawn = draw(document)
    pictures = [put(folder / name, content) for name, content in drawn.pictures.items()]
    page = put(folder / PAGE, drawn.html.encode())
    return [page, data, *pictures]


def put(path: Path, content: bytes) -> Path:
    """Under a name of its own first: whoever looks sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def draw(document: Document) -> DrawnReport:
    """The page, and what is on it."""
    mark = mark_of(document)
    sections: list[PageSection] = []
    pictures: dict[str, bytes] = {}
    for heading, makers in SECTIONS.items():
        made = [maker(document) for maker in makers]
        figures = []
        for picture in (one for one in made if isinstance(one, Picture)):
            inline, pictures[f"{picture.name}.png"] = picture.render(mark)
            figures.append(PageFigure(picture.name, picture, inline))
        missing = [one for one in made if isinstance(one, str)]
        sections.append(PageSection(heading, figures, list(dict.fromkeys(missing))))
    settings = document.settings
    html = environment().get_template("comparison.html.j2").render(
        title=f"thinwire compare: {_where(settings)}",
        scope=scope_of(document),
        mark=mark,
        document=document,
        links=_links(settings) if settings.links else "the links asked for",
        headings=headings_of(settings),
        rows=[row_of(method, document) for method in document.methods],
        failed=failed_of(document),
        sections=sections,
        charts=charts_of(figure for section in sections for figure in section.figures),
        pays=where_it_pays(document),
        settings=_shown(settings.model_dump(exclude={"command"})),
        machine=_shown({**document.machine, **document.versions}),
        files=list(pictures),
    )  # fmt: skip
    return DrawnReport(share_glyphs(html), pictures)


def mark_of(document: Document) -> str:
    """What stands at each heading where seconds are not measured."""
    return "projected" if document.projected else ""


def charts_of(figures: Iterable[PageFigure]) -> Markup:
    """What charts.js draws, by the names of the figures.

    JSON that no browser takes for the end of the script, or for a comment.
    """
    charts = {
        figure.name: figure.picture.chart.to_json()
        for figure in figures
        if figure.picture.chart is not None
    }
    text = json.dumps(charts, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


# Words above the results


def _where(settings: DocumentSettings) -> str:
    over = f" with {_links(settings)}" if settings.links else ""
    workload = settings.workload.rsplit("/", 1)[-1]
    return f"{workload} on {plural(settings.hosts, 'host')}{over}"


def _links(settings: DocumentSettings) -> str:
    found = f"links of {in_words(dict.fromkeys(map(link, settings.links)))}"
    found += distance_in_words(settings.delay, settings.jitter, settings.loss)
    return f"{found} and {link(settings.inter)} between racks" if settings.inter else found


def scope_of(document: Document) -> str:
    settings = document.settings
    parts = [f"{settings.parameters:,} parameters"] if settings.parameters else []
    if settings.parallel != BASELINE:
        parts.append(f"sharded by {PARALLELISMS[settings.parallel].title}")
    if settings.weights:
        parts.append(f"parameters gathered by {settings.weights} with methods of thinwire")
    if settings.steps is not None:
        parts.append(plural(settings.steps, "step"))
    if settings.seconds is not None:
        parts.append(f"{show_number(settings.seconds)} seconds per run")
    parts += [plural(len(settings.seeds), "seed"), day(document.date)]
    return ", ".join(parts) + "."


# The table of results


def headings_of(settings: DocumentSettings) -> list[str]:
    final = "final training loss"
    if settings.metric is not None:
        better = "higher" if settings.higher_is_better else "lower"
        final = f"final {settings.metric} ({better} is better)"
    return [
        final,
        "ms per step",
        "faster per step",
        "seconds to within 2 % of the baseline's final loss",
        "sooner",
        "sent per step",
        "fewer bytes",
    ]


def row_of(method: MethodResult, document: Document) -> ResultRow:
    state = "failed" if method.error is not None else "diverged" if method.diverged else "ok"
    return ResultRow(
        parts=re.split(r"(?<=[|,])|(?=\+)", method.name),
        title=method.title if method.title != method.name else "",
        is_baseline=method.name == document.baseline,
        cells=_cells(method, document),
        state=state,
    )


def _cells(method: MethodResult, document: Document) -> list[ResultCell]:
    summary = method.summary
    if summary is None:
        return [ResultCell(NOTHING)] * len(headings_of(document.settings))
    final = summary.final_loss if document.settings.metric is None else summary.final_metric
    step, sent, reached = summary.step_seconds, summary.megabytes_a_step, summary.to_target
    target = NOTHING
    if document.target_loss is not None:
        target = digits(reached.seconds) if reached else "not reached"
    return [
        _spread(final),
        ResultCell(digits(None if step is None else 1e3 * step)),
        ResultCell(show_ratio(summary.step_speedup)),
        ResultCell(target),
        ResultCell(show_ratio(reached.speedup if reached else None)),
        ResultCell(show_bytes(None if sent is None else 1e6 * sent)),
        ResultCell(show_ratio(summary.fewer_bytes)),
    ]


def _spread(spread: Spread | None) -> ResultCell:
    if spread is None:
        return ResultCell(NOTHING)
    low, high = digits(spread.lowest), digits(spread.highest)
    return ResultCell(digits(spread.mean), f"{low} to {high}" if low != high else "")


def failed_of(document: Document) -> list[FailedMethod]:
    return [_failed(method) for method in document.methods if method.error is not None]


def _failed(method: MethodResult) -> FailedMethod:
    text = (method.error or "").strip()
    line = one_line(text)
    line = line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
    whole = text if line != text else ""
    return FailedMethod(method.name, len(method.runs), line, whole, (method.output or "").strip())


# Settings and machine, as lists


def _shown(values: dict[str, Any]) -> dict[str, str]:
    return {
        key.removesuffix("_bytes").replace("_", " "): _show(key, value)
        for key, value in values.items()
    }


def _show(key: str, value: Any) -> str:
    if value is None:
        return "not set" if key in _NOT_SET else "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key.endswith("_bytes"):
        return show_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
