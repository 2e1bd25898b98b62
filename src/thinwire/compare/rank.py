"""What runs on every host: python -m thinwire.compare.rank PLAN.json [SCRIPT ARGUMENTS...]

Trains one job of the plan after the other and prints events. A failure ends the process: the state
of the others is unknown then, and who started this starts anew behind the job that failed.

With a script there is one job. The script runs as under torchrun: every DistributedDataParallel
model that it makes, or model that it has sharded by `fully_shard`, gets the method,
`thinwire.attach` and `LocalSteps` keep their other options, and every backward pass is a step,
whose loss is what `backward()` was called on. A method of local steps begins when there are a model
and an optimizer of its parameters, and is finished when the script ends or destroys its process
group. With the method "script" nothing is changed, only measured.

Torch is imported only when the timer against hangs has been set.
"""

import faulthandler
import json
import os
import runpy
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakSet

from thinwire.compare.method import Method, from_json, to_json
from thinwire.compare.settings import BASELINE, ParallelName

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from thinwire.compare.models import CollectiveClock
    from thinwire.parallel.wire import Wire

START_SECONDS = 60.0  # for a rank to import torch and find the others, on top of the patience
_MARK = "@thinwire "  # what a script prints is not taken for an event


# What goes to a rank


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        link: the rate at which only the time per step is measured, in a few steps.
    """

    method: Method
    seed: int
    link: str | None = None


@dataclass(frozen=True)
class RankPlan:
    """What a set of ranks is to do.

    Args:
        jobs: in this order.
        patience: seconds without a step after which a rank ends itself.
        loopback: whether the ranks share the counters of one interface.
        projected_rate: if times will be projected, the bits per second of the slowest link.
        probe_steps: of a job with a link.
        replicas: with "hsdp", how often there is a whole model.
        workload, parallel, weights, steps, seconds, target, evaluations: as in
            `ComparisonSettings`.
    """

    jobs: tuple[Job, ...]
    patience: float
    loopback: bool
    projected_rate: int | None = None
    probe_steps: int = 0
    workload: str = ""
    parallel: ParallelName = BASELINE
    replicas: int = 1
    weights: str | None = None
    steps: int | None = None
    seconds: float | None = None
    target: float | None = None
    evaluations: int = 0

    def to_json(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        jobs = [{"method": to_json(j.method), "seed": j.seed, "link": j.link} for j in self.jobs]
        return json.dumps({**values, "jobs": jobs})

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        jobs = [Job(from_json(each.pop("method")), **each) for each in values.pop("jobs")]
        return cls(tuple(jobs), **values)


# What comes back: a JSON object per line, on standard output


@dataclass
class RankRecord:
    """What one rank measured of a training.

    Args:
        losses, seconds, num_bytes: after each step, the latter two since the start.
        evaluations: (step, metric).
        exposed: seconds per step that training waited for the network: backward at its end, or
            the optimizer.
        inside: seconds per step of exchanges in "encode", "network" and "decode", hidden or not.
        reported: bytes by thinwire's own count.
        tensors: thinwire's figures of each tensor.
        in_rounds: whether only some steps exchange, so that no single one is typical.
    """

    losses: list[float]
    seconds: list[float]
    num_bytes: list[int]
    evaluations: list[tuple[int, float]]
    exposed: float = 0.0
    inside: dict[str, float] = field(default_factory=dict)
    reported: int | None = None
    tensors: list[dict[str, Any]] = field(default_factory=list)
    in_rounds: bool = False

    @property
    def step_seconds(self) -> float:
        """What a step takes, see `typical_step`."""
        return typical_step(self.seconds, self.in_rounds)

    @property
    def bytes_per_step(self) -> float:
        return self.num_bytes[-1] / len(self.num_bytes)


def typical_step(seconds: Sequence[float], in_rounds: bool) -> float:
    """Seconds per step, from the seconds since the start after each: what all tables, pictures and
    progress bars show.

    The median over steps but the first, which connects and makes buffers. Where exchanges come in
    rounds most steps exchange nothing, and the median would leave the exchanges out: the mean.
    """
    if in_rounds:
        return seconds[-1] / len(seconds)
    durations = [after - before for before, after in pairwise(seconds)]
    return statistics.median(durations or seconds)


class StepEvent(NamedTuple):
    """How far a training has come; `steps` is None if nobody knows how many there will be."""

    step: int
    steps: int | None
    loss: float
    step_seconds: float  # so far, by `typical_step`
    num_bytes: int


def tell(event: str, **values: Any) -> None:
    """Print {"event": event, ...} on a line of its own: a script may have left one unfinished."""
    print(f"\n{_MARK}{json.dumps({'event': event, **values})}", flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """The event in a line, if there is one."""
    if not line.startswith(_MARK):
        return None
    try:
        event = json.loads(line[len(_MARK) :])
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None


# The process


class Timer:
    """Ends the process when nothing has been heard of it for too long."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.restart(START_SECONDS)

    def restart(self, more: float = 0.0) -> None:
        # In C, with a thread of its own: it fires also when torch never comes back.
        faulthandler.dump_traceback_later(self._patience + more, exit=True)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def main(path: str, script: list[str]) -> None:
    plan = RankPlan.from_json(Path(path).read_text(encoding="utf-8"))
    timer = Timer(plan.patience)
    if script:
        run_script(plan, timer, script)
    else:
        run_jobs(plan, timer)
    timer.stop()


def run_jobs(plan: RankPlan, timer: Timer) -> None:
    """Train a bundled workload with one method after the other."""
    import torch
    import torch.distributed as dist

    from thinwire.compare.models import mesh_of
    from thinwire.compare.training import Training, warm_up
    from thinwire.workloads import workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task, mesh = workload(plan.workload), mesh_of(plan)
    for number, job in enumerate(plan.jobs):
        if dist.get_rank() == 0:
            tell("begin", job=number)
        if number == 0 and mesh is not None:
            warm_up(task, plan.parallel, mesh)
        record = Training(task, job, plan, timer, mesh).run()
        tell("end", job=number, rank=dist.get_rank(), record=asdict(record))
        dist.barrier()
    dist.destroy_process_group()


def run_script(plan: RankPlan, timer: Timer, words: list[str]) -> None:
    """Run a user's own script with one method."""
    import torch

    (job,) = plan.jobs
    rank = int(os.environ["RANK"])
    if rank == 0:
        tell("begin", job=0)
    torch.manual_seed(job.seed)
    kind = _ScriptObserver if plan.parallel == BASELINE else _ShardedScriptObserver
    observer = kind(job, plan, timer)
    observer.install()
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    observer.finish()
    timer.stop()
    observer.conclude(rank)


class _ScriptObserver:
    """What is changed in torch and thinwire while a script runs."""

    def __init__(self, job: Job, plan: RankPlan, timer: Timer) -> None:
        from thinwire.compare.training import TrainingMeter

        self._method, self._seed, self._timer = job.method, job.seed, timer
        world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self._meter = TrainingMeter(world, plan.loopback, rank == 0, self._clock())
        self._models: list[Any] = []
        self._optimizers: list[Optimizer] = []
        self._wires: dict[int, Wire] = {}  # by the id of their model
        self._about: dict[str, Any] = {}
        self._started = False
        self._losses: list[float] = []  # of passes that do not exchange anything yet

    def _clock(self) -> "CollectiveClock | None":
        return None

    def install(self) -> None:
        import torch
        import torch.distributed as dist

        import thinwire.parallel
        import thinwire.parallel.attachment
        import thinwire.parallel.local
        from thinwire.telemetry import listen

        tensors: Any = torch.Tensor
        optimizers: Any = torch.optim.Optimizer
        original_backward = tensors.backward
        original_optimizer, original_destroy = optimizers.__init__, dist.destroy_process_group
        self._attach = thinwire.parallel.attachment.attach

        def backward(tensor: Any, *args: Any, **options: Any) -> None:
            self._begin_pass()
            original_backward(tensor, *args, **options)
            self._end_pass(tensor)

        def optimizer_init(optimizer: Any, *args: Any, **options: Any) -> None:
            original_optimizer(optimizer, *args, **options)
            self._optimizers.append(optimizer)
            self._pair()

        def destroy(group: Any = None) -> None:
            if group is None or group is dist.group.WORLD:
                self.finish()
            original_destroy(group)

        tensors.backward = backward
        self._observe_models()
        for module in ("thinwire", "thinwire.parallel", "thinwire.parallel.attachment"):
            setattr(sys.modules[module], "attach", self._attached)  # noqa: B010, for mypy
        for module in ("thinwire", "thinwire.parallel", "thinwire.parallel.local"):
            setattr(sys.modules[module], "LocalSteps", self._made_local)  # noqa: B010
        if self._method.kind == "local":
            optimizers.__init__ = optimizer_init
            for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
                setattr(sys.modules[module], "destroy_process_group", destroy)  # noqa: B010
        listen(self._tracked)

    def _observe_models(self) -> None:
        """Learn of each model that is to get the method."""
        from torch.nn.parallel import DistributedDataParallel

        from thinwire.compare.models import ddp_options

        ddp: Any = DistributedDataParallel
        original = ddp.__init__

        def init(model: Any, *args: Any, **options: Any) -> None:
            original(model, *args, **{**options, **ddp_options(self._method)})
            self._made(model)

        ddp.__init__ = init

    def _made(self, model: "DistributedDataParallel") -> None:
        from thinwire.compare.training import equip
        from thinwire.parallel.ddp import ATTRIBUTE, RegisteredHook

        self._models.append(model)
        self._meter.watch(model)
        if self._method.kind == "thinwire":
            wire = equip(model, self._method, seed=self._seed)
            assert wire is not None
            self._wires[id(model)] = wire
        elif self._method.kind == "torch":
            if self._method.name != "ddp":
                equip(model, self._method)
            # A wire that the script attaches finds this in its place, and is never asked.
            setattr(model, ATTRIBUTE, RegisteredHook(model.process_group))
        self._pair()

    # Local steps: a method's own, or the script's.

    def _pair(self) -> None:
        """Let every model take local steps that there is an optimizer of."""
        from thinwire.compare.training import ScriptLocalSteps

        if self._method.kind != "local":
            return
        for model in self._models:
            held = {id(p) for p in model.parameters()}
            own = [
                optimizer
                for optimizer in self._optimizers
                if held.issuperset(id(p) for g in optimizer.param_groups for p in g["params"])
            ]
            before = self._wires.get(id(model))
            if not own or (isinstance(before, ScriptLocalSteps) and before.trained_by == own):
                continue
            self._detach(model)
            self._wires[id(model)] = ScriptLocalSteps(
                self._meter, model, own, self._method.name, seed=self._seed
            )

    def _made_local(
        self, model: Any, optimizer: Any, compressor: Any = "none", **options: Any
    ) -> Any:
        """In place of `LocalSteps`, as a script calls it."""
        from thinwire.compare.training import NoLocalSteps, ScriptLocalSteps
        from thinwire.methods import LocalRecipe, Recipe
        from thinwire.torch_internals import uncompiled

        if self._method.kind not in ("local", "script"):
            return NoLocalSteps()
        if self._method.kind == "local":
            self._detach(uncompiled(model))
            compressor = self._method.name
            # What a method has settings of its own for.
            own = {each.name for each in fields(LocalRecipe)} - {
                each.name for each in fields(Recipe)
            }
            left_out = own | {"feedback"}
            options = {key: value for key, value in options.items() if key not in left_out}
        local = ScriptLocalSteps(self._meter, model, optimizer, compressor, **options)
        self._wires[id(uncompiled(model))] = local
        return local

    def _check_local(self) -> None:
        """Training begins: refuse to measure a method that is not at work."""
        if self._method.kind == "local" and any(id(m) not in self._wires for m in self._models):
            raise ValueError(
                f"{self._method.name}: a method of local steps needs an optimizer of the "
                "parameters of the DistributedDataParallel model and of no others, made before the "
                "first backward pass: the script has none"
            )

    def _detach(self, model: Any) -> None:
        from thinwire.compare.training import ScriptLocalSteps

        before = self._wires.pop(id(model), None)
        if isinstance(before, ScriptLocalSteps):
            if before.inner_steps:
                raise ValueError(
                    f"{self._method.name}: the script makes another optimizer of the model's "
                    "parameters after the first step, and a method of local steps follows one "
                    "training from its beginning: make all optimizers before it"
                )
            before.detach()

    def finish(self) -> None:
        """Let a method of local steps end: with the same parameters on all ranks."""
        from thinwire.compare.training import ScriptLocalSteps
        from thinwire.parallel.replicas import check_replicas

        if self._method.kind != "local":
            return
        for model in self._models:
            local = self._wires.get(id(model))
            if isinstance(local, ScriptLocalSteps) and not local.ended:
                self._timer.restart()
                local.finish()
                check_replicas(model)

    # Gradients.

    def _attached(self, model: Any, compressor: Any, **options: Any) -> Any:
        from thinwire.torch_internals import uncompiled

        ddp = uncompiled(model)
        if self._method.kind == "local":  # no gradients are exchanged
            wire = self._attach(model, compressor, **options)
            wire.detach()
            return wire
        if self._method.kind == "thinwire":
            before = self._wires.pop(id(ddp), None)
            if before is not None:
                before.detach()
            compressor, options = self._in_place_of(options)
        wire = self._attach(model, compressor, **options)
        if self._method.kind != "torch":
            self._wires[id(ddp)] = wire
        return wire

    def _in_place_of(self, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The method as a compressor for `attach`, and a script's options without its own."""
        if self._method.named:
            kept = {key: value for key, value in options.items() if key != "feedback"}
            return self._method.name, kept
        return self._method.policy, {**options, "feedback": self._method.feedback}

    def _exchanges(self) -> bool:
        """Whether backward passes exchange gradients now."""
        return all(model.require_backward_grad_sync for model in self._models)

    def _begin_pass(self) -> None:
        self._timer.restart()
        if self._models and not self._started:
            self._check_local()
            self._started = True
            self._meter.start()

    def _end_pass(self, tensor: Any) -> None:
        if not self._models:
            return
        self._losses.append(float(tensor.detach()) if tensor.numel() == 1 else float("nan"))
        if self._exchanges():
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
        from thinwire.compare.training import stats_of

        if not self._meter.losses:
            return
        if rank == 0:
            count = sum(p.numel() for model in self._models for p in model.parameters())
            tell("about", parameters=count, **self._about)
        wires = [self._wires[id(model)] for model in self._models if id(model) in self._wires]
        wire = wires[0] if wires else None
        tell("end", job=0, rank=rank, record=asdict(self._meter.record(stats_of(wire))))


class _ShardedScriptObserver(_ScriptObserver):
    """The same for models that the script applies `fully_shard` to.

    A model is known when it is called for the first time, which is before it gathers anything; or
    when the script gives it to `attach`, which alone tells who holds replicas of its shards.
    """

    def __init__(self, job: Job, plan: RankPlan, timer: Timer) -> None:
        super().__init__(job, plan, timer)
        self._replicated, self._weights = plan.parallel == "hsdp", plan.weights
        self._known: WeakSet[Any] = WeakSet()  # modules of all models
        self._accumulating: WeakSet[Any] = WeakSet()  # those that exchange nothing now

    def _clock(self) -> "CollectiveClock":
        from thinwire.compare.models import CollectiveClock

        return CollectiveClock().__enter__()  # for as long as the process lasts

    def _observe_models(self) -> None:
        from torch.distributed.fsdp import FSDPModule
        from torch.nn.modules.module import register_module_forward_pre_hook

        sharded: Any = FSDPModule
        original = sharded.set_requires_gradient_sync

        def set_requires_gradient_sync(
            module: Any, required: bool, *, recurse: bool = True
        ) -> None:
            original(module, required, recurse=recurse)
            for each in _sharded_in(module) if recurse else [module]:
                (self._accumulating.discard if required else self._accumulating.add)(each)

        sharded.set_requires_gradient_sync = set_requires_gradient_sync
        register_module_forward_pre_hook(self._called)

    def _called(self, module: Any, _: Any) -> None:
        """Before each call of any module."""
        if not self._is_new(module):
            return
        if self._replicated:
            raise ValueError(
                "--parallel hsdp: the script must say over which group replicas of its shards are "
                'averaged: fully_shard(module, mesh=mesh["shard"]) for every module, then '
                'tw.attach(model, "none", replicate=mesh["replicate"]) before the first call'
            )
        if self._method.kind == "thinwire":
            from thinwire.compare.training import equip

            wire = equip(module, self._method, seed=self._seed, weights=self._weights)
            assert wire is not None
            self._wires[id(module)] = wire
        self._note(module)

    def _is_new(self, module: Any) -> bool:
        if module in self._known:
            return False
        return any(each not in self._known for each in _sharded_in(module))

    def _note(self, model: Any) -> None:
        self._models.append(model)
        self._known.update(model.modules())

    def _attached(self, model: Any, compressor: Any, **options: Any) -> Any:
        from thinwire.compare.models import PlainAverage
        from thinwire.parallel.attachment import wire_of
        from thinwire.parallel.shards import replicas_of

        replicas = options.get("replicate")
        if self._replicated and replicas is None:
            raise ValueError(
                "--parallel hsdp: tw.attach needs replicate=, the group or mesh over which replicas"
                " of the shards are averaged"
            )
        if replicas is not None and not self._replicated:
            raise ValueError("the script has replicas of its shards: compare it by --parallel hsdp")
        if self._is_new(model):
            self._note(model)
        before = wire_of(model)
        for key, wire in list(self._wires.items()):
            if wire is before:
                self._wires.pop(key).detach()
        if self._method.kind == "thinwire":
            compressor, options = self._in_place_of(options)
            if self._weights is not None:
                options["weights"] = self._weights
        made = self._attach(model, compressor, **options)
        if self._method.kind != "torch":
            self._wires[id(model)] = made
            return made
        made.detach()  # a wire that the script can ask, while FSDP goes on by itself
        if replicas is not None:
            for module in _sharded_in(model):
                module.set_all_reduce_hook(PlainAverage(replicas_of(replicas)))
        return made

    def _exchanges(self) -> bool:
        return not self._accumulating


def _sharded_in(model: Any) -> list[Any]:
    """The modules of a model that `fully_shard` was applied to."""
    from thinwire.torch_internals import is_fully_sharded

    return [module for module in model.modules() if is_fully_sharded(module)]


if __name__ == "__main__":
    # By its own name, so that there is one copy of this module.
    from thinwire.compare.rank import main as start

    start(sys.argv[1], sys.argv[2:])
