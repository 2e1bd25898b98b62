"""What the DDP hook costs, and whether compression and communication hide behind backward.

    python benchmarks/ddp.py [--only overhead|pipeline] [--rounds 9]
                             [--out benchmarks/records/NAME.json]

Overhead: 2 ranks on loopback, the same model in plain DDP, with torch's own `allreduce_hook` and
with `attach(model, "none")`, which take turns; a step is forward, backward and the optimizer's
step. DDP multiplies gradients while it copies them to its buckets; any hook goes over them again.

Pipeline: 2 hosts in network namespaces. First backward alone (under no_sync) and exchange alone are
timed on loopback; then the links get the rate at which the exchange takes as long as backward.
On that network: backward alone, exchange alone, one after the other, and both at a time, which is
what the hook does; and for how long a core was busy meanwhile, by the clock of the process. What
exceeds backward alone there is compression, gloo and TCP, which have the same core. With n buckets
of equal size, the first of which is ready after 1/n of backward and the last of which leaves after
all of it, both at a time take 1 + 1/n at best.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Target, conclude, read_options, run_ranks
from rich.console import Console

from thinwire.lab import Cluster, Lab, Loopback

LAYERS, WIDTH = 12, 768
BUCKET_MB = WIDTH * WIDTH * 4 / 2**20


def network(batch: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(batch, WIDTH)


def slowest(seconds: float) -> float:
    """The longest time of all ranks."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def timed(work: Callable[[], object]) -> float:
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    work()
    return slowest(time.perf_counter() - begin)


def rank_overhead(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {}
    for name in ("plain DDP", "allreduce_hook", "attach none", "attach none, telemetry off"):
        net, x = network(job["batch"])
        model = DistributedDataParallel(net)
        if name == "allreduce_hook":
            model.register_comm_hook(None, allreduce_hook)
        elif name != "plain DDP":
            tw.attach(model, "none", measure_every=0 if "off" in name else 100)
        models[name] = (model, torch.optim.SGD(model.parameters(), lr=1e-3), x)

    def step(name: str) -> None:
        model, optimizer, x = models[name]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for turn in range(-2, job["rounds"]):  # the first two rebuild buckets and connect
        for name in models:
            seconds = min(timed(lambda name=name: step(name)) for _ in range(3))
            if dist.get_rank() == 0 and turn >= 0:
                print(json.dumps({"name": name, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def rank_pipeline(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net, x = network(job["batch"])
    model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    wire = tw.attach(
        model, job["compressor"], feedback="ef14", measure_every=0, collective="gather"
    )
    alone = tw.Reducer(job["compressor"], feedback="ef14", collective="gather")
    groups = [[p] for p in net.parameters() if p.dim() == 2][::-1]

    def backward() -> None:
        with model.no_sync():
            loss = model(x).square().mean()
        dist.barrier()
        begin = time.perf_counter()
        with model.no_sync():
            loss.backward()
        took.append(time.perf_counter() - begin)

    def hooked() -> None:
        loss = model(x).square().mean()
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        loss.backward()
        took.append(time.perf_counter() - begin)
        worked.append(time.process_time() - busy)

    def exchange() -> None:
        dist.barrier()
        begin = time.perf_counter()
        handles = [
            alone.average({str(i): p.grad for p in group}, async_op=True)
            for i, group in enumerate(groups)
        ]
        tw.wait_all(handles)
        took.append(time.perf_counter() - begin)

    took: list[float] = []
    worked: list[float] = []  # seconds of a core, in passes with the hook
    parts = {"backward": backward, "both at a time": hooked, "exchange": exchange}
    for turn in range(-3, job["rounds"]):
        for name, work in parts.items():
            model.zero_grad(set_to_none=name != "exchange")
            if name == "exchange":
                for p in net.parameters():
                    p.grad = torch.randn_like(p)
            took.clear()
            work()
            seconds = slowest(took[0])
            if dist.get_rank() == 0 and turn >= 0:
                print(json.dumps({"name": name, "seconds": seconds}), flush=True)
            if name == "both at a time":
                busy = slowest(worked[-1])
                if dist.get_rank() == 0 and turn >= 0:
                    row = {"name": "both at a time: a core is busy", "seconds": busy}
                    print(json.dumps(row), flush=True)
    if dist.get_rank() == 0:
        total = wire.stats()["total"]
        row = {"name": "bytes", "seconds": total["network_bytes"] / wire.step}
        print(json.dumps(row), flush=True)
        for kind, seconds in wire.stats()["seconds"].items():
            row = {"name": f"hook: {kind}", "seconds": seconds / wire.step}
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def measured(cluster: Cluster, job: dict[str, Any]) -> dict[str, list[float]]:
    """The seconds of all rounds, by what was timed."""
    found: dict[str, list[float]] = {}

    def on_row(row: dict[str, Any]) -> None:
        found.setdefault(row["name"], []).append(row["seconds"])

    run_ranks(cluster, __file__, job, on_row, limit=1200)
    return found


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def link_for(base: dict[str, Any], console: Console) -> str:
    """The rate at which the exchange takes about as long as backward."""
    with console.status("backward and exchange on loopback, to choose the link"):
        free = medians(measured(Loopback(2), {**base, "part": "pipeline", "rounds": 3}))
    # What encoding, decoding and a fast network take stays; the link has the rest of the time.
    rest = max(0.1 * free["backward"], free["backward"] - free["exchange"])
    return f"{8 * free['bytes'] / rest / 1e6:.1f}mbit"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("overhead", "pipeline"), help="one part alone")
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take the median of (9)")
    parser.add_argument("--batch", type=int, default=1024, help="rows of a batch (1024)")
    parser.add_argument("--link", help="rate of the links (chosen by what loopback takes)")
    parser.add_argument("--compressor", default="quantize:8", help="of the pipeline (quantize:8)")
    options = read_options(parser)
    if options.as_rank:
        job = json.loads(Path(options.as_rank).read_text())
        {"overhead": rank_overhead, "pipeline": rank_pipeline}[job["part"]](job)
        return 0
    console = Console()
    record: dict[str, Any] = {}
    targets: list[Target] = []
    base = {"rounds": options.rounds, "batch": options.batch, "compressor": options.compressor}
    if options.only in (None, "overhead"):
        with console.status("overhead on loopback"):
            rounds = measured(Loopback(2), {**base, "part": "overhead", "batch": 128})
        record["overhead"], found = rounds, medians(rounds)
        for name, seconds in found.items():
            console.print(f"{name}: {1e3 * seconds:.1f} ms per step")
        over = found["attach none"] / found["plain DDP"]
        targets.append(Target.at_most("attach none: a step over plain DDP", over, 1.05))
        over = found["attach none"] / found["allreduce_hook"]
        targets.append(Target.at_most("attach none: a step over torch's hook", over, 1.05))
    if options.only in (None, "pipeline"):
        link = options.link or link_for(base, console)
        with console.status(f"pipeline on links of {link}"):
            rounds = measured(Lab(2, link), {**base, "part": "pipeline"})
        record["pipeline"], found = {"link": link, **rounds}, medians(rounds)
        for name, value in found.items():
            unit = f"{value / 1e6:.2f} MB per step" if name == "bytes" else f"{1e3 * value:.1f} ms"
            console.print(f"{name}: {unit}")
        longer = max(found["backward"], found["exchange"])
        after = (found["backward"] + found["exchange"]) / longer
        console.print(f"links of {link}; one after the other: {after:.2f}x of the longer")
        both = found["both at a time"] / longer
        targets.append(Target.at_most("both at a time over the longer one", both, 1.25))
    return conclude(console, options, "thinwire.ddp/2", record, targets)


if __name__ == "__main__":
    sys.exit(main())
