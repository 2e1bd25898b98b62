"""How far a run has come, on stderr: a bar on a terminal, a line for each stage elsewhere."""

import contextlib
import sys
from collections.abc import Iterator

from thinwire.bench.run import Tick


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
    # Two times a second: drawing takes a core from the work that is being timed.
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
        # A line a stage: rounds and compressors would fill a log.
        what = stage.partition(", round ")[0]
        if what not in said:
            print(what, file=sys.stderr, flush=True)
            said.add(what)

    return tick
