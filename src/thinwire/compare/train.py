"""Training a bundled workload with one method, on one rank."""

import statistics
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.compare.counters import FULL
from thinwire.compare.hooks import ddp_options, equip, optimizer_of, stats_of, warm_up
from thinwire.compare.meter import Meter
from thinwire.compare.method import Method
from thinwire.optim.base import ExchangingOptimizer
from thinwire.parallel.replicas import check_replicas
from thinwire.parallel.wire import Wire
from thinwire.workloads import Workload

PROBE_STEPS = 5  # that tell how many steps there is time for
_MEASUREMENTS = 4  # of the compression error in a training


class Training:
    """One training of one method from one seed.

    Args:
        alive: called before everything that may take long.
    """

    def __init__(self, task: Workload, method: Method, job: dict[str, Any], alive: Any) -> None:
        self._task, self._method, self._job, self._alive = task, method, job, alive
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def run(self) -> dict[str, Any]:
        """Train as the job says; what was measured."""
        steps = self._job["steps"] or self._task.default_steps
        if self._job["seconds"] is not None:
            steps = self._affordable(self._job["seconds"])
        return self._train(steps)

    def probe(self, steps: int) -> dict[str, Any]:
        """Only the time of a step: a few of them, without evaluation; the first is left out."""
        found = self._train(steps + 1, evaluations=0)
        times = [b - a for a, b in zip(found["seconds"], found["seconds"][1:], strict=False)]
        return {"step_seconds": statistics.median(times), "bytes": found["bytes"]}

    def _affordable(self, seconds: float) -> int:
        """Steps for which there is time, the same number on all ranks."""
        found = self.probe(PROBE_STEPS)
        step = torch.tensor(found["step_seconds"])
        if self._job["slow"]:  # the times of this run will be projected for a slower link
            step += 8 * FULL * found["bytes"][-1] / len(found["bytes"]) / self._job["slow"]
        dist.all_reduce(step, dist.ReduceOp.MAX)
        return max(1, int(seconds / step.item()))

    def _train(self, steps: int, evaluations: int | None = None) -> dict[str, Any]:
        task, seed = self._task, self._job["seed"]
        self._alive()
        warm_up(self._method)
        model = DistributedDataParallel(task.model(seed), **ddp_options(self._method))
        every = max(1, steps // _MEASUREMENTS)
        optimizer = optimizer_of(self._method, task.optimizer(model), steps)
        alone = isinstance(optimizer, ExchangingOptimizer)  # gradients stay where they are
        options: dict[str, Any] = {"measure_every": every, "seed": seed, "optimizer": optimizer}
        wire = equip(model, self._method, **(options if self._ours else {}))
        schedule = task.schedule(optimizer, steps)
        quiet = self._rank > 0 or evaluations == 0
        meter = Meter(self._world, self._job["loopback"], speaks=not quiet)
        meter.watch(model)
        due = self._evaluations(steps, evaluations)
        dist.barrier()
        meter.start()
        for step, batch in enumerate(task.batches(self._rank, self._world, seed), 1):
            self._alive()
            optimizer.zero_grad()
            with model.no_sync() if alone else nullcontext():
                loss = task.loss(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
            if alone:
                optimizer.step()
                meter.backward_ended()
            else:
                meter.backward_ended()
                optimizer.step()
            schedule.step()
            meter.stepped(loss.item(), steps)
            ended = step >= steps
            if step in due:
                meter.pause()
                self._alive()
                ended |= self._evaluate(model, meter, wire)
                meter.resume()
            if ended:
                break
        found = meter.result(stats_of(wire, optimizer))
        if self._ours:
            check_replicas(model)
        return found

    @property
    def _ours(self) -> bool:
        return self._method.kind == "thinwire"

    def _evaluations(self, steps: int, number: int | None) -> set[int]:
        number = self._job["evaluations"] if number is None else number
        return {max(1, round(steps * i / number)) for i in range(1, number + 1)}

    def _evaluate(self, model: DistributedDataParallel, meter: Meter, wire: Wire | None) -> bool:
        """Take the metric on rank 0; whether the target is reached, the same on all ranks."""
        verdict = torch.zeros(1)
        if self._rank == 0:
            value = self._task.evaluate(model.module)
            meter.evaluated(value)
            if wire is not None:
                wire.observe(value)
            if self._job["target"] is not None:
                beyond = value - self._job["target"]
                verdict[0] = float((beyond if self._task.higher_is_better else -beyond) >= 0)
        dist.broadcast(verdict, 0)
        return bool(verdict.item())
