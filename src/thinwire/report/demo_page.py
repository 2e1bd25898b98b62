"""The page of the demo: what two comparisons came to, and the way to their reports."""

import base64
from pathlib import Path
from typing import NamedTuple

from thinwire.compare.document import Document
from thinwire.report.curves import loss_seconds, metric_seconds
from thinwire.report.page import PAGE, ResultRow, headings_of, put, row_of, scope_of
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
    projected: bool
    headings: list[str]
    rows: list[ResultRow]
    picture: str  # as a data URI
    text: str
    report: str


def write_demo(parts: list[DemoPart], folder: Path) -> Path:
    """Write the page, self-contained but for the links to the reports beside it."""
    template = environment().get_template("demo.html.j2")
    html = template.render(title="thinwire demo", parts=[_shown(part) for part in parts])
    return put(folder / PAGE, html.encode())


def _shown(part: DemoPart) -> ShownDemo:
    document = part.document
    picture = metric_seconds(document)
    if not isinstance(picture, Picture):
        picture = loss_seconds(document)
    uri, text = "", ""
    if isinstance(picture, Picture):
        _, png = picture.render("projected" if document.projected else "")
        uri = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        text = f"{picture.title}. {picture.text}"
    headings = headings_of(document.settings)
    rows = [row_of(method, document) for method in document.methods]
    return ShownDemo(
        title=part.title,
        verdict=document.verdict,
        scope=scope_of(document),
        projected=document.projected,
        headings=[headings[i] for i in COLUMNS],
        rows=[row._replace(cells=[row.cells[i] for i in COLUMNS]) for row in rows],
        picture=uri,
        text=text,
        report=f"{part.folder}/{PAGE}",
    )
