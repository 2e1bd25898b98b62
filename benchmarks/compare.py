"""What compression buys on a slow network: the full comparison, against its targets.

    python benchmarks/compare.py [--workload images] [--link 10mbit] [--steps 120] [--seeds 3]
                                 [--sweep 100mbit,1gbit] [--out benchmarks/records/NAME.json]
    python benchmarks/compare.py --workload text [--link 100mbit] ...

The same as `thinwire compare` with more methods, seeds and steps, and with a table of targets. The
record is the document of that comparison: `thinwire report NAME.json --out FOLDER` draws it. The
targets of speed are those of 4 hosts at 10 Mbit/s.

images  SGD, 120 steps: compressed gradients. About 35 minutes, most of them for plain DDP.
text    AdamW, 60 steps: compressed gradients, updates, local steps, `auto`. About 7 minutes for
        each seed at 10 Mbit/s, and 3 at 100.
"""

import argparse
import shlex
import statistics
import sys
from typing import NamedTuple

from harness import Target, read_options, show_targets
from recording import stamped
from rich.console import Console

from thinwire.compare.document import Document
from thinwire.compare.run import Comparison, shown
from thinwire.compare.settings import ComparisonSettings
from thinwire.compare.table import print_document

CLOSE = 0.005  # of the baseline's metric
LINK = "10mbit"  # of the targets of speed


class Study(NamedTuple):
    """What is compared on a workload, and what is expected of the best method.

    Args:
        methods: ours.
        steps: of each training.
        sweep: rates at which the time per step is measured too.
        share: of a step of plain DDP that the network takes at least.
        sooner: at least so many times sooner at DDP's final loss than each of these.
    """

    methods: tuple[str, ...]
    steps: int
    sweep: str
    share: float
    sooner: dict[str, float]


STUDIES = {
    "images": Study(
        methods=(
            *("quantize:4+ef14", "onebit+ef14", "topk:0.01+ef14", "topk:0.01|quantize:4+ef14"),
            "randomk:0.1+ef14",
        ),
        steps=120,
        sweep="100mbit,1gbit",
        share=0.9,
        sooner={"ddp": 8.0, "torch:fp16": 3.0, "torch:powersgd": 1.0},
    ),
    "text": Study(
        methods=(
            *("powersgd:4", "quantize:4", "auto", "onebit-adam", "adam-update", "demo"),
            *("local-sgd:4,compressor=(onebit)", "local-sgd:12,compressor=(quantize:4)"),
            "sparseloco:15",
        ),
        steps=60,
        sweep="",
        share=0.9,
        sooner={"ddp": 15.0, "torch:powersgd": 2.0},
    ),
}


def targets_of(document: Document, study: Study) -> list[Target]:
    results = {method.name: method for method in document.methods}
    summaries = {name: m.summary for name, m in results.items() if m.summary is not None}
    ours = [name for name in summaries if results[name].kind in ("thinwire", "local")]
    targets = []
    times = {name: s.to_target.seconds for name, s in summaries.items() if s.to_target}
    reached = {name: times[name] for name in ours if name in times}
    slow = document.settings.links[0] == LINK  # of other rates there is no target of speed
    if slow:
        share = statistics.fmean(r.split.network / r.split.whole for r in results["ddp"].runs)
        targets = [Target.at_least("DDP's share of a step on the network", share, study.share)]
    if slow and reached and "ddp" in times:
        best = min(reached, key=reached.__getitem__)
        for rival, bound in study.sooner.items():
            if rival in times:
                gain = times[rival] / times[best]
                what = f"{best}: times sooner at DDP's final loss than {rival}"
                targets.append(Target.at_least(what, gain, bound))
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
    parser.add_argument("--workload", default="images", help="images or text, with arguments")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--link", default=LINK)
    parser.add_argument("--steps", type=int, help="default: the study's own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweep", help="default: the study's own")
    options = read_options(parser)
    name = options.workload.partition(":")[0]
    if name not in STUDIES:
        parser.error(f"--workload: expected one of {', '.join(STUDIES)}, got {name!r}")
    study = STUDIES[name]
    sweep = study.sweep if options.sweep is None else options.sweep
    console = Console(width=120)
    settings = ComparisonSettings(
        workload=options.workload,
        methods=study.methods,
        hosts=options.hosts,
        links=(options.link,) * options.hosts,
        sweep=tuple(filter(None, sweep.split(","))),
        steps=options.steps or study.steps,
        seeds=tuple(range(options.seeds)),
    )
    comparison = Comparison(settings)
    with shown(comparison.methods, options.seeds) as watcher:
        command = shlex.join(["python", *sys.argv])
        document = comparison.run(watcher, command)
    print_document(document, console)
    targets = targets_of(document, study)
    show_targets(console, targets)
    if options.out:
        fields = stamped(options.start)
        # The comparison has looked itself for other work.
        since = [note for note in fields["notes"] if note not in options.start.notes]
        fields["notes"] = [*document.notes, *since]
        fields["targets"] = [target._asdict() for target in targets]
        options.out.write_text(document.model_copy(update=fields).to_json())
        console.print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
