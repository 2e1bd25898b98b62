"""A plain DDP script with one line more.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --compressor none
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --save checkpoint
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --resume checkpoint --steps 120

Trains a small convolutional network on Fashion-MNIST (a part of it ships with thinwire) and prints
what was sent. `--save` writes a checkpoint at the end, `--resume` goes on from it with the steps
that are left, as if it had never stopped.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.workloads import Images


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compressor", default="topk:0.01")
    parser.add_argument("--feedback", default="ef14")
    parser.add_argument("--steps", type=int, default=60, help="in all, before and after --resume")
    parser.add_argument("--save", type=Path, help="folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="folder with checkpoints")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task = Images(per_class=300, test_per_class=100)
    model = DistributedDataParallel(task.model(seed=0))
    wire = tw.attach(model, options.compressor, feedback=options.feedback)  # the one line
    optimizer = task.optimizer(model)
    if options.resume:
        saved = tw.load_checkpoint(options.resume)
        if saved is None:
            raise SystemExit(f"no checkpoint in {options.resume}")
        model.load_state_dict(saved.state["model"])
        optimizer.load_state_dict(saved.state["optimizer"])
        wire.load_state_dict(saved.state["wire"])

    done = wire.step
    for step, batch in zip(range(options.steps), task.batches(rank, world), strict=False):
        if step < done:
            continue  # the data of steps before the checkpoint
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {wire.step}: loss {loss.item():.3f}", flush=True)

    tw.check_replicas(model)
    if options.save:
        state = {  # every rank has its own: residuals differ
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "wire": wire.state_dict(),
        }
        tw.save_checkpoint(options.save, state, step=wire.step)
    if rank == 0:
        print(f"test accuracy {task.evaluate(model.module):.1f} %")
        print(wire.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
