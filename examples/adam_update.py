"""AdamW under strong compression: what is compressed is the update of each step.

    torchrun --standalone --nproc-per-node 2 examples/adam_update.py
    torchrun --standalone --nproc-per-node 2 examples/adam_update.py --method none

Continues Moby Dick character by character with a small transformer (both ship with thinwire). No
DDP and no other change of the loop: each rank's AdamW works with the gradients of its own batches,
and after each step the ranks average what their optimizers have done, 1 % of it in 4 bits.
"""

import argparse

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.workloads import Text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="adam-update:0.01", help="none averages uncompressed")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64, help="of the transformer")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task = Text(width=options.width, test_windows=128)
    model = task.model(seed=0)
    optimizer = task.optimizer(model)  # AdamW
    schedule = task.schedule(optimizer, options.steps)

    with tw.LocalSteps(model, optimizer, options.method) as local:  # the one line
        for step, batch in zip(range(options.steps), task.batches(rank, world), strict=False):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            if rank == 0 and step % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    tw.check_replicas(model)
    if rank == 0:
        print(f"test nll {task.evaluate(model):.3f} nats per character")
        print(local.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
