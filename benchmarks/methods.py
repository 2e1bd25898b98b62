"""Accuracy against bytes for all named methods: the frontier.

    python benchmarks/methods.py [--workload images] [--ranks 4] [--seeds 3] [--steps N]
                                 [--out benchmarks/records/NAME.json] [--picture FILE.png]
    python benchmarks/methods.py --cost [--ranks 4] [--link 100mbit] [--out ...]

Every method trains the same model from the same seeds on loopback: figures of accuracy and bytes,
not of speed. Groups differ in the optimizer where a method asks for it: DGC is compared under
momentum SGD, signs under a small learning rate, each with plain DDP beside it.

With --cost: the time of a step in a lab instead, of ARC-Top-K against Top-K with gather, and of
PowerSGD against PyTorch's hook.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from harness import write_record
from rich.console import Console
from rich.table import Table

from thinwire.compare.progress import shown
from thinwire.compare.run import Comparison
from thinwire.compare.settings import Settings
from thinwire.compare.table import print_document

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
NOTES = ["times of a step on loopback mean little: all ranks share this machine's cores"]
COST = ("arc:0.05", "topk:0.05", "topk:0.01", "powersgd:2")


def compare(options: argparse.Namespace, workload: str, methods: tuple[str, ...]) -> dict[str, Any]:
    steps = options.steps
    settings = Settings(
        workload=workload,
        methods=tuple(method.format(epoch=max(1, (steps or 300) // 15)) for method in methods),
        baselines=("ddp", "torch:powersgd") if options.cost else ("ddp",),
        hosts=options.ranks,
        links=(options.link,) * options.ranks,
        steps=steps,
        seeds=tuple(range(options.seeds)),
        evaluations=1,
        project=not options.cost,
    )
    comparison = Comparison(settings)
    with shown(comparison.methods, options.seeds) as watcher:
        return comparison.run(watcher, shlex.join(["python", *sys.argv]))


def rows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What a method came to: its metric of each seed, and the megabytes that a rank sent in a step.

    Bytes are those that thinwire reports (counters of a loopback count what others do, too), and
    for plain DDP those of a ring all-reduce.
    """
    settings = document["settings"]
    size = settings["hosts"]
    dense = 2 * (size - 1) / size * 4 * settings["parameters"]
    rows = []
    for method in document["methods"]:
        runs = method["runs"]
        sent = [run["bytes_reported"] / run["steps"] for run in runs if run["bytes_reported"]]
        rows.append(
            {
                "workload": settings["workload"],
                "method": method["name"],
                "metric": [run["final_metric"] for run in runs],
                "megabytes_a_step": (sum(sent) / len(sent) if sent else dense) / 1e6,
                "step_ms": [1e3 * run["step_seconds"] for run in runs],
            }
        )
    return rows


def mean(row: dict[str, Any]) -> float:
    return float(sum(row["metric"]) / len(row["metric"]))


def table_of(rows: list[dict[str, Any]], metric: str) -> Table:
    table = Table(title="all from the same seeds, means over seeds")
    for column in ("workload", "method", metric, "lowest", "highest", "MB a step", "fewer"):
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


def draw(rows: list[dict[str, Any]], metric: str, path: Path) -> None:
    """The metric against bytes, means over seeds."""
    from thinwire.bench.labels import place
    from thinwire.report.figure import INK, new_figure, settle

    figure = new_figure(9.0, 6.0)
    axes = figure.subplots()
    styles = zip(("#0072B2", "#D55E00", "#009E73"), ("o", "s", "^"), strict=True)
    points, names = [], []
    for workload, (color, marker) in zip(dict.fromkeys(r["workload"] for r in rows), styles,
                                         strict=False):  # fmt: skip
        first = True
        for row in (row for row in rows if row["workload"] == workload):
            point = (row["megabytes_a_step"], mean(row))
            label = workload if first else ""
            first = False
            axes.plot(*point, marker, color=color, ms=7, label=label)
            points.append(point)
            names.append(row["method"].replace("+ef14", "").replace("+ef21m", ""))
    axes.set_xscale("log")
    low, high = axes.get_ylim()
    if high - low > 15:  # plain SGD with the learning rate of signs hardly moves
        axes.set_ylim(max(low, sorted(y for _, y in points)[1] - 1), high)
    axes.set_xlabel("MB a rank sends in a step")
    axes.set_ylabel(metric)
    axes.set_title("Accuracy against bytes, four ranks, means of three seeds")
    axes.grid(visible=True, color=INK, alpha=0.15, lw=0.6)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    settle(figure, [lambda: place(axes, points, names, INK)])
    figure.savefig(path, format="png", facecolor="white")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=tuple(GROUPS), default="images")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine (4)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (3)")
    parser.add_argument("--steps", type=int, help="steps of a run (the workload's own)")
    parser.add_argument("--cost", action="store_true", help="the time of a step in a lab instead")
    parser.add_argument("--link", default="100mbit", help="of the lab (100mbit)")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    parser.add_argument("--picture", type=Path, help="draw the frontier as a PNG")
    options = parser.parse_args()
    console = Console(width=120)
    groups = {"images:hidden=512": COST} if options.cost else GROUPS[options.workload]
    documents = [compare(options, workload, methods) for workload, methods in groups.items()]
    rows = [row for document in documents for row in rows_of(document)]
    metric = documents[0]["settings"]["metric"]
    for document in documents if options.cost else ():
        print_document(document, console)
    console.print(table_of(rows, metric))
    if options.out:
        write_record(options.out, "thinwire.methods/1", vars(options), NOTES, rows, [])
        console.print(f"written: {options.out}")
    if options.picture:
        draw(rows, metric, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
