"""A transformer under AdamW: loss against bytes, of gradients, updates and local steps.

    python benchmarks/local.py [--ranks 4] [--seeds 3] [--steps 600] [--tune-steps 150]
                               [--out benchmarks/records/NAME.json] [--picture FILE.png]
                               [--progress FILE]
    python benchmarks/local.py --draw RECORD.json --picture FILE.png

Every method trains the bundled text workload from the same seeds on loopback: figures of loss and
bytes, not of speed. First each method tries the same few learning rates, times the workload's own
(DeMo: times its own), for fewer steps and from a seed of its own; the best is what it then trains
with. All else is each method's default. With --progress a run that was interrupted goes on where it
was, on the same commit.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Target, conclude, read_options
from rich.console import Console
from rich.table import Table

from thinwire.compare.document import Document
from thinwire.compare.run import Comparison, shown
from thinwire.compare.settings import ComparisonSettings
from thinwire.machine import versions

METHODS = (
    *("ddp", "adam-update:0.01", "local-sgd:12,compressor=(quantize:4)", "sparseloco:50"),
    *("sparseloco:15", "diloco:15", "diloco:50", "quantize:4", "powersgd:4", "demo"),
    *("onebit-adam", "adam-update:0.019,keep=0.7", "adam-update:0.019,keep=0.7,gain=true"),
    *("local-sgd:4,compressor=(onebit)", "streaming-diloco:48"),
)
RATES = (0.5, 1.0, 2.0)  # times the workload's learning rate
RATE = 3e-3  # the workload's
TUNING_SEED = 100
PATIENCE = 900.0  # seconds without a step: this study may run beside others, or be stopped a while
BEYOND = {"adam-update": (3.0, 60.0), "averages": (2.0, 80.0), "few": (5.0, 1000.0)}
NOTE = "times of a step on loopback mean little: all ranks share this machine's cores"


def compare(
    options: argparse.Namespace,
    rate: float,
    methods: Sequence[str],
    steps: int,
    seeds: tuple[int, ...],
) -> Document:
    settings = ComparisonSettings(
        workload=f"text:learning_rate={rate:g}",
        methods=tuple(methods),
        baselines=(),
        hosts=options.ranks,
        links=(options.link,) * options.ranks,
        steps=steps,
        seeds=seeds,
        evaluations=1,
        project=True,
        patience=PATIENCE,
    )
    comparison = Comparison(settings)
    with shown(comparison.methods, len(seeds)) as watcher:
        return comparison.run(watcher, shlex.join(["python", *sys.argv]))


def rows_of(document: Document, rate: float) -> list[dict[str, Any]]:
    """What each method came to: its loss from each seed, and the bytes that a rank sent in a step.

    Bytes are those that thinwire reports (counters of a loopback count what others do, too), and
    for plain DDP those of a ring all-reduce.
    """
    settings = document.settings
    size = settings.hosts
    dense = 2 * (size - 1) / size * 4 * settings.parameters
    rows = []
    for method in document.methods:
        if not method.runs:
            raise SystemExit(f"{method.name} failed: {method.error}")
        sent = [run.bytes_reported / run.steps for run in method.runs if run.bytes_reported]
        rows.append(
            {
                "method": method.name,
                "learning_rate": rate,
                "nll": [run.final_metric for run in method.runs],
                "bytes_a_step": sum(sent) / len(sent) if sent else dense,
                "fewer": dense * len(sent) / sum(sent) if sent else 1.0,
            }
        )
    return rows


def mean(row: dict[str, Any]) -> float:
    return float(sum(row["nll"]) / len(row["nll"]))


def best_rate(tried: list[dict[str, Any]]) -> float:
    """The learning rate with the lowest loss; the workload's own if none was tried."""

    def loss(row: dict[str, Any]) -> float:
        return mean(row) if math.isfinite(mean(row)) else math.inf

    return float(min(tried, key=loss)["learning_rate"]) if tried else RATE


class Progress:
    """What has been trained so far, a line of a file for each training of a method."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        commit = versions()["commit"]
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                if found["commit"] != commit:
                    raise SystemExit(f"{path} is of commit {found['commit']}: name another file")
                self._rows[found["key"]] = found["row"]
        self._commit = commit
        self.resumed = len(self._rows)

    def row(
        self,
        options: argparse.Namespace,
        rate: float,
        method: str,
        steps: int,
        seeds: tuple[int, ...],
    ) -> dict[str, Any]:
        key = json.dumps([options.ranks, rate, method, steps, seeds])
        if key not in self._rows:
            (row,) = rows_of(compare(options, rate, [method], steps, seeds), rate)
            self._rows[key] = {**row, "method": method}
            if self._path is not None:
                line = {"commit": self._commit, "key": key, "row": self._rows[key]}
                with self._path.open("a") as file:
                    file.write(f"{json.dumps(line)}\n")
        return self._rows[key]


def table_of(rows: list[dict[str, Any]]) -> Table:
    dense = mean(rows[0])
    table = Table(title="test nll, all from the same seeds, means over seeds")
    for column in (
        "method",
        "lr",
        "nll",
        "lowest",
        "highest",
        "above DDP",
        "bytes a step",
        "fewer",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['learning_rate']:g}",
            *(f"{value:.4f}" for value in (mean(row), min(row["nll"]), max(row["nll"]))),
            f"{100 * (mean(row) / dense - 1):.1f} %",
            f"{row['bytes_a_step']:,.0f}",
            f"{row['fewer']:,.1f}x",
        )
    return table


def targets_of(rows: list[dict[str, Any]]) -> list[Target]:
    """Each asks for a method that is within so many per cent of DDP's loss and sends so many times
    fewer bytes."""
    dense = mean(rows[0])
    groups = {
        "adam-update": [row for row in rows if row["method"].startswith("adam-update")],
        "averages": [row for row in rows if row["method"].startswith(("local-", "diloco", "sp"))],
        "few": [row for row in rows if row["method"].startswith(("local-", "diloco", "sp"))],
    }
    targets = []
    for name, (per_cent, fewer) in BEYOND.items():
        enough = [row for row in groups[name] if row["fewer"] >= fewer]
        best = min(enough, key=mean, default=None)
        above = None if best is None else 100 * (mean(best) / dense - 1)
        method = "no method" if best is None else best["method"]
        what = f"{method}, at least {fewer:g}x fewer bytes: nll above DDP's, %"
        targets.append(Target.at_most(what, above, per_cent))
    return targets


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The loss against bytes."""
    from thinwire.bench.picture import place_labels
    from thinwire.report.figure import INK, new_figure, settle

    figure = new_figure(9.0, 5.5)
    axes = figure.subplots()
    looks = {"gradients": ("#0072B2", "o"), "updates, local steps": ("#D55E00", "s")}
    points, names = [], []
    for row in rows:
        own = row["method"].startswith(("adam-update", "local", "diloco", "sparse", "stream"))
        kind = "updates, local steps" if own else "gradients"
        color, marker = looks[kind]
        new = kind not in axes.get_legend_handles_labels()[1]
        point = (row["bytes_a_step"], mean(row))
        axes.plot(*point, marker, color=color, ms=7, label=kind if new else "")
        axes.plot([point[0]] * 2, [min(row["nll"]), max(row["nll"])], color=color, lw=1)
        points.append(point)
        names.append(row["method"].replace("+ef14", ""))
    axes.axhline(mean(rows[0]), color=INK, lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_xlabel("bytes a rank sends, per optimizer step")
    axes.set_ylabel("test nll, nats a character")
    axes.grid(visible=True, color=INK, alpha=0.15, lw=0.6)
    axes.legend(frameon=False, fontsize=8)
    count = len(rows[0]["nll"])
    figure.suptitle(f"A transformer under AdamW, four ranks: loss against bytes ({count} seeds)")
    settle(figure, [lambda: place_labels(axes, points, names, INK)])
    figure.savefig(path, format="png", facecolor="white")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine (4)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (3)")
    parser.add_argument("--steps", type=int, default=600, help="steps of a run (600)")
    parser.add_argument("--tune-steps", type=int, default=150, help="of a trial, 0 for none (150)")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="to train with; ddp first")
    parser.add_argument("--link", default="100mbit", help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help="note here what is done, and go on from it")
    parser.add_argument("--draw", type=Path, help="draw this record, train nothing")
    parser.add_argument("--picture", type=Path, help="draw loss against bytes as a PNG")
    options = read_options(parser)
    if options.draw:
        if options.picture is None:
            parser.error("--draw needs --picture")
        draw(json.loads(options.draw.read_text())["measured"]["trained"], options.picture)
        return 0
    console = Console(width=120)
    progress = Progress(options.progress)
    tried: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for method in options.methods:
        own = [
            progress.row(options, factor * RATE, method, options.tune_steps, (TUNING_SEED,))
            for factor in (RATES if options.tune_steps else ())
        ]
        tried += own
        rate = best_rate(own)
        console.print(f"{method}: learning rate {rate:g}")
        seeds = tuple(range(options.seeds))
        rows.append(progress.row(options, rate, method, options.steps, seeds))
    if tried:
        console.print(table_of(tried))
    console.print(table_of(rows))
    if options.picture:
        draw(rows, options.picture)
    measured = {"tried": tried, "trained": rows}
    note = NOTE
    if progress.resumed:
        note += f" Put together from several runs: {progress.resumed} trainings are older."
    return conclude(console, options, "thinwire.local/1", measured, targets_of(rows), note)


if __name__ == "__main__":
    sys.exit(main())
