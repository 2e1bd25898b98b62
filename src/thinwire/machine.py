"""Where a run took place: the machine, the versions, the commit."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class Machine(NamedTuple):
    cpu: str
    cores: int  # that this process may use
    memory_bytes: int | None
    system: str


def machine() -> Machine:
    return Machine(
        _cpu(), _cores(), _memory("MemTotal"), f"{platform.system()} {platform.release()}"
    )


def versions() -> dict[str, str | None]:
    """Of the packages that decide the speed; `commit` is thinwire's, in a checkout of it."""
    names = ("thinwire", "torch", "numba", "numpy")
    found: dict[str, str | None] = {name: _version(name) for name in names}
    return {**found, "python": platform.python_version(), "commit": _commit()}


def busy() -> str | None:
    """A sentence on work that disturbs ours, if there seems to be any."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < 0.5 * _cores():
        return None
    return f"the load was {load:.1f} when this began; work beside ours makes speeds unreliable"


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


def _commit() -> str | None:
    here = Path(__file__).resolve()
    # An environment inside somebody else's repository must not lend us its commit.
    commands = (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty"])
    text = None
    for command in commands:
        try:
            done = subprocess.run(
                ["git", *command], cwd=here.parent, capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        text = done.stdout.strip()
    return text
