"""Measure the library against its performance targets; every figure is a ratio within one run.

    python benchmarks/targets.py [--only calls] [--size 25.6M] [--rounds 15]
                                 [--out benchmarks/records/NAME.json] [--picture FILE.png]

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
from harness import Target, read_options, run_ranks, show_targets
from recording import write_record
from rich.console import Console

import thinwire as tw
from thinwire.bench.picture import write_picture
from thinwire.bench.results import TensorResults, document, ratio
from thinwire.bench.run import pause, prepare, run, shown
from thinwire.bench.settings import BenchSettings, read_size
from thinwire.lab import Loopback

PASSES = {"topk:0.01": 2.5, "qsgd:7": 3, "onebit": 3}
DENSE = ("randomk:0.01", "scaledsign", "onebit", "quantize:8", "quantize:4", "quantize:2", "qsgd:7")
SMALL = ("topk:0.01", "quantize:8", "quantize:4")
CALLED = ("quantize:4", "topk:0.01")


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
            pause()
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


def rank_call(job: dict[str, Any]) -> None:
    """What a call costs this rank besides the network: queueing (arguments, exchange, handle),
    timed while nothing else in the process runs, and encoding, done once more by itself."""
    import torch.distributed as dist

    from thinwire.collectives.allreduce import AllReduce
    from thinwire.collectives.options import Options

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    me, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    for spec in job["specs"]:
        xs, r = [torch.randn(10_000) for _ in range(50)], torch.zeros(10_000)
        queueing, encoding = [], []
        for turn in range(job["rounds"]):
            if me:
                store.wait([f"{spec} {turn}"])  # not before rank 0 has queued everything
            handles = [tw.all_reduce(xs[0], spec, residual=r, async_op=True)]
            time.sleep(0.02)  # it is under way; what shares its memory will not be prepared beside
            for x in xs[1:]:
                begin = time.thread_time()
                handles.append(tw.all_reduce(x, spec, residual=r, async_op=True))
                queueing.append(time.thread_time() - begin)
            if not me:
                store.set(f"{spec} {turn}", "")
            tw.wait_all(handles)
            options = Options.of(None)
            for x in () if me else xs:
                exchange = AllReduce("call", [x], [r], [tw.parse(spec)], options)
                begin = time.thread_time()
                exchange.prepare()
                encoding.append(time.thread_time() - begin)
            dist.barrier()  # the other rank rests meanwhile
        if not me:
            row = {"spec": spec, "queue": statistics.median(queueing)}
            print(json.dumps({**row, "encode": statistics.median(encoding)}), flush=True)
    dist.destroy_process_group()


def calls(rounds: int = 10) -> list[Target]:
    """Microseconds of a call on 10 k elements with a residual, without the network."""
    rows: list[dict[str, Any]] = []
    run_ranks(Loopback(2), __file__, {"specs": CALLED, "rounds": rounds}, rows.append)
    return [
        Target.at_most(
            f"call: {row['spec']}, 10 k elements, queue {1e6 * row['queue']:.1f} + encode "
            f"{1e6 * row['encode']:.1f}, us",
            1e6 * (row["queue"] + row["encode"]),
            100,
        )
        for row in rows
    ]


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
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("calls",), help="what a call costs, alone")
    parser.add_argument("--size", default="25.6M", help="elements of the tensor (25.6M)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds to take the median of (15)")
    parser.add_argument("--picture", type=Path, help="draw ratio against error, and speed, as PNG")
    arguments = read_options(parser)
    if arguments.as_rank:
        rank_call(json.loads(Path(arguments.as_rank).read_text()))
        return 0
    if arguments.only:
        show_targets(Console(), calls())
        return 0
    numel = read_size(arguments.size)
    settings = BenchSettings(
        compressors=("topk:0.01", *DENSE), sizes=(numel,), data=("normal",), rounds=arguments.rounds
    )
    plan = prepare(settings)
    with shown(plan.num_steps) as tick:
        report = run(plan, tick)
    results = encoding(report.groups[0]) if report.groups else []
    if not report.interrupted:
        print(
            "accumulation, index coding, small tensors, calls, import", file=sys.stderr, flush=True
        )
        results += [
            accumulation(numel, arguments.rounds),
            *(index_coding(density) for density in (0.1, 0.01, 0.001)),
            *(small(spec) for spec in SMALL),
            *calls(),
            import_seconds(),
        ]
    show_targets(Console(), results)
    if arguments.out:
        write_record(arguments, "thinwire.targets/1", {"bench": document(report)}, results)
    if arguments.picture:
        write_picture(report, arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
