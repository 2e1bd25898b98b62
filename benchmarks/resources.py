"""What a process holds: memory, threads, descriptors, children; as Linux tells it."""

import contextlib
import ctypes
import gc
import os
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

OWN = Path("/proc/self")


class Held(NamedTuple):
    """Threads by name, descriptors by kind, and the number of child processes."""

    threads: Counter[str]
    descriptors: Counter[str]
    children: int

    def beyond(self, before: "Held") -> dict[str, int]:
        """What there is more than before."""
        more = {
            **{f"thread {name}": n for name, n in (self.threads - before.threads).items()},
            **{f"{kind} open": n for kind, n in (self.descriptors - before.descriptors).items()},
        }
        if self.children > before.children:
            more["child process"] = self.children - before.children
        return more


def held() -> Held:
    """What this process holds now."""
    threads, descriptors, children = Counter[str](), Counter[str](), 0
    for task in (OWN / "task").iterdir():
        with contextlib.suppress(OSError):  # may have ended meanwhile
            threads[(task / "comm").read_text().strip()] += 1
            children += len((task / "children").read_text().split())
    for name in os.listdir(OWN / "fd"):
        with contextlib.suppress(OSError):  # the one of this listing
            descriptors[os.readlink(OWN / "fd" / name).partition(":[")[0]] += 1
    return Held(threads, descriptors, children)


def left_over(before: Held, seconds: float = 0.0) -> dict[str, int]:
    """What there is more than before; threads have so many seconds to end."""
    end = time.monotonic() + seconds
    while True:
        gc.collect()
        more = held().beyond(before)
        if not more or time.monotonic() >= end:
            return more
        time.sleep(0.05)


def resident_bytes() -> int:
    """The memory of this process."""
    pages = int((OWN / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class MallocInfo(ctypes.Structure):
    """The C library's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """What the allocator of the C library has given out; 0 where it does not tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = MallocInfo
    found = mallinfo()
    return int(found.uordblks) + int(found.hblkhd)
