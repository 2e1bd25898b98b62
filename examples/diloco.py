"""DiLoCo: each rank trains by itself, and every so many steps the ranks agree.

    torchrun --standalone --nproc-per-node 2 examples/diloco.py
    torchrun --standalone --nproc-per-node 2 examples/diloco.py --method sparseloco:every=10
    torchrun --standalone --nproc-per-node 2 examples/diloco.py --save checkpoints
    torchrun --standalone --nproc-per-node 2 examples/diloco.py --resume checkpoints

Continues Moby Dick character by character with a small transformer (both ship with thinwire). Stop
it at any time, in the middle of a round too: `--save` writes a checkpoint every 50 steps, and
`--resume` goes on from the last one as if it had never stopped.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.workloads import Text

# The paper's outer momentum of 0.9 is for many rounds: over the 20 of this script it overshoots.
METHOD = "diloco:every=10,lr=0.7,momentum=0.5,compressor=(quantize:4)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default=METHOD)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64, help="of the transformer")
    parser.add_argument("--save", type=Path, help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--resume", type=Path, help="folder with checkpoints")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task = Text(width=options.width, test_windows=128)
    model = DistributedDataParallel(task.model(seed=0))  # or the plain module
    optimizer = task.optimizer(model)  # AdamW
    schedule = task.schedule(optimizer, options.steps)  # counts the steps of each rank

    with tw.LocalSteps(model, optimizer, options.method) as local:  # the one line
        if options.resume:
            saved = tw.load_checkpoint(options.resume)
            if saved is None:
                raise SystemExit(f"no checkpoint in {options.resume}")
            local.load_state_dict(saved.state["local"])  # the model and its optimizer too
            schedule.load_state_dict(saved.state["schedule"])
        done = local.inner_steps
        for step, batch in zip(range(options.steps), task.batches(rank, world), strict=False):
            if step < done:
                continue  # the data of steps before the checkpoint
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            if rank == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1}, round {local.step}: loss {loss.item():.3f}", flush=True)
            if options.save and (step + 1) % options.save_every == 0:
                state = {"local": local.state_dict(), "schedule": schedule.state_dict()}
                tw.save_checkpoint(options.save, state, step=step + 1)

    tw.check_replicas(model)
    if rank == 0:
        print(f"test nll {task.evaluate(model.module):.6f} nats per character")
        print(local.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped: --resume goes on from the last checkpoint") from None
