"""A training with Accelerate, started by torchrun; rank 0 prints a line of JSON.

torchrun --nproc-per-node 2 accelerate_training.py FOLDER MODE
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw

STEPS = 8


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))


def main(folder: str, mode: str) -> None:
    torch.set_num_threads(1)
    accumulate = 2 if mode == "accumulate" else 1
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    compressor = "topk:0.2"
    if mode.startswith("handler"):
        handler = tw.accelerate.compress(accelerator, compressor, min_numel=2)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(256, 20, generator=generator), torch.randint(4, (256,), generator=generator)
    model = net()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader
    )
    if mode.startswith("handler"):
        wire = handler.wire
        assert tw.wire_of(model) is wire
    elif mode != "plain":
        wire = tw.attach(model, compressor, min_numel=2)
    if mode != "plain":
        accelerator.register_for_checkpointing(tw.accelerate.CheckpointedWire(model))
    saved = Path(folder, mode.removesuffix("-resumed"))
    begin = 0
    if mode.endswith("-resumed"):
        accelerator.load_state(saved)
        begin = STEPS // 2 * accumulate
    losses = []
    for step, (inputs, targets) in enumerate(loader):
        if step >= STEPS * accumulate:
            break
        if step < begin:
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == STEPS // 2 * accumulate and not mode.endswith("-resumed"):
            accelerator.save_state(saved)
    found = {"losses": losses, "weights": [p.sum().item() for p in model.parameters()]}
    if mode != "plain":
        found |= {"steps": wire.step, "ratio": wire.stats()["total"]["ratio"]}
    if accelerator.is_main_process:
        print("@" + json.dumps(found), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
