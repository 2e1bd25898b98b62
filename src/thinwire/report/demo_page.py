"""The page of the demo: what two comparisons came to, and the way to their reports."""

from pathlib import Path
from typing import NamedTuple

from thinwire.compare.document import Document
from thinwire.report.figure import share_glyphs
from thinwire.report.page import (
    PAGE,
    SECTIONS,
    FailedMethod,
    PageFigure,
    ResultRow,
    charts_of,
    failed_of,
    headings_of,
    mark_of,
    put,
    row_of,
    scope_of,
)
from thinwire.report.picture import Picture
from thinwire.report.template import environment

COLUMNS = (0, 1, 2, 3, 4, 6)  # of the table of results: what fits a phone


class DemoPart(NamedTuple):
    """A model that was trained: what it is, the folder of its report, and what came out."""

    title: str
    folder: str
    document: Document


class ShownDemo(NamedTuple):
    """The same as the page shows it."""

    title: str
    verdict: str
    scope: str
    mark: str
    headings: list[str]
    rows: list[ResultRow]
    failed: list[FailedMethod]
    figures: list[PageFigure]
    report: str


def write_demo(parts: list[DemoPart], folder: Path) -> Path:
    """Write the page, self-contained but for the links to the reports beside it."""
    shown = [_shown(part) for part in parts]
    charts = charts_of(figure for part in shown for figure in part.figures)
    template = environment().get_template("demo.html.j2")
    html = template.render(title="thinwire demo", parts=shown, charts=charts)
    return put(folder / PAGE, share_glyphs(html).encode())


def _shown(part: DemoPart) -> ShownDemo:
    document = part.document
    headings = headings_of(document.settings)
    rows = [row_of(method, document) for method in document.methods]
    return ShownDemo(
        title=part.title,
        verdict=document.verdict,
        scope=scope_of(document),
        mark=mark_of(document),
        headings=[headings[i] for i in COLUMNS],
        rows=[row._replace(cells=[row.cells[i] for i in COLUMNS]) for row in rows],
        failed=failed_of(document),
        figures=_figures(part),
        report=f"{part.folder}/{PAGE}",
    )


def _figures(part: DemoPart) -> list[PageFigure]:
    """The charts of the part's report; its folder tells their names from those of other parts."""
    mark = mark_of(part.document)
    made = [maker(part.document) for makers in SECTIONS.values() for maker in makers]
    charts = [one for one in made if isinstance(one, Picture) and one.chart is not None]
    names = [f"{part.folder}-{picture.name}" for picture in charts]
    return [
        PageFigure(name, picture, picture.inline(mark, name))
        for name, picture in zip(names, charts, strict=True)
    ]
