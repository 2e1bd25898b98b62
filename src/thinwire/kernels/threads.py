"""Own threads for CPU work: a tensor is cut into contiguous ranges, one a thread.

The pool follows ``torch.get_num_threads()``. Kernels are written so that the cut never shows in
the result. The calling thread takes the last range itself.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")
Range = tuple[int, int]

# Handing a range to another thread costs about 30 microseconds, as much as 60 k elements take.
LEAST = 1 << 16
KEPT = 8 << 20  # bytes of scratch memory that a thread keeps, at most

_lock = threading.Lock()
_here = threading.local()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def ranges(n: int, quantum: int = 1, least: int = LEAST) -> list[Range]:
    """Cut [0, n) into at most one range a thread, each starting at a multiple of `quantum`."""
    if n < 2 * least:
        return [(0, n)]
    threads = min(torch.get_num_threads(), n // least)
    step = -(-n // threads)
    step = -(-step // quantum) * quantum
    return [(lo, min(n, lo + step)) for lo in range(0, n, step)]


def run(work: Callable[[int, int], T], parts: list[Range]) -> list[T]:
    """Call `work(lo, hi)` for every range, in parallel; results in the order of the ranges.

    Within such work the ranges of a further call run one after the other: a thread of the pool that
    waited for the pool could wait for ever.
    """
    if len(parts) == 1 or getattr(_here, "inside", False):
        return [work(*part) for part in parts]
    pool = _pool(len(parts) - 1)
    try:
        futures = [pool.submit(_inside, work, lo, hi) for lo, hi in parts[:-1]]
    except RuntimeError:  # no new work for pools while the interpreter ends
        return [work(*part) for part in parts]
    try:
        last = work(*parts[-1])
    finally:
        done = [future.exception() for future in futures]
    for error in done:
        if error is not None:
            raise error
    return [*(future.result() for future in futures), last]


def _inside(work: Callable[[int, int], T], lo: int, hi: int) -> T:
    _here.inside = True
    try:
        return work(lo, hi)
    finally:
        _here.inside = False


def _pool(workers: int) -> ThreadPoolExecutor:
    # Keyed by process: a pool's threads do not survive a fork.
    key = (os.getpid(), workers)
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(workers, thread_name_prefix="thinwire")
        return _pools[key]


def scratch(num_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Memory to work in until this thread asks again.

    It is kept: the system hands out fresh memory at a page fault a page, which can take longer than
    to fill it. More than `KEPT` bytes are not.
    """
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = getattr(_here, "scratch", None)
    if found is None or found.size < num_bytes:
        found = np.empty(num_bytes, np.uint8)
        if num_bytes <= KEPT:
            _here.scratch = found
    return found[:num_bytes]
