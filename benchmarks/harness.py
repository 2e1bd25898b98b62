"""What the benchmarks with several ranks share: where ranks run, targets, records."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from thinwire.machine import machine, versions


class Target(NamedTuple):
    """One target: what, the figure, its bound, and whether it is met."""

    what: str
    figure: float
    bound: str
    met: bool

    @classmethod
    def at_most(cls, what: str, figure: float, bound: float) -> "Target":
        return cls(what, figure, f"<= {bound:g}", figure <= bound)


Runner = Callable[[list[str], Callable[[str], None]], None]


def in_lab(hosts: int, link: str, limit: float) -> Runner:
    """Run on hosts in network namespaces."""
    from thinwire.lab import Lab

    def run(argv: list[str], on_line: Callable[[str], None]) -> None:
        with Lab(hosts=hosts, link=link) as lab:
            lab.run(
                argv,
                timeout=limit,
                on_line=lambda host, stream, line: (
                    on_line(line) if (host, stream) == (0, "stdout") else None
                ),
            )

    return run


def on_loopback(ranks: int, limit: float) -> Runner:
    """Run on plain processes of this machine."""

    def run(argv: list[str], on_line: Callable[[str], None]) -> None:
        port = 20000 + os.getpid() % 20000
        common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        processes = [
            subprocess.Popen(
                argv,
                env={**common, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            output = processes[0].stdout
            assert output is not None
            for line in output:
                on_line(line.rstrip())
            codes = [process.wait(limit) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with exit codes {codes}")

    return run


def run_ranks(
    run: Runner, script: str, job: dict[str, Any], on_row: Callable[[dict[str, Any]], None]
) -> None:
    """Run a script's rank part; every JSON line that rank 0 prints is a row."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        run(
            [sys.executable, script, "--as-rank", file.name],
            lambda line: on_row(json.loads(line)) if line.startswith("{") else None,
        )


def sent_bytes() -> int:
    """What this network namespace has sent, on all interfaces but loopback."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, rest = line.partition(":")
        if name.strip() != "lo":
            total += int(rest.split()[8])
    return total


def show_targets(console: Console, targets: Sequence[Target]) -> None:
    table = Table(title="targets")
    for column in ("what", "figure", "target", ""):
        table.add_column(column, justify="right" if column == "figure" else "left")
    for target in targets:
        table.add_row(
            target.what, f"{target.figure:.3f}", target.bound, "met" if target.met else "MISSED"
        )
    console.print(table)


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
