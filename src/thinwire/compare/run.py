"""A comparison from its settings to its document."""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from thinwire.compare.analysis import document_of
from thinwire.compare.events import heard
from thinwire.compare.failure import reason
from thinwire.compare.method import Method, read
from thinwire.compare.place import cluster_of
from thinwire.compare.settings import SWEEP_STEPS, SettingError, Settings
from thinwire.lab import Cluster, HostFailedError, parse_rate, why_not
from thinwire.machine import busy

_LEAST_PATIENCE, _SCRIPT_PATIENCE = 30.0, 300.0  # seconds
_DENSE_STEPS = 8  # that a step may take as long as


@dataclass(frozen=True)
class Job:
    """One training."""

    method: Method
    seed: int


@dataclass
class Outcome:
    """What became of one method."""

    method: Method
    runs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # seed: of all ranks
    sweep: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # link: of all ranks
    error: str | None = None


class Watcher(Protocol):
    """Is told how far a comparison has come."""

    def said(self, text: str) -> None: ...

    def began(self, job: Job) -> None: ...

    def stepped(self, job: Job, event: dict[str, Any]) -> None: ...

    def ended(self, job: Job, ranks: list[dict[str, Any]]) -> None: ...

    def failed(self, job: Job, error: str) -> None: ...


class Comparison:
    """Trains with every method and gathers what came out."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.methods = _methods(settings)
        self.notes: list[str] = []
        self.projected = settings.project
        self.outcomes = {method.name: Outcome(method) for method in self.methods}
        self.parameters: int | None = None
        self.metric: dict[str, Any] = {"metric": None, "higher_is_better": True}

    def run(self, watcher: Watcher, command: str) -> dict[str, Any]:
        """All trainings, then the sweep; the document, also of what was done until Ctrl-C."""
        settings, self._watcher = self.settings, watcher
        self._look_around()
        jobs = [Job(method, seed) for seed in settings.seeds for method in self.methods]
        interrupted = False
        try:
            with cluster_of(settings, settings.links, self.projected) as cluster:
                self._train(cluster, jobs)
            for link in settings.sweep:
                self._watcher.said(f"the time of a step at {link}")
                with cluster_of(settings, [link] * settings.hosts, self.projected) as cluster:
                    self._probe(cluster, link)
        except KeyboardInterrupt:
            interrupted = True
            self.notes.append("interrupted: this is what was done until then")
        found = document_of(self, command)
        found["interrupted"] = interrupted
        return found

    def _look_around(self) -> None:
        """What can be known before anything runs."""
        settings = self.settings
        if note := busy():
            self.notes.append(note)
        if not self.projected and (missing := why_not()):
            self.projected = True
            self.notes.append(f"no lab can be made here, so times are projected: {missing}")
        if self.projected and settings.racks > 1:
            raise SettingError("--racks needs a lab: times cannot be projected for it")
        if settings.script is None:
            from thinwire.workloads import workload

            task = workload(settings.workload)
            self.metric = {"metric": task.metric, "higher_is_better": task.higher_is_better}
            self.parameters = sum(p.numel() for p in task.model().parameters())
            self._watcher.said("compiling kernels")
            from thinwire.compare.hooks import warm_up

            for method in self.methods:
                warm_up(method)

    def _train(self, cluster: Cluster, jobs: list[Job]) -> None:
        if self.settings.script is not None:
            for job in jobs:
                if self.outcomes[job.method.name].error is None:
                    self._run_script(cluster, job)
            return
        while jobs:
            jobs = self._run_jobs(cluster, jobs, None, self._keep_run)

    def _probe(self, cluster: Cluster, link: str) -> None:
        jobs = [
            Job(method, self.settings.seeds[0])
            for method in self.methods
            if self.outcomes[method.name].runs
        ]

        def keep(job: Job, ranks: list[dict[str, Any]]) -> None:
            self.outcomes[job.method.name].sweep[link] = ranks

        while jobs:
            jobs = self._run_jobs(cluster, jobs, SWEEP_STEPS, keep)

    def _keep_run(self, job: Job, ranks: list[dict[str, Any]]) -> None:
        self.outcomes[job.method.name].runs[job.seed] = ranks
        self._watcher.ended(job, ranks)

    def _run_jobs(
        self,
        cluster: Cluster,
        jobs: list[Job],
        probe: int | None,
        keep: Callable[[Job, list[dict[str, Any]]], None],
    ) -> list[Job]:
        """Run jobs in one set of processes until one fails; those that are left to do."""
        settings = self.settings
        plan = {
            "workload": settings.workload,
            "steps": settings.steps,
            "seconds": settings.seconds,
            "target": settings.target,
            "evaluations": settings.evaluations,
            "patience": self._patience(),
            "loopback": self.projected,
            "slow": min(map(parse_rate, settings.links)) if self.projected else None,
            "threads": 1,
            "jobs": [
                {"number": n, "method": job.method.name, "seed": job.seed, "probe": probe}
                for n, job in enumerate(jobs)
            ],
        }
        follower = _Follower(jobs, settings.hosts, self._watcher if probe is None else None, keep)
        with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
            path = Path(folder, "jobs.json")
            path.write_text(json.dumps(plan), encoding="utf-8")
            argv = [sys.executable, "-m", "thinwire.compare.rank", str(path)]
            try:
                cluster.run(argv, on_line=follower.on_line)
            except HostFailedError as error:
                return self._left(follower, error)
        return []

    def _left(self, follower: "_Follower", error: HostFailedError) -> list[Job]:
        """After a failure: blame the job that was running, go on with those behind it."""
        why = reason(error, self._patience())
        current = follower.current
        if current is None:
            raise SettingError(f"the ranks could not start: {why}") from error
        self._fail(current, why)
        return [
            job
            for job in follower.jobs
            if job not in follower.done and self.outcomes[job.method.name].error is None
        ]

    def _run_script(self, cluster: Cluster, job: Job) -> None:
        settings = self.settings
        follower = _Follower([job], settings.hosts, self._watcher, self._keep_run)
        plan = json.dumps(
            {
                "method": job.method.name,
                "seed": job.seed,
                "patience": self._patience(),
                "loopback": self.projected,
            }
        )
        words = [str(settings.script), *settings.arguments]
        argv = [sys.executable, "-m", "thinwire.compare.script", plan, *words]
        try:
            cluster.run(argv, env={"THINWIRE_SEED": str(job.seed)}, on_line=follower.on_line)
        except HostFailedError as error:
            self._fail(job, reason(error, self._patience()))
            return
        if job not in follower.done:
            self._fail(job, "the script never called backward() on a DistributedDataParallel model")
        for found in follower.news:
            self.metric["metric"] = found.get("metric") or self.metric["metric"]
            self.metric["higher_is_better"] = found.get("higher_is_better", True)
            self.parameters = found.get("parameters") or self.parameters

    def _patience(self) -> float:
        """Seconds without a step after which a method hangs: many times what a dense one takes."""
        settings = self.settings
        if settings.patience is not None:
            return settings.patience
        if settings.script is not None or self.parameters is None:
            return _SCRIPT_PATIENCE
        slowest = min(
            map(parse_rate, (*settings.links, *settings.sweep, settings.inter or "10gbit"))
        )
        return _LEAST_PATIENCE + _DENSE_STEPS * 2 * 32 * self.parameters / slowest

    def _fail(self, job: Job, why: str) -> None:
        self.outcomes[job.method.name].error = why
        self._watcher.failed(job, why)


class _Follower:
    """Hears the events of a set of ranks."""

    def __init__(
        self,
        jobs: Sequence[Job],
        hosts: int,
        watcher: Watcher | None,
        keep: Callable[[Job, list[dict[str, Any]]], None],
    ) -> None:
        self.jobs, self._hosts, self._watcher, self._keep = jobs, hosts, watcher, keep
        self.current: Job | None = None
        self.done: set[Job] = set()
        self.news: list[dict[str, Any]] = []  # what a script told of itself
        self._found: dict[int, dict[int, dict[str, Any]]] = {}

    def on_line(self, host: int, stream: str, line: str) -> None:
        event = heard(line) if stream == "stdout" else None
        match event and event.get("event"):
            case "begin":
                assert event
                self.current = self.jobs[event["job"]]
                if self._watcher:
                    self._watcher.began(self.current)
            case "step":
                assert event
                if self._watcher and self.current:
                    self._watcher.stepped(self.current, event)
            case "about":
                assert event
                self.news.append(event)
            case "end":
                assert event
                ranks = self._found.setdefault(event["job"], {})
                ranks[event["rank"]] = event["found"]
                if len(ranks) == self._hosts:
                    job = self.jobs[event["job"]]
                    self.done.add(job)
                    self._keep(job, [ranks[rank] for rank in range(self._hosts)])


def _methods(settings: Settings) -> list[Method]:
    """All methods, each once; a hook of PyTorch's that may crash or hang comes last."""
    found = {method.name: method for method in map(read, settings.names)}
    if settings.script is None and "script" in found:
        raise SettingError("'script' is a method for --workload SCRIPT.py")
    for method in found.values():
        if settings.script is not None and method.kind == "optimizer":
            raise SettingError(
                f"{method.name}: a script makes its own optimizer, so compare it as two scripts"
            )
    return sorted(found.values(), key=lambda method: method.name.startswith("torch:"))
