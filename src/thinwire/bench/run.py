"""A whole run: every compressor on every tensor, timed in interleaved rounds.

A round times one ``r += g`` over the tensor and then every compressor once, so that whatever else
the machine does meanwhile falls on all alike. The first call of each compressor compiles its
kernels (cached on disk afterwards) and is not timed.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.bench.measure import Measurement, residual_of
from thinwire.bench.memory import LEAST_BYTES, extra_bytes, why_not
from thinwire.bench.results import BenchReport, TensorResults, Timing
from thinwire.bench.settings import EAGER_ROUNDS, BenchSettingError, BenchSettings
from thinwire.bench.tensors import TensorSource, load
from thinwire.compressors import LocalCompressor, local_of
from thinwire.formatting import show_bytes, show_count
from thinwire.machine import available_bytes, busy, machine, versions

_PAUSE = 0.02  # seconds
Tick = Callable[[str, str], None]  # told stage and detail of what begins now, once per step


class BenchPlan(NamedTuple):
    settings: BenchSettings
    compressors: list[LocalCompressor]
    sources: list[TensorSource]

    @property
    def eager_rounds(self) -> int:
        return min(self.settings.rounds, EAGER_ROUNDS) if self.settings.eager else 0

    @property
    def num_steps(self) -> int:
        """Of `run`: for every compressor and tensor a warm-up, size and error, rounds, memory."""
        each = 3 + self.settings.rounds + self.eager_rounds
        return len(self.sources) * len(self.compressors) * each


def prepare(settings: BenchSettings) -> BenchPlan:
    """Read the settings. Raises BenchSettingError and MissingExtraError."""
    try:
        found = {str(compressor): compressor for compressor in map(local_of, settings.compressors)}
    except (TypeError, ValueError) as error:
        raise BenchSettingError(str(error)) from None
    if settings.input is None:
        sources = [TensorSource(kind, size) for size in settings.sizes for kind in settings.data]
        num_bytes = 4 * max(settings.sizes)
    else:
        tensor = load(settings.input)
        sources = [TensorSource("file", tensor.numel(), str(settings.input))]
        num_bytes = tensor.numel() * tensor.dtype.itemsize
    _check_memory(num_bytes, len(found))
    return BenchPlan(settings, list(found.values()), sources)


def _check_memory(num_bytes: int, compressors: int) -> None:
    """Every compressor keeps a residual; an eager version takes up to ten tensors more."""
    needed, available = num_bytes * (compressors + 12), available_bytes()
    if available is not None and needed > available:
        raise BenchSettingError(
            f"{compressors} compressors on a tensor of {show_bytes(num_bytes)} take about "
            f"{show_bytes(needed)} of memory, {show_bytes(available)} are free: choose a smaller "
            "tensor or fewer compressors"
        )


def run(plan: BenchPlan, tick: Tick) -> BenchReport:
    """Measure. Ctrl-C ends the run early; what was done until then is returned."""
    with _threads(plan.settings.threads) as threads:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        notes = [note] if (note := busy()) else []
        report = BenchReport(plan.settings, machine(), versions(), threads, date, notes=notes)
        try:
            for source in plan.sources:
                _measure(plan, source, report, tick)
            _weigh(plan, report, tick)
        except KeyboardInterrupt:
            report.interrupted = True
    return report


def _measure(plan: BenchPlan, source: TensorSource, report: BenchReport, tick: Tick) -> None:
    """Add the group of one tensor to the report, as far as it gets."""
    x = source.make()
    measurements = [
        Measurement(compressor, x, plan.settings.eager) for compressor in plan.compressors
    ]
    baseline: list[float] = []
    try:
        _judge(measurements, f"{source.name}, {show_count(x.numel())}", tick)
        _time(measurements, baseline, plan, f"{source.name}, {show_count(x.numel())}", tick)
    finally:
        rows = [row for row in (measurement.row() for measurement in measurements) if row]
        dtype = str(x.dtype).removeprefix("torch.")
        num_bytes = x.numel() * x.dtype.itemsize
        group = TensorResults(source.name, x.numel(), dtype, num_bytes, Timing.of(baseline), rows)
        if rows:
            report.groups.append(group)


def _judge(measurements: list[Measurement], title: str, tick: Tick) -> None:
    """Warm up, then size and error."""
    for measurement in measurements:
        tick(f"{title}: compiling kernels, first use only", str(measurement.compressor))
        measurement.warm_up()
    out = torch.empty_like(measurements[0].x)
    for measurement in measurements:
        tick(f"{title}: size and error", str(measurement.compressor))
        measurement.judge(out)


def _time(
    measurements: list[Measurement], baseline: list[float], plan: BenchPlan, title: str, tick: Tick
) -> None:
    x = measurements[0].x
    out, r = torch.empty_like(x), residual_of(x)
    for i in range(plan.settings.rounds):
        baseline.append(_seconds_of_pass(r, x))
        for measurement in measurements:
            tick(
                f"{title}: speed, round {i + 1} of {plan.settings.rounds}",
                str(measurement.compressor),
            )
            measurement.time(i + 1, out)
            if i < plan.eager_rounds:
                tick(f"{title}: speed of plain PyTorch", str(measurement.compressor))
                measurement.time_eager()
                pause()


def _seconds_of_pass(r: Tensor, g: Tensor) -> float:
    begin = time.perf_counter()
    r += g
    seconds = time.perf_counter() - begin
    pause()
    return seconds


def pause() -> None:
    """What comes after work of torch, whose threads wait for more on the cores that are measured
    next.

    Awake: a system may put a thread that has slept on one core with its helpers, for a while.
    """
    end = time.perf_counter() + _PAUSE
    while time.perf_counter() < end:
        pass


def _weigh(plan: BenchPlan, report: BenchReport, tick: Tick) -> None:
    """Fill in the extra memory, or note why not."""
    if reason := why_not():
        report.notes.append(reason)
        return
    pairs = list(zip(plan.sources, report.groups, strict=True))
    heavy = [(source, group) for source, group in pairs if group.num_bytes >= LEAST_BYTES]
    if len(heavy) < len(pairs):
        report.notes.append(f"extra memory is not measured under {show_bytes(LEAST_BYTES)}")
    if not heavy:
        return
    specs = [str(compressor) for compressor in plan.compressors]
    found = extra_bytes([source for source, _ in heavy], specs, report.threads)
    with contextlib.closing(found):
        for source, group in heavy:
            for row in group.rows:
                tick(f"{source.name}, {show_count(group.numel)}: memory", row.compressor)
                extra = next(found, None)
                row.extra_memory = None if extra is None else extra / group.num_bytes
    if heavy[-1][1].rows[-1].extra_memory is None:
        report.notes.append("the process that measures extra memory ended early")


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[int]:
    """Run the block with so many threads of torch, which the kernels follow."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


# How far a run has come, on stderr: a bar on a terminal, a line for each stage elsewhere


@contextlib.contextmanager
def shown(num_steps: int) -> Iterator[Tick]:
    """A tick for `run` that shows how far it has come while the block lasts."""
    if sys.stderr.isatty():
        with _bar(num_steps) as tick:
            yield tick
    else:
        yield _lines()


@contextlib.contextmanager
def _bar(num_steps: int) -> Iterator[Tick]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(24), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    words = TextColumn("{task.description}", markup=False)
    # Twice per second: drawing takes a core from the work that is being timed.
    with Progress(
        *columns,
        words,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=2,
    ) as progress:
        task = progress.add_task("", total=num_steps)
        begun = False

        def tick(stage: str, detail: str) -> None:
            nonlocal begun
            progress.update(task, advance=int(begun), description=f"{stage} · {detail}")
            begun = True

        yield tick


def _lines() -> Tick:
    said: set[str] = set()

    def tick(stage: str, detail: str) -> None:
        # One line per stage: rounds and compressors would fill a log.
        what = stage.partition(", round ")[0]
        if what not in said:
            print(what, file=sys.stderr, flush=True)
            said.add(what)

    return tick
