"""The mark that all processes of a lab carry in their environment, and what it says.

`THINWIRE_LAB=<process>:<start>:<process namespace>:<network namespace>` names the owner, which
made the lab, so that processes whose owner is gone can be told from those of a lab in use.
Numbers of processes are used again, but not with the same start; and they mean something only in
their own namespace: seen from outside a container, its owners are other processes or none.
"""

import os
from dataclasses import astuple, dataclass

VARIABLE = "THINWIRE_LAB"


@dataclass(frozen=True)
class Mark:
    """Whose lab a process belongs to."""

    owner: int
    start: int  # of the owner, in the kernel's ticks since boot
    processes: int  # the namespace in which `owner` is a process
    network: int  # the owner's network: nothing in it is in the lab

    def __str__(self) -> str:
        return ":".join(map(str, astuple(self)))

    def owner_is_gone(self) -> bool:
        """Whether it is certain that the owner has ended."""
        if self.processes != _namespace("self", "pid"):
            return False
        try:
            os.kill(self.owner, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # somebody else's, but there
        try:
            start, runs = _start_and_whether_it_runs(self.owner)
        except OSError:
            return False
        return start != self.start or not runs


def own_mark() -> Mark:
    """The mark for what this process starts."""
    start, _ = _start_and_whether_it_runs(os.getpid())
    return Mark(os.getpid(), start, _namespace("self", "pid"), _namespace("self", "net"))


def mark_of(pid: int) -> Mark | None:
    """The mark a process was started with, or None: it has none, is gone or may not be looked at.

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
    mark = Mark(*map(int, words))
    return None if network in (mark.network, here) else mark


def _namespace(pid: int | str, kind: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino


def _start_and_whether_it_runs(pid: int) -> tuple[int, bool]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in parentheses, may hold anything: what follows the last one is in columns.
        words = file.read().rpartition(b")")[2].split()
    state, threads, start = words[0], int(words[17]), int(words[19])
    # A zombie has ended and waits to be noticed, unless only its first thread has.
    return start, state not in (b"Z", b"X") or threads > 1
