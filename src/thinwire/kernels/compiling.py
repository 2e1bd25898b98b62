"""Compiling kernels before they are needed, once per machine.

A kernel is compiled by calling it. So whoever uses kernels can do once, on made-up tensors, what it
will do later (a `KernelUse`): before backward passes begin, before time limits run, before anything
is measured. Compiled code goes to the cache directory, with a mark for each use that is complete.
Processes that need the same at the same time share the work: what one is compiling, the others
leave to it, and load it afterwards.
"""

import contextlib
import functools
import hashlib
import logging
import multiprocessing
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import IO

from thinwire.kernels import cache

log = logging.getLogger("thinwire")
PATIENCE = 300.0  # seconds to wait for what others compile; then each does it for itself
PAUSE = 0.05  # seconds between two looks whether they have ended


class KernelUse(ABC):
    """Something that runs kernels; equal uses run the same ones."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For messages, and for the mark in the cache directory: each use has one of its own."""

    @abstractmethod
    def rehearse(self) -> None:
        """Run all kernels that it may ever run, on made-up tensors."""


_rehearsed: set[KernelUse] = set()  # in this process


def compile_kernels(
    uses: Iterable[KernelUse],
    announcement: contextlib.AbstractContextManager[object] | None = None,
) -> None:
    """Have everything compiled, or loaded, that these uses need.

    Args:
        announcement: entered if something must be compiled, for as long as that takes.
    """
    due = [use for use in dict.fromkeys(uses) if use not in _rehearsed]
    if not due:
        return
    if all(map(is_compiled, due)):
        announcement = None
    with announcement or contextlib.nullcontext():
        _rehearse(due)


def compile_in_processes(uses: Iterable[KernelUse], processes: int) -> Iterator[str]:
    """The same in several new processes at once; yields the name of each use that is compiled.

    They are spawned: only for programs whose main module may be imported.
    """
    due = [use for use in dict.fromkeys(uses) if not is_compiled(use)]
    if not due:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(due)), context, _begin_worker) as pool:
        futures = {pool.submit(_rehearse, [use]): use.name for use in due}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def is_compiled(use: KernelUse) -> bool:
    """Whether all its kernels are in the cache directory."""
    return (cache.directory() / _mark(use)).exists()


def _rehearse(uses: Sequence[KernelUse]) -> None:
    pending, end = list(uses), time.monotonic() + PATIENCE
    while pending:
        before = len(pending)
        for use in list(pending):
            with _claim(use, late=time.monotonic() > end) as claimed:
                if claimed:
                    use.rehearse()
                    _rehearsed.add(use)
                    pending.remove(use)
        if len(pending) == before:
            time.sleep(PAUSE)


@contextlib.contextmanager
def _claim(use: KernelUse, late: bool) -> Iterator[bool]:
    """Whether to rehearse a use now; not while another process compiles it, unless it is late."""
    if is_compiled(use):
        yield True
        return
    with (cache.directory() / f"{_mark(use)}.lock").open("a") as file:
        if not _locked(file) and not late:
            yield False
            return
        if not is_compiled(use):
            # A warning, or nobody would see why a program stands still.
            log.warning("compiling kernels for %s, once per machine", use)
        yield True
        with contextlib.suppress(OSError):  # a full disk: the next process compiles again
            (cache.directory() / _mark(use)).write_text(f"{use.name}\n", encoding="utf-8")


def _locked(file: IO[str]) -> bool:
    """Lock a file for this process, until it is closed; whether nobody else has it."""
    try:
        import fcntl
    except ImportError:  # Windows: each process compiles for itself
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _mark(use: KernelUse) -> str:
    return f"compiled-{hashlib.sha256(f'{use.name} {_target()}'.encode()).hexdigest()[:16]}"


@functools.cache
def _target() -> str:
    """What Numba keeps compiled code apart by, besides the sources."""
    import llvmlite.binding
    import numba

    features = llvmlite.binding.get_host_cpu_features().flatten()
    name = llvmlite.binding.get_host_cpu_name()
    own = (numba.config.CPU_NAME, numba.config.CPU_FEATURES)
    return f"{numba.__version__} {name} {features} {own} {cache.SOURCES}"


def _begin_worker() -> None:
    """The parent tells what is done; without it a worker would wait for work for ever."""
    log.setLevel(logging.ERROR)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
