"""`clean`: end what a lab has left behind, should it ever leave something.

Every process of a lab carries in its environment
`THINWIRE_LAB=<process>:<start>:<process namespace>:<network namespace>`: the owner, the process
that opened the lab. So processes whose owner is gone can be told from those of a lab in use.
Numbers of processes are used again, but not with the same start; and they mean something only in
their own namespace: seen from outside a container, its owners are other processes or none.

A lab ends its processes by itself. This is for when it could not: the process that holds its
namespaces was killed together with the owner while a program had asked the kernel not to be killed
with them, or it was stopped.
"""

import os
import signal
import time
from dataclasses import astuple, dataclass
from pathlib import Path

VARIABLE = "THINWIRE_LAB"
_LONGEST_SECONDS = 5.0


@dataclass(frozen=True)
class Owner:
    """The process that opened a lab."""

    pid: int
    start: int  # in the kernel's ticks since boot
    processes: int  # the namespace in which `pid` is a process
    network: int  # its network: nothing in it is in the lab

    def __str__(self) -> str:
        return ":".join(map(str, astuple(self)))

    def is_gone(self) -> bool:
        """Whether it is certain that it has ended."""
        if self.processes != _namespace("self", "pid"):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # somebody else's, but there
        try:
            start, runs = _start_and_whether_it_runs(self.pid)
        except OSError:
            return False
        return start != self.start or not runs


def this_process() -> Owner:
    """The owner of what this process starts."""
    start, _ = _start_and_whether_it_runs(os.getpid())
    return Owner(os.getpid(), start, _namespace("self", "pid"), _namespace("self", "net"))


def owner_of(pid: int) -> Owner | None:
    """The owner of the lab that a process is in, or None: in none, gone, or not ours to look at.

    None too for a process that is in no lab, whatever its environment says.
    """
    key = f"{VARIABLE}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
        network = _namespace(pid, "net")
        here = _namespace("self", "net")
    except OSError:
        return None
    texts = [entry.removeprefix(key) for entry in entries if entry.startswith(key)]
    words = texts[0].split(b":") if len(texts) == 1 else []
    if len(words) != 4 or not all(word.isdigit() for word in words):
        return None
    owner = Owner(*map(int, words))
    return None if network in (owner.network, here) else owner


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
    nor is any process that names no owner or shares its network with this process or
    with the owner.
    """
    ended: dict[int, Orphan] = {}
    end = time.monotonic() + _LONGEST_SECONDS
    # More than one look: a process may start another between look and kill.
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
        owner = owner_of(pid)
        if owner is None or not owner.is_gone():
            return None
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:  # it is gone
        return None
    return Orphan(pid, owner.pid, b" ".join(words).decode(errors="replace"))


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


def _namespace(pid: int | str, kind: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino


def _start_and_whether_it_runs(pid: int) -> tuple[int, bool]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in parentheses, may hold anything: what follows the last one is in columns.
        words = file.read().rpartition(b")")[2].split()
    state, threads, start = words[0], int(words[17]), int(words[19])
    # A zombie has ended and waits to be noticed, unless only its first thread has.
    return start, state not in (b"Z", b"X") or threads > 1
