"""The results of a comparison on a terminal."""

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from thinwire.compare.document import Document, MethodResult


def print_document(document: "Document", console: Console) -> None:
    """A table, what failed, and the verdict."""
    settings = document.settings
    links = " and ".join(dict.fromkeys(settings.links))
    projected = ", times projected" if settings.network == "projected" else ""
    seeds = len(settings.seeds)
    title = f"{settings.hosts} hosts, {links}{projected}, {seeds} seed{'s' if seeds > 1 else ''}"
    console.print(Text(f"\n{settings.workload}", "bold"))
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
        show_edge=False,
    )  # fmt: skip
    table.add_column("method")
    metric = settings.metric or "final loss"
    for heading in (metric, "ms a step", "faster", "to DDP's loss", "sooner", "MB a step", "fewer"):
        table.add_column(heading, justify="right")
    for method in document.methods:
        table.add_row(*_cells(method, settings.metric is not None))
    console.print(table)
    for method in document.methods:
        if method.error:
            console.print(Text(f"{method.name} failed: {method.error}", "red"))
        if method.diverged:
            console.print(Text(f"{method.name} diverged", "red"))
    for note in document.notes:
        console.print(Text(f"note: {note}"))
    console.print(Text(f"\n{document.verdict}", "bold"))


def _cells(method: "MethodResult", has_metric: bool) -> list[Text | str]:
    name = Text(method.name, "bold")
    summary = method.summary
    if summary is None:
        return [name, "failed" if method.error else "not run"]
    value = summary.final_metric if has_metric else summary.final_loss
    reached = summary.to_target
    return [
        name,
        f"{value.mean:.2f}" if value else "-",
        f"{1e3 * summary.step_seconds:.0f}" if summary.step_seconds is not None else "-",
        _times(summary.step_speedup),
        f"{reached.seconds:.1f} s" if reached else "not reached",
        _times(reached.speedup) if reached else "-",
        f"{summary.megabytes_a_step:.3g}" if summary.megabytes_a_step is not None else "-",
        _times(summary.fewer_bytes),
    ]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}x" if value < 100 else f"{value:.0f}x"
