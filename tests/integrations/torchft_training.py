"""A training with torchft: a lighthouse and three replicas, one of which is killed.

python torchft_training.py FOLDER starts all of them and prints a line of JSON.
"""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import thinwire as tw

REPLICAS, STEPS, DEATH = 3, 8, 4


def replica(folder: str, place: int, lighthouse: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=20)
    group = tw.torchft.CompressedGroup(ProcessGroupGloo(timeout=limit), "quantize:8")
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    manager = Manager(
        pg=group,
        load_state_dict=lambda state: (
            net.load_state_dict(state["net"]),
            inner.load_state_dict(state["inner"]),
        ),
        state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
        min_replica_size=2,
        replica_id=f"replica_{place}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=limit,
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    sizes, skipped = [], 0
    while manager.current_step() < STEPS:
        step = manager.current_step()
        generator = torch.Generator().manual_seed(100 * step + place)
        x = torch.randn(8, 20, generator=generator)
        y = torch.randint(4, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if place == REPLICAS - 1 and step == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if manager.current_step() > step:
            sizes.append(manager.num_participants())
        else:
            skipped += 1
    weights = [p.detach().double().sum().item() for p in net.parameters()]
    found = {"sizes": sizes, "skipped": skipped, "weights": weights, "calls": group._calls}
    Path(folder, f"{place}.json").write_text(json.dumps(found))
    os._exit(0)  # the threads of a manager whose peers are gone need not be waited for


def main(folder: str) -> None:
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=2000, heartbeat_timeout_ms=2000
    )
    address = lighthouse.address()
    port = address.rpartition(":")[2]
    words = [sys.executable, __file__, folder]
    processes = [
        subprocess.Popen([*words, str(place), f"http://127.0.0.1:{port}"])
        for place in range(REPLICAS)
    ]
    try:
        for process in processes:
            process.wait(timeout=150)
    finally:
        for process in processes:
            process.kill()
        lighthouse.shutdown()
    reports = [Path(folder, f"{place}.json") for place in range(REPLICAS)]
    found = [json.loads(each.read_text()) if each.exists() else None for each in reports]
    print("@" + json.dumps({"replicas": found}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        replica(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    main(sys.argv[1])
