"""Running a user's own training script with one method:

    python -m thinwire.compare.script PLAN SCRIPT ARGUMENTS...

The script runs as under torchrun. Every DistributedDataParallel model that it makes gets the
method, `thinwire.attach` keeps its other options, and every backward pass is a step: its loss is
what `backward()` was called on. With the method "script" nothing is changed, only measured.
"""

import faulthandler
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from thinwire.compare.events import tell
from thinwire.compare.settings import START_SECONDS


def main(plan: dict[str, Any], script: str, arguments: list[str]) -> None:
    def alive(more: float = 0.0) -> None:
        faulthandler.dump_traceback_later(plan["patience"] + more, exit=True)

    alive(START_SECONDS)
    import torch

    from thinwire.compare.method import read

    rank = int(os.environ["RANK"])
    if rank == 0:
        tell("begin", job=0)
    torch.manual_seed(plan["seed"])
    visit = _Visit(read(plan["method"]), plan, alive)
    visit.prepare()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    visit.conclude(rank)


class _Visit:
    """What is changed in torch and thinwire while a script runs."""

    def __init__(self, method: Any, plan: dict[str, Any], alive: Any) -> None:
        from thinwire.compare.meter import Meter

        self._method, self._alive, self._seed = method, alive, plan["seed"]
        world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self._meter = Meter(world, plan["loopback"], speaks=rank == 0)
        self._models: list[Any] = []
        self._wires: dict[int, Any] = {}
        self._about: dict[str, Any] = {}
        self._started = False
        self._losses: list[float] = []  # of passes that do not exchange anything yet

    def prepare(self) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import thinwire.parallel
        import thinwire.parallel.attachment
        from thinwire.compare.hooks import ddp_options, warm_up
        from thinwire.telemetry import listen

        warm_up(self._method)
        ddp: Any = DistributedDataParallel
        tensors: Any = torch.Tensor
        original_init, original_backward = ddp.__init__, tensors.backward
        self._attach = thinwire.parallel.attachment.attach

        def init(model: Any, *args: Any, **options: Any) -> None:
            original_init(model, *args, **{**options, **ddp_options(self._method)})
            self._made(model)

        def backward(tensor: Any, *args: Any, **options: Any) -> None:
            self._begin_pass()
            original_backward(tensor, *args, **options)
            self._end_pass(tensor)

        ddp.__init__, tensors.backward = init, backward
        for module in ("thinwire", "thinwire.parallel", "thinwire.parallel.attachment"):
            setattr(sys.modules[module], "attach", self._attached)  # noqa: B010, for mypy
        listen(self._tracked)

    def _made(self, model: Any) -> None:
        from thinwire.compare.hooks import equip
        from thinwire.parallel.ddp import ATTRIBUTE, RegisteredHook

        self._models.append(model)
        self._meter.watch(model)
        if self._method.kind == "thinwire":
            self._wires[id(model)] = equip(model, self._method, seed=self._seed)
        elif self._method.kind == "torch":
            if self._method.name != "ddp":
                equip(model, self._method)
            # A wire that the script attaches finds this in its place, and is never asked.
            setattr(model, ATTRIBUTE, RegisteredHook(model.process_group))

    def _attached(self, model: Any, compressor: Any, **options: Any) -> Any:
        from thinwire.torch_internals import uncompiled

        ddp = uncompiled(model)
        if self._method.kind == "thinwire":
            before = self._wires.pop(id(ddp), None)
            if before is not None:
                before.detach()
            if self._method.named:
                compressor = self._method.name
                options.pop("feedback", None)
            else:
                compressor, options["feedback"] = self._method.compressor, self._method.feedback
        wire = self._attach(model, compressor, **options)
        if self._method.kind != "torch":
            self._wires[id(ddp)] = wire
        return wire

    def _begin_pass(self) -> None:
        self._alive()
        if self._models and not self._started:
            self._started = True
            self._meter.start()

    def _end_pass(self, tensor: Any) -> None:
        if not self._models:
            return
        self._losses.append(float(tensor.detach()) if tensor.numel() == 1 else float("nan"))
        if all(model.require_backward_grad_sync for model in self._models):
            self._meter.backward_ended()
            self._meter.stepped(sum(self._losses) / len(self._losses), None)
            self._losses = []

    def _tracked(self, value: float, name: str, higher_is_better: bool) -> None:
        self._about = {"metric": name, "higher_is_better": higher_is_better}
        if self._started:
            self._meter.evaluated(value)
        for wire in self._wires.values():
            wire.observe(value)

    def conclude(self, rank: int) -> None:
        faulthandler.cancel_dump_traceback_later()
        if not self._meter.losses:
            return
        from thinwire.compare.hooks import stats_of

        wire = next(iter(self._wires.values()), None)
        if rank == 0:
            count = sum(p.numel() for model in self._models for p in model.parameters())
            tell("about", parameters=count, **self._about)
        tell("end", job=0, rank=rank, found=self._meter.result(stats_of(wire)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:])
