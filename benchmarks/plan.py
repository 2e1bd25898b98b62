"""Is the plan right? Predicted against measured step times in a lab, cell by cell.

    python benchmarks/plan.py --out benchmarks/records/NAME.json [--grid medium] [--seconds 240]

A cell is a lab (hosts, rate, delay, racks), a workload and a way to train: DDP with six methods,
FSDP with four, local steps with three. Methods take turns, three times each (twice at 10 Mbit/s),
as a machine is not equally fast for minutes. A time is the median over steps of all turns; of local
steps the mean of a step over whole rounds.

What is predicted comes from a table of codecs measured on one core, the workload's step measured
alone (when each gradient is there) and, for each number of hosts, the seconds that a step computes
while all hosts share this machine's cores and nothing is exchanged: of all ranks for local steps,
halfway to the slowest rank where exchanges wait for it in every step. No step with an exchange is
looked at before it is predicted. Constants of the formulas come from `benchmarks/costs.py`, and the
cells in `SEEN` were looked at besides: errors are given without them too.

Every cell is written to the record when it is done. A run that was stopped, by Ctrl-C, by
`--seconds` or by a crash, goes on where it was when called again with the same `--out`. The whole
grid takes about two hours, `--grid medium` half an hour, `--grid small` ten minutes.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from costs import lab_network
from harness import Target, read_options, show_targets
from recording import Start, stamped
from rich.console import Console
from rich.table import Table

from thinwire.bench.codecs import measure_codecs
from thinwire.bench.profile import from_json, profile_workload, to_json
from thinwire.collectives.costs import Interconnect
from thinwire.compare.rank import RankRecord
from thinwire.compare.run import Comparison, shown
from thinwire.compare.settings import ComparisonSettings
from thinwire.lab.topology import parse_rate
from thinwire.machine import busy
from thinwire.plan.predict import Prediction, Setting, fastest, predict, read_method
from thinwire.policies.codecs import CodecTable, table_from

SCHEMA = "thinwire.plan-check/2"
ALONE = "local-sgd:1000"  # exchanges nothing while it is measured
METHODS = {
    "ddp": ("quantize:8", "quantize:4", "topk:0.01", "topk:0.01|quantize:4", "powersgd:4", ALONE),
    "fsdp": ("quantize:8", "quantize:4", "topk:0.01"),
    "local": ("local-sgd:4", "local-sgd:12", "diloco:12,compressor=(quantize:4)"),
}
# Steps and turns of a method, and steps of a turn that connections and buffers are made in. At
# 10 Mbit/s a step takes seconds, and few of them tell.
STEPS, TURNS, SKIPPED = 10, 3, 2
SLOW, SLOW_STEPS, SLOW_TURNS = 20_000_000, 5, 2
ROUNDS = 24  # steps of a turn in whole rounds of local steps
MEDIAN, SHARE, NEAR = 0.10, 0.90, 0.25
RIGHT, ENOUGH = 1.05, 0.90


@dataclass(frozen=True)
class Cell:
    """One lab, one workload, one way to train."""

    workload: str
    hosts: int
    link: str
    delay: str | None = None
    racks: int = 1
    inter: str | None = None
    way: str = "ddp"

    @property
    def name(self) -> str:
        words = [self.workload] if self.way == "ddp" else [f"{self.workload}, {self.way}"]
        words += [f"{self.hosts} hosts", self.link]
        words += [f"{self.delay} delay"] if self.delay else []
        words += [f"{self.racks} racks, {self.inter} between"] if self.racks > 1 else []
        return ", ".join(words)

    @property
    def plain(self) -> str:
        """The name of plain PyTorch."""
        return "fsdp" if self.way == "fsdp" else "ddp"

    @property
    def slow(self) -> bool:
        return parse_rate(self.link) < SLOW

    @property
    def seen(self) -> bool:
        return self in SEEN

    def network(self, table: CodecTable) -> Interconnect:
        return lab_network(table, self.hosts, self.link, self.delay, self.racks, self.inter)


# Looked at while the formulas were made.
SEEN = (
    *(Cell("images", 4, link) for link in ("10mbit", "100mbit", "1gbit")),
    Cell("text", 4, "10mbit"),
    Cell("images", 4, "100mbit", way="fsdp"),
    Cell("images", 4, "100mbit", way="local"),
)


def cells_of(grid: str) -> list[Cell]:
    return {"seen": lambda: list(SEEN), "small": small, "medium": medium, "full": full}[grid]()


def small() -> list[Cell]:
    return [
        *(Cell(w, 4, r) for w in ("images", "text") for r in ("10mbit", "100mbit", "1gbit")),
        *(Cell("images", h, "100mbit") for h in (2, 8)),
        Cell("images", 4, "100mbit", delay="15ms"),
        Cell("text", 2, "100mbit", delay="5ms"),
        Cell("images", 4, "1gbit", racks=2, inter="50mbit"),
    ]


def medium() -> list[Cell]:
    """All that the full grid spans, along its edges; what was looked at before comes last."""
    cells = [
        *small(),
        *besides(),
        Cell("text", 4, "30mbit", delay="15ms"),
        Cell("text", 4, "100mbit", racks=2, inter="10mbit"),
        Cell("images", 2, "1gbit"),
        Cell("text", 8, "100mbit"),
        Cell("images", 4, "30mbit"),
        Cell("text", 6, "100mbit"),
        Cell("images", 8, "1gbit"),
        Cell("images", 4, "300mbit"),
        Cell("images", 2, "10mbit"),
        Cell("text", 2, "100mbit"),
        Cell("images", 8, "1gbit", racks=2, inter="100mbit"),
        Cell("images", 8, "30mbit", delay="15ms"),
    ]
    return sorted(cells, key=lambda cell: (cell.seen, cell.way == "ddp"))


def besides() -> list[Cell]:
    """Sharded models and local steps."""
    return [
        *(Cell("images", 4, link, way="fsdp") for link in ("100mbit", "300mbit")),
        Cell("text", 4, "100mbit", way="fsdp"),
        *(Cell("images", 4, link, way="local") for link in ("30mbit", "100mbit")),
        Cell("text", 4, "100mbit", way="local"),
    ]


def full() -> list[Cell]:
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
    return [*found, *besides()]


# Measuring


def measure(cell: Cell) -> dict[str, Any]:
    """Seconds per step with each method, and of computing alone, in each turn and in all."""
    steps, turns = (SLOW_STEPS, SLOW_TURNS) if cell.slow else (STEPS, TURNS)
    settings = ComparisonSettings(
        workload=cell.workload,
        parallel="fsdp" if cell.way == "fsdp" else "ddp",
        methods=METHODS[cell.way],
        baselines=(cell.plain,),
        hosts=cell.hosts,
        links=(cell.link,) * cell.hosts,
        delay=cell.delay,
        racks=cell.racks,
        inter=cell.inter,
        # The last of local steps exchanges what is left, and is not part of a round.
        steps=ROUNDS + 1 if cell.way == "local" else steps + SKIPPED,
        seeds=tuple(range(turns)),
        evaluations=0,
    )
    comparison = Comparison(settings)
    with shown(comparison.methods, turns) as watcher:
        document = comparison.run(watcher, "benchmarks/plan.py")
    if document.interrupted:
        raise KeyboardInterrupt
    found: dict[str, Any] = {"measured": {}, "turns": {}}
    names = [cell.plain, *METHODS[cell.way]]
    for name, outcome in zip(names, comparison.outcomes.values(), strict=True):
        if outcome.error or not outcome.runs:
            raise SystemExit(f"{cell.name}: {name} failed: {outcome.error}")
        # All ranks wait for each other, so those of any tell.
        seconds = [ranks[0].seconds for ranks in outcome.runs.values()]
        if name == ALONE:
            found["alone"] = computing_alone(list(outcome.runs.values()))
            continue
        every = read_method(name).every
        each = [rounds_of(own, every) if every else steps_of(own) for own in seconds]
        found["turns"][name] = [statistics.median(own) for own in each]
        found["measured"][name] = statistics.median(itertools.chain(*each))
    return found


def steps_of(seconds: Sequence[float]) -> list[float]:
    """What each step takes, the first ones left out."""
    return [b - a for a, b in itertools.pairwise(seconds)][SKIPPED - 1 :]


def rounds_of(seconds: Sequence[float], every: int) -> list[float]:
    """The mean of a step in each round, the first left out."""
    ends = seconds[every - 1 : ROUNDS : every]
    return [(b - a) / every for a, b in itertools.pairwise(ends)]


def computing_alone(runs: Sequence[Sequence[RankRecord]]) -> dict[str, float]:
    """Seconds of steps without exchanges: of the slowest rank of each, and of all ranks.

    Without exchanges ranks do not wait for each other, so each step has another slowest one. The
    last step of local steps exchanges all there is, and is left out.
    """
    slowest, all_ranks = [], []
    for ranks in runs:
        durations = [steps_of(rank.seconds)[:-1] for rank in ranks]
        slowest += [max(step) for step in zip(*durations, strict=True)]
        all_ranks += [statistics.fmean(step) for step in zip(*durations, strict=True)]
    return {"slowest": statistics.median(slowest), "mean": statistics.median(all_ranks)}


# Predicting


def predicted(cell: Cell, record: dict[str, Any]) -> list[Prediction]:
    ranks, cores = cell.hosts, os.cpu_count() or 1
    table = table_from(record["codecs"]).shared(ranks, cores)
    profile = from_json(record["profiles"][cell.workload])
    compute = computing(record, cell)
    setting = Setting(profile.model, cell.network(table), table, compute, cell.plain)
    methods = [read_method(name) for name in METHODS[cell.way] if name != ALONE]
    return predict(methods, setting)


def computing(record: dict[str, Any], cell: Cell) -> float:
    """Seconds that a step of all hosts together computes: the median over cells.

    Local steps go on without waiting for each other. Others wait for the slowest rank of each step,
    but then it gets the cores of those who wait: something between the two.
    """
    alone = [
        each["alone"]
        for each in record["cells"].values()
        if "alone" in each and (each["workload"], each["hosts"]) == (cell.workload, cell.hosts)
    ]
    if cell.way == "local":
        return statistics.median(each["mean"] for each in alone)
    return statistics.median(0.5 * (each["mean"] + each["slowest"]) for each in alone)


def compare(
    record: dict[str, Any], cells: list[Cell]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each cell and method that was measured; for each cell of DDP what the advice was,
    and how fast that was."""
    rows, advice = [], []
    done_cells = record["cells"]
    known = {(each["workload"], each["hosts"]) for each in done_cells.values() if "alone" in each}
    for cell in cells:
        done = done_cells.get(cell.name)
        if done is None or (cell.workload, cell.hosts) not in known:
            continue
        found, measured = predicted(cell, record), done["measured"]
        for each in found:
            name, seconds = each.method.name, each.cost.seconds
            row = {"cell": cell.name, "way": cell.way, "seen": cell.seen, "method": name}
            row |= {"measured": measured[name], "predicted": seconds}
            rows.append(row | {"error": seconds / measured[name] - 1})
        if cell.way == "ddp":
            choice, best = fastest(found).method.name, min(measured, key=measured.__getitem__)
            spread = max(done["turns"][best]) / min(done["turns"][best])
            advice.append(
                {
                    "cell": cell.name,
                    "seen": cell.seen,
                    "advised": choice,
                    "best": best,
                    "slower": measured[choice] / measured[best],
                    "spread": spread,  # of the best one's turns
                }
            )
    return rows, advice


def targets_of(rows: list[dict[str, Any]], advice: list[dict[str, Any]]) -> list[Target]:
    """Of DDP, which is what advice is about."""
    errors = [abs(row["error"]) for row in rows if row["way"] == "ddp"]
    if not errors:
        return []
    near = sum(error <= NEAR for error in errors) / len(errors)
    right = sum(each["slower"] <= RIGHT for each in advice) / len(advice)
    return [
        Target.at_most("median error of step times", statistics.median(errors), MEDIAN),
        Target.at_least("share of step times within 25 %", near, SHARE),
        Target.at_least("share of cells with advice within 5 % of the best", right, ENOUGH),
    ]


def summary(rows: list[dict[str, Any]], advice: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for each way to train, with and without the cells that were looked at."""
    found = []
    for way, unseen in itertools.product(METHODS, (False, True)):
        errors = [
            abs(row["error"]) for row in rows if row["way"] == way and not (unseen and row["seen"])
        ]
        if not errors:
            continue
        own = [each for each in advice if way == "ddp" and not (unseen and each["seen"])]
        line = {"way": way, "without_seen": unseen, "times": len(errors)}
        line |= {"median": statistics.median(errors), "near": sum(e <= NEAR for e in errors)}
        line |= {"cells": len(own), "right": sum(each["slower"] <= RIGHT for each in own)}
        found.append(line)
    return found


def show(console: Console, rows: list[dict[str, Any]], advice: list[dict[str, Any]]) -> None:
    verdicts = {each["cell"]: each for each in advice}
    for way in METHODS:
        own = [row for row in rows if row["way"] == way]
        if not own:
            continue
        table = Table(title=f"{way}: predicted / measured, ms per step")
        methods = list(dict.fromkeys(row["method"] for row in own))
        for column in ("cell", *methods, "advised"):
            table.add_column(column, justify="left" if column in ("cell", "advised") else "right")
        for cell in dict.fromkeys(row["cell"] for row in own):
            figures = []
            for row in (row for row in own if row["cell"] == cell):
                text = f"{1e3 * row['predicted']:.0f}/{1e3 * row['measured']:.0f}"
                wrong = abs(row["error"]) > NEAR
                figures.append(f"[bold red]{text}[/]" if wrong else text)
            table.add_row(cell, *figures, _verdict(verdicts.get(cell)))
        console.print(table)
    for line in summary(rows, advice):
        console.print(line)


def _verdict(advice: dict[str, Any] | None) -> str:
    if advice is None:
        return ""
    right = advice["slower"] <= RIGHT
    return f"{advice['advised']}, " + (
        "right" if right else f"{advice['slower']:.2f}x: {advice['best']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--grid", choices=("seen", "small", "medium", "full"), default="full")
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
                note, found = busy(), measure(cell)
                entry = {"workload": cell.workload, "hosts": cell.hosts, **found}
                record["cells"][cell.name] = entry | {"busy": note}
                save(record, options.out)
    except KeyboardInterrupt:
        console.print("interrupted: call it again to go on")
    rows, advice = compare(record, cells)
    if rows:
        targets = targets_of(rows, advice)
        record |= {"rows": rows, "advice": advice, "summary": summary(rows, advice)}
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
        specs = ["none", *(spec for spec in METHODS["ddp"] if spec != ALONE)]
        record["codecs"] = json.loads(measure_codecs(specs).to_json())
    for workload in ("images", "text"):
        if workload not in record["profiles"]:
            console.print(f"measuring a step of {workload}")
            record["profiles"][workload] = to_json(profile_workload(workload))
    save(record, path)


if __name__ == "__main__":
    sys.exit(main())
