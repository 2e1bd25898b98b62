"""`thinwire compile`: compile kernels ahead of time."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from thinwire.cli.parsing import Commands, complain
from thinwire.formatting import plural

if TYPE_CHECKING:
    from thinwire.kernels.compiling import KernelUse

DTYPES = ("float32", "float64")
MOST = 4  # processes: more only compile what they share several times
_DESCRIPTION = """\
Compile the kernels for CPUs ahead of time. Training does it by itself, for what
it needs, when it begins; this is for images, and for clusters whose machines
should all begin at once.
"""
_EPILOG = """\
examples:
  thinwire compile                      everything, half a minute on two cores
  thinwire compile topk:0.01 --dtype float32
  thinwire compile "topk:0.01+ef14:storage=bf16" dgc:0.001 onebit-adam

Compiled kernels are kept in $THINWIRE_CACHE_DIR, by default in the user's cache
directory (~/.cache/thinwire), for the processor they were compiled on.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile kernels ahead of time",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "specs",
        metavar="SPEC",
        nargs="*",
        help="compressors, policies or methods, as for thinwire compare; by default all",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        help="types of tensors (half types count as float32); by default both",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.compare.settings import ComparisonSettingError
    from thinwire.kernels import cache
    from thinwire.kernels.compiling import compile_in_processes, is_compiled

    try:
        uses = _uses(arguments)
    except ComparisonSettingError as error:
        return complain("compile", error)
    due = [use for use in dict.fromkeys(uses) if not is_compiled(use)]
    begin = time.monotonic()
    with _shown(len(due)) as tick:
        for name in compile_in_processes(due, min(MOST, os.cpu_count() or 1)):
            tick(name)
    seconds = f" in {time.monotonic() - begin:.0f} s" if due else ", all were there already"
    print(f"compiled kernels for {plural(len(due), 'use')}{seconds}: {cache.directory()}")
    return 0


def _uses(arguments: argparse.Namespace) -> "list[KernelUse]":
    import torch

    from thinwire.compare.method import read, uses_of_method
    from thinwire.compressors.compiling import every_use
    from thinwire.feedback.state import STORAGES, storage_uses

    dtypes = [getattr(torch, name) for name in arguments.dtype]
    if arguments.specs:
        methods = [read(spec) for spec in arguments.specs]
        return [use for method in methods for use in uses_of_method(method, dtypes)]
    return [*every_use(dtypes), *storage_uses(STORAGES, dtypes)]


@contextlib.contextmanager
def _shown(count: int) -> Iterator[Callable[[str], None]]:
    """A tick that shows how far it has come while the block lasts."""
    if not sys.stderr.isatty():
        yield lambda name: print(f"compiled {name}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling kernels", total=count)
        yield lambda name: progress.update(task, advance=1, description=f"compiled {name}")
