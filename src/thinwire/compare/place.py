"""Where programs run: a lab, or this machine's loopback if there can be none."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Protocol

from thinwire.compare.settings import ComparisonSettings
from thinwire.lab import HostFailedError, Lab, Result
from thinwire.lab.run import OnLine

_GRACE_SECONDS = 3.0
_Line = tuple[int, str, str | None]  # host, stream, the line or None at its end


class Place(Protocol):
    """Runs one program on every host, with torchrun's variables; see `thinwire.lab.Lab.run`."""

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> list[Result]: ...


@contextlib.contextmanager
def opened(settings: ComparisonSettings, links: Sequence[str], projected: bool) -> Iterator[Place]:
    """Hosts with these links, while the block lasts."""
    if projected:
        yield Loopback(settings.hosts)
        return
    racks = {} if settings.racks == 1 else {"racks": settings.racks, "inter": settings.inter}
    with Lab(settings.hosts, list(links), **racks) as lab:  # type: ignore[arg-type]
        yield lab


class Loopback:
    """Hosts that are plain processes of this machine and talk over its loopback."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> list[Result]:
        common = {
            **os.environ,
            "WORLD_SIZE": str(self._hosts),
            "LOCAL_WORLD_SIZE": str(self._hosts),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            **(env or {}),
        }
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(self._hosts):
                processes.append(
                    subprocess.Popen(
                        list(argv),
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        errors="replace",
                        start_new_session=True,  # on Ctrl-C it is we who end them
                    )
                )
            return _follow(processes, on_line)
        finally:
            _end(processes)


def _follow(processes: list[subprocess.Popen[str]], on_line: OnLine | None) -> list[Result]:
    """Hand on their lines until all have ended, or one has failed."""
    lines: queue.SimpleQueue[_Line] = queue.SimpleQueue()
    readers = []
    for host, process in enumerate(processes):
        for name, file in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert file is not None
            reader = threading.Thread(target=_read, args=(host, name, file, lines), daemon=True)
            reader.start()
            readers.append(reader)
    texts: dict[tuple[int, str], list[str]] = {}
    failed: int | None = None
    open_streams = len(readers)
    while open_streams:
        try:
            host, name, line = lines.get(timeout=0.1)
        except queue.Empty:
            line = host = name = None  # type: ignore[assignment]
        if line is not None:
            texts.setdefault((host, name), []).append(line)
            if on_line is not None:
                on_line(host, name, line)
        elif host is not None:
            open_streams -= 1
        if failed is None:
            failed = next((h for h, p in enumerate(processes) if p.poll()), None)
            if failed is not None:
                _end(processes)  # the rest of what they said still comes
    results = [
        Result(host, process.wait(), *("\n".join(texts.get((host, name), ())) for name in _STREAMS))
        for host, process in enumerate(processes)
    ]
    if failed is not None:
        raise HostFailedError(failed, results)
    return results


_STREAMS = ("stdout", "stderr")


def _read(host: int, name: str, file: IO[str], lines: "queue.SimpleQueue[_Line]") -> None:
    for line in file:
        lines.put((host, name, line.rstrip("\n")))
    lines.put((host, name, None))


def _end(processes: list[subprocess.Popen[str]]) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and what they started
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
