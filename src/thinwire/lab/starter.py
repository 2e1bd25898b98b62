"""Starting the programs of a lab, and ending them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

Popen = subprocess.Popen[bytes]
GRACE_SECONDS = 3.0


class Starter:
    """The thread that starts all programs of a lab, and the list of them.

    The kernel ends a program when the *thread* that started it ends, so this must be one that lasts
    as long as the lab, not the caller's.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thinwire-lab")
        self._started: list[Popen] = []

    def start(self, opening: Callable[[], Popen]) -> Popen:
        return self._thread.submit(self._start, opening).result()

    def _start(self, opening: Callable[[], Popen]) -> Popen:
        self._started = [process for process in self._started if process.returncode is None]
        # Noted here and not by the caller, whom Ctrl-C may call away in between.
        self._started.append(opening())
        return self._started[-1]

    def close(self) -> None:
        try:
            self._thread.submit(lambda: None).result()  # the last start, if one is under way
            end(self._started)
        finally:
            self._thread.shutdown()


def end(processes: Iterable[Popen], grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask all to terminate, then kill what is left of them and of what they started."""
    running = [process for process in processes if process.returncode is None]
    try:
        for process in running:
            os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while not all(map(has_ended, running)) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        for process in running:
            reap(process)


def has_ended(process: Popen) -> bool:
    """Whether a program has ended, without waiting for it: until then its number stays its own."""
    if process.returncode is not None:
        return True
    try:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, how) is not None
    except ChildProcessError:
        return True


def reap(process: Popen) -> int:
    """Kill a program with all that it started in its session, if need be, and get its exit code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
