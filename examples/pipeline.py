"""A model in two stages on two ranks: activations go forward and gradients back at 8 bits.

    torchrun --standalone --nproc-per-node 2 examples/pipeline.py

Stage 0 holds the first half of a small regression model, stage 1 the second half and the loss.
"""

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw

STEPS, BATCH, WIDTH = 200, 64, 128


def first_stage(inputs: torch.Tensor) -> None:
    stage = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
    for _ in range(STEPS):
        token = tw.pipeline.send(stage(inputs), "quantize:8", dst=1)
        optimizer.zero_grad()
        token.backward()
        optimizer.step()


def second_stage(targets: torch.Tensor) -> None:
    stage = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
    for step in range(STEPS):
        activations = tw.pipeline.recv((BATCH, WIDTH), src=0, grad_compressor="quantize:8")
        loss = nn.functional.mse_loss(stage(activations), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, STEPS - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        raise SystemExit("this example has two stages: run it with --nproc-per-node 2")
    inputs = torch.randn(BATCH, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    if dist.get_rank() == 0:
        first_stage(inputs)
    else:
        second_stage(targets)
    tw.pipeline.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
