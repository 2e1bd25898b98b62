"""Is the plan right? Predicted against measured step times in a lab, cell by cell.

    python benchmarks/plan.py --out benchmarks/records/NAME.json [--grid small] [--seconds 240]

A cell is a lab (hosts, rate, delay, racks) and a workload; in each, six methods train a few steps.
What is predicted comes from a table of codecs measured on one core, the workload's step measured
alone (when each gradient is there) and, for each number of hosts, the seconds that the slowest rank
of a step computes while all hosts share this machine's cores and nothing is exchanged. No step with
an exchange is looked at before it is predicted.

Every cell is written to the record when it is done. A run that was stopped, by Ctrl-C, by
`--seconds` or by a crash, goes on where it was when called again with the same `--out`. The whole
grid takes about two hours; `--grid small` some minutes.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Target, read_options, show_targets
from recording import Start, stamped
from rich.console import Console
from rich.table import Table

from thinwire.bench.codecs import measure_codecs
from thinwire.bench.profile import from_json, profile_workload, to_json
from thinwire.collectives.costs import Interconnect, StepCost
from thinwire.compare.run import Comparison, shown
from thinwire.compare.settings import ComparisonSettings
from thinwire.lab.topology import parse_rate, parse_time
from thinwire.machine import busy
from thinwire.plan.predict import PLAIN, PlannedMethod, Setting, read_method, step_of
from thinwire.policies.codecs import CodecTable, table_from

SCHEMA = "thinwire.plan-check/1"
METHODS = ("quantize:8", "quantize:4", "topk:0.01", "topk:0.01|quantize:4", "powersgd:4")
ALONE = "local-sgd:1000"  # exchanges nothing while it is measured
STEPS, SKIPPED = 12, 2
# Payload that all hosts of a lab send together, bytes per second: gloo, TCP and the lab's own links
# take two cores for it.
TOGETHER = 1.0e9
MEDIAN, SHARE, NEAR = 0.10, 0.90, 0.25
RIGHT, ENOUGH = 1.05, 0.90


@dataclass(frozen=True)
class Cell:
    """One lab and one workload."""

    workload: str
    hosts: int
    link: str
    delay: str | None = None
    racks: int = 1
    inter: str | None = None

    @property
    def name(self) -> str:
        words = [self.workload, f"{self.hosts} hosts", self.link]
        words += [f"{self.delay} delay"] if self.delay else []
        words += [f"{self.racks} racks, {self.inter} between"] if self.racks > 1 else []
        return ", ".join(words)

    def network(self, table: CodecTable) -> Interconnect:
        return Interconnect(
            hosts=self.hosts,
            rate=parse_rate(self.link) / 8,
            delay=parse_time(self.delay) if self.delay else 0.0,
            racks=self.racks,
            uplink=parse_rate(self.inter) / 8 if self.inter else float("inf"),
            start=table.start,
            peer=table.peer,
            inside=table.inside,
            together=TOGETHER,
        )


def cells_of(grid: str) -> list[Cell]:
    if grid == "small":
        return [
            *(Cell(w, 4, r) for w in ("images", "text") for r in ("10mbit", "100mbit", "1gbit")),
            *(Cell("images", h, "100mbit") for h in (2, 8)),
            Cell("images", 4, "100mbit", delay="15ms"),
            Cell("text", 2, "100mbit", delay="5ms"),
            Cell("images", 4, "1gbit", racks=2, inter="50mbit"),
        ]
    found = []
    for workload, hosts, link in itertools.product(
        ("images", "text"), (2, 4, 6, 8), ("10mbit", "30mbit", "100mbit", "300mbit", "1gbit")
    ):
        found.append(Cell(workload, hosts, link))
        if link in ("30mbit", "100mbit"):
            found.append(Cell(workload, hosts, link, delay="15ms"))
        if hosts > 2 and link in ("100mbit", "1gbit"):
            inter = f"{parse_rate(link) // 10**7}mbit"
            found.append(Cell(workload, hosts, link, racks=2, inter=inter))
    return found


# Measuring


def measure(cell: Cell) -> dict[str, float]:
    """Seconds per step with each method, medians, and of computing alone."""
    settings = ComparisonSettings(
        workload=cell.workload,
        methods=(*METHODS, ALONE),
        baselines=(PLAIN,),
        hosts=cell.hosts,
        links=(cell.link,) * cell.hosts,
        delay=cell.delay,
        racks=cell.racks,
        inter=cell.inter,
        steps=STEPS + SKIPPED,
        evaluations=0,
    )
    comparison = Comparison(settings)
    with shown(comparison.methods, 1) as watcher:
        document = comparison.run(watcher, "benchmarks/plan.py")
    if document.interrupted:
        raise KeyboardInterrupt
    found = {}
    for method, asked in zip(document.methods, (PLAIN, *METHODS, ALONE), strict=True):
        if method.error or not method.runs:
            raise SystemExit(f"{cell.name}: {method.name} failed: {method.error}")
        seconds = method.runs[0].seconds
        steps = [b - a for a, b in itertools.pairwise(seconds)][SKIPPED - 1 :]
        found[asked] = statistics.median(steps)
    found[ALONE] = slowest_rank(comparison)
    return found


def slowest_rank(comparison: Comparison) -> float:
    """Seconds that the slowest rank of each step computes: an exchange would wait for it.

    Without exchanges ranks do not wait for each other, so each step has another slowest one. The
    last step of local steps exchanges all there is, and is left out.
    """
    (outcome,) = (o for o in comparison.outcomes.values() if o.method.kind == "local")
    (ranks,) = outcome.runs.values()
    durations = [[b - a for a, b in itertools.pairwise(rank.seconds)] for rank in ranks]
    slowest = [max(step) for step in zip(*durations, strict=True)]
    return statistics.median(slowest[SKIPPED - 1 : -1])


# Predicting


def predicted(cell: Cell, record: dict[str, Any], compute: float) -> dict[str, StepCost]:
    ranks, cores = cell.hosts, os.cpu_count() or 1
    table = table_from(record["codecs"]).shared(ranks, cores)
    profile = from_json(record["profiles"][cell.workload])
    setting = Setting(profile.model, cell.network(table), table, compute)
    methods = [PlannedMethod(PLAIN, plain=True), *map(read_method, METHODS)]
    return {method.name: step_of(method, setting) for method in methods}


def computing(record: dict[str, Any], cell: Cell) -> float:
    """Seconds that a step of all hosts together computes: the median over cells."""
    own = [
        each["measured"][ALONE]
        for each in record["cells"].values()
        if (each["workload"], each["hosts"]) == (cell.workload, cell.hosts)
    ]
    return statistics.median(own)


def compare(record: dict[str, Any], cells: list[Cell]) -> list[dict[str, Any]]:
    """A row for each cell and method that was measured."""
    rows = []
    for cell in cells:
        done = record["cells"].get(cell.name)
        if done is None:
            continue
        expected = predicted(cell, record, computing(record, cell))
        for method, cost in expected.items():
            measured = done["measured"][method]
            row = {"cell": cell.name, "method": method, "measured": measured}
            row |= {"predicted": cost.seconds, "error": cost.seconds / measured - 1}
            rows.append(row)
    return rows


def advised(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell, the method that is predicted to be fastest, and how fast it was."""
    found = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        own = [row for row in rows if row["cell"] == cell]
        choice = min(own, key=lambda row: row["predicted"])
        best = min(own, key=lambda row: row["measured"])
        slower = choice["measured"] / best["measured"]
        found.append(
            {"cell": cell, "advised": choice["method"], "best": best["method"], "slower": slower}
        )
    return found


def targets_of(rows: list[dict[str, Any]], advice: list[dict[str, Any]]) -> list[Target]:
    errors = [abs(row["error"]) for row in rows]
    near = sum(error <= NEAR for error in errors) / len(errors)
    right = sum(each["slower"] <= RIGHT for each in advice) / len(advice)
    return [
        Target.at_most("median error of step times", statistics.median(errors), MEDIAN),
        Target.at_least("share of step times within 25 %", near, SHARE),
        Target.at_least("share of cells with advice within 5 % of the best", right, ENOUGH),
    ]


def show(console: Console, rows: list[dict[str, Any]], advice: list[dict[str, Any]]) -> None:
    table = Table(title="predicted / measured, ms per step")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for column in ("cell", *methods, "advised"):
        table.add_column(column, justify="left" if column in ("cell", "advised") else "right")
    for each in advice:
        own = {row["method"]: row for row in rows if row["cell"] == each["cell"]}
        figures = []
        for method in methods:
            row = own[method]
            text = f"{1e3 * row['predicted']:.0f}/{1e3 * row['measured']:.0f}"
            wrong = abs(row["error"]) > NEAR
            figures.append(f"[bold red]{text}[/]" if wrong else text)
        verdict = "right" if each["slower"] <= RIGHT else f"{each['slower']:.2f}x: {each['best']}"
        table.add_row(each["cell"], *figures, f"{each['advised']}, {verdict}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--grid", choices=("small", "full"), default="full")
    parser.add_argument("--seconds", type=float, help="stop before a cell that begins later")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = read_options(parser)
    if options.out is None:
        parser.error("--out is needed: the record is written, and continued, cell by cell")
    console, begin = Console(width=200), time.monotonic()
    record = load(options.out, options.start)
    cells = cells_of(options.grid)
    try:
        if not options.show:
            prepare(record, options.out, console)
            for cell in cells:
                late = options.seconds and time.monotonic() - begin > options.seconds
                if late or cell.name in record["cells"]:
                    continue
                console.print(cell.name)
                note, measured = busy(), measure(cell)
                entry = {"workload": cell.workload, "hosts": cell.hosts, "measured": measured}
                record["cells"][cell.name] = entry | {"busy": note}
                save(record, options.out)
    except KeyboardInterrupt:
        console.print("interrupted: call it again to go on")
    rows = compare(record, cells)
    if rows:
        advice = advised(rows)
        targets = targets_of(rows, advice)
        record |= {"rows": rows, "advice": advice}
        record["targets"] = [target._asdict() for target in targets]
        record["missing"] = [cell.name for cell in cells if cell.name not in record["cells"]]
        save(record, options.out)
        show(console, rows, advice)
        show_targets(console, targets)
    return 0


def load(path: Path, start: Start) -> dict[str, Any]:
    """The record so far; one that is continued says from which commits."""
    fields = stamped(start)
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        found.setdefault("continued", []).append(fields["started"])
        return found
    return {"schema": SCHEMA, **fields, "codecs": None, "profiles": {}, "cells": {}}


def save(record: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def prepare(record: dict[str, Any], path: Path, console: Console) -> None:
    """What predictions are made from, measured with one thread, as ranks of a lab have."""
    torch.set_num_threads(1)
    if record["codecs"] is None:
        console.print("measuring codecs")
        record["codecs"] = json.loads(measure_codecs(["none", *METHODS]).to_json())
    for workload in ("images", "text"):
        if workload not in record["profiles"]:
            console.print(f"measuring a step of {workload}")
            record["profiles"][workload] = to_json(profile_workload(workload))
    save(record, path)


if __name__ == "__main__":
    sys.exit(main())
