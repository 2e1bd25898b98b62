"""Feed damaged and hostile frames to the reader: ten million of them, or as many as you like.

    python benchmarks/fuzz.py [--frames 10000000] [--seed 0] [--start 0] [--processes P]
                              [--minutes M] [--state FILE] [--save FOLDER]

Every frame, and every container of frames, must be refused with FrameError or decode to tensors of
the shape it claims, in memory between guard pages and within the limits that the reader promises.
The first one that does anything else, or ends its process, is written to a file, and the exit
status is 1. It is 1 too if there was some kind of mutation, some code or some limit of which none
was refused or none was read. The frames are those of tests/mutations.py; a seed always makes the
same ones, whatever the number of processes. Ctrl-C stops and says how far it came; with --state the
same command then goes on from there.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from trials import BLOCK, SLACK, MisreadError, Tally, Trials, memory_limit

from thinwire.frames.frame import ALWAYS
from thinwire.machine import machine, versions

SHOWN_EVERY = 0.5  # seconds on a terminal
LINE_EVERY = 60.0  # seconds elsewhere, and between writings of the state
LONGEST_BLOCK = 600.0  # seconds of CPU time: a process that takes longer for a block hangs
ENOUGH = 50 * BLOCK  # so many mutations have some of every kind


class Range(NamedTuple):
    """The mutations to try: those of a seed with numbers in [start, stop)."""

    seed: int
    start: int
    stop: int

    def blocks(self) -> Iterator["Range"]:
        first = self.start // BLOCK
        for block in range(first, -(-self.stop // BLOCK)):
            lo, hi = max(self.start, block * BLOCK), min(self.stop, (block + 1) * BLOCK)
            yield Range(self.seed, lo, hi)


class Failure(NamedTuple):
    """A mutation that was neither refused nor read."""

    number: int
    data: bytes
    story: str


def work(seed: int, parent: Connection, at: Any) -> None:
    """A process that tries the ranges it is given, and ends when there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # ends it
    torch.set_num_threads(1)
    trials = Trials(seed)
    gc.freeze()  # what is there now stays: a collection would look through all of torch each time
    with memory_limit(ALWAYS + SLACK), contextlib.suppress(EOFError, BrokenPipeError):
        parent.send(None)
        while True:
            given: Range = parent.recv()
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_BLOCK)
            try:
                parent.send((given, trials.run(given.start, given.stop, at)))
            except MisreadError as error:
                parent.send(Failure(error.number, error.data, traceback.format_exc()))


class Worker:
    """A process and the connection to it."""

    def __init__(self, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._seed = seed
        self._at = context.RawArray("q", [-1])
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(seed, theirs, self._at), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """What it says next: a range and its tally, None when it is ready, a failure."""
        try:
            return self.connection.recv()
        except EOFError:
            self._process.join()
        number, code = self._at[0], self._process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        if number < 0:
            raise SystemExit(f"a process ended with {how} before its first frame")
        data = bytes(Trials(self._seed).mutation(number).data)
        return Failure(number, data, f"the process that decoded it ended with {how}")

    def end(self) -> None:
        self._process.kill()
        self._process.join()


class Campaign:
    """Tries mutations in several processes; what is known so far is that of a prefix of them."""

    def __init__(self, wanted: Range, state: Path | None) -> None:
        self._wanted, self._state = wanted, state
        self.tally = Tally()
        self._done = wanted.start
        self._early: dict[int, tuple[Range, Tally]] = {}  # by start, of ranges further on
        if state is not None and state.exists():
            self._resume(json.loads(state.read_text()))

    def _resume(self, found: dict[str, Any]) -> None:
        for name in ("seed", "start"):
            expected = getattr(self._wanted, name)
            if found[name] != expected:
                raise SystemExit(
                    f"{self._state} is of --{name} {found[name]}, not {expected}: give another file"
                )
        self.tally, self._done = Tally.from_json(found["tally"]), found["done"]

    def save(self) -> None:
        if self._state is None:
            return
        known = {"done": self._done, "tally": self.tally.to_json()}
        kept = self._state.with_name(f"{self._state.name}.new")
        kept.write_text(json.dumps({**self._wanted._asdict(), **known}))
        kept.replace(self._state)

    def run(self, processes: int, minutes: float) -> Failure | None:
        """Try all mutations, or as many as go into so many minutes."""
        blocks = self._wanted._replace(start=self._done).blocks()
        end = time.monotonic() + 60 * minutes
        workers = [Worker(self._wanted.seed) for _ in range(processes)]
        busy = {worker.connection: worker for worker in workers}
        try:
            with shown(self, self._wanted.stop - self._wanted.start) as show:
                while busy:
                    for ready in wait(list(busy), SHOWN_EVERY):
                        worker = busy[ready]  # type: ignore[index]
                        heard = worker.hear()
                        if isinstance(heard, Failure):
                            return heard
                        if heard is not None:
                            self._learn(*heard)
                        given = next(blocks, None) if time.monotonic() < end else None
                        if given is None:
                            del busy[worker.connection]
                        else:
                            worker.connection.send(given)
                    show()
        finally:
            for worker in workers:
                worker.end()
            self.save()
        return None

    def _learn(self, tried: Range, tally: Tally) -> None:
        self._early[tried.start] = tried, tally
        while self._done in self._early:
            tried, tally = self._early.pop(self._done)
            self.tally.merge(tally)
            self._done = tried.stop

    @property
    def missing(self) -> list[str]:
        """What should have occurred among so many mutations."""
        return self.tally.missing if self.tally.done >= ENOUGH else []

    def __str__(self) -> str:
        tally = self.tally
        return (
            f"seed {self._wanted.seed}: {tally.done:,} mutations from {self._wanted.start:,} on, "
            f"{tally.done - tally.read:,} refused with FrameError, {tally.read:,} read as what "
            f"they claim; {tally.seconds:,.0f} s of CPU time, slowest {tally.slowest:.2f} s, most "
            f"memory with default limits {tally.growth / 2**20:.0f} MiB"
        )


@contextlib.contextmanager
def shown(campaign: Campaign, count: int) -> Iterator["Display"]:
    """A bar on a terminal, a line a minute elsewhere, both on standard error."""
    if not sys.stderr.isatty():
        yield Display(campaign, None)
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(TextColumn("frames"), *columns, console=Console(stderr=True))
    with bar:
        bar.add_task("frames", total=count, completed=campaign.tally.done)
        yield Display(campaign, bar)


class Display:
    """Called again and again; shows something now and then, and has the state saved."""

    def __init__(self, campaign: Campaign, bar: Progress | None) -> None:
        self._campaign, self._bar = campaign, bar
        self._last = time.monotonic()

    def __call__(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._campaign.tally.done)
        now = time.monotonic()
        if now - self._last < LINE_EVERY:
            return
        self._last = now
        self._campaign.save()
        if self._bar is None:
            print(self._campaign, file=sys.stderr, flush=True)


def table(tally: Tally) -> Table:
    """How many of each kind, code and limit were refused, and read."""
    drawn = Table("what", box=None)
    for column in ("mutations", "refused", "read"):
        drawn.add_column(column, justify="right")
    for name, (refused, read) in tally.rows().items():
        drawn.add_row(name, *(f"{count:,}" for count in (refused + read, refused, read)))
    return drawn


def survey(given: argparse.Namespace) -> int:
    """Try the mutations, say what came of them; the exit status."""
    wanted = Range(given.seed, given.start, given.start + given.frames)
    campaign, failure = Campaign(wanted, given.state), None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        failure = campaign.run(given.processes, given.minutes)
    Console().print(table(campaign.tally))
    print(f"{campaign}; commit {versions()['commit']}")
    if failure is not None:
        path = given.save / f"fuzz-{given.seed}-{failure.number}.bin"
        path.write_bytes(failure.data)
        print(failure.story, file=sys.stderr)
        print(f"mutation {failure.number} of seed {given.seed} is {path}", file=sys.stderr)
    if campaign.missing:
        print(f"none refused, or none read: {', '.join(campaign.missing)}", file=sys.stderr)
    return int(failure is not None or bool(campaign.missing))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=10_000_000, help="how many (default: 10^7)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--start", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument(
        "--processes", type=int, default=machine().cores, help="default: one for each core"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--state", type=Path, help="file to go on from, kept up to date")
    parser.add_argument("--save", type=Path, default=Path(), help="folder for an offending frame")
    return survey(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
