"""What compression buys on a slow network: the full comparison, against its targets.

    python benchmarks/compare.py [--workload images] [--link 10mbit] [--steps 120] [--seeds 3]
                                 [--sweep 100mbit,1gbit] [--out benchmarks/records/NAME.json]

The same as `thinwire compare` with more methods, seeds and steps, and with a table of targets. The
record is the document of that comparison: `thinwire report NAME.json --out FOLDER` draws it. Takes
about 35 minutes with its defaults, most of them for plain DDP.
"""

import argparse
import shlex
import statistics
import sys
from pathlib import Path

from harness import Target, show_targets
from rich.console import Console

from thinwire.compare.document import Document
from thinwire.compare.run import Comparison, shown
from thinwire.compare.settings import ComparisonSettings
from thinwire.compare.table import print_document

METHODS = (
    *("quantize:4+ef14", "onebit+ef14", "topk:0.01+ef14", "topk:0.01|quantize:4+ef14"),
    "randomk:0.1+ef14",
)
CLOSE = 0.005  # of the baseline's metric


def targets_of(document: Document) -> list[Target]:
    results = {method.name: method for method in document.methods}
    summaries = {name: m.summary for name, m in results.items() if m.summary is not None}
    ours = [name for name in summaries if results[name].kind == "thinwire"]
    share = statistics.fmean(r.split.network / r.split.whole for r in results["ddp"].runs)
    targets = [Target("DDP's share of a step on the network", share, ">= 0.9", share >= 0.9)]
    times = {name: s.to_target.seconds for name, s in summaries.items() if s.to_target}
    reached = {name: times[name] for name in ours if name in times}
    if reached and "ddp" in times:
        best = min(reached, key=reached.__getitem__)
        for rival, bound in (("ddp", 8.0), ("torch:fp16", 3.0), ("torch:powersgd", 1.0)):
            if rival in times:
                gain = times[rival] / times[best]
                what = f"{best}: times sooner at DDP's final loss than {rival}"
                targets.append(Target(what, gain, f">= {bound:g}", gain >= bound))
    sign = 1 if document.settings.higher_is_better else -1
    metrics = {name: s.final_metric.mean for name, s in summaries.items() if s.final_metric}
    lost = [sign * (1 - metrics[name] / metrics["ddp"]) for name in ours]
    close = sum(value <= CLOSE for value in lost)
    targets.append(
        Target("methods that lose at most 0.5 % of the metric", close, ">= 3", close >= 3)
    )
    for name in ours:
        runs = [run for run in results[name].runs if run.bytes_reported]
        off = max(abs(run.bytes_counted / run.bytes_reported - 1) for run in runs)
        targets.append(Target.at_most(f"{name}: bytes counted against reported", off, 0.05))
    return targets


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", default="images")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--link", default="10mbit")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweep", default="100mbit,1gbit")
    parser.add_argument("--out", type=Path, help="write the document here")
    options = parser.parse_args()
    console = Console(width=120)
    settings = ComparisonSettings(
        workload=options.workload,
        methods=METHODS,
        hosts=options.hosts,
        links=(options.link,) * options.hosts,
        sweep=tuple(filter(None, options.sweep.split(","))),
        steps=options.steps,
        seeds=tuple(range(options.seeds)),
    )
    comparison = Comparison(settings)
    with shown(comparison.methods, options.seeds) as watcher:
        command = shlex.join(["python", *sys.argv])
        document = comparison.run(watcher, command)
    print_document(document, console)
    targets = targets_of(document)
    show_targets(console, targets)
    if options.out:
        record = document.model_copy(update={"targets": [target._asdict() for target in targets]})
        options.out.write_text(record.to_json())
        console.print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
