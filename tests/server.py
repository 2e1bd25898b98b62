"""The process from which all ranks of tests fork, with torch and the kernels loaded.

Processes that share the tests (pytest-xdist) share it, too: it takes ten seconds to start. The one
that starts them and it has no use for torch itself, so nothing here imports it.
"""

import atexit
import functools
import multiprocessing
import multiprocessing.forkserver
import os
from pathlib import Path
from typing import Any

import pytest

ZYGOTE = "THINWIRE_TEST_ZYGOTE"  # set while the server starts
QUIET = "THINWIRE_TEST_QUIET"  # set besides, if its output is the terminal of others


@functools.cache
def server() -> Any:
    """The process from which all others fork; it cannot see sys.path, only the environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks"])
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv(ZYGOTE, "1")
        # Children inherit the environment, which THINWIRE_MAX_BYTES is part of.
        patch.delenv("THINWIRE_MAX_BYTES", raising=False)
        multiprocessing.forkserver.ensure_running()
    # It would end by itself, some time after this process: no process may be left behind.
    atexit.register(multiprocessing.forkserver._forkserver._stop)
    return context


def address() -> str:
    """Where processes that this one starts can join its server; nowhere if empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(QUIET, "1")
        server()
    if hasattr(multiprocessing.forkserver._forkserver, "_forkserver_authkey"):
        return ""  # from Python 3.14 on it forks for its own process only
    return multiprocessing.forkserver._forkserver._forkserver_address


class JoinedServer(multiprocessing.forkserver.ForkServer):
    """The server of another process, for this one to fork from."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # nobody asks it to stop

    def ensure_running(self) -> None:
        """It runs as long as the process that started this one."""


def join(address: str) -> None:
    """Let all processes fork from the server of another process."""
    joined = JoinedServer(address)
    for name in ("ensure_running", "connect_to_new_process"):
        setattr(multiprocessing.forkserver, name, getattr(joined, name))
    multiprocessing.forkserver._forkserver = joined
