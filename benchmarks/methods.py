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
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

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


def draw(documents: list[dict[str, Any]], path: Path) -> None:
    """Loss of the metric against bytes, relative to plain DDP with the same optimizer."""
    from thinwire.bench.labels import place
    from thinwire.report.figure import INK, new_figure, settle

    figure = new_figure(8.0, 5.5)
    axes = figure.subplots()
    colors = ("#0072B2", "#D55E00", "#009E73")
    markers = ("o", "s", "^")
    points, names = [], []
    for document, color, marker in zip(documents, colors, markers, strict=False):
        base = document["methods"][0]["summary"]
        sign = 1 if document["settings"]["higher_is_better"] else -1
        for i, method in enumerate(document["methods"][1:]):
            summary = method["summary"]
            if not summary or not summary["final_metric"]:
                continue
            gain = sign * (summary["final_metric"]["mean"] - base["final_metric"]["mean"])
            point = (summary["fewer_bytes"], gain)
            label = document["settings"]["workload"] if i == 0 else ""
            axes.plot(*point, marker, color=color, ms=7, label=label)
            points.append(point)
            names.append(method["name"])
    axes.axhline(0, color=INK, lw=1, ls="--")
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than plain DDP")
    axes.set_ylabel(f"{documents[0]['settings']['metric']}: better than plain DDP by")
    axes.set_title("Accuracy against bytes")
    axes.grid(visible=True, color=INK, alpha=0.15, lw=0.6)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
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
    for document in documents:
        print_document(document, console)
    if options.out:
        options.out.write_text(json.dumps(documents, indent=1, allow_nan=False) + "\n")
        console.print(f"written: {options.out}")
    if options.picture:
        draw(documents, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
