"""A whole run: every compressor on every tensor, timed in interleaved rounds.

A round times one ``r += g`` over the tensor and then every compressor once, so that whatever else
the machine does meanwhile falls on all alike. The first call of each compressor compiles its
kernels (cached on disk afterwards) and is not timed.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import torch
from torch import Tensor

from thinwire.bench.memory import LEAST_BYTES, why_not
from thinwire.bench.plan import Plan
from thinwire.bench.result import Group, Report, Timing
from thinwire.bench.sizes import show_size
from thinwire.bench.source import Source
from thinwire.bench.subject import Subject, residual_of
from thinwire.bench.weigh import extra_bytes
from thinwire.machine import busy, machine, versions

Tick = Callable[[str, str], None]  # told stage and detail of what begins now, once a step


def run(plan: Plan, tick: Tick) -> Report:
    """Measure. Ctrl-C ends the run early; what was done until then is returned."""
    with _threads(plan.settings.threads) as threads:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        notes = [note] if (note := busy()) else []
        report = Report(plan.settings, machine(), versions(), threads, date, notes=notes)
        try:
            for source in plan.sources:
                _measure(plan, source, report, tick)
            _weigh(plan, report, tick)
        except KeyboardInterrupt:
            report.interrupted = True
    return report


def _measure(plan: Plan, source: Source, report: Report, tick: Tick) -> None:
    """Add the group of one tensor to the report, as far as it gets."""
    x = source.make()
    subjects = [Subject(compressor, x, plan.settings.eager) for compressor in plan.compressors]
    baseline: list[float] = []
    try:
        _judge(subjects, f"{source.name}, {show_size(x.numel())}", tick)
        _time(subjects, baseline, plan, f"{source.name}, {show_size(x.numel())}", tick)
    finally:
        rows = [row for row in (subject.row() for subject in subjects) if row]
        dtype = str(x.dtype).removeprefix("torch.")
        num_bytes = x.numel() * x.dtype.itemsize
        group = Group(source.name, x.numel(), dtype, num_bytes, Timing.of(baseline), rows)
        if rows:
            report.groups.append(group)


def _judge(subjects: list[Subject], title: str, tick: Tick) -> None:
    """Warm up, then size and error."""
    for subject in subjects:
        tick(f"{title}: compiling kernels, first use only", str(subject.compressor))
        subject.warm_up()
    out = torch.empty_like(subjects[0].x)
    for subject in subjects:
        tick(f"{title}: size and error", str(subject.compressor))
        subject.judge(out)


def _time(
    subjects: list[Subject], baseline: list[float], plan: Plan, title: str, tick: Tick
) -> None:
    x = subjects[0].x
    out, r = torch.empty_like(x), residual_of(x)
    for i in range(plan.settings.rounds):
        baseline.append(_seconds_of_pass(r, x))
        for subject in subjects:
            tick(
                f"{title}: speed, round {i + 1} of {plan.settings.rounds}", str(subject.compressor)
            )
            subject.time(i + 1, out)
            if i < plan.eager_rounds:
                tick(f"{title}: speed of plain PyTorch", str(subject.compressor))
                subject.time_eager()


def _seconds_of_pass(r: Tensor, g: Tensor) -> float:
    begin = time.perf_counter()
    r += g
    return time.perf_counter() - begin


def _weigh(plan: Plan, report: Report, tick: Tick) -> None:
    """Fill in the extra memory, or note why not."""
    if reason := why_not():
        report.notes.append(reason)
        return
    pairs = list(zip(plan.sources, report.groups, strict=True))
    heavy = [(source, group) for source, group in pairs if group.num_bytes >= LEAST_BYTES]
    if len(heavy) < len(pairs):
        report.notes.append(f"extra memory is not measured under {LEAST_BYTES / 1e6:g} MB")
    if not heavy:
        return
    specs = [str(compressor) for compressor in plan.compressors]
    found = extra_bytes([source for source, _ in heavy], specs, report.threads)
    with contextlib.closing(found):
        for source, group in heavy:
            for row in group.rows:
                tick(f"{source.name}, {show_size(group.numel)}: memory", row.compressor)
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
