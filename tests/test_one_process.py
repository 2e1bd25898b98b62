"""A training whose ranks are threads of one process is the training of real ranks."""

import sys
from pathlib import Path

import pytest
import ranks
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.workloads import Images

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import one_process

TASK = Images(4, 20, 2, width=8, momentum=0.9, learning_rate=0.05)  # one matrix of 32 x 784
STEPS = 3
WAYS = [
    *(("topk:0.01", "ef14"), ("arc:0.05", "ef21m:0.1"), ("powersgd:2", "auto"), ("onebit", "ef14")),
    *(("randomk:0.1,shared=true", "auto"), ("dgc:0.01,warmup=1,clip=4", "auto")),
    ("accuracy:(topk:0.01),1,5", "ef14"),
]


def on_trainings() -> list[tuple[list[float], int]]:
    found = []
    for spec, feedback in WAYS:
        model = DistributedDataParallel(TASK.model(0))
        optimizer = TASK.optimizer(model)
        options = {"feedback": feedback, "optimizer": optimizer, "measure_every": 0}
        wire = tw.attach(model, spec, **options)
        batches = TASK.batches(dist.get_rank(), dist.get_world_size(), 0)
        schedule, losses = TASK.schedule(optimizer, STEPS), []
        for _, batch in zip(range(STEPS), batches, strict=False):
            optimizer.zero_grad()
            loss = TASK.loss(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        found.append((losses, wire.stats()["total"]["network_bytes"]))
        wire.detach()
    return found


def test_threads_train_as_processes_do():
    expected = ranks.run(on_trainings, ranks=3)[0]
    for (spec, feedback), (losses, sent) in zip(WAYS, expected, strict=True):
        with one_process.threads_as_ranks():
            training = one_process.Training(TASK, spec, feedback, ranks=3, steps=STEPS)
            found = training.run()
        # gloo adds up in another order: a few roundings of float32, through three steps.
        assert training.losses == pytest.approx(losses, rel=1e-5), spec
        assert found["megabytes_a_step"] * STEPS == pytest.approx(sent / 1e6, rel=1e-12), spec


def test_an_error_of_one_thread_ends_all():
    with one_process.threads_as_ranks():
        training = one_process.Training(TASK, "topk:0.01", ranks=2, steps=1)
        training.reducers[1].detach()
        with pytest.raises(ValueError, match="this reducer is detached"):
            training.run()
    assert not dist.is_initialized()
