"""Accuracy against bytes for all named methods: the frontier.

    python benchmarks/methods.py [--workload images] [--ranks 4] [--seeds 3] [--steps N]
                                 [--out benchmarks/records/NAME.json] [--picture FILE.png]
    python benchmarks/methods.py --draw RECORD.json ... --picture FILE.png
    python benchmarks/methods.py --cost [--ranks 4] [--link 100mbit] [--rounds 15] [--out ...]

Every method trains the same model from the same seeds on loopback: figures of accuracy and bytes,
not of speed. Groups differ in the optimizer where a method asks for it: DGC is compared under
momentum SGD, signs under a small learning rate, each with plain DDP beside it.

With --cost: the time of a step in a lab instead, of ARC-Top-K against Top-K with gather, and of
PowerSGD against PyTorch's hook. All candidates take turns; figures are medians of the slowest rank,
and all ranks share this machine's cores.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Target, conclude, read_options, run_ranks
from rich.console import Console
from rich.table import Table

from thinwire.compare.document import Document
from thinwire.compare.run import Comparison, shown
from thinwire.compare.settings import ComparisonSettings
from thinwire.lab import Lab

PLAIN = (
    *("powersgd:2", "powersgd:4", "arc:0.05", "arc:0.2", "randomk:0.05,shared=true"),
    *("topk:0.01", "topk:0.001", "1bit-sgd", "ef-signsgd", "quantize:4", "qsgd:4bit"),
    *("terngrad", "natural"),
)
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "images": {
        "images": PLAIN,
        "images:learning_rate=0.05,momentum=0.9": (
            *("topk:0.01", "dgc:0.01", "dgc:0.001,warmup={epoch}", "powersgd:2"),
        ),
        "images:learning_rate=0.002": ("signsgd", "signum"),
    },
    "text": {"text": PLAIN},
}
NOTE = "times of a step on loopback mean little: all ranks share this machine's cores"
COST = (  # method, collective
    ("ddp", ""),
    ("torch:powersgd", ""),
    ("powersgd:2", "auto"),
    ("arc:0.05", "auto"),
    ("topk:0.05", "gather"),
    ("topk:0.05", "auto"),
    ("arc:0.01", "auto"),
    ("topk:0.01", "gather"),
    ("topk:0.01", "auto"),
)


def compare(options: argparse.Namespace, workload: str, methods: tuple[str, ...]) -> Document:
    steps = options.steps
    settings = ComparisonSettings(
        workload=workload,
        methods=tuple(method.format(epoch=max(1, (steps or 300) // 15)) for method in methods),
        baselines=("ddp",),
        hosts=options.ranks,
        links=(options.link,) * options.ranks,
        steps=steps,
        seeds=tuple(range(options.seeds)),
        evaluations=1,
        project=True,
    )
    comparison = Comparison(settings)
    with shown(comparison.methods, options.seeds) as watcher:
        return comparison.run(watcher, shlex.join(["python", *sys.argv]))


def rows_of(document: Document) -> list[dict[str, Any]]:
    """What a method came to: its metric of each seed, and the megabytes that a rank sent in a step.

    Bytes are those that thinwire reports (counters of a loopback count what others do, too), and
    for plain DDP those of a ring all-reduce.
    """
    settings = document.settings
    size = settings.hosts
    dense = 2 * (size - 1) / size * 4 * settings.parameters
    rows = []
    for method in document.methods:
        runs = method.runs
        sent = [run.bytes_reported / run.steps for run in runs if run.bytes_reported]
        rows.append(
            {
                "workload": settings.workload,
                "unit": settings.metric,
                "method": method.name,
                "metric": [run.final_metric for run in runs],
                "megabytes_a_step": (sum(sent) / len(sent) if sent else dense) / 1e6,
                "step_ms": [1e3 * run.step_seconds for run in runs],
            }
        )
    return rows


def mean(row: dict[str, Any]) -> float:
    return float(sum(row["metric"]) / len(row["metric"]))


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="all from the same seeds, means over seeds")
    for column in (
        "workload",
        "method",
        rows[0]["unit"],
        "lowest",
        "highest",
        "MB per step",
        "fewer",
    ):
        table.add_column(column, justify="left" if column in ("workload", "method") else "right")
    for row in rows:
        dense = next(r for r in rows if r["workload"] == row["workload"])["megabytes_a_step"]
        values = (mean(row), min(row["metric"]), max(row["metric"]))
        size = row["megabytes_a_step"]
        table.add_row(
            row["workload"],
            row["method"],
            *(f"{value:.2f}" for value in values),
            f"{size:.4f}",
            f"{dense / size:.1f}x",
        )
    return table


def draw(panels: Sequence[list[dict[str, Any]]], path: Path) -> None:
    """The metric against bytes, means over seeds; a panel for each study."""
    from thinwire.bench.picture import place_labels
    from thinwire.report.figure import INK, new_figure, settle

    figure = new_figure(9.0, 5.5 * len(panels))
    labels = []
    for axes, rows in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        styles = zip(("#0072B2", "#D55E00", "#009E73"), ("o", "s", "^"), strict=True)
        looks = dict(zip(dict.fromkeys(row["workload"] for row in rows), styles, strict=False))
        points, names = [], []
        for row in rows:
            color, marker = looks[row["workload"]]
            new = row["workload"] not in axes.get_legend_handles_labels()[1]
            point = (row["megabytes_a_step"], mean(row))
            axes.plot(*point, marker, color=color, ms=7, label=row["workload"] if new else "")
            points.append(point)
            names.append(row["method"].replace("+ef14", "").replace("+ef21m", ""))
        axes.set_xscale("log")
        low, high = axes.get_ylim()
        if high - low > 15:  # plain SGD with the learning rate of signs hardly moves
            axes.set_ylim(sorted(y for _, y in points)[1] - 1, max(y for _, y in points) + 1)
        axes.set_xlabel("MB a rank sends in a step")
        axes.set_ylabel(rows[0]["unit"])
        axes.grid(visible=True, color=INK, alpha=0.15, lw=0.6)
        axes.legend(frameon=False, fontsize=8)
        labels.append((axes, points, names))
    figure.suptitle("Accuracy against bytes, four ranks, means of three seeds")
    settle(figure, [lambda each=each: place_labels(*each, INK) for each in labels])
    figure.savefig(path, format="png", facecolor="white")


def rank_main(job: dict[str, Any]) -> None:
    """Steps of all candidates in turn; rank 0 prints a line for each."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from thinwire.compare.method import read
    from thinwire.compare.training import ddp_options, equip, warm_up
    from thinwire.workloads import workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = workload(job["workload"])
    batches = task.batches(dist.get_rank(), dist.get_world_size(), 0)
    ways = []
    for spec, collective in COST:
        method = read(spec)
        model = DistributedDataParallel(task.model(0), **ddp_options(method))
        warm_up(method)
        ours = method.kind == "thinwire"
        equip(model, method, **({"collective": collective, "measure_every": 0} if ours else {}))
        ways.append((spec, collective, model, task.optimizer(model)))
    for turn in range(-3, job["rounds"]):  # at first connections and buckets are made
        for spec, collective, model, optimizer in ways:
            batch = next(batches)
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
            seconds = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            row = {
                "method": spec,
                "collective": collective,
                "turn": turn,
                "ms": 1e3 * seconds.item(),
            }
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def cost(options: argparse.Namespace, console: Console) -> int:
    rows: list[dict[str, Any]] = []
    job = {"workload": options.model, "rounds": options.rounds}
    with console.status("connecting ...") as status:

        def on_row(row: dict[str, Any]) -> None:
            if row["turn"] >= 0:
                rows.append(row)
            status.update(f"round {row['turn'] + 1} of {options.rounds}: {row['method']}")

        run_ranks(Lab(options.ranks, options.link), __file__, job, on_row, limit=3600)
    table = Table(title=f"a step of {options.model}, {options.ranks} hosts, {options.link}")
    for column in ("method", "collective", "ms", "lowest", "highest", "of DDP's"):
        left = column in ("method", "collective")
        table.add_column(column, justify="left" if left else "right")
    medians: dict[tuple[str, str], float] = {}
    for way in COST:
        times = [row["ms"] for row in rows if (row["method"], row["collective"]) == way]
        medians[way] = statistics.median(times)
        shown = (medians[way], min(times), max(times))
        share = medians[way] / medians[COST[0]]
        table.add_row(*way, *(f"{time:.0f}" for time in shown), f"{share:.2f}")
    console.print(table)
    arcs = [
        Target(
            f"arc:{ratio}: less than Top-K by gather, %",
            100 * (1 - medians[f"arc:{ratio}", "auto"] / medians[f"topk:{ratio}", "gather"]),
            "> 0",
            medians[f"arc:{ratio}", "auto"] < medians[f"topk:{ratio}", "gather"],
        )
        for ratio in ("0.05", "0.01")
    ]
    share = medians["powersgd:2", "auto"] / medians["torch:powersgd", ""]
    targets = [*arcs, Target.at_most("PowerSGD / PyTorch's hook", share, 1.0)]
    return conclude(console, options, "thinwire.methods-cost/1", rows, targets)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=tuple(GROUPS), default="images")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine (4)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (3)")
    parser.add_argument("--steps", type=int, help="steps of a run (the workload's own)")
    parser.add_argument("--cost", action="store_true", help="the time of a step in a lab instead")
    parser.add_argument("--link", default="100mbit", help="of the lab (100mbit)")
    parser.add_argument("--model", default="images:hidden=512", help="workload of --cost")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each, of --cost (15)")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=Path, nargs="+", help="draw these records, train nothing")
    parser.add_argument("--picture", type=Path, help="draw the frontier as a PNG")
    options = read_options(parser)
    if options.as_rank:
        rank_main(json.loads(options.as_rank.read_text()))
        return 0
    if options.draw:
        if options.picture is None:
            parser.error("--draw needs --picture")
        draw([json.loads(path.read_text())["measured"] for path in options.draw], options.picture)
        return 0
    console = Console(width=120)
    if options.cost:
        return cost(options, console)
    groups = GROUPS[options.workload]
    documents = [compare(options, workload, methods) for workload, methods in groups.items()]
    rows = [row for document in documents for row in rows_of(document)]
    console.print(table_of(rows))
    if options.picture:
        draw([rows], options.picture)
    return conclude(console, options, "thinwire.methods/1", rows, note=NOTE)


if __name__ == "__main__":
    sys.exit(main())
