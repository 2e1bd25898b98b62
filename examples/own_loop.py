"""A training loop of your own: average the gradients where and when you like.

    torchrun --standalone --nproc-per-node 2 examples/own_loop.py

No DDP: after backward the largest 5 % of each matrix are averaged over all ranks, and the vectors
uncompressed, both in the background. Linear regression, so that the right answer is known.
"""

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw

STEPS, BATCH, INPUTS, OUTPUTS = 300, 64, 64, 32


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same model everywhere
    answer = torch.randn(OUTPUTS, INPUTS)
    model = nn.Linear(INPUTS, OUTPUTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    reducer = tw.Reducer("topk:0.05", feedback="ef14", min_numel=1024)
    generator = torch.Generator().manual_seed(rank)  # other data everywhere

    for _ in range(STEPS):
        inputs = torch.randn(BATCH, INPUTS, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs @ answer.T)
        optimizer.zero_grad()
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        handle = reducer.average(gradients, async_op=True)
        handle.wait()  # whatever needs no gradients can come before this
        optimizer.step()

    tw.check_replicas(model)
    if rank == 0:
        error = (model.weight - answer).norm() / answer.norm()
        total = reducer.stats()["total"]
        sent, dense = total["bytes_sent"], total["bytes_in"]
        print(f"{sent / 1e6:.2f} MB sent, the gradients have {dense / 1e6:.2f} MB")
        print(f"distance to the right answer: {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
