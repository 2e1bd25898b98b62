"""The memory that a piece of work needs at its peak, as the kernel of the system counts it.

Linux keeps the largest resident size of a process (VmHWM) and sets it back when 5 is written to
/proc/self/clear_refs. That sees every allocation alike: torch's, NumPy's, Numba's, zstandard's.

The C library keeps freed memory, which would hide what is allocated out of it, or show what nobody
uses any more. `ENVIRONMENT` has it take blocks from 128 kB on from the system and give them back
one by one, so that what is counted is what is alive; it must be set when the process starts
(`weigh` starts one). What the counters cannot show: the kernel updates them in batches, some
hundred kilobytes a thread, so tensors under `LEAST_BYTES` are not measured.
"""

import ctypes
import gc
import platform
import sys
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
LEAST_BYTES = 4_000_000


def peak_extra_bytes(work: Callable[[], object]) -> int:
    """How far the process grows while `work` runs, over its size before.

    Run the work once on something small beforehand, so that code that is loaded at first use is not
    counted. What `work` returns is counted: it exists at the peak.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _reset()
    before = _read("VmRSS")
    result = work()
    peak = _read("VmHWM")
    del result
    return max(0, peak - before)


def why_not() -> str | None:
    """Why memory cannot be measured here, or None if it can."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return f"extra memory is measured on Linux with the GNU C library, not on {sys.platform}"
    try:
        _reset()
        _read("VmHWM")
    except (OSError, ValueError) as error:
        return f"extra memory needs {RESET}, which this system refuses ({error})"
    return None


def _reset() -> None:
    RESET.write_text("5")


def _read(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise ValueError(f"no {field} in {STATUS}")
