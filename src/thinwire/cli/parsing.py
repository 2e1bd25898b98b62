"""What all commands share: a parser that reports a mistake in one line, and a patient Ctrl-C."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TypeAlias

from thinwire.formatting import one_line

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended, by the custom of shells


class _Help(argparse.RawDescriptionHelpFormatter):
    """Texts keep their lines; the longest of the commands has its help beside it."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += 2  # argparse forgets that commands are indented


class Parser(argparse.ArgumentParser):
    """An argparse whose texts keep their lines and whose errors are one line long."""

    def __init__(self, **options: object) -> None:
        options.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


# What `add_subparsers` returns; a string, because the class is generic for type checkers only.
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_distance(group: argparse._ArgumentGroup) -> None:
    """The options of hosts that are far from each other."""
    group.add_argument(
        "--delay",
        metavar="TIME",
        help="how long what a host sends is on its way, one way, so that a round trip between two "
        "hosts takes twice as long: 15ms; default: none",
    )
    group.add_argument(
        "--jitter",
        metavar="TIME",
        help="how much longer a packet may take by chance, without overtaking others: 2ms",
    )
    group.add_argument(
        "--loss", metavar="SHARE", help="of the packets that a host sends: 0.001 or 0.1%%"
    )


def add_folder(group: argparse._ActionsContainer, what: str) -> None:
    """Where a command writes its report."""
    group.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=Path("report"),
        help=f"for {what}; default: report",
    )


def complain(command: str, error: Exception) -> int:
    """Report a mistake of the user's, on one line; returns the exit code."""
    print(f"thinwire {command}: error: {one_line(error)}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done, so that a result that took minutes is not lost."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed.is_set():
        raise KeyboardInterrupt
