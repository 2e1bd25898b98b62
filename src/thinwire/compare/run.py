"""A comparison from its settings to its document: starts the ranks, follows them, shows progress.

Methods run one after the other in the same set of processes; after a failure a new set goes on
behind the method that failed.
"""

import contextlib
import math
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.compare.method import Method, read, uses_of_method
from thinwire.compare.place import cluster_of, lab_of, rate_of
from thinwire.compare.rank import Job, RankPlan, RankRecord, StepEvent, heard
from thinwire.compare.settings import (
    BASELINE,
    PARALLELISMS,
    SWEEP_STEPS,
    ComparisonSettingError,
    ComparisonSettings,
)
from thinwire.formatting import show_bytes, show_seconds
from thinwire.lab import Cluster, HostFailedError, Lab, Result, why_not
from thinwire.machine import busy, versions

if TYPE_CHECKING:
    from thinwire.compare.document import Document, TrainingRun

_LEAST_PATIENCE, _SCRIPT_PATIENCE = 30.0, 300.0  # seconds
# What a script must train.
_MODELS = {
    BASELINE: "a DistributedDataParallel model",
    "fsdp": "a model that fully_shard was applied to",
    "hsdp": "a model that fully_shard and tw.attach(..., replicate=...) were applied to",
}
_GLOO = (
    "over gloo plain FSDP2 sends the bytes of an all-reduce for each reduce-scatter, twice as many "
    "as over NCCL; 'none' sends those of a reduce-scatter"
)
_DENSE_STEPS = 8  # that a step may take as long as
_ROUND_TRIPS_PER_HOST = 20  # of a dense step: ten buckets, each a ring there and back
_NO_PROJECTION = (
    "delay, jitter and loss need a lab: what they cost cannot be projected from the bytes sent"
)


@dataclass
class Outcome:
    """What became of one method."""

    method: Method
    runs: dict[int, list[RankRecord]] = field(default_factory=dict)  # seed: of all ranks
    sweep: dict[str, list[RankRecord]] = field(default_factory=dict)  # link: of all ranks
    error: str | None = None
    output: str | None = None  # the last lines of hosts that failed


class Watcher(Protocol):
    """Is told how far a comparison has come."""

    def said(self, text: str) -> None: ...

    def began(self, job: Job) -> None: ...

    def stepped(self, job: Job, event: StepEvent) -> None: ...

    def ended(self, job: Job, run: "TrainingRun") -> None: ...

    def failed(self, job: Job, error: str) -> None: ...


class Comparison:
    """Trains with every method and gathers what came out."""

    def __init__(self, settings: ComparisonSettings) -> None:
        _check_parallel(settings)
        self.settings = settings
        self.methods = _methods(settings)
        try:
            # None of these is opened: they say what is wrong before anything runs.
            self._asked_lab = lab_of(settings, settings.links)
            for link in settings.sweep:
                lab_of(settings, [link] * settings.hosts)
        except ValueError as error:
            raise ComparisonSettingError(str(error)) from None
        self.notes: list[str] = []
        # As the run begins: by its end somebody may have committed or installed something else.
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.versions = versions()
        self.projected = settings.project
        # As they were asked for, baselines first.
        self.outcomes = {method.name: Outcome(method) for method in self.methods}
        self.parameters: int | None = None
        self.metric: str | None = None
        self.higher_is_better = True

    def run(self, watcher: Watcher, command: str) -> "Document":
        """All trainings, then the sweep; the document, also of what was done until Ctrl-C."""
        from thinwire.compare.analysis import document_of

        settings, self._watcher = self.settings, watcher
        self._look_around()
        # A hook of PyTorch's that may crash or hang comes last.
        order = sorted(self.methods, key=lambda method: method.name.startswith("torch:"))
        interrupted = False
        try:
            with cluster_of(settings, settings.links, self.projected) as cluster:
                jobs = [Job(method, seed) for seed in settings.seeds for method in order]
                self._train(cluster, jobs)
                if isinstance(cluster, Lab) and (late := cluster.lateness()):
                    self.notes.append(str(late))
            for link in settings.sweep:
                watcher.said(f"measuring the time per step at {link}")
                with cluster_of(settings, [link] * settings.hosts, self.projected) as cluster:
                    done = [method for method in order if self.outcomes[method.name].runs]
                    self._train(cluster, [Job(m, settings.seeds[0], link) for m in done])
        except KeyboardInterrupt:
            interrupted = True
            self.notes.append("interrupted: this is what was done until then")
        return document_of(self, command, interrupted)

    @property
    def slowest(self) -> int | None:
        """Bits per second of the slowest link, if times are projected for it."""
        return min(map(rate_of, self.settings.links)) if self.projected else None

    @property
    def asked(self) -> set[str]:
        """Names of the methods whose failure is one of the comparison."""
        settings = self.settings
        names = settings.parallel, *settings.methods
        return {read(name, settings.parallel).name for name in names}

    def keep(self, job: Job, ranks: list[RankRecord]) -> None:
        """What all ranks measured of a job that has ended."""
        from thinwire.compare.analysis import run_of

        outcome = self.outcomes[job.method.name]
        if job.link is None:
            outcome.runs[job.seed] = ranks
            # The same figures that the table will have.
            self._watcher.ended(job, run_of(job.seed, ranks, self.slowest))
        else:
            outcome.sweep[job.link] = ranks

    def _look_around(self) -> None:
        """What can be known before anything runs."""
        settings = self.settings
        if note := busy():
            self.notes.append(note)
        distant = self._asked_lab.is_distant
        if distant and self.projected:
            raise ComparisonSettingError(f"--project: {_NO_PROJECTION}")
        if not self.projected and (missing := why_not(distance=distant)):
            if distant:
                raise ComparisonSettingError(f"{_NO_PROJECTION}, and none can be made: {missing}")
            self.projected = True
            self.notes.append(f"no lab can be made here, so times are projected: {missing}")
        if settings.parallel == "fsdp":
            self.notes.append(_GLOO)
        if self.projected and settings.racks > 1:
            raise ComparisonSettingError("--racks needs a lab: times cannot be projected for it")
        if settings.script is not None:
            return
        import torch

        from thinwire.kernels.compiling import compile_kernels
        from thinwire.workloads import workload

        task = workload(settings.workload)
        self.metric, self.higher_is_better = task.metric, task.higher_is_better
        model = task.model()
        self.parameters = sum(p.numel() for p in model.parameters())
        self._watcher.said("compiling kernels")
        # Here once, not in each rank while the others wait for it.
        uses = [use for method in self.methods for use in uses_of_method(method)]
        if settings.weights is not None:
            from thinwire.compressors import local_of
            from thinwire.compressors.compiling import uses_of

            uses += uses_of([local_of(settings.weights)], [torch.float32])
        compile_kernels(uses)

    def _train(self, cluster: Cluster, jobs: list[Job]) -> None:
        if self.settings.script is None:
            while jobs:
                jobs = self._run_jobs(cluster, jobs)
            return
        for job in jobs:
            if self.outcomes[job.method.name].error is None:
                self._run_script(cluster, job)

    def _run_jobs(self, cluster: Cluster, jobs: list[Job]) -> list[Job]:
        """Run jobs in one set of processes until one fails; those that are left to do."""
        follower = _Follower(self, jobs, self._watcher)
        try:
            self._start(cluster, follower)
        except HostFailedError as error:
            return self._left(follower, error)
        return []

    def _run_script(self, cluster: Cluster, job: Job) -> None:
        settings = self.settings
        follower = _Follower(self, [job], self._watcher)
        try:
            self._start(cluster, follower, str(settings.script), *settings.arguments)
        except HostFailedError as error:
            self._fail(job, reason(error, self._patience()), output_of(error))
            return
        if job not in follower.done:
            self._fail(job, f"the script never called backward() on {_MODELS[settings.parallel]}")
        for about in follower.about:
            self.metric = about.get("metric") or self.metric
            self.higher_is_better = about.get("higher_is_better", True)
            self.parameters = about.get("parameters") or self.parameters

    def _start(self, cluster: Cluster, follower: "_Follower", *script: str) -> None:
        """Run the jobs of a follower on all hosts."""
        settings = self.settings
        plan = RankPlan(
            jobs=tuple(follower.jobs),
            patience=self._patience(),
            loopback=self.projected,
            projected_rate=self.slowest,
            probe_steps=SWEEP_STEPS,
            workload=settings.workload,
            parallel=settings.parallel,
            replicas=settings.replicas,
            weights=settings.weights,
            steps=settings.steps,
            seconds=settings.seconds,
            target=settings.target,
            evaluations=settings.evaluations,
        )
        with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
            path = Path(folder, "plan.json")
            path.write_text(plan.to_json(), encoding="utf-8")
            argv = [sys.executable, "-m", "thinwire.compare.rank", str(path), *script]
            seed = {"THINWIRE_SEED": str(follower.jobs[0].seed)} if script else {}
            cluster.run(argv, env=seed, on_line=follower.on_line)

    def _left(self, follower: "_Follower", error: HostFailedError) -> list[Job]:
        """After a failure: blame the job that was running, go on with those behind it."""
        why = reason(error, self._patience())
        if follower.current is None:
            raise ComparisonSettingError(f"the ranks could not start: {why}") from error
        self._fail(follower.current, why, output_of(error))
        return [
            job
            for job in follower.jobs
            if job not in follower.done and self.outcomes[job.method.name].error is None
        ]

    def _patience(self) -> float:
        """Seconds without a step after which a method hangs: many times what a dense one takes."""
        settings = self.settings
        if settings.patience is not None:
            return settings.patience
        if settings.script is not None or self.parameters is None:
            return _SCRIPT_PATIENCE
        links = (*settings.links, *settings.sweep, settings.inter or "10gbit")
        bulk = 2 * 32 * self.parameters / min(map(rate_of, links))
        trips = _ROUND_TRIPS_PER_HOST * settings.hosts * self._asked_lab.round_trip_seconds
        return _LEAST_PATIENCE + _DENSE_STEPS * (bulk + trips)

    def _fail(self, job: Job, why: str, output: str | None = None) -> None:
        outcome = self.outcomes[job.method.name]
        outcome.error, outcome.output = why, output
        self._watcher.failed(job, why)


class _Follower:
    """Hears the events of a set of ranks."""

    def __init__(self, comparison: Comparison, jobs: Sequence[Job], watcher: Watcher) -> None:
        self._comparison, self.jobs, self._watcher = comparison, jobs, watcher
        self._hosts = comparison.settings.hosts
        self.current: Job | None = None
        self.done: set[Job] = set()
        self.about: list[dict[str, Any]] = []  # what a script told of itself
        self._records: dict[int, dict[int, RankRecord]] = {}

    def on_line(self, host: int, stream: str, line: str) -> None:
        event = heard(line) if stream == "stdout" else None
        if event is None:
            return
        kind = event.pop("event", None)
        if kind == "begin":
            self.current = self.jobs[event["job"]]
            if self.current.link is None:
                self._watcher.began(self.current)
        elif kind == "step" and self.current is not None:
            self._watcher.stepped(self.current, StepEvent(**event))
        elif kind == "about":
            self.about.append(event)
        elif kind == "end":
            ranks = self._records.setdefault(event["job"], {})
            ranks[event["rank"]] = RankRecord(**event["record"])
            if len(ranks) == self._hosts:
                job = self.jobs[event["job"]]
                self.done.add(job)
                self._comparison.keep(job, [ranks[rank] for rank in range(self._hosts)])


def _check_parallel(settings: ComparisonSettings) -> None:
    """Refuse hosts and weights that do not go with how models are divided."""
    parallel, hosts, replicas = settings.parallel, settings.hosts, settings.replicas
    if parallel not in PARALLELISMS:
        known = ", ".join(PARALLELISMS)
        raise ComparisonSettingError(f"--parallel must be one of {known}, got {parallel!r}")
    if parallel == "hsdp" and (hosts % replicas or hosts < 2 * replicas):
        racks = f"--racks {replicas}" if settings.racks > 1 else f"{replicas} replicas"
        raise ComparisonSettingError(
            f"--parallel hsdp shards a model over at least two hosts of each replica, over equally "
            f"many: {hosts} hosts cannot be divided so for {racks}, {2 * replicas} could"
        )
    if settings.weights is None:
        return
    if parallel != "fsdp":
        raise ComparisonSettingError(
            f"--weights is for --parallel fsdp, got --parallel {parallel}: only there hosts send "
            "each other parameters over slow links"
        )
    from thinwire.compressors import local_of

    try:
        local_of(settings.weights)
    except ValueError as error:
        raise ComparisonSettingError(f"--weights: {error}") from None
    except TypeError:
        raise ComparisonSettingError(
            "--weights must be a compressor that each host applies by itself, such as quantize:8, "
            f"got {settings.weights}"
        ) from None


def _methods(settings: ComparisonSettings) -> list[Method]:
    """All methods, each once."""
    methods = [read(name, settings.parallel) for name in settings.names]
    found = {method.name: method for method in methods}
    if settings.script is None and "script" in found:
        raise ComparisonSettingError("'script' is a method for --workload SCRIPT.py")
    for method in found.values():
        if settings.script is not None and method.kind == "optimizer":
            raise ComparisonSettingError(
                f"{method.name}: a script makes its own optimizer, so compare it as two scripts"
            )
    return list(found.values())


# Why a method failed, in a line

_ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)")
# What the others say when a rank has gone.
_CONSEQUENCE = re.compile(r"[Cc]onnection|Broken pipe|PeerError|store|ECONN|socket")
_TIMEOUT = re.compile(r"Timeout \([\d:.]+\)!")
_LONGEST = 2000


def reason(error: HostFailedError, patience: float) -> str:
    """What went wrong first, from what the ranks said on standard error."""
    if error.exit_code < 0:  # a signal: what others say is its consequence
        return str(error).splitlines()[0].rstrip(":")
    results = [error.results[error.host]]
    results += [result for result in error.results if result.host != error.host]
    said = [line for result in results if (line := _last_error(result))]
    for line in said:
        if not _CONSEQUENCE.search(line):
            return line[:_LONGEST]
    if any(_TIMEOUT.search(result.stderr) for result in results):
        return f"no step within {patience:g} s: it hangs"
    return (said[0] if said else str(error))[:_LONGEST]


_KEPT = {"stderr": 60, "stdout": 20}  # lines of a host that failed


def output_of(error: HostFailedError) -> str:
    """How the hosts that failed by themselves ended, and their last lines: the traceback."""
    ours = {-signal.SIGTERM, -signal.SIGKILL, 0}
    others = [r for r in error.results if r.host != error.host and r.exit_code not in ours]
    parts = []
    for result in (error.results[error.host], *others):
        parts.append(result.ending)
        for stream, number in _KEPT.items():
            lines = [line for line in getattr(result, stream).splitlines() if not heard(line)]
            if any(map(str.strip, lines)):
                parts += [f"-- {stream}:", *lines[-number:]]
    return "\n".join(parts)


def _last_error(result: Result) -> str | None:
    for line in reversed(result.stderr.splitlines()):
        match = _ERROR.match(line.strip())
        if match:
            return match[1].strip()
    return None


# Progress, on standard error: a bar per method on a terminal, lines elsewhere


@contextlib.contextmanager
def shown(methods: list[Method], seeds: int) -> Iterator[Watcher]:
    """A watcher that shows what it is told while the block lasts."""
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TextColumn("{task.fields[figures]}", markup=False),
        console=Console(stderr=True),
        refresh_per_second=3,  # drawing takes a core from the training
    )
    with progress:
        yield ProgressBars(progress, methods, seeds)


class ProgressLines:
    """One line when a training begins, one when it has ended."""

    def said(self, text: str) -> None:
        self._print(f"{text} ...")

    def began(self, job: Job) -> None:
        self._print(f"{job.method.name}, seed {job.seed} ...")

    def stepped(self, job: Job, event: StepEvent) -> None:
        pass

    def ended(self, job: Job, run: "TrainingRun") -> None:
        figures = _figures(run.losses[-1], run.step_seconds, 1e6 * run.megabytes[-1])
        self._print(f"{job.method.name}, seed {job.seed}: {run.steps} steps, {figures}")

    def failed(self, job: Job, error: str) -> None:
        self._print(f"{job.method.name} failed: {_first_line(error)}")

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class ProgressBars:
    """One bar per method, with the loss, the time per step and what was sent."""

    def __init__(self, progress: Any, methods: list[Method], seeds: int) -> None:
        self._progress = progress
        self._stage = progress.add_task("starting", total=None, figures="", visible=True)
        wide = max(len(method.name) for method in methods)
        self._tasks = {
            method.name: progress.add_task(method.name.ljust(wide), total=seeds, figures="waits")
            for method in methods
        }
        self._done = dict.fromkeys(self._tasks, 0)

    def said(self, text: str) -> None:
        self._progress.update(self._stage, description=text, visible=True)

    def began(self, job: Job) -> None:
        self._progress.update(self._stage, visible=False)
        self._progress.update(self._tasks[job.method.name], figures=f"seed {job.seed} starts")

    def stepped(self, job: Job, event: StepEvent) -> None:
        part = event.step / event.steps if event.steps else 0.0
        self._progress.update(
            self._tasks[job.method.name],
            completed=self._done[job.method.name] + part,
            figures=_figures(event.loss, event.step_seconds, event.num_bytes),
        )

    def ended(self, job: Job, run: "TrainingRun") -> None:
        self._done[job.method.name] += 1
        self._progress.update(
            self._tasks[job.method.name],
            completed=self._done[job.method.name],
            figures=_figures(run.losses[-1], run.step_seconds, 1e6 * run.megabytes[-1]),
        )

    def failed(self, job: Job, error: str) -> None:
        self._progress.update(
            self._tasks[job.method.name], figures=f"failed: {_first_line(error)[:60]}"
        )


def _figures(loss: float | None, step: float, sent: float) -> str:
    shown = f"{math.nan if loss is None else loss:6.3f}"
    return f"loss {shown}  {show_seconds(step):>7} per step  {show_bytes(round(sent)):>7} sent"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
