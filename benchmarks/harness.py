"""What the benchmarks with several ranks share: running ranks, targets, an end."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from recording import Target, read_options, write_record
from rich.console import Console
from rich.table import Table

from thinwire.lab import Cluster

__all__ = ["Target", "conclude", "read_options", "run_ranks", "show_targets"]


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
    options: argparse.Namespace,
    schema: str,
    measured: Any,
    targets: Sequence[Target] = (),
    note: str | None = None,
) -> int:
    """Show the targets and write the record where `--out` says; the exit code."""
    if targets:
        show_targets(console, targets)
    if options.out:
        write_record(options, schema, measured, targets, [note] if note else [])
    return 0
