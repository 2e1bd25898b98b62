"""How far a comparison has come, on stderr: a bar a method on a terminal, lines elsewhere."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from thinwire.compare.method import Method
from thinwire.compare.run import Job, Watcher


@contextlib.contextmanager
def shown(methods: list[Method], seeds: int) -> Iterator[Watcher]:
    """A watcher that shows what it is told while the block lasts."""
    if not sys.stderr.isatty():
        yield Lines()
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
        yield Bars(progress, methods, seeds)


class Lines:
    """One line when a training begins, one when it has ended."""

    def said(self, text: str) -> None:
        self._print(f"{text} ...")

    def began(self, job: Job) -> None:
        self._print(f"{job.method.name}, seed {job.seed} ...")

    def stepped(self, job: Job, event: dict[str, Any]) -> None:
        pass

    def ended(self, job: Job, ranks: list[dict[str, Any]]) -> None:
        found = ranks[0]
        steps = len(found["losses"])
        figures = _figures(found["losses"][-1], found["seconds"][-1], found["bytes"][-1], steps)
        self._print(f"{job.method.name}, seed {job.seed}: {steps} steps, {figures}")

    def failed(self, job: Job, error: str) -> None:
        self._print(f"{job.method.name} failed: {_first_line(error)}")

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bars:
    """One bar a method, with the loss, the time of a step and what was sent."""

    def __init__(self, progress: Any, methods: list[Method], seeds: int) -> None:
        self._progress, self._seeds = progress, seeds
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

    def stepped(self, job: Job, event: dict[str, Any]) -> None:
        part = event["step"] / event["steps"] if event["steps"] else 0.0
        self._progress.update(
            self._tasks[job.method.name],
            completed=self._done[job.method.name] + part,
            figures=_figures(event["loss"], event["seconds"], event["bytes"], event["step"]),
        )

    def ended(self, job: Job, ranks: list[dict[str, Any]]) -> None:
        self._done[job.method.name] += 1
        self._progress.update(self._tasks[job.method.name], completed=self._done[job.method.name])

    def failed(self, job: Job, error: str) -> None:
        self._progress.update(
            self._tasks[job.method.name], figures=f"failed: {_first_line(error)[:60]}"
        )


def _figures(loss: float, seconds: float, sent: int, steps: int) -> str:
    return f"loss {loss:6.3f}  {1e3 * seconds / steps:6.0f} ms a step  {sent / 1e6:7.1f} MB sent"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
