"""Do the same many times over, and see that memory, threads and descriptors stay as they are.

    python benchmarks/soak.py [--quick] [--only PARTS] [--out FILE]

Two ranks on loopback: 100,000 all-reduces of small tensors, 20,000 steps of DDP with a wire, 500
times attach and detach, 200 process groups made and destroyed. Each rank looks at itself forty
times. After the first third threads and descriptors must not change at all, and memory must neither
grow by more than its bound each time nor by a lot at once. Memory is what the process has when the
C library has given back what is free; how much of it is allocated is noted too, which tells memory
in use from pages that the allocator cannot give back. `--quick` takes a minute. Exit status 1 if
something is not flat, 130 after Ctrl-C.
"""

import argparse
import contextlib
import ctypes
import gc
import multiprocessing.connection
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from typing import Any

import forked
import torch
import torch.distributed as dist
from chaos_rank import Pipe, join, leave, torch_once
from chaos_trainings import LEAST, RATE, loss_of, net
from forked import Child
from recording import read_options, write_record
from resources import allocated_bytes, held, left_over, resident_bytes
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.formatting import show_bytes

SAMPLES = 40
WARM_UP = 1 / 3  # of all samples
LEAST_GROWTH = 1 << 20  # bytes: what memory may grow by, whatever its slope, and at once
SILENCE = 300.0  # seconds without a word from a rank
SETTLING = 5.0  # seconds for threads to end after their group


@dataclass(frozen=True)
class Sample:
    """What a rank holds after so many operations.

    Args:
        allocated_bytes: by the C library's allocator and not freed; 0 where it does not tell.
    """

    rank: int
    done: int
    resident_bytes: int
    allocated_bytes: int
    threads: int
    descriptors: int


class Operation(ABC):
    """Something that is done over and over, in processes of its own."""

    name: str
    count: int
    quick: int  # how many do for a first look
    most: float  # bytes per operation that memory may grow by

    def begin(self) -> None:
        """Called once, in a group of two."""
        return None

    @abstractmethod
    def work(self, number: int) -> None:
        """Called `count` times."""

    def settle(self) -> None:
        """Called before the rank looks at itself."""
        return None


class AllReduces(Operation):
    name, count, quick, most = "all_reduce", 100_000, 5_000, 20.0
    specs = ("topk:0.1", "quantize:4", "none")

    def begin(self) -> None:
        self.x, self.residual = torch.randn(256), torch.zeros(256)

    def work(self, number: int) -> None:
        spec = self.specs[number % len(self.specs)]
        residual = None if spec == "none" else self.residual
        tw.all_reduce(self.x, spec, residual=residual, op="avg")


class Steps(Operation):
    name, count, quick, most = "DDP step", 20_000, 3_000, 100.0

    def begin(self) -> None:
        self.model = DistributedDataParallel(net())
        self.wire = tw.attach(self.model, "topk:0.1", min_numel=LEAST)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def work(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, number).backward()
        self.optimizer.step()


class Attachments(Operation):
    name, count, quick, most = "attach, detach", 500, 150, 4_000.0

    def begin(self) -> None:
        self.model = DistributedDataParallel(net())

    def work(self, number: int) -> None:
        wire = tw.attach(self.model, "topk:0.1", min_numel=LEAST)
        loss_of(self.model, number).backward()
        wire.detach()


class Groups(Operation):
    """The group that the part begins in goes first, too."""

    name, count, quick, most = "process group", 200, 40, 8_000.0

    def __init__(self, port: int, rank: int) -> None:
        self._group = {"port": port, "master": False, "rank": rank, "size": 2}

    def begin(self) -> None:
        leave()
        self._before = held()

    def work(self, number: int) -> None:
        join({**self._group, "name": f"groups/{number}"})
        tw.all_reduce(torch.ones(100), "topk:0.1")
        leave()

    def settle(self) -> None:
        left_over(self._before, SETTLING)


PARTS: dict[str, type[Operation]] = {
    "all-reduce": AllReduces,
    "steps": Steps,
    "attach": Attachments,
    "groups": Groups,
}


def live(pipe: Any, key: str, count: int, port: int, rank: int) -> None:
    """One of the two ranks."""
    torch.set_num_threads(1)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch's record of the last 2000 exchanges: memory
    told = Pipe(pipe)
    torch_once()
    join({"name": key, "port": port, "master": False, "rank": rank, "size": 2})
    made = PARTS[key]
    part = made(port, rank) if issubclass(made, Groups) else made()
    part.begin()
    step = max(1, count // SAMPLES)
    for number in range(count):
        part.work(number)
        if (number + 1) % step == 0:
            part.settle()
            told.tell(asdict(look(rank, number + 1)))
    del part
    leave()


def look(rank: int, done: int) -> Sample:
    gc.collect()
    with contextlib.suppress(AttributeError):  # memory that was freed goes back to the system
        ctypes.CDLL(None).malloc_trim(0)
    found = held()
    descriptors = found.descriptors.total()
    return Sample(
        rank, done, resident_bytes(), allocated_bytes(), found.threads.total(), descriptors
    )


def soak(context: Any, key: str, count: int, on_sample: Any = None) -> list[Sample]:
    """The samples of both ranks; their processes have ended afterwards."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children: list[Child] = []
    samples: list[Sample] = []
    try:
        for rank in range(2):
            children.append(Child(context, live, key, count, int(store.port), rank))
        talking = {child.pipe: child for child in children}
        while talking:
            ready = multiprocessing.connection.wait(list(talking), SILENCE)
            if not ready:
                raise TimeoutError(f"{key}: no word from a rank for {SILENCE:g} s")
            for pipe in ready:
                message = talking[pipe].hear()
                if message is None:
                    del talking[pipe]
                    continue
                samples.append(Sample(**message))
                if on_sample is not None:
                    on_sample(samples[-1])
        codes = [child.wait(10) for child in children]
        if codes != [0, 0]:
            raise RuntimeError(f"{key}: the ranks ended with exit codes {codes}")
    finally:
        for child in children:
            child.end()
    return samples


@dataclass(frozen=True)
class Verdict:
    """Of one part on one rank.

    Args:
        growth: bytes per operation: the smaller one of both halves after the warm-up, of each the
            median of the slopes between all pairs of samples. What grows each time does so in both.
        jump: most bytes between two samples, one after the other.
        allocated_growth: as `growth`, of what is allocated.
        threads, descriptors: the numbers that were seen after the warm-up.
        flaws: what is not flat, in words.
    """

    part: str
    rank: int
    count: int
    resident_bytes: int
    growth: float
    jump: int
    allocated_growth: float
    threads: tuple[int, ...]
    descriptors: tuple[int, ...]
    flaws: tuple[str, ...]


def judge(key: str, rank: int, samples: Sequence[Sample]) -> Verdict:
    own = sorted((s for s in samples if s.rank == rank), key=lambda sample: sample.done)
    steady = own[int(len(own) * WARM_UP) :]
    made = PARTS[key]
    growth = growth_of([(sample.done, sample.resident_bytes) for sample in steady])
    allocated = growth_of([(sample.done, sample.allocated_bytes) for sample in steady])
    jump, at = max(
        ((b.resident_bytes - a.resident_bytes, b.done) for a, b in pairwise(steady)),
        default=(0, 0),
    )
    threads = tuple(sorted({sample.threads for sample in steady}))
    descriptors = tuple(sorted({sample.descriptors for sample in steady}))
    flaws = []
    grown = steady[-1].resident_bytes - steady[0].resident_bytes
    if growth > made.most and grown > LEAST_GROWTH:
        flaws.append(f"memory grows by {growth:.0f} bytes each time, more than {made.most:g}")
    if jump > LEAST_GROWTH:
        flaws.append(f"memory grows by {show_bytes(jump)} at once, shortly before {at:,}")
    for what, numbers in (("threads", threads), ("descriptors", descriptors)):
        if len(numbers) > 1:
            flaws.append(f"{what} are not always the same: {numbers[0]} to {numbers[-1]}")
    return Verdict(
        made.name,
        rank,
        own[-1].done,
        own[-1].resident_bytes,
        growth,
        jump,
        allocated,
        threads,
        descriptors,
        tuple(flaws),
    )


def growth_of(points: Sequence[tuple[int, int]]) -> float:
    """See `Verdict.growth`, of (operations, bytes)."""
    half = len(points) // 2
    return min(_slope(points[:half]), _slope(points[half:]))


def _slope(points: Sequence[tuple[int, int]]) -> float:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)]
    return statistics.median(slopes) if slopes else 0.0


def table_of(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="after the first third")
    columns = ("bytes each time", "allocated", "at once", "threads", "descriptors", "")
    for column in ("what", "rank", "times", "memory", *columns):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    for each in verdicts:
        table.add_row(
            each.part,
            str(each.rank),
            f"{each.count:,}",
            show_bytes(each.resident_bytes),
            f"{each.growth:+,.1f}",
            f"{each.allocated_growth:+,.1f}",
            show_bytes(each.jump),
            _range(each.threads),
            _range(each.descriptors),
            "NOT FLAT" if each.flaws else "flat",
        )
    return table


def _range(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer of each")
    parser.add_argument("--only", default="", metavar="PARTS", help=f"of {', '.join(PARTS)}")
    options = read_options(parser)
    keys = [key.strip() for key in options.only.split(",") if key.strip()] or list(PARTS)
    unknown = [key for key in keys if key not in PARTS]
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(PARTS)}")
    console, began = Console(), time.monotonic()
    verdicts: list[Verdict] = []
    everything: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        with console.status("loading torch"):
            forked.wait_for(forked.server("soak"))
        with Progress(*columns, console=console, transient=True) as progress:
            for key in keys:
                count = PARTS[key].quick if options.quick else PARTS[key].count
                task = progress.add_task(f"{PARTS[key].name} x {count:,}", total=count)
                found = soak(
                    forked.server("soak"),
                    key,
                    count,
                    lambda sample, task=task: progress.update(task, completed=sample.done),
                )
                progress.remove_task(task)
                verdicts += [judge(key, rank, found) for rank in range(2)]
                everything += [{"part": key, **asdict(sample)} for sample in found]
    except KeyboardInterrupt:
        return 130
    finally:
        forked.stop()
    console.print(table_of(verdicts))
    for verdict in verdicts:
        for flaw in verdict.flaws:
            console.print(f"{verdict.part}, rank {verdict.rank}: {flaw}")
    console.print(f"{time.monotonic() - began:.0f} s")
    if options.out:
        write(options, verdicts, everything)
    return int(any(verdict.flaws for verdict in verdicts))


def write(options: Any, verdicts: Sequence[Verdict], samples: list[dict[str, Any]]) -> None:
    measured = {"verdicts": [asdict(verdict) for verdict in verdicts], "samples": samples}
    write_record(options, "thinwire-soak/1", measured)


if __name__ == "__main__":
    sys.exit(main())
