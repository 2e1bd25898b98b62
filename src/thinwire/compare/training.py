"""Training with one method on one rank: the method's hook, what is measured, the loop itself."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import count, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from thinwire.compare import counters
from thinwire.compare.method import OPTIMIZERS, Method, local_recipe, read
from thinwire.compare.models import CollectiveClock, DistributedModel, model_of
from thinwire.compare.rank import Job, RankPlan, RankRecord, StepEvent, Timer, tell, typical_step
from thinwire.compare.settings import ParallelName
from thinwire.optim.base import ExchangingOptimizer
from thinwire.parallel import LocalSteps, attach
from thinwire.parallel.buffers import FLAGS
from thinwire.parallel.local import PROGRESS
from thinwire.parallel.wire import Wire
from thinwire.policies import Fixed
from thinwire.workloads import Batch, Workload

PROBE_STEPS = 5  # that tell how many steps there is time for
SETTLING = 12  # steps before them in which a policy that learns has made its first choices
_MEASUREMENTS = 4  # of the compression error in a training
_COMMON_LOSSES = 60  # of what all ranks hold, in a training with local steps, at most
_COMMON_BATCHES = 5  # that one of them is the mean over, at most
_EVENT_SECONDS = 0.3  # between two lines on how far it has come
_POWERSGD_START = 2  # the step from which it compresses, the least that it takes (default 1000)
_WAITING = ("waiting", "gathering")  # seconds of a sharded model's wire
_TENSOR = ("numel", "ratio", "relative_error", "bytes_sent", "compressor", "collective")


# The method


def equip(model: nn.Module, method: Method, **options: Any) -> Wire | None:
    """Let a model be trained by a method; the wire if it is one of ours.

    Args:
        options: of `attach`, or of `LocalSteps` for a method of that kind, which needs the
            optimizer.
    """
    if method.kind == "local":
        return LocalSteps(model, options.pop("optimizer"), method.name, **options)
    if method.named:
        return attach(model, method.name, **options)
    if method.kind == "thinwire":
        assert method.policy is not None
        assert method.feedback is not None
        return attach(model, method.policy, feedback=method.feedback, **options)
    ddp: Any = model
    if method.name == "torch:fp16":
        ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif method.name == "torch:bf16":
        ddp.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)
    elif method.rank:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=method.rank, start_powerSGD_iter=_POWERSGD_START
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def optimizer_of(method: Method, given: Optimizer, steps: int) -> Optimizer:
    """The optimizer of a method with one of its own, in place of a workload's Adam.

    Where a method begins uncompressed it does for a fifth of the steps; the papers take 15 to 25 %.
    """
    if method.kind != "optimizer":
        return given
    from thinwire import optim

    first = given.param_groups[0]
    if "betas" not in first:
        raise ValueError(
            f"{method.name} takes the place of Adam, and this workload trains with "
            f"{type(given).__name__}: compare it on one that uses Adam (text)"
        )
    name, _ = OPTIMIZERS[method.name]
    parameters = [p for group in given.param_groups for p in group["params"]]
    if name == "DeMo":  # whose steps are as long as Adam's
        return optim.DeMo(parameters, lr=first["lr"], weight_decay=first["weight_decay"])
    options = {"decoupled": isinstance(given, AdamW)} if name != "OneBitLamb" else {}
    freeze = "var_freeze_step" if name == "ZeroOneAdam" else "freeze_step"
    kept = {key: first[key] for key in ("lr", "betas", "eps", "weight_decay")}
    made: Optimizer = getattr(optim, name)(
        parameters, **kept, **{freeze: max(1, steps // 5)}, **options
    )
    return made


def stats_of(wire: Wire | None, optimizer: Optimizer | None = None) -> Mapping[str, Any] | None:
    """What thinwire reports of a training, if it took part in it.

    A step is one of the optimizer, also with `LocalSteps`, whose own are exchanges.
    """
    if isinstance(wire, LocalSteps):
        found = wire.stats()
        share = found["step"] / max(1, found["inner_steps"])
        seconds = {kind: share * value for kind, value in found["seconds_per_step"].items()}
        flags = (PROGRESS, FLAGS)  # what ranks tell each other beside tensors
        tensors = {name: row for name, row in found["tensors"].items() if name not in flags}
        return {**found, "seconds_per_step": seconds, "tensors": tensors}
    if wire is not None:
        return wire.stats()
    if isinstance(optimizer, ExchangingOptimizer):
        told = optimizer.stats()
        steps = max(1, told["steps"])
        per_step = {kind: seconds / steps for kind, seconds in told["seconds"].items()}
        return {"total": told, "seconds_per_step": per_step, "tensors": {}}
    return None


# What is measured


class TrainingMeter:
    """Loss, seconds and bytes after each step, from `start` on.

    What happens between `pause` and `resume` is left out.

    Args:
        clock: of the collectives of a sharded model, in place of `watch`.
    """

    def __init__(
        self, world: int, loopback: bool, speaks: bool, clock: CollectiveClock | None = None
    ) -> None:
        self._world, self._loopback, self._speaks = world, loopback, speaks
        self._clock = clock
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.num_bytes: list[int] = []
        self.evaluations: list[tuple[int, float]] = []
        self._exposed = 0.0  # seconds of waiting for the network
        self._last_gradient = self._told = 0.0
        self.in_rounds = False  # whether only some steps exchange, as far as it is known

    def watch(self, model: nn.Module) -> None:
        """Note when the last gradient is there: what backward takes from then on is waiting."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                hook(self._note_gradient)

    def _note_gradient(self, _: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def start(self) -> None:
        if self._clock is not None:
            self._clock.seconds = 0.0
        self._first_bytes = self._sent()
        self._begin = time.perf_counter()

    def pause(self) -> None:
        """On all ranks together. What the last step sent is counted now, to its last packet."""
        self._paused = time.perf_counter()
        # Others come here when they have all that this rank sent: then it has left.
        dist.barrier()
        self._paused_bytes = self._sent()
        if self.num_bytes:
            self.num_bytes[-1] = self._paused_bytes - self._first_bytes

    def resume(self) -> None:
        self._begin += time.perf_counter() - self._paused
        self._first_bytes += self._sent() - self._paused_bytes

    def backward_ended(self) -> None:
        if self._last_gradient:
            self._exposed += time.perf_counter() - self._last_gradient

    def stepped(self, loss: float, steps: int | None) -> None:
        now = time.perf_counter()
        self.losses.append(loss)
        self.seconds.append(now - self._begin)
        self.num_bytes.append(self._sent() - self._first_bytes)
        step = len(self.losses)
        if self._speaks and (now - self._told >= _EVENT_SECONDS or step == steps):
            self._told = now
            took = typical_step(self.seconds, self.in_rounds)
            event = StepEvent(step, steps, loss, took, self.num_bytes[-1])
            tell("step", **event._asdict())

    def prolong(self) -> None:
        """The last step ends only now."""
        if self.seconds:
            self.seconds[-1] = time.perf_counter() - self._begin
            self.num_bytes[-1] = self._sent() - self._first_bytes

    @contextmanager
    def in_last_step(self) -> Iterator[None]:
        """What is done in the block belongs to the last step; time before the block does not."""
        if self.seconds:
            self._begin = time.perf_counter() - self.seconds[-1]
        yield
        self.prolong()

    def evaluated(self, value: float) -> None:
        self.evaluations.append((len(self.losses), value))

    def record(self, stats: Mapping[str, Any] | None) -> RankRecord:
        """What the run came to; `stats` are thinwire's own, if it took part."""
        steps = max(1, len(self.losses))
        record = RankRecord(self.losses, self.seconds, self.num_bytes, self.evaluations)
        record.exposed = self._exposed / steps
        if stats is not None and "rounds" in stats:  # of local steps, which know how they waited
            record.exposed = stats["seconds"].get("waiting", 0.0) / steps
            record.in_rounds = stats["rounds"] < stats["inner_steps"]
        if stats is not None:
            record.reported = stats["total"]["network_bytes"]
            record.inside = {
                kind: seconds
                for kind, seconds in stats["seconds_per_step"].items()
                if kind in ("encode", "network", "decode")
            }
            record.tensors = [
                {"name": name, **{key: row[key] for key in _TENSOR}}
                for name, row in stats["tensors"].items()
            ]
        if self._clock is not None:
            # FSDP goes on when a collective has ended, whoever carries it.
            own = self._clock.seconds / steps
            waited = {} if stats is None else stats["seconds"]
            record.exposed = own + sum(waited.get(k, 0.0) for k in _WAITING) / steps
            record.inside["network"] = record.inside.get("network", 0.0) + own
        return record

    def _sent(self) -> int:
        return counters.sent(self._world, self._loopback)


def shared_out(found: RankRecord, every: int) -> RankRecord:
    """A record whose steps each have their share of the exchange that ended the last of them."""
    durations = [b - a for a, b in pairwise(found.seconds)]
    step = statistics.median(durations[:-1] or durations)
    sent = found.num_bytes[-1] - found.num_bytes[-2]
    seconds = step + max(0.0, durations[-1] - step) / every
    count = len(found.losses)
    return replace(
        found,
        seconds=[seconds * (i + 1) for i in range(count)],
        num_bytes=[round(sent * (i + 1) / every) for i in range(count)],
        in_rounds=False,
    )


# Local steps


class CommonLoss:
    """The loss of what all ranks hold, of one exchange after the other.

    That of each rank's own parameters is lower: they have just been fitted to the rank's batches.
    It is taken on batches before they are trained on, as plain DDP's is.

    Attributes:
        value: the last.
    """

    def __init__(
        self, task: Workload, model: nn.Module, local: LocalSteps, meter: TrainingMeter, steps: int
    ) -> None:
        self._task, self._model, self._local, self._meter = task, model, local, meter
        self._every = max(1, steps // _COMMON_LOSSES)
        self._measured_step = self._measured_exchange = -1
        self.value = math.nan

    def take(self, step: int, batches: "Lookahead") -> None:
        """Before a step, on all ranks; the time for it does not count.

        Only when an exchange has ended: then ranks have waited for each other already, and no
        exchange goes on while nobody counts.
        """
        passed = step - self._measured_step
        new = self._local.step != self._measured_exchange
        if not new or passed < self._every or self._local.exchanging:
            return
        number = min(passed, _COMMON_BATCHES) if step > 1 else 1
        self._measured_step, self._measured_exchange = step, self._local.step
        self._meter.pause()
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        with self._local.common_parameters(), torch.no_grad():
            losses = [self._task.loss(self._model, batch).item() for batch in batches.ahead(number)]
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])
        self.value = statistics.fmean(losses)
        dist.barrier()
        self._meter.resume()


class Lookahead:
    """Batches that can be looked at before they are due."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._ahead: deque[Batch] = deque()

    def take(self) -> Batch:
        """The next one."""
        return self._ahead.popleft() if self._ahead else next(self._batches)

    def ahead(self, count: int) -> list[Batch]:
        """The next ones, which are to come all the same."""
        self._ahead.extend(islice(self._batches, max(0, count - len(self._ahead))))
        return list(islice(self._ahead, count))


class ScriptLocalSteps(LocalSteps):
    """Local steps whose exchanges are measured as parts of the steps that they end.

    Attributes:
        trained_by: the optimizers.
    """

    def __init__(
        self,
        meter: TrainingMeter,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *args: Any,
        **options: Any,
    ) -> None:
        self._training_meter = meter
        super().__init__(model, optimizer, *args, **options)
        self.trained_by = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.trained_by[-1].register_step_post_hook(lambda *_: meter.prolong())

    def finish(self) -> None:
        with self._training_meter.in_last_step():
            super().finish()

    @property
    def ended(self) -> bool:
        """Whether there is nothing to finish: no step since the last time, or detached."""
        return self.finished or self._detached


class NoLocalSteps:
    """What a script has in place of its own local steps when its gradients are exchanged."""

    def __enter__(self) -> "NoLocalSteps":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def finish(self) -> None:
        pass

    def detach(self) -> None:
        pass

    def common_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def summary(self, rows: int = 20) -> str:
        return "no local steps: this method exchanges gradients"

    def explain(self) -> str:
        return self.summary()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"LocalSteps.{name}: with a method that exchanges gradients a script has no local "
            "steps to ask; it may call finish, detach, common_parameters, summary and explain"
        )


# The loop


def warm_up(task: Workload, parallel: ParallelName, mesh: DeviceMesh) -> None:
    """Take a step of a sharded model that nobody measures.

    The first one in a process takes 0.3 s of a core more than others (torch 2.13 looks up how each
    operation treats shards, and keeps that), and it would always be the baseline's.
    """
    model = model_of(task, 0, read(parallel, parallel), mesh, None).module
    optimizer = task.optimizer(model)
    batch = next(task.batches(dist.get_rank(), dist.get_world_size()))
    task.loss(model, batch).backward()
    optimizer.step()


class Training:
    """One training of a bundled workload with one method from one seed."""

    def __init__(
        self,
        task: Workload,
        job: Job,
        plan: RankPlan,
        timer: Timer,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._task, self._plan, self._timer, self._mesh = task, plan, timer, mesh
        self._method, self._seed = job.method, job.seed
        self._probes = job.link is not None
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def run(self) -> RankRecord:
        """Train as the plan says; what was measured."""
        if self._probes:
            return self._probe(self._plan.probe_steps)
        steps = self._plan.steps or self._task.default_steps
        if self._plan.seconds is not None:
            steps = self._affordable(self._plan.seconds)
        return self._train(steps, self._plan.evaluations)

    def _probe(self, steps: int) -> RankRecord:
        """A few steps without evaluation, and one before them that does not count.

        A round of local steps may be longer: then steps are measured without an exchange, one
        exchange of all parameters at the end, and each step gets its share of that.
        """
        recipe = local_recipe(self._method)
        if recipe is None or recipe.every == 1:
            return self._train(steps + 1, evaluations=0)
        alone = {"every": steps + 2, "warmup": 0, "fragments": 1, "overlap": 0}
        return shared_out(self._train(steps + 1, evaluations=0, **alone), recipe.every)

    def _affordable(self, seconds: float) -> int:
        """Steps for which there is time, the same number on all ranks."""
        recipe = local_recipe(self._method)
        policy = self._method.policy
        # Steps that take longer than those after them, their seconds and bytes.
        settling, lead, before = 0, 0.0, 0.0
        if recipe is not None and recipe.warmup:
            # Its steps take longest, and there may be time for no others.
            found = self._train(PROBE_STEPS + 1, evaluations=0)
        elif policy is not None and not isinstance(policy, Fixed):
            found = self._train(SETTLING + PROBE_STEPS, evaluations=0)
            settling, lead = SETTLING, found.seconds[SETTLING - 1]
            before = found.num_bytes[SETTLING - 1]
            found.seconds = found.seconds[SETTLING - 1 :]
            found.num_bytes = [each - before for each in found.num_bytes[SETTLING:]]
        else:
            found = self._probe(PROBE_STEPS)
        took = torch.tensor([found.step_seconds, lead])
        if self._plan.projected_rate:
            rate = self._plan.projected_rate / (8 * counters.FULL)
            took += torch.tensor([found.bytes_per_step, before]) / rate
        dist.all_reduce(took, dist.ReduceOp.MAX)
        step, lead = took.tolist()
        if lead >= seconds:
            return max(1, int(settling * seconds / lead))
        return max(1, settling + int((seconds - lead) / step))

    def _train(self, steps: int, evaluations: int, **rounds: int) -> RankRecord:
        """Train and measure; `rounds` take the place of the method's own settings of rounds."""
        with CollectiveClock() if self._mesh is not None else nullcontext() as clock:
            return self._train_timed(steps, evaluations, clock, **rounds)

    def _train_timed(
        self, steps: int, evaluations: int, clock: CollectiveClock | None, **rounds: int
    ) -> RankRecord:
        task, seed = self._task, self._seed
        self._timer.restart()
        spread = model_of(task, seed, self._method, self._mesh, self._plan.weights)
        model = spread.module
        recipe = local_recipe(self._method)
        exchanges = steps if recipe is None else steps * recipe.fragments // recipe.every
        every = max(1, exchanges // _MEASUREMENTS)
        optimizer = optimizer_of(self._method, task.optimizer(model), steps)
        alone = isinstance(optimizer, ExchangingOptimizer)  # the optimizer exchanges, not backward
        options: dict[str, Any] = {"measure_every": every, "seed": seed, "optimizer": optimizer}
        options.update(spread.options)
        ours = self._method.kind in ("thinwire", "local")
        wire = equip(model, self._method, **(options if ours else {}), **rounds)
        local = wire if isinstance(wire, LocalSteps) else None
        schedule = task.schedule(optimizer, steps)
        quiet = self._rank > 0 or evaluations == 0
        meter = TrainingMeter(self._world, self._plan.loopback, not quiet, clock)
        meter.in_rounds = recipe is not None and recipe.every > recipe.fragments
        if clock is None:
            meter.watch(model)
        due = {max(1, round(steps * i / evaluations)) for i in range(1, evaluations + 1)}
        dist.barrier()
        common = None
        if local is not None and evaluations:
            common = CommonLoss(task, spread.whole(), local, meter, steps)
        batches = Lookahead(task.batches(self._rank, self._world, seed))
        meter.start()
        for step in count(1):
            self._timer.restart()
            if common is not None:
                common.take(step, batches)
            batch = batches.take()
            optimizer.zero_grad()
            with spread.no_sync() if alone else nullcontext():
                loss = task.loss(model, batch)
                loss.backward()
            if alone:
                optimizer.step()
                meter.backward_ended()
            else:
                meter.backward_ended()
                optimizer.step()
            schedule.step()
            meter.stepped(loss.item() if common is None else common.value, steps)
            ended = step >= steps
            if ended and local is not None:
                self._timer.restart()
                with meter.in_last_step():
                    local.finish()
            if step in due or ended:
                meter.pause()
                self._timer.restart()
                reached = step in due and self._evaluate(spread, meter, wire)
                meter.resume()
                if reached and not ended and local is not None:
                    with meter.in_last_step():
                        local.finish()
                    meter.pause()
                    meter.resume()
                if reached or ended:
                    break
        found = meter.record(stats_of(wire, optimizer))
        if ours:
            spread.check()
        return found

    def _evaluate(self, model: DistributedModel, meter: TrainingMeter, wire: Wire | None) -> bool:
        """Take the metric on rank 0; whether the target is reached, the same on all ranks."""
        reached, whole = torch.zeros(1), model.whole()
        if self._rank == 0:
            in_common = wire.common_parameters() if isinstance(wire, LocalSteps) else nullcontext()
            with in_common:
                value = self._task.evaluate(whole)
            meter.evaluated(value)
            if wire is not None:
                wire.observe(value)
            if self._plan.target is not None:
                beyond = value - self._plan.target
                reached[0] = float((beyond if self._task.higher_is_better else -beyond) >= 0)
        dist.broadcast(reached, 0)
        return bool(reached.item())
