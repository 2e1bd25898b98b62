"""Where a run took place: the machine, the versions, the commit."""

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

_COUNTERS = Path("/proc/stat")
_QUIET = 0.2  # of the time of all cores: who takes less does not disturb much


class Machine(NamedTuple):
    cpu: str
    cores: int  # that this process may use
    memory_bytes: int | None
    system: str


def machine() -> Machine:
    return Machine(
        _cpu(), _cores(), _memory("MemTotal"), f"{platform.system()} {platform.release()}"
    )


def starts_slowly_after_pauses() -> bool:
    """Whether TCP forgets, in a pause, how much it may send at once; Linux does unless told not to.

    Of the network namespace that this process is in.
    """
    setting = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
    try:
        return setting.read_text().strip() != "0"
    except OSError:
        return False


class Checkout(NamedTuple):
    """The checkout that this package is in.

    Args:
        commit: that is checked out.
        changed: files that decide what a run does and are not as in that commit.
    """

    commit: str
    changed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.commit}-dirty" if self.changed else self.commit


# Records and pictures that one run writes must not make the next one dirty.
_CODE = (":/src", ":/benchmarks", ":/examples", ":/pyproject.toml", ":/constraints.txt")
_NOT_CODE = ":(top,exclude)benchmarks/records"


def checkout() -> Checkout | None:
    """As it is now; None if this package is not in a checkout of thinwire.

    Ask when a run begins: by its end somebody may have committed.
    """
    # An environment inside somebody else's repository must not lend us its commit.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "-uall", "--", *_CODE, _NOT_CODE)
    if commit is None or changed is None:
        return None
    return Checkout(commit.strip(), tuple(line[3:] for line in changed.splitlines()))


def versions() -> dict[str, str | None]:
    """Of the packages that decide the speed; `commit` is thinwire's, in a checkout of it."""
    names = ("thinwire", "torch", "numba", "numpy")
    found: dict[str, str | None] = {name: _version(name) for name in names}
    here = checkout()
    commit = None if here is None else str(here)
    return {**found, "python": platform.python_version(), "commit": commit}


class Ticks(NamedTuple):
    """What the kernel has counted: time that nobody used, that the hypervisor gave to others, all.

    Nothing where there is no /proc/stat.
    """

    idle: int
    stolen: int
    total: int

    @classmethod
    def now(cls) -> "Ticks":
        try:
            first, *_ = _COUNTERS.read_text().splitlines()
        except OSError:
            return cls(0, 0, 0)
        # User, nice, system, idle, waiting for a disk, two kinds of interrupts, stolen; guests are
        # counted twice after these.
        counts = [int(word) for word in first.split()[1:9]]
        return cls(counts[3] + counts[4], counts[7], sum(counts))

    def used_since(self, before: "Ticks") -> float:
        """The share of the machine's time that somebody computed in."""
        total = self.total - before.total
        return 1 - (self.idle - before.idle) / total if total else 0.0

    def stolen_since(self, before: "Ticks") -> float:
        """The share that a hypervisor gave to others."""
        return (self.stolen - before.stolen) / max(1, self.total - before.total)


def busy() -> str | None:
    """A sentence on work that disturbs ours, if there is any; it looks for half a second.

    What the load average says is no sign: for minutes it remembers what has ended.
    """
    before = Ticks.now()
    time.sleep(0.5)
    used = Ticks.now().used_since(before)
    if used < _QUIET:
        return None
    return (
        f"other work took {100 * used:.0f} % of this machine when this began, which makes speeds "
        "unreliable"
    )


def available_bytes() -> int | None:
    """Memory that can be had without swapping, where the system says so."""
    return _memory("MemAvailable")


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory(field: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
    except OSError:
        pass
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*command: str) -> str | None:
    """What git says of the directory this file is in; None if it fails, or there is no git."""
    try:
        done = subprocess.run(
            ["git", *command],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
