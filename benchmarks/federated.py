"""Federated averaging of ten clients with uneven data: accuracy against bytes uploaded.

    python benchmarks/federated.py [--seeds 3] [--jobs 2] [--rounds 120] [--methods SPEC ...]
                                   [--out benchmarks/records/NAME.json] [--picture FILE.png]
    python benchmarks/federated.py --draw RECORD.json --picture FILE.png

The clients and the loop are those of examples/federated.py, whose options are the defaults here.
Every method has the same rounds, learning rate, seeds and sampled clients; a number behind "@" is
the decay of what a client left out. Figures of accuracy and bytes, not of time.
"""

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from harness import Target, conclude, read_options
from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).parent.parent / "examples" / "federated.py"
METHODS = ["none", "topk:0.02|onebit", "topk:0.02|onebit@0.9"]
NOTE = (
    "accuracy of the server's model after the last round, in percent; bytes are those of the "
    "frames that clients upload, downloads are not compressed and not counted"
)


def example() -> Any:
    """examples/federated.py as a module."""
    found = importlib.util.spec_from_file_location("federated_example", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def train(job: tuple[str, int, int]) -> list[dict[str, Any]]:
    """The curve of a method (of large matrices) with a seed over so many rounds."""
    method, seed, rounds = job
    torch.set_num_threads(1)
    federated = example()
    compressor, _, decay = method.partition("@")
    words = ["--seed", str(seed), "--rounds", str(rounds), "--decay", decay or "1"]
    words += ["--compressor", compressor]
    clients = federated.Clients(federated.parser().parse_args(words))
    choose = (lambda name: "none") if compressor == "none" else clients.compressor
    return [found._asdict() for found in federated.plain_loop(clients, choose)]


def final(row: dict[str, Any], what: str) -> float:
    """The mean over seeds after the last round."""
    return statistics.fmean(curve[-1][what] for curve in row["curves"])


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="after the last round, means and extremes over seeds")
    for column in ("method", "accuracy, %", "lowest", "highest", "MB", "times fewer bytes"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        found = [curve[-1]["accuracy"] for curve in row["curves"]]
        fewer = final(rows[0], "megabytes") / final(row, "megabytes")
        figures = (final(row, "accuracy"), min(found), max(found))
        megabytes = f"{final(row, 'megabytes'):.3f}"
        table.add_row(row["method"], *(f"{f:.2f}" for f in figures), megabytes, f"{fewer:.0f}")
    return table


def targets_of(rows: list[dict[str, Any]]) -> list[Target]:
    """For the most accurate method with a hundredth of the bytes or less."""
    plain = rows[0]
    small = [r for r in rows if final(plain, "megabytes") >= 100 * final(r, "megabytes")]
    best = max(small, key=lambda row: final(row, "accuracy"), default=None)
    lost = None if best is None else final(plain, "accuracy") - final(best, "accuracy")
    fewer = None if best is None else final(plain, "megabytes") / final(best, "megabytes")
    name = "no method" if best is None else best["method"]
    return [
        Target.at_most(f"{name}: points of accuracy below uncompressed FedAvg", lost, 1.0),
        Target.at_least(f"{name}: times fewer bytes uploaded", fewer, 100.0),
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against megabytes: a line is the mean of the seeds, its shade their extremes."""
    from thinwire.report.figure import COLORS, INK, log_axis, new_figure, settle, style_axes

    figure = new_figure(8.0, 4.6)
    axes = figure.subplots()
    colors = (INK, *COLORS)
    for row, color, marker in zip(rows, colors, "osD^vPX", strict=False):
        points = list(zip(*row["curves"], strict=True))
        megabytes = [statistics.fmean(p["megabytes"] for p in point) for point in points]
        found = [[p["accuracy"] for p in point] for point in points]
        label = (
            "uncompressed" if row["method"] == "none" else row["method"].replace("@", ", decay ")
        )
        means = list(map(statistics.fmean, found))
        axes.plot(megabytes, means, marker=marker, ms=4, lw=1.4, color=color, label=label)
        low, high = list(map(min, found)), list(map(max, found))
        axes.fill_between(megabytes, low, high, color=color, alpha=0.12, lw=0)
    log_axis(axes, "x")
    style_axes(axes, "MB uploaded by all clients (logarithmic)", "test accuracy, %")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    settle(figure, [])
    figure.savefig(path, format="png", facecolor="white")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (2)")
    parser.add_argument("--rounds", type=int, default=120, help="of a run (120)")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="the uncompressed one first")
    parser.add_argument("--draw", type=Path, help="draw this record, train nothing")
    parser.add_argument("--picture", type=Path, help="draw accuracy against bytes as a PNG")
    options = read_options(parser)
    if options.draw:
        if options.picture is None:
            parser.error("--draw needs --picture")
        draw(json.loads(options.draw.read_text())["measured"], options.picture)
        return 0
    console = Console(width=120)
    seeds = range(options.seeds)
    jobs = [(method, seed, options.rounds) for method in options.methods for seed in seeds]
    rows = [{"method": method, "curves": list[Any]()} for method in options.methods]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for i, curve in enumerate(pool.imap(train, jobs)):
            rows[i // options.seeds]["curves"].append(curve)
            console.print(f"{jobs[i]}: {curve[-1]}")
    console.print(table_of(rows))
    if options.picture:
        draw(rows, options.picture)
    return conclude(console, options, "thinwire.federated/1", rows, targets_of(rows), NOTE)


if __name__ == "__main__":
    sys.exit(main())
