"""Measure the library against its performance targets; every figure is a ratio within one run.

    python benchmarks/targets.py [--size 25.6M] [--rounds 15] [--out benchmarks/records/NAME.json]

Rounds interleave ``r += g`` and all candidates, so that whatever else the machine does falls on all
alike; figures are medians over rounds. Needs a machine that is otherwise idle: a memory pass slows
down less than computation when another process takes a core. After work of torch there is a pause:
its threads go on spinning for some milliseconds, and would take a core from what is timed next.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Target, show_targets
from rich.console import Console

import thinwire as tw
from thinwire.bench.results import TensorResults, document, ratio
from thinwire.bench.run import PAUSE, prepare, run, shown
from thinwire.bench.settings import BenchSettings, read_size

PASSES = {"topk:0.01": 2.5, "qsgd:7": 3, "onebit": 3}
DENSE = ("randomk:0.01", "scaledsign", "onebit", "quantize:8", "quantize:4", "quantize:2", "qsgd:7")
SMALL = ("topk:0.01", "quantize:8", "quantize:4")


def encoding(group: TensorResults) -> list[Target]:
    """Passes of r += g, speed-up over plain PyTorch, extra memory."""
    results = []
    for row in group.rows:
        passes, speedup = ratio(row.encode, group.baseline), ratio(row.eager_encode, row.encode)
        top = row.compressor == "topk:0.01"
        results += [
            Target.at_most(
                f"{row.compressor}: encode, passes of r += g",
                passes,
                PASSES.get(row.compressor, 3.5),
            ),
            Target.at_least(
                f"{row.compressor}: encode, speed over eager", speedup, 25 if top else 5
            ),
        ]
        # A quantiser needs its payload and blocks; 1 MB allows for buffers per thread.
        allowed = 0.3 if top else (row.num_bytes + 1e6) / group.num_bytes
        if row.compressor != "randomk:0.01":
            what = f"{row.compressor}: extra memory, of the tensor"
            results.append(Target.at_most(what, row.extra_memory, round(allowed, 3)))
    return results


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each candidate."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for work in candidates.values():
        work()
    for _ in range(rounds):
        for name, work in candidates.items():
            begin = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begin)
            time.sleep(PAUSE)
    return {name: statistics.median(times) for name, times in seconds.items()}


def accumulation(numel: int, rounds: int) -> Target:
    """Eight received frames of Top-K 1 %, unpacked and added to one tensor."""
    compressor = tw.TopK(0.01)
    generator = torch.Generator().manual_seed(1)
    frames = [tw.pack(compressor.encode(torch.randn(numel, generator=generator))) for _ in range(8)]
    out, r, g = torch.zeros(numel), torch.zeros(numel), torch.randn(numel, generator=generator)
    times = interleaved(
        {
            "pass": lambda: r.add_(g),
            "frames": lambda: compressor.accumulate([tw.unpack(f) for f in frames], out),
        },
        rounds,
    )
    figure = times["frames"] / times["pass"]
    return Target.at_most(
        "topk:0.01: unpack and accumulate 8 frames, passes of r += g", figure, 2.5
    )


def index_coding(density: float, numel: int = 10_000_000) -> Target:
    """Bits an index against the entropy of a Bernoulli source of that density."""
    compressor = tw.RandomK(density)
    payload = compressor.encode(torch.ones(numel), key=tw.Key(1))
    count = payload.sections[1].numel()
    bits = 8 * payload.sections[0].numel() * payload.sections[0].dtype.itemsize / count
    p = count / numel
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p
    what = f"indices at {density:.1%}: {bits:.3f} bits, entropy {entropy:.3f}, ratio"
    return Target.at_most(what, bits / entropy, 1.02)


def small(spec: str, rounds: int = 2000) -> Target:
    """Microseconds to encode 10 k elements with a residual."""
    compressor = tw.parse(spec)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(10_000, generator=generator) for _ in range(50)]
    residual = torch.zeros(10_000)
    seconds = []
    for step in range(rounds):
        begin = time.perf_counter()
        compressor.encode(gradients[step % 50], residual=residual)
        seconds.append(time.perf_counter() - begin)
    return Target.at_most(
        f"{spec}: encode 10 k elements, us", 1e6 * statistics.median(seconds), 100
    )


def import_seconds(rounds: int = 5) -> Target:
    """What `import thinwire` adds to `import torch`."""
    code = """
import time, torch
begin = time.perf_counter()
import thinwire
thinwire.TopK
print(time.perf_counter() - begin)
"""
    command = [sys.executable, "-c", code]
    found = [
        float(subprocess.run(command, capture_output=True, check=True).stdout)
        for _ in range(rounds)
    ]
    return Target.at_most("import thinwire after torch, s", statistics.median(found), 0.3)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="25.6M", help="elements of the tensor (25.6M)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds to take the median of (15)")
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    arguments = parser.parse_args()
    numel = read_size(arguments.size)
    settings = BenchSettings(
        compressors=("topk:0.01", *DENSE), sizes=(numel,), data=("normal",), rounds=arguments.rounds
    )
    plan = prepare(settings)
    with shown(plan.num_steps) as tick:
        report = run(plan, tick)
    results = encoding(report.groups[0]) if report.groups else []
    if not report.interrupted:
        print("accumulation, index coding, small tensors, import", file=sys.stderr, flush=True)
        results += [
            accumulation(numel, arguments.rounds),
            *(index_coding(density) for density in (0.1, 0.01, 0.001)),
            *(small(spec) for spec in SMALL),
            import_seconds(),
        ]
    show_targets(Console(), results)
    record: dict[str, Any] = {
        "targets": [result._asdict() for result in results],
        "bench": document(report),
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {arguments.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
