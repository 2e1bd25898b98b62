"""What the benchmarks with several ranks share: running ranks, targets, records."""

import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from thinwire.lab import Cluster
from thinwire.machine import machine, versions


class Target(NamedTuple):
    """One target: what, the figure, its bound, and whether it is met."""

    what: str
    figure: float
    bound: str
    met: bool

    @classmethod
    def at_most(cls, what: str, figure: float | None, bound: float) -> "Target":
        value = math.nan if figure is None else figure  # not measured: missed
        return cls(what, value, f"<= {bound:g}", value <= bound)

    @classmethod
    def at_least(cls, what: str, figure: float | None, bound: float) -> "Target":
        value = math.nan if figure is None else figure
        return cls(what, value, f">= {bound:g}", value >= bound)


def run_ranks(
    cluster: Cluster,
    script: str,
    job: dict[str, Any],
    on_row: Callable[[dict[str, Any]], None],
    limit: float | None = None,
) -> None:
    """Run a script's rank part on every host; every JSON line that rank 0 prints is a row."""

    def heard(host: int, stream: str, line: str) -> None:
        if (host, stream) == (0, "stdout") and line.startswith("{"):
            on_row(json.loads(line))

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, cluster:
        json.dump(job, file)
        file.flush()
        argv = [sys.executable, script, "--as-rank", file.name]
        cluster.run(argv, timeout=limit, on_line=heard)


def show_targets(console: Console, targets: Sequence[Target]) -> None:
    table = Table(title="targets")
    for column in ("what", "figure", "target", ""):
        table.add_column(column, justify="right" if column == "figure" else "left")
    for target in targets:
        table.add_row(
            target.what, f"{target.figure:.3f}", target.bound, "met" if target.met else "MISSED"
        )
    console.print(table)


def conclude(
    console: Console,
    options: Any,
    schema: str,
    measured: Any,
    targets: Sequence[Target] = (),
    note: str | None = None,
) -> int:
    """Show the targets and write the record where `--out` says; the exit code."""
    if targets:
        show_targets(console, targets)
    if options.out:
        settings = {k: v for k, v in vars(options).items() if k not in ("out", "as_rank")}
        write_record(options.out, schema, settings, [note] if note else [], measured, targets)
        console.print(f"written: {options.out}")
    return 0


def write_record(
    path: Path,
    schema: str,
    settings: dict[str, Any],
    notes: list[str],
    measured: Any,
    targets: Sequence[Target],
) -> None:
    """The record of a run as JSON: machine, versions, settings, figures."""
    document = {
        "schema": schema,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine()._asdict(),
        "versions": versions(),
        "settings": {key: str(value) for key, value in settings.items()},
        "notes": notes,
        "measured": measured,
        "targets": [target._asdict() for target in targets],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
