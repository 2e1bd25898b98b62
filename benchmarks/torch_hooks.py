"""Which of PyTorch's own communication hooks train over gloo, and what the others raise.

    python benchmarks/torch_hooks.py [--ranks 4] [--steps 40] [--out benchmarks/records/NAME.json]

Each hook trains the images workload on loopback, in processes of its own and within a time limit,
as some hang.
"""

import argparse
import json
import sys
from typing import Any

from harness import conclude, read_options, run_ranks
from rich.console import Console
from rich.table import Table

from thinwire.lab import HostFailedError, Loopback, RunTimeoutError

KNOWN = ("fp16", "bf16", "powersgd")  # to `thinwire compare`
HOOKS = (*KNOWN, "batched powersgd", "quantize per tensor", "quantize per channel")
LIMIT = 60.0  # seconds; those that work take five


def rank_main(job: dict[str, Any]) -> None:
    """Train with one hook; rank 0 prints what it came to."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from thinwire.workloads import workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task = workload("images")
    model = DistributedDataParallel(task.model(0))
    add_hook(model, job["hook"])
    optimizer = task.optimizer(model)
    for _, batch in zip(range(job["steps"]), task.batches(rank, world, 0), strict=False):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    if rank == 0:
        print(json.dumps({"metric": task.evaluate(model.module)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def add_hook(model: Any, name: str) -> None:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks

    from thinwire.compare.method import read
    from thinwire.compare.training import equip

    if name in KNOWN:
        equip(model, read(f"torch:{name}"))
    elif name == "batched powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2)
        model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    else:
        hook = getattr(quantization_hooks, f"quantization_{name.split()[1]}{name.split()[2]}_hook")
        model.register_comm_hook(dist.group.WORLD, hook)


def train(hook: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a hook came to: its `metric`, or its `failure`."""
    found: list[dict[str, Any]] = []
    job = {"hook": hook, "steps": options.steps}
    try:
        run_ranks(Loopback(options.ranks), __file__, job, found.append, LIMIT)
    except RunTimeoutError:
        return {"failure": f"no end within {LIMIT:g} s: hangs"}
    except HostFailedError as failed:
        ended = failed.results[failed.host]
        said = [line.partition("]:")[2].strip() or line for line in ended.stderr.splitlines()]
        errors = [line for line in said if "Error" in line or "what()" in line]
        return {"failure": errors[-1] if errors else ended.last_lines(1)}
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine (4)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a training (40)")
    options = read_options(parser)
    if options.as_rank:
        with open(options.as_rank) as file:
            rank_main(json.load(file))
        return 0
    console = Console()
    table = Table("hook", "test accuracy, or what it raised")
    rows = []
    for hook in HOOKS:
        with console.status(f"torch's {hook} hook ..."):
            row = {"name": f"torch {hook}", **train(hook, options)}
        rows.append(row)
        table.add_row(hook, row.get("failure") or f"{row['metric']:.1f} %")
    console.print(table)
    return conclude(console, options, "thinwire.torch-hooks/1", rows)


if __name__ == "__main__":
    sys.exit(main())
