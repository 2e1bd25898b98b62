"""End what a lab has left behind: processes whose owner is gone.

The holder does that by itself. This is for when it could not: it was killed together with its
owner while a program had asked the kernel not to be killed with them, or it was stopped.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from thinwire.lab.mark import mark_of

_LONGEST_SECONDS = 5.0


@dataclass(frozen=True)
class Orphan:
    """A process of a lab whose owner is gone."""

    pid: int
    owner: int
    command: str
    ended: bool = True  # False: it was asked to, but is stuck in the kernel


def clean() -> list[Orphan]:
    """Kill the processes of labs whose owner is gone, and tell which they were.

    Only those of this user, or of all if this is root. A lab whose owner lives is never touched,
    nor is any process that does not carry a lab's mark or shares its network with this process or
    with the owner.
    """
    ended: dict[int, Orphan] = {}
    end = time.monotonic() + _LONGEST_SECONDS
    # More than one look, as in sweep: a process may start another between look and blow.
    while (found := _orphans()) and time.monotonic() < end:
        ended.update({orphan.pid: orphan for orphan in found if _kill(orphan.pid)})
        time.sleep(0.01)
    stuck = {orphan.pid for orphan in found}
    return [
        Orphan(orphan.pid, orphan.owner, orphan.command, orphan.pid not in stuck)
        for orphan in (ended | {orphan.pid: orphan for orphan in found}).values()
    ]


def _orphans() -> list[Orphan]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = (_orphan(pid) for pid in pids if pid != os.getpid())
    return [orphan for orphan in found if orphan is not None]


def _orphan(pid: int) -> Orphan | None:
    try:
        user = os.stat(f"/proc/{pid}").st_uid
        if os.geteuid() not in (0, user):
            return None
        mark = mark_of(pid)
        if mark is None or not mark.owner_is_gone():
            return None
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:  # it is gone
        return None
    return Orphan(pid, mark.owner, b" ".join(words).decode(errors="replace"))


def _kill(pid: int) -> bool:
    """Kill a process if it still is an orphan, by a handle that no other process can come to."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _orphan(pid) is None:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
