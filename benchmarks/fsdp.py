"""Sharded training: steps of FSDP2 and HSDP on slow links, and the loss after some hundred steps.

    python benchmarks/fsdp.py [--link 100mbit] [--inter RATE] [--rounds 5] [--width 288]
                              [--layers 10] [--loss-steps 200] [--seeds 3]
                              [--out benchmarks/records/NAME.json]

fsdp: four hosts in network namespaces, each with a link of this rate; a transformer of about ten
million parameters under AdamW. hsdp: two racks of two hosts with fast links inside and one of this
rate between them; shards inside of racks, a replica in each. All candidates take turns in every
round; figures are medians over rounds of the slowest rank, bytes are counted at its interface. All
ranks share this machine's cores. loss: the text workload on loopback, four ranks, the same seeds.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from harness import Target, conclude, read_options, run_ranks
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

LIMIT = 3 * 3600.0  # seconds for all
HOSTS = 4
PARTS = ("fsdp", "hsdp", "loss")


class Candidate(NamedTuple):
    """One way to take a step; without a compressor that of FSDP itself."""

    compressor: str = ""
    weights: str = ""

    @property
    def name(self) -> str:
        if not self.compressor:
            return "plain"
        return f"{self.compressor}, weights {self.weights}" if self.weights else self.compressor


BEST = Candidate("quantize:4", "quantize:8")
CANDIDATES = {
    "fsdp": [Candidate(), Candidate("none"), Candidate("quantize:4"), BEST],
    "hsdp": [Candidate(), Candidate("none"), Candidate("quantize:4"), Candidate("topk:0.01")],
    "loss": [Candidate(), Candidate("quantize:4"), BEST],
}


def rank_main(job: dict[str, Any]) -> None:
    """What runs on each host; rank 0 prints rows."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (measure_loss if job["part"] == "loss" else measure_steps)(job)
    dist.destroy_process_group()


def sharded(job: dict[str, Any], way: Candidate, task: Any, seed: int = 0) -> tuple[Any, Any]:
    """The model of a candidate, and its wire."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import thinwire as tw

    model = task.model(seed)
    mesh = None
    options: dict[str, Any] = {}
    if job["part"] == "hsdp":
        both = init_device_mesh("cpu", (2, HOSTS // 2), mesh_dim_names=("replicate", "shard"))
        mesh = both["shard"] if way.compressor else both
        options = {"replicate": both["replicate"]}
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not way.compressor:
        return model, None
    return model, tw.attach(model, way.compressor, weights=way.weights or None, **options)


def measure_steps(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from thinwire.compare import counters
    from thinwire.workloads import Text

    rank, size = dist.get_rank(), dist.get_world_size()
    task = Text(batch_size=job["batch"], width=job["width"], layers=job["layers"])
    ways = [Candidate(*each) for each in job["candidates"]]
    trained = {}
    for way in ways:
        model, wire = sharded(job, way, task)
        trained[way] = model, wire, task.optimizer(model), task.batches(rank, size, 0)
    for turn in range(-2, job["rounds"]):  # the first connect, and gather parameters whole
        for way, (model, wire, optimizer, batches) in trained.items():
            before = 0 if wire is None else wire.stats()["total"]["network_bytes"]
            dist.barrier()
            counted, begin = counters.sent(size, loopback=False), time.perf_counter()
            task.loss(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - begin
            dist.barrier()
            counted = counters.sent(size, loopback=False) - counted
            reported = 0 if wire is None else wire.stats()["total"]["network_bytes"] - before
            mine = torch.tensor([seconds, counted, reported], dtype=torch.float64)
            table = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(table, mine)
            if rank == 0:
                rows = torch.stack(table)
                row = {
                    "name": way.name,
                    "turn": turn,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "seconds": rows[:, 0].max().item(),
                    "bytes_counted": rows[:, 1].mean().item(),
                    "bytes_reported": rows[:, 2].mean().item(),
                    "gradient_bytes": None if wire is None else gradient_bytes(wire),
                }
                print(json.dumps(row), flush=True)


def gradient_bytes(wire: Any) -> float:
    """That this rank has sent of gradients, per step."""
    stats = wire.stats()
    rows = [row for name, row in stats["tensors"].items() if not name.endswith("(parameters)")]
    return sum(row["bytes_sent"] for row in rows) / max(1, stats["step"])


def measure_loss(job: dict[str, Any]) -> None:
    import torch.distributed as dist

    from thinwire.workloads import Text

    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in range(job["seeds"]):
        for way in [Candidate(*each) for each in job["candidates"]]:
            task = Text()
            model, _ = sharded(job, way, task, seed)
            optimizer = task.optimizer(model)
            schedule = task.schedule(optimizer, job["steps"])
            batches = task.batches(rank, size, seed)
            for _ in range(job["steps"]):
                task.loss(model, next(batches)).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            nll = task.evaluate(model)
            if rank == 0:
                print(json.dumps({"name": way.name, "seed": seed, "nll": nll}), flush=True)


def measure(part: str, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    from thinwire.lab import Lab, Loopback

    cluster: Any = Loopback(HOSTS)
    if part == "fsdp":
        cluster = Lab(HOSTS, options.link)
    elif part == "hsdp":
        cluster = Lab(HOSTS, "10gbit", racks=2, inter=options.inter or options.link)
    job = {
        "part": part,
        "candidates": CANDIDATES[part],
        "rounds": options.rounds,
        "width": options.width,
        "layers": options.layers,
        "batch": options.batch,
        "steps": options.loss_steps,
        "seeds": options.seeds,
    }
    found: list[dict[str, Any]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(part)

        def on_row(row: dict[str, Any]) -> None:
            found.append(row)
            progress.update(task, description=f"{part}: {row['name']}")

        run_ranks(cluster, __file__, job, on_row, LIMIT)
    return found


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each candidate, of the rounds that count."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    summary = []
    for name in names:
        own = [row for row in rows if row["name"] == name and row["turn"] >= 0]
        one: dict[str, Any] = {"name": name, "parameters": own[0]["parameters"]}
        for key in ("seconds", "bytes_counted", "bytes_reported"):
            one[key] = statistics.median(row[key] for row in own)
        one["all_seconds"] = [row["seconds"] for row in own]
        one["gradient_bytes"] = own[-1]["gradient_bytes"]
        summary.append(one)
    return summary


def show_steps(console: Console, part: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{part}: a step, median")
    for column in ("", "seconds", "faster", "MB sent", "MB by thinwire's count"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        reported = f"{row['bytes_reported'] / 1e6:.3g}" if row["bytes_reported"] else "-"
        table.add_row(
            row["name"],
            f"{row['seconds']:.3f}",
            f"{rows[0]['seconds'] / row['seconds']:.2f}x",
            f"{row['bytes_counted'] / 1e6:.3g}",
            reported,
        )
    console.print(table)


def targets_of(steps: dict[str, list[dict[str, Any]]], loss: list[dict[str, Any]]) -> list[Target]:
    found = []
    if "fsdp" in steps:
        rows = {row["name"]: row for row in steps["fsdp"]}
        plain, best = rows["plain"], rows[BEST.name]
        bits = rows["quantize:4"]["gradient_bytes"] / rows["none"]["gradient_bytes"]
        counted = best["bytes_reported"] / best["bytes_counted"]
        found += [
            Target.at_most("gradient bytes, quantize:4 over float32", bits, 0.14),
            Target.at_least(
                f"step of plain FSDP2 over {BEST.name}", plain["seconds"] / best["seconds"], 2.5
            ),
            Target.at_least("bytes reported over counted", counted, 0.95),
            Target.at_most("bytes reported over counted", counted, 1.0),
        ]
    if "hsdp" in steps:
        rows = {row["name"]: row for row in steps["hsdp"]}
        faster = rows["plain"]["seconds"] / rows["topk:0.01"]["seconds"]
        found.append(Target.at_least("step of plain HSDP over topk:0.01", faster, 5.0))
    if loss:
        means = {
            name: statistics.fmean(row["nll"] for row in loss if row["name"] == name)
            for name in dict.fromkeys(row["name"] for row in loss)
        }
        for name, value in means.items():
            if name != "plain":
                found.append(
                    Target.at_most(f"nll, {name} over plain", value / means["plain"], 1.01)
                )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--link", default="100mbit", help="of a host (100mbit)")
    parser.add_argument("--inter", default="", help="between racks (as --link)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each candidate (5)")
    parser.add_argument("--width", type=int, default=288, help="of the transformer (288)")
    parser.add_argument("--layers", type=int, default=10, help="of the transformer (10)")
    parser.add_argument("--batch", type=int, default=2, help="windows of a rank in a step (2)")
    parser.add_argument("--loss-steps", type=int, default=200, help="of the text workload (200)")
    parser.add_argument("--seeds", type=int, default=3, help="of the text workload (3)")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = read_options(parser)
    if options.as_rank:
        rank_main(json.loads(options.as_rank.read_text()))
        return 0
    console = Console(width=110)
    steps = {}
    loss: list[dict[str, Any]] = []
    for part in options.parts:
        rows = measure(part, options, console)
        if part == "loss":
            loss = rows
            for row in rows:
                console.print(f"{row['name']}, seed {row['seed']}: nll {row['nll']:.4f}")
        else:
            steps[part] = medians(rows)
            show_steps(console, part, steps[part])
    measured = {**steps, "loss": loss}
    return conclude(console, options, "thinwire.fsdp/1", measured, targets_of(steps, loss))


if __name__ == "__main__":
    sys.exit(main())
