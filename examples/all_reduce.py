"""Average gradients over all ranks with 40 times fewer bytes, and lose nothing.

    torchrun --standalone --nproc-per-node 4 examples/all_reduce.py

Every rank has its own stream of gradients. Each step averages them, compressed; a residual keeps
what was not sent. In the end the sum of all compressed averages differs from the sum of the exact
ones by just what the residuals hold.
"""

import torch
import torch.distributed as dist

import thinwire as tw

STEPS, NUMEL = 50, 200_000


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    residual = torch.zeros(NUMEL)
    total, exact = torch.zeros(NUMEL), torch.zeros(NUMEL)
    sent, collective = 0, ""
    for _ in range(STEPS):
        gradient = torch.randn(NUMEL, generator=generator)
        dense = gradient.clone()
        dist.all_reduce(dense)
        exact += dense / world
        handle = tw.all_reduce(gradient, "topk:0.01", residual=residual, op="avg")
        total += gradient
        sent += handle.bytes_sent
        collective = handle.collective

    left = residual.clone()
    dist.all_reduce(left)
    lost = (total + left / world - exact).abs().max() / exact.abs().max()
    if rank == 0:
        dense_bytes = STEPS * 2 * (world - 1) * 4 * NUMEL // world
        print(f"{world} ranks, {STEPS} steps, collective {collective!r}")
        print(f"sent by each rank: {sent / 1e6:.2f} MB instead of {dense_bytes / 1e6:.2f} MB")
        print(f"averages + residuals = exact averages, to {lost:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
