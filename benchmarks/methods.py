"""Accuracy against bytes for all named methods: the frontier.

    python benchmarks/methods.py [--workload images] [--parts arc momentum ...] [--seeds 3]
                                 [--steps N] [--progress FILE] [--run-with nice]
                                 [--out benchmarks/records/NAME.json] [--picture FILE.png]
    python benchmarks/methods.py --draw RECORD.json ... --picture FILE.png
    python benchmarks/methods.py --cost [--ranks 4] [--link 100mbit] [--rounds 15] [--out ...]

Every method trains the same model from the same seeds, with all ranks in one process
(`one_process.py`): figures of accuracy and bytes, not of speed. Groups differ in the optimizer
where a method asks for it: DGC is compared under momentum SGD, signs under a small learning rate,
each with plain DDP beside it. Four compressors run without error feedback too, as the control. With
--progress a run that was interrupted goes on where it was, on the same commit.

With --cost: the time of a step in a lab instead, of ARC-Top-K against Top-K with gather, and of
PowerSGD against PyTorch's hook. All candidates take turns; figures are medians of the slowest rank,
and all ranks share this machine's cores.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import Target, conclude, read_options, run_ranks
from one_process import Task, Trainings, add_training_options
from rich.console import Console
from rich.table import Table

from thinwire.lab import Lab

MOMENTUM = "images:learning_rate=0.05,momentum=0.9"
SIGNS = "images:learning_rate=0.002"
SMALL = "images:learning_rate=0.1"  # a third of the usual: EF21 applies old gradients
OWN, SHORT = "row=0,width=4", "row=128,width=2"  # as in the paper, or our default
FEW = f"arc:0.02,{SHORT}+ef14"
# DGC as published: warm-up over a fifth of the steps, clipping.
DGC = ("dgc:0.001,warmup={part}", "dgc:0.001,warmup={part},clip=8")
NOTE = "ranks are threads of one process (benchmarks/one_process.py): figures of accuracy and bytes"


class Way(NamedTuple):
    """One method on one workload; `{part}` is a twentieth of the steps."""

    workload: str
    method: str
    ranks: int = 4
    granularity: str = "bucket"
    longer: int = 1  # times the steps


def ways(workload: str, *methods: str, **options: Any) -> list[Way]:
    return [Way(workload, method, **options) for method in methods]


def sparse(ratio: str, feedback: str, *rows: str) -> list[str]:
    """ARC-Top-K in rows of these lengths, Random-K and Top-K, with one feedback for all."""
    compressors = (*(f"arc:{ratio},{row}" for row in rows), f"randomk:{ratio},shared=true")
    return [f"{compressor}+{feedback}" for compressor in (*compressors, f"topk:{ratio}")]


COMPRESSORS = ("topk:0.01", "quantize:4", "onebit", "randomk:0.1")
CONTROLLED = (  # each with error feedback, and as the control without
    *(f"{compressor}+{feedback}" for compressor in COMPRESSORS for feedback in ("ef14", "none")),
    *("topk:0.01+ef21", "topk:0.01|quantize:4+ef14", "quantize:4+ef14:storage=int8,reset=1024"),
)

PARTS: dict[str, dict[str, list[Way]]] = {
    "images": {
        "feedback": ways("images", "ddp", *CONTROLLED),
        "arc": ways(
            "images",
            "ddp",
            *sparse("0.02", "ef14", OWN, SHORT),
            *sparse("0.05", "ef14", SHORT),
            *sparse("0.05", "ef21m:0.1", SHORT),
            *sparse("0.05", "ef21m:0.3", SHORT),
        ),
        "momentum": [
            *ways(MOMENTUM, "ddp", "powersgd:4", *DGC),
            *ways(MOMENTUM, DGC[0], granularity="tensor"),
        ],
        "small steps": ways(SMALL, "ddp", "topk:0.01+ef21"),
        "low rank": ways("images", "powersgd:4"),
        "grid": ways(
            "images",
            *(f"arc:0.02,row={row},width=2+ef14" for row in (196, 98, 64)),
            f"arc:0.05,{OWN}+ef21m:0.1",
            f"warmup:30,(arc:0.02,{SHORT})+ef14",
            "warmup:30,(randomk:0.02,shared=true)+ef14",
        ),
        "longer": ways(MOMENTUM, "ddp", DGC[1], longer=2),
        "eight ranks": ways("images", "ddp", *sparse("0.02", "ef14", SHORT), ranks=8),
        "others": [
            *ways(
                "images",
                *("powersgd:2", "topk:0.001", "1bit-sgd", "ef-signsgd"),
                *("qsgd:4bit", "terngrad", "natural"),
            ),
            *ways(SIGNS, "ddp", "signsgd", "signum"),
        ],
    },
    "text": {
        "feedback": ways("text", "ddp", *CONTROLLED),
        "arc": ways("text", "ddp", *sparse("0.05", "ef14", OWN, SHORT), "powersgd:4"),
        "grid": ways(
            "text",
            *(f"arc:0.05,row={row},width=2+ef14" for row in (64, 256)),
            *sparse("0.05", "ef21m:0.1", OWN, SHORT),
            *sparse("0.05", "ef21m:0.3", SHORT),
            *sparse("0.02", "ef14", SHORT),
            f"warmup:{{part}},(arc:0.05,{OWN})+ef14",
            "warmup:{part},(powersgd:4)+ef14",
        ),
        "eight ranks": ways("text", "ddp", *sparse("0.05", "ef14", SHORT), ranks=8),
        "others": ways("text", "powersgd:2", "1bit-sgd", "qsgd:4bit", "terngrad", "natural"),
    },
}
STEPS = {"images": 300, "text": 120}
RATIOS = ("0.05", "0.02", "0.01")
COST = (  # method, collective
    ("ddp", ""),
    ("torch:powersgd", ""),
    ("powersgd:2", "auto"),
    *(
        way
        for ratio in RATIOS
        for way in (
            (f"arc:{ratio}", "auto"),
            (f"randomk:{ratio},shared=true", "auto"),
            (f"topk:{ratio}", "gather"),
            (f"topk:{ratio}", "auto"),
        )
    ),
)


def tasks_of(way: Way, options: argparse.Namespace) -> list[Task]:
    steps = way.longer * (options.steps or STEPS[options.workload])
    method = way.method.replace("{part}", str(max(1, steps // 20)))
    return [
        Task(way.workload, method, way.ranks, steps, seed, way.granularity)
        for seed in range(options.seeds)
    ]


def study(options: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], int]:
    """What each method came to: its metric of each seed, the megabytes that a rank sent per step;
    and how many trainings an earlier run had done."""
    parts = PARTS[options.workload]
    chosen = [way for name in options.parts or parts for way in parts[name]]
    chosen = list(dict.fromkeys(chosen))
    trainings = Trainings(options)
    planned = {way: tasks_of(way, options) for way in chosen}
    # One seed of all of them first.
    tasks = sorted((task for each in planned.values() for task in each), key=lambda t: t.seed)
    found = trainings.run(tasks, console)
    rows = []
    for way, own in planned.items():
        runs = [found[task.key] for task in own]
        rows.append(
            {
                "workload": way.workload,
                "unit": runs[0]["unit"],
                "method": own[0].method,
                "ranks": way.ranks,
                "granularity": way.granularity,
                "steps": own[0].steps,
                "metric": [run["metric"] for run in runs],
                "megabytes_a_step": sum(run["megabytes_a_step"] for run in runs) / len(runs),
            }
        )
    return rows, trainings.resumed


def targets_of(rows: list[dict[str, Any]]) -> list[Target]:
    """For the images, as far as it was trained."""
    four = [row for row in rows if row["ranks"] == 4 and row["granularity"] == "bucket"]
    dense = {(r["workload"], r["steps"]): mean(r) for r in four if r["method"] == "ddp"}
    known = {(row["workload"], row["method"]): mean(row) for row in four}
    wanted = {("images", FEW): f"`{FEW}`", ("images", "powersgd:4"): "PowerSGD rank 4"}
    wanted[MOMENTUM, "powersgd:4"] = "PowerSGD rank 4, momentum"
    targets = []
    for row in four:
        what = wanted.get((row["workload"], row["method"]))
        if row["method"].startswith("dgc:0.001"):
            what = f"DGC as published (`{row['method']}`, {row['steps']} steps)"
        best = dense.get((row["workload"], row["steps"]))
        if what is not None and best is not None:
            short = 100 * (best - mean(row)) / best
            targets.append(Target.at_most(f"{what}: % below dense", short, 1.0))
    for compressor in COMPRESSORS:
        fed = known.get(("images", f"{compressor}+ef14"))
        control = known.get(("images", f"{compressor}+none"))
        if fed is not None and control is not None:
            lost = known["images", "ddp"] - fed
            targets.append(Target.at_most(f"{compressor}+ef14: points below dense", lost, 1.0))
            gain = fed - control
            what = f"{compressor}: points that feedback wins"
            targets.append(Target(what, gain, ">= 1", gain >= 1))
    for feedback in ("ef21m:0.1", "ef14"):
        ours = known.get(("images", f"arc:0.05,{SHORT}+{feedback}"))
        blind = known.get(("images", f"randomk:0.05,shared=true+{feedback}"))
        if ours is not None and blind is not None:
            what = f"ARC 5 % above Random-K 5 %, both {feedback}, points"
            targets.append(Target(what, ours - blind, "> 0", ours > blind))
    return targets


def mean(row: dict[str, Any]) -> float:
    return float(sum(row["metric"]) / len(row["metric"]))


def dense_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The dense training that one is to be compared with: the first of its workload and ranks."""
    return next(
        each
        for each in rows
        if (each["workload"], each["ranks"]) == (row["workload"], row["ranks"])
    )


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="all from the same seeds, means over seeds")
    for column in (
        "workload",
        "ranks",
        "method",
        rows[0]["unit"],
        "lowest",
        "highest",
        "MB per step",
        "fewer",
    ):
        table.add_column(column, justify="left" if column in ("workload", "method") else "right")
    for row in rows:
        dense = dense_of(row, rows)["megabytes_a_step"]
        values = (mean(row), min(row["metric"]), max(row["metric"]))
        size = row["megabytes_a_step"]
        table.add_row(
            row["workload"],
            str(row["ranks"]),
            row["method"],
            *(f"{value:.2f}" for value in values),
            f"{size:.4f}",
            f"{dense / size:.1f}x",
        )
    return table


def drawn(row: dict[str, Any], first: dict[str, Any]) -> bool:
    """Whether a row is in the picture, and not one of a grid or of another setting."""
    alike = all(row[key] == first[key] for key in ("ranks", "steps", "granularity"))
    rows = re.search(r"row=\d+", row["method"])
    short = rows is None or rows[0] in (each.partition(",")[0] for each in (OWN, SHORT))
    apart = ("ef21", "+none", "storage=", "warmup:")
    return alike and short and not any(each in row["method"] for each in apart)


def draw(panels: Sequence[list[dict[str, Any]]], path: Path) -> None:
    """The metric against bytes, means over seeds; a panel for each study, without its grids."""
    from thinwire.bench.picture import place_labels
    from thinwire.report.figure import INK, new_figure, settle

    figure = new_figure(9.0, 5.5 * len(panels))
    labels = []
    for axes, panel in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        rows = [row for row in panel if drawn(row, panel[0])]
        styles = zip(("#0072B2", "#D55E00", "#009E73"), ("o", "s", "^"), strict=True)
        looks = dict(zip(dict.fromkeys(row["workload"] for row in rows), styles, strict=False))
        points, names = [], []
        for row in rows:
            color, marker = looks[row["workload"]]
            new = row["workload"] not in axes.get_legend_handles_labels()[1]
            point = (row["megabytes_a_step"], mean(row))
            axes.plot(*point, marker, color=color, ms=7, label=row["workload"] if new else "")
            points.append(point)
            names.append(row["method"].replace("+ef14", "").replace(",shared=true", ""))
        axes.set_xscale("log")
        low, high = axes.get_ylim()
        if high - low > 15:  # plain SGD with the learning rate of signs hardly moves
            axes.set_ylim(sorted(y for _, y in points)[1] - 1, max(y for _, y in points) + 1)
        axes.set_xlabel("MB a rank sends in a step")
        axes.set_ylabel(rows[0]["unit"])
        axes.grid(visible=True, color=INK, alpha=0.15, lw=0.6)
        axes.legend(frameon=False, fontsize=8)
        labels.append((axes, points, names))
    figure.suptitle("Accuracy against bytes, four ranks, means over seeds")
    settle(figure, [lambda each=each: place_labels(*each, INK) for each in labels])
    figure.savefig(path, format="png", facecolor="white")


def rank_main(job: dict[str, Any]) -> None:
    """Steps of all candidates in turn; rank 0 prints a line for each."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from thinwire.compare.method import read, uses_of_method
    from thinwire.compare.models import ddp_options
    from thinwire.compare.training import equip
    from thinwire.kernels.compiling import compile_kernels
    from thinwire.workloads import workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = workload(job["workload"])
    batches = task.batches(dist.get_rank(), dist.get_world_size(), 0)
    ways = []
    for spec, collective in COST:
        method = read(spec)
        model = DistributedDataParallel(task.model(0), **ddp_options(method))
        compile_kernels(uses_of_method(method))
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
        for ratio in RATIOS
    ]
    share = medians["powersgd:2", "auto"] / medians["torch:powersgd", ""]
    targets = [*arcs, Target.at_most("PowerSGD / PyTorch's hook", share, 1.0)]
    return conclude(console, options, "thinwire.methods-cost/1", rows, targets)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", choices=tuple(PARTS), default="images")
    parser.add_argument("--parts", nargs="+", help="of the study (all)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (3)")
    parser.add_argument("--steps", type=int, help="steps of a run (images: 300, text: 120)")
    add_training_options(parser)
    parser.add_argument("--ranks", type=int, default=4, help="of --cost (4)")
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
    unknown = set(options.parts or ()) - PARTS[options.workload].keys()
    if unknown:
        parser.error(f"--parts: there are {', '.join(PARTS[options.workload])}")
    if options.draw:
        if options.picture is None:
            parser.error("--draw needs --picture")
        draw([json.loads(path.read_text())["measured"] for path in options.draw], options.picture)
        return 0
    console = Console(width=120)
    if options.cost:
        return cost(options, console)
    rows, resumed = study(options, console)
    console.print(table_of(rows))
    if options.picture:
        draw([rows], options.picture)
    note = NOTE
    if resumed:
        note += f". Put together from several runs: {resumed} trainings are older"
    return conclude(console, options, "thinwire.methods/2", rows, targets_of(rows), f"{note}.")


if __name__ == "__main__":
    sys.exit(main())
