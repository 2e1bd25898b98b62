"""A training with Ray Train: two workers on this machine; prints a line of JSON.

python ray_training.py FOLDER
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import thinwire as tw

STEPS = 6


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    model = prepare_model(net)
    wire = tw.attach(model, "topk:0.2", min_numel=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank, begin = ray.train.get_context().get_world_rank(), 0
    mine = f"rank{rank}.pt"
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, mine), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        wire.load_state_dict(state["wire"])
        begin = wire.step
    for step in range(begin, config["steps"]):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 20, generator=generator)
        y = torch.randint(4, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step + 1 == config["saved"]:
            with tempfile.TemporaryDirectory() as folder:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "wire": wire.state_dict()}, Path(folder, mine))
                saved = Checkpoint.from_directory(folder)
                ray.train.report({"step": wire.step}, checkpoint=saved)
            if config["fails"] and checkpoint is None and rank == 1:
                raise RuntimeError("this worker fails once")
    found = {
        "weights": [p.sum().item() for p in model.parameters()],
        "steps": wire.step,
        "begin": begin,
        "ratio": wire.stats()["total"]["ratio"],
    }
    Path(config["folder"], f"{config['name']}-{rank}.json").write_text(json.dumps(found))


def main(folder: str) -> None:
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20, log_to_driver=False,
    )  # fmt: skip
    try:
        for name, fails in (("whole", False), ("failed", True)):
            config = {"folder": folder, "name": name, "steps": STEPS, "saved": 3, "fails": fails}
            TorchTrainer(
                train,
                train_loop_config=config,
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                run_config=RunConfig(
                    name=name, storage_path=folder, failure_config=FailureConfig(max_failures=1)
                ),
            ).fit()
    finally:
        ray.shutdown()
    found = {
        name: [json.loads(Path(folder, f"{name}-{rank}.json").read_text()) for rank in range(2)]
        for name in ("whole", "failed")
    }
    print("@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
