"""Feed damaged and hostile frames to the reader: ten million of them, or as many as you like.

    python benchmarks/fuzz.py [--frames 10000000] [--seed 0] [--minutes M] [--save FOLDER]

Every frame must be refused with FrameError or decode to a tensor of the shape it claims, within
512 MiB of memory. The first one that does anything else is written to a file, and the exit status
is 1. The frames are those of tests/mutations.py; a seed always makes the same ones. Ctrl-C stops
and says how far it came.
"""

import argparse
import contextlib
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from mutations import MisreadError, fuzz
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SHOWN_EVERY = 0.5  # seconds on a terminal
LINE_EVERY = 60.0  # seconds elsewhere


class Tally:
    """What came of the frames so far."""

    def __init__(self, seed: int) -> None:
        self._seed, self._started = seed, time.monotonic()
        self.done = self.read = 0
        self._slowest = 0.0  # seconds of CPU time, making the frame included
        self._before = time.process_time()

    def add(self, readable: bool) -> None:
        now = time.process_time()
        self._slowest = max(self._slowest, now - self._before) if self.done else 0.0
        self._before = now
        self.done, self.read = self.done + 1, self.read + readable

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __str__(self) -> str:
        return (
            f"seed {self._seed}: {self.done:,} frames, {self.done - self.read:,} refused with "
            f"FrameError, {self.read:,} read as what they claim, slowest {self._slowest:.2f} s, "
            f"{self.seconds / 60:.0f} minutes"
        )


def survey(count: int, seed: int, minutes: float, save: Path) -> int:
    """Try so many frames; the exit status."""
    tally, status = Tally(seed), 0
    with contextlib.suppress(KeyboardInterrupt), shown(tally, count) as show:
        try:
            for readable in fuzz(seed, count):
                tally.add(readable)
                show()
                if tally.seconds > 60 * minutes:
                    break
        except MisreadError as misread:
            path = save / f"fuzz-{seed}-{tally.done}.bin"
            path.write_bytes(misread.data)
            traceback.print_exc()
            print(f"frame {tally.done} of seed {seed} is saved as {path}", file=sys.stderr)
            status = 1
    print(tally)
    return status


@contextlib.contextmanager
def shown(tally: Tally, count: int) -> Iterator["Display"]:
    """A bar on a terminal, a line a minute elsewhere, both on standard error."""
    if not sys.stderr.isatty():
        yield Display(tally, None)
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(TextColumn("frames"), *columns, console=Console(stderr=True))
    with bar:
        bar.add_task("frames", total=count)
        yield Display(tally, bar)


class Display:
    """Called after every frame; shows something now and then."""

    def __init__(self, tally: Tally, bar: Progress | None) -> None:
        self._tally, self._bar = tally, bar
        self._last = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last < (LINE_EVERY if self._bar is None else SHOWN_EVERY):
            return
        self._last = now
        if self._bar is None:
            print(self._tally, file=sys.stderr, flush=True)
        else:
            self._bar.update(self._bar.task_ids[0], completed=self._tally.done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=10_000_000, help="how many (default: 10^7)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--save", type=Path, default=Path(), help="folder for an offending frame")
    given = parser.parse_args()
    return survey(given.frames, given.seed, given.minutes, given.save)


if __name__ == "__main__":
    sys.exit(main())
