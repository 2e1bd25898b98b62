"""A sharded model (FSDP2) with compressed gradients and parameters.

    torchrun --standalone --nproc-per-node 2 examples/fsdp.py
    torchrun --standalone --nproc-per-node 2 examples/fsdp.py --compressor topk:0.05 --weights none
    torchrun --standalone --nproc-per-node 4 examples/fsdp.py --replicas 2
    torchrun --standalone --nproc-per-node 2 examples/fsdp.py --save checkpoint
    torchrun --standalone --nproc-per-node 4 examples/fsdp.py --resume checkpoint

Continues Moby Dick character by character with a small transformer (both ship with thinwire). Each
rank keeps its part of the parameters, gradients and optimizer states; with `--replicas` there are
several copies of the model, each on its own ranks, and what goes between them is compressed. A
checkpoint can be read by another number of ranks.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.workloads import Text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compressor", default="quantize:4")
    parser.add_argument("--weights", default="quantize:8", help="for parameters, or none")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64, help="of the transformer")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint, in the end")
    parser.add_argument("--resume", type=Path, help="folder with a checkpoint")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = (options.replicas, world // options.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    task = Text(width=options.width, test_windows=128)
    model = task.model(seed=0)  # the same on all ranks
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = task.optimizer(model)  # AdamW
    schedule = task.schedule(optimizer, options.steps)

    if options.replicas > 1:
        wire = tw.attach(model, options.compressor, replicate=mesh["replicate"])
    else:
        weights = None if options.weights == "none" else options.weights
        wire = tw.attach(model, options.compressor, weights=weights)  # the one line

    if options.resume:
        parameters, moments = get_state_dict(model, optimizer)
        state = {"model": parameters, "optimizer": moments, "wire": wire.stateful(options.resume)}
        load(state, checkpoint_id=options.resume)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    for step, batch in zip(range(options.steps), task.batches(rank, world), strict=False):
        if step < wire.step:
            schedule.step()
            continue  # the data of steps before the checkpoint
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if options.save:
        parameters, moments = get_state_dict(model, optimizer)
        state = {"model": parameters, "optimizer": moments, "wire": wire.stateful()}
        save(state, checkpoint_id=options.save)
    nll = task.evaluate(model)  # on all ranks: each has only a part of the model
    if rank == 0:
        print(wire.summary(rows=6))
        print(f"test nll {nll:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
