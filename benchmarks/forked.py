"""Processes that fork from one server in which torch and thinwire are loaded: milliseconds each.

The server ends with the process that uses it, and every process of it ends with the server, at the
latest.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SERVER = "THINWIRE_FORK_SERVER"  # set while the server starts: what it loads
PR_SET_PDEATHSIG = 1
LOADING = 600.0  # seconds, at most: kernels may have to be compiled
SPECS = ("none", "topk:0.1", "quantize:4", "cast:bf16", "scaledsign")

# Starting a process looks after all others that were started: not by two threads at a time.
_lock = threading.Lock()
Message = dict[str, Any]


class Child:
    """A forked process and the pipe to it, on which messages go as JSON.

    Args:
        context: of `server`, or another that forks.
        function: of a module, called with the other end of the pipe and the arguments.
    """

    def __init__(self, context: Any, function: Callable[..., None], *args: Any) -> None:
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=_begin, args=(function, there, *args), daemon=False)
        with _lock:
            self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # nobody may be there any more
            self.pipe.send_bytes(json.dumps(message).encode())

    def hear(self) -> Message | None:
        """The next message; None if the process has closed its end."""
        try:
            message: Message = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return message

    def signal(self, number: int) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """The exit code, negative for a signal; None if it has not ended by then."""
        multiprocessing.connection.wait([self._process.sentinel], max(0.0, seconds))
        return self.exit_code

    @property
    def exit_code(self) -> int | None:
        with _lock:
            code: int | None = self._process.exitcode
        return code

    def end(self) -> None:
        """Kill it, if it lives, and leave nothing of it behind."""
        self.signal(signal.SIGKILL)
        self.wait(10)
        with _lock, contextlib.suppress(ValueError):
            self._process.close()
        self.pipe.close()


def _begin(function: Callable[..., None], pipe: Any, *args: Any) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    function(pipe, *args)


def wait_for(context: Any) -> None:
    """Return when the server has loaded what it should, which may take a minute."""
    first = Child(context, _nothing)
    try:
        if first.wait(LOADING) != 0:
            raise RuntimeError(f"the server of processes did not come up within {LOADING:g} s")
    finally:
        first.end()


def _nothing(pipe: Any) -> None:
    pipe.close()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@functools.cache
def server(*modules: str) -> Any:
    """The context of a server that has these modules loaded, besides torch and thinwire."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked"])
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    with _environment({"PYTHONPATH": path, SERVER: " ".join(modules) or "torch"}):
        multiprocessing.forkserver.ensure_running()
    atexit.register(stop)
    return context


def stop() -> None:
    """End the server now: it would end by itself some time after this process."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _environment(given: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _load(modules: Sequence[str]) -> None:
    """What forked processes would otherwise load, or compile, each for itself."""
    import torch

    import thinwire as tw

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # What DDP and agents import when first used: seconds, in each process anew otherwise.
    used = ("torch._dynamo", "torch.nn.parallel", "torch.distributed.launcher.api")
    for name in (*used, "thinwire.parallel", *modules):
        importlib.import_module(name)
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for spec in SPECS:
        compressor: Any = tw.parse(spec)
        payload = tw.unpack(tw.pack(compressor.encode(x, residual=torch.zeros(3000))))
        compressor.accumulate([payload, payload], torch.zeros(3000))
        compressor.decode(payload)
    gc.collect()
    gc.freeze()


_loading = os.environ.pop(SERVER, None)
if _loading:
    try:
        _load(_loading.split())
    except ImportError as error:  # the server would pass over it, and all processes start cold
        raise RuntimeError("the server of processes cannot load what it should") from error
