"""What all commands share: a parser that reports a mistake in one line, files that can be written
in the end, and a patient Ctrl-C."""

import argparse
import contextlib
import os
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


def reserve(*paths: Path | None) -> contextlib.ExitStack:
    """Before minutes of work, see that its results can be written. Raises ValueError.

    Returns what removes the files that were made for that, when it is closed and nothing has come.
    """
    made = contextlib.ExitStack()
    for path in paths:
        if path is None or (path.exists() and not (path.is_file() or path.is_dir())):
            continue  # a pipe has a reader, whom this would tell that all has come
        new = not path.exists()
        try:
            path.open("a").close()
        except OSError as error:
            made.close()
            raise ValueError(f"cannot write {path}: {error.strerror}") from None
        if new:
            made.callback(_remove_empty, path)
    return made


def _remove_empty(path: Path) -> None:
    if path.is_file() and not path.stat().st_size:
        path.unlink()


# Of them Windows has not all.
_ENDINGS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done, so that a result that took minutes is not lost, and
    other signals that count as it (`ended_gently`)."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    pressed = threading.Event()
    taken = {each: handler for each in _ENDINGS if callable(handler := signal.getsignal(each))}
    for each in taken:
        signal.signal(each, lambda *_: pressed.set())
    try:
        yield
    finally:
        for each, handler in taken.items():
            signal.signal(each, handler)
    if pressed.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def ended_gently() -> Iterator[None]:
    """While the block lasts SIGTERM, and SIGHUP of a terminal that is closed, count as Ctrl-C.

    What is printed to a terminal that has gone would fail, so it is printed to nowhere.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminals = [each for each in (1, 2) if os.isatty(each)]

    def end(number: int, _: object) -> None:
        if number != signal.SIGTERM:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for each in terminals:
                os.dup2(nowhere, each)
            os.close(nowhere)
        raise KeyboardInterrupt

    # Not what somebody ignores, as nohup does.
    taken = [each for each in _ENDINGS if signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)
