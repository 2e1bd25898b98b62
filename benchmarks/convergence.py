"""Does training get as far with compressed gradients? The bundled workloads, with and without.

    python benchmarks/convergence.py [--workload images] [--ranks 4] [--seeds 3] [--steps N]
                                     [--out benchmarks/records/NAME.json]

Every method trains the same model from the same seeds on the same batches, with the same optimizer
and number of steps, on loopback: figures of accuracy, not of speed. Each compressor runs with error
feedback and, as the control, without. PyTorch's own hooks run in the same harness; one that fails
is listed with its error, one that hangs with the time limit it was given.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from harness import Target, conclude, read_options, run_ranks
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.lab import Loopback
from thinwire.machine import busy

COMPRESSORS = ("topk:0.01", "quantize:4", "onebit", "randomk:0.1")
FEEDBACK = [(f"{spec} + ef14", {"compressor": spec, "feedback": "ef14"}) for spec in COMPRESSORS]
CONTROL = [(spec, {"compressor": spec, "feedback": "none"}) for spec in COMPRESSORS]
MORE = [
    ("topk:0.01 + ef21", {"compressor": "topk:0.01", "feedback": "ef21"}),
    ("topk:0.01|quantize:4 + ef14", {"compressor": "topk:0.01|quantize:4", "feedback": "ef14"}),
    ("quantize:4 + ef14, int8 residual", {"compressor": "quantize:4",
                                          "feedback": "ef14:storage=int8,reset=1024"}),
]  # fmt: skip
OURS = dict([("dense DDP", {}), *FEEDBACK, *CONTROL, *MORE])
TORCH = ("fp16", "bf16", "powersgd", "batched powersgd", "quantize per tensor",
         "quantize per channel")  # fmt: skip
LIMIT = 45.0  # seconds for a hook of PyTorch to get through its first steps
CLOSE = 1.0  # points of accuracy that feedback may cost


def rank_main(job: dict[str, Any]) -> None:
    """What runs on each rank: train with one method after the other."""
    import torch
    import torch.distributed as dist

    from thinwire.workloads import workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = workload(job["workload"])
    steps = job["steps"] or task.default_steps
    for name, settings in job["methods"].items():
        for seed in job["seeds"]:
            row = train(task, settings, seed, steps)
            if dist.get_rank() == 0:
                print(json.dumps({"name": name, "seed": seed, **row}), flush=True)
    dist.destroy_process_group()


def train(task: Any, settings: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw

    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(task.model(seed))
    wire = None
    if "hook" in settings:
        add_torch_hook(model, settings["hook"])
    elif settings:
        wire = tw.attach(model, **settings)
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer, steps)
    losses = []
    begin = time.perf_counter()
    for _, batch in zip(range(steps), task.batches(rank, world, seed), strict=False):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    seconds = (time.perf_counter() - begin) / steps
    tw.check_replicas(model)
    row = {"seconds": seconds, "losses": [round(v, 4) for v in losses[::10]]}
    if wire is not None:
        total = wire.stats()["total"]
        row |= {"ratio": total["ratio"], "bytes_sent": total["bytes_sent"] / steps}
        row |= {"error": total["relative_error"]}
    if rank == 0:
        row["metric"] = task.evaluate(model.module)
    dist.barrier()
    return row


def add_torch_hook(model: Any, name: str) -> None:
    """Those that `thinwire compare` knows, and those that never work on gloo."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks

    from thinwire.compare.method import read
    from thinwire.compare.training import equip

    if name == "batched powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2)
        model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    elif name.startswith("quantize"):
        hook = getattr(quantization_hooks, f"quantization_{name.split()[1]}{name.split()[2]}_hook")
        model.register_comm_hook(dist.group.WORLD, hook)
    else:
        equip(model, read(f"torch:{name}"))


def run_ours(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    methods = {
        name: settings
        for name, settings in OURS.items()
        if not options.only or any(part in name for part in options.only)
    }
    job = {
        "workload": options.workload,
        "steps": options.steps,
        "seeds": list(range(options.seeds)),
        "methods": methods,
    }
    rows: list[dict[str, Any]] = []
    total = len(methods) * options.seeds
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(f"{options.workload}: 0 of {total} runs")

        def on_row(row: dict[str, Any]) -> None:
            rows.append(row)
            shown = f"{len(rows)} of {total} runs, {row['name']}: {row['metric']:.3f}"
            progress.update(bar, description=f"{options.workload}: {shown}")
            if not console.is_terminal:
                console.print(shown, highlight=False)

        run_ranks(Loopback(options.ranks), __file__, job, on_row)
    return rows


def run_torch(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Each hook in processes of its own: some hang."""
    rows = []
    for hook in TORCH:
        console.print(f"torch {hook} hook ...", highlight=False)
        job = {
            "workload": options.workload,
            "steps": options.steps,
            "seeds": [0],
            "methods": {f"torch {hook}": {"hook": hook}},
        }
        rows.append(one_torch(options, job, hook))
    return rows


def one_torch(options: argparse.Namespace, job: dict[str, Any], hook: str) -> dict[str, Any]:
    """A few steps first, with a time limit; the whole training if those went well."""
    import subprocess
    import tempfile

    found: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**job, "steps": 20}, file)
        file.flush()
        probe = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        probe += ["--nproc-per-node", str(options.ranks), __file__, "--as-rank", file.name]
        try:
            done = subprocess.run(probe, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"name": f"torch {hook}", "failure": f"no end within {LIMIT:g} s: hangs"}
    if done.returncode:
        lines = [line.partition(":")[2] if line.startswith("[rank") else line
                 for line in done.stderr.splitlines()]  # fmt: skip
        errors = [line.strip() for line in lines if "Error" in line and "Child" not in line]
        return {"name": f"torch {hook}", "failure": errors[0] if errors else "failed"}
    run_ranks(Loopback(options.ranks), __file__, job, found.append)
    return found[0]


def table_of(options: argparse.Namespace, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{options.workload}: {options.ranks} ranks, {options.seeds} seeds")
    for column in ("method", "metric", "spread", "ratio", "error", "ms per step"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        if "failure" in own[0]:
            table.add_row(name, own[0]["failure"][:70])
            continue
        metrics = [row["metric"] for row in own]
        first = own[0]
        table.add_row(
            name,
            f"{statistics.mean(metrics):.3f}",
            f"{max(metrics) - min(metrics):.3f}",
            f"{first['ratio']:.1f}x" if "ratio" in first else "-",
            f"{first['error']:.3f}" if first.get("error") is not None else "-",
            f"{1e3 * first['seconds']:.0f}",
        )
    return table


def targets_of(rows: list[dict[str, Any]]) -> list[Target]:
    """For the images: feedback within a point of dense, the control visibly worse."""
    means = {
        name: statistics.mean(row["metric"] for row in rows if row["name"] == name)
        for name in {row["name"] for row in rows if "metric" in row}
    }
    targets = []
    for (with_it, _), (without, _) in zip(FEEDBACK, CONTROL, strict=True):
        if {with_it, without, "dense DDP"} <= means.keys():
            lost = means["dense DDP"] - means[with_it]
            targets.append(Target.at_most(f"{with_it}: points below dense", lost, CLOSE))
            gap = means[with_it] - means[without]
            targets.append(
                Target(f"{without}: points that feedback wins", gap, f">= {CLOSE:g}", gap >= CLOSE)
            )
    return targets


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=("images", "text"), default="images")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine (4)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (3)")
    parser.add_argument("--steps", type=int, help="steps of a run (the workload's own)")
    parser.add_argument("--only", nargs="*", help="methods whose name holds one of these")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch's own hooks out")
    options = read_options(parser)
    if options.as_rank:
        rank_main(json.loads(Path(options.as_rank).read_text()))
        return 0
    console = Console()
    note = busy()
    rows = run_ours(options, console)
    if not options.no_torch:
        rows += run_torch(options, console)
    console.print(table_of(options, rows))
    targets = targets_of(rows) if options.workload == "images" else []
    return conclude(console, options, "thinwire.convergence/1", rows, targets, note)


if __name__ == "__main__":
    sys.exit(main())
