"""The results of a comparison on a terminal."""

from typing import TYPE_CHECKING

from thinwire.compare.settings import PARALLELISMS, distance_in_words
from thinwire.formatting import (
    NOTHING,
    TableColumn,
    plural,
    show_bytes,
    show_ratio,
    show_seconds,
    table,
)

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.compare.document import Document, MethodResult


def print_document(document: "Document", console: "Console") -> None:
    """A table, what failed, and the verdict."""
    from rich.text import Text

    settings = document.settings
    links = " and ".join(dict.fromkeys(settings.links))
    links += distance_in_words(settings.delay, settings.jitter, settings.loss)
    projected = ", times projected" if settings.network == "projected" else ""
    seeds = plural(len(settings.seeds), "seed")
    figures = (
        *(settings.metric or "final loss", "per step", "faster"),
        *(f"to {PARALLELISMS[settings.parallel].title}'s loss", "sooner"),
        *("sent per step", "fewer"),
    )
    columns = [
        TableColumn("method", bold=True),
        *(TableColumn(f, right=True) for f in figures),
    ]
    rows = [_cells(method, document) for method in document.methods]
    console.print(Text(f"\n{settings.workload}", "bold"))
    title = f"{plural(settings.hosts, 'host')}, {links}{projected}, {seeds}"
    if settings.weights:
        title += f", parameters by {settings.weights}"
    console.print(table(columns, rows, title))
    for method in document.methods:
        if method.error:
            console.print(Text(f"{method.name} failed: {method.error}", "red"))
        if method.diverged:
            console.print(Text(f"{method.name} diverged", "red"))
    for note in document.notes:
        console.print(Text(f"note: {note}"))
    console.print(Text(f"\n{document.verdict}", "bold"))


def _cells(method: "MethodResult", document: "Document") -> list[str]:
    summary = method.summary
    if summary is None:
        return [method.name, "failed" if method.error else "not run"]
    has_metric = document.settings.metric is not None
    value = summary.final_metric if has_metric else summary.final_loss
    reached, sent = summary.to_target, summary.megabytes_a_step
    target = NOTHING
    if document.target_loss is not None:
        target = show_seconds(reached.seconds) if reached else "not reached"
    return [
        method.name,
        f"{value.mean:.2f}" if value else NOTHING,
        show_seconds(summary.step_seconds),
        show_ratio(summary.step_speedup),
        target,
        show_ratio(reached.speedup) if reached else NOTHING,
        show_bytes(None if sent is None else 1e6 * sent),
        show_ratio(summary.fewer_bytes),
    ]
