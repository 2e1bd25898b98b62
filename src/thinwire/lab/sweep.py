"""End whatever still runs in a lab's namespaces."""

import os
import signal
import time
from pathlib import Path

_LONGEST_SECONDS = 5.0


def sweep(namespaces: set[int]) -> None:
    """Kill all processes in these network namespaces but this one, until none is left.

    More than one look is needed: a process may start another between the look and the blow. What
    does not die in seconds is stuck in the kernel, and waiting longer would not help it.
    """
    end = time.monotonic() + _LONGEST_SECONDS
    while (found := _inhabitants(namespaces)) and time.monotonic() < end:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def _inhabitants(namespaces: set[int]) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _namespace(pid) in namespaces]


def _namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:  # it is gone, it is a zombie, or it is not ours to look at
        return None
