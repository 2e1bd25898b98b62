"""Real ranks for tests: processes on this machine that form gloo groups over loopback.

`run` uses four workers that live as long as the test session; every task forms a new process group
of two to four of them. `Ranks` starts processes for one test, which may kill or stall them. Both
fork from one server (see server.py) that has torch and the kernels loaded, so that a process costs
milliseconds.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import multiprocessing.connection
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import warm
from server import QUIET, ZYGOTE, server

PATIENCE = 120.0  # seconds for a task: a worker may be compiling kernels for the first time
GRACE = 5.0  # seconds that the others get after one has failed: they wait for it in vain
PR_SET_PDEATHSIG = 1


class Task(NamedTuple):
    """A function of a module, to be called by one rank of a group."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    size: int
    store: str  # the path of a FileStore, or host:port of a TCPStore
    among_us: bool  # all ranks of the group are tasks like this


class Outcome(NamedTuple):
    """How a rank's task ended."""

    value: Any = None
    error: str = ""  # a traceback
    dead: bool = False  # the process is gone, or did not answer


class Ranks:
    """So many processes, killed at the latest when the block ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="ranks")
        self._tasks = 0
        context = server()
        self.processes, self._pipes = [], []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._directory.cleanup()

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 0,
        first: int = 0,
        store: str = "",
    ) -> None:
        """Let `ranks` of the processes call a function as one process group.

        They are its last ranks, from `first` on; those before come from elsewhere.
        """
        self._tasks += 1
        count = ranks or self.size
        store = store or f"{self._directory.name}/{self._tasks}"
        for i, pipe in enumerate(self._pipes[:count]):
            task = Task(function, args, first + i, first + count, store, among_us=first == 0)
            # Not pipe.send: with torch loaded that hands tensors over in shared memory, which a
            # killed rank takes along. Both ends of the pipe are processes of this test run.
            pipe.send_bytes(pickle.dumps(task))

    def outcomes(
        self, ranks: int = 0, seconds: float = PATIENCE, dying: Sequence[int] = ()
    ) -> list[Outcome]:
        """How the task ended on each rank; those that do not answer in time are `dead`."""
        pipes = self._pipes[: ranks or self.size]
        awaited = [pipe for i, pipe in enumerate(pipes) if i not in dying]
        found: dict[Any, Outcome] = {}
        end = time.monotonic() + seconds
        while len(found) < len(awaited) and time.monotonic() < end:
            missing = [pipe for pipe in awaited if pipe not in found]
            for pipe in multiprocessing.connection.wait(missing, timeout=end - time.monotonic()):
                found[pipe] = _receive(pipe)
                if found[pipe].error:
                    end = min(end, time.monotonic() + GRACE)
        late = Outcome(error=f"no answer within {seconds:g} s", dead=True)
        return [found.get(pipe, late) for pipe in pipes]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 0,
        seconds: float = PATIENCE,
        store: str = "",
        dying: Sequence[int] = (),
    ) -> list[Any]:
        """What the function returned on each rank; the test fails with the tracebacks if it raised.

        Ranks that are `dying` may do as they like: nobody waits for them, and they give None.
        """
        self.start(function, *args, ranks=ranks, store=store)
        outcomes = self.outcomes(ranks, seconds, dying)
        failed = [i for i, o in enumerate(outcomes) if o.error and i not in dying]
        if failed:
            texts = [f"rank {i} of {len(outcomes)}:\n{outcomes[i].error}" for i in failed]
            pytest.fail("\n".join(texts), pytrace=False)
        return [outcome.value for outcome in outcomes]


def run(
    function: Callable[..., Any], *args: Any, ranks: int = 4, seconds: float = PATIENCE
) -> list[Any]:
    """Call a module's function on workers of the pool as one process group, rank by rank."""
    pool = _pool()
    done = False
    try:
        values = pool.run(function, *args, ranks=ranks, seconds=seconds)
        done = True
        return values
    finally:
        if not done:  # a worker may be stuck, or an answer may still come: start anew
            pool.close()
            _pool.cache_clear()


@functools.cache
def _pool() -> Ranks:
    pool = Ranks(4)
    atexit.register(pool.close)
    return pool


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def leave_for_torchrun(port: int) -> dict[str, str]:
    """Leave the group of a task; the variables with which torchrun would have started this rank."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    return {
        **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }


# Tasks and outcomes are pickled: the pipe is one that this process made to its own child, and plain
# pickle, unlike torch's in multiprocessing, copies tensors instead of sharing their memory.


def _receive(pipe: Any) -> Outcome:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return Outcome(error="the process died", dead=True)


def _serve(pipe: Any) -> None:
    """Tasks until the pipe closes; a parent that dies takes this process along."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            task = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(_carry_out(task)))


def _carry_out(task: Task) -> Outcome:
    try:
        dist.init_process_group(
            "gloo",
            store=_store(task),
            rank=task.rank,
            world_size=task.size,
            timeout=timedelta(seconds=PATIENCE),
        )
        if task.among_us:  # or one may be done and gone while another still connects
            dist.barrier()
        return Outcome(task.function(*task.args))
    except BaseException:
        return Outcome(error=traceback.format_exc())
    finally:
        torch.set_num_threads(1)
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(task: Task) -> Any:
    host, colon, port = task.store.partition(":")
    if not colon:
        return dist.FileStore(task.store, task.size)
    return dist.TCPStore(host, int(port), task.size, is_master=task.rank == 0)


def _warm() -> None:
    """Load what tests use: forked processes have it then.

    What is there by then stays: no process need look for garbage in it, which takes 0.15 s.
    """
    torch.set_num_threads(1)
    importlib.import_module("tensors")  # the tests will want it
    # What DDP, FSDP and checkpoints import when first used: seconds, in each process anew.
    for name in (
        *("torch._dynamo", "torch.distributed.fsdp"),
        *("thinwire.parallel.checkpoint", "torch.distributed.checkpoint"),
        "torch.distributed.checkpoint.state_dict",
    ):
        importlib.import_module(name)
    logging.disable(logging.WARNING)
    warm.warm()
    logging.disable(logging.NOTSET)
    gc.collect()
    gc.freeze()


def _be_quiet() -> None:
    """What ranks print would stand among the names of tests that have nothing to do with them."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)


if os.environ.pop(ZYGOTE, None):
    quiet = os.environ.pop(QUIET, None)
    try:
        _warm()
    except ImportError as error:  # the server would pass over it, and all processes start cold
        raise RuntimeError("the server of test processes cannot load what it should") from error
    if quiet:
        _be_quiet()
