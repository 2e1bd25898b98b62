"""The memory that a piece of work needs at its peak, as the kernel of the system counts it.

Linux keeps the largest resident size of a process (VmHWM) and sets it back when 5 is written to
/proc/self/clear_refs. That sees every allocation alike: torch's, NumPy's, Numba's, zstandard's.

The C library keeps freed memory, which would hide what is allocated out of it, or show what nobody
uses any more. `ENVIRONMENT` has it take blocks from 128 kB on from the system and give them back
one by one, so that what is counted is what is alive. It must be set when a process starts, and it
would slow down what the benchmark times: so encoding is measured in a process of its own, which
reads its task from standard input and prints a number per line: `python -m thinwire.bench.memory`.
What the counters cannot show: the kernel updates them in batches, some hundred kB per thread,
so tensors under `LEAST_BYTES` are not measured.
"""

import contextlib
import ctypes
import functools
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.bench.tensors import TensorSource

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


def extra_bytes(
    sources: "Sequence[TensorSource]", compressors: Sequence[str], threads: int
) -> Generator[int, None, None]:
    """Bytes that `encode` with a residual adds at its peak: all compressors on the first tensor,
    then on the next.

    Ends early if the other process does, for want of memory perhaps.
    """
    task = json.dumps([sources, compressors, threads])
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire.bench.memory"],
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for us alone: we end the other process
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(task + "\n")
                process.stdin.close()
            yield from map(int, process.stdout)
        finally:
            process.kill()


def main() -> None:
    """The other process."""
    import torch

    from thinwire.bench.measure import Measurement
    from thinwire.bench.tensors import TensorSource
    from thinwire.compressors import local_of

    sources, compressors, threads = json.loads(sys.stdin.readline())
    torch.set_num_threads(threads)
    for source in sources:
        x = TensorSource(*source).make()
        for compressor in map(local_of, compressors):
            measurement = Measurement(compressor, x)
            measurement.warm_up()
            print(peak_extra_bytes(functools.partial(measurement.encode, 0)), flush=True)


if __name__ == "__main__":
    main()
