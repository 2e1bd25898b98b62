"""One program on every host at once: their output as it comes, and an end to all when one fails."""

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Iterable

from thinwire.lab.results import HostFailedError, LabError, Result, RunTimeoutError
from thinwire.lab.starter import Popen, end, reap

OnLine = Callable[[int, str, str], object]  # host, "stdout" or "stderr", the line without its end

_HOLDER = -1  # stands before the hosts


class _Stream:
    """What one program writes to one of its outputs, cut into lines."""

    def __init__(self, host: int, name: str, file: int, on_line: OnLine | None) -> None:
        self.host, self.name, self.file, self.on_line = host, name, file, on_line
        self._received: list[bytes] = []
        self._rest = b""  # of a line that has not ended yet
        os.set_blocking(file, False)

    def read(self) -> bool:
        """Take what has come. False at the end; BlockingIOError if nothing has come yet."""
        chunk = os.read(self.file, 2**16)
        self._received.append(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk and self._rest:
            lines, self._rest = [self._rest], b""
        if self.on_line is not None:
            for line in lines:
                self.on_line(self.host, self.name, line.decode(errors="replace"))
        return bool(chunk)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.read():
                pass

    def text(self) -> str:
        return b"".join(self._received).decode(errors="replace")


class Run:
    """Programs under way, one a host, in the order of the hosts. `finish` leaves none running."""

    def __init__(self, processes: list[Popen], holder: int, on_line: OnLine | None) -> None:
        self._processes = processes
        self._codes: dict[int, int] = {}  # in the order in which they ended
        self._streams = [_streams(host, process, on_line) for host, process in enumerate(processes)]
        self._selector = selectors.DefaultSelector()
        self._watches = [os.pidfd_open(pid) for pid in (holder, *(p.pid for p in processes))]
        for host, watch in enumerate(self._watches, _HOLDER):
            self._selector.register(watch, selectors.EVENT_READ, host)
        for stream in self._all_streams():
            self._selector.register(stream.file, selectors.EVENT_READ, stream)

    def finish(self, timeout: float | None) -> list[Result]:
        try:
            self._follow(timeout)
            late = [host for host in range(len(self._processes)) if host not in self._codes]
            end(self._processes)
            for stream in self._all_streams():
                stream.drain()
        finally:
            end(self._processes)
            self._close()
        results = [self._result(host) for host in range(len(self._processes))]
        for host, code in self._codes.items():
            if code:
                raise HostFailedError(host, results)
        if late:
            assert timeout is not None
            raise RunTimeoutError(timeout, late, results)
        return results

    def _follow(self, timeout: float | None) -> None:
        """Read until all have ended, one has failed or time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(self._codes) < len(self._processes) and not any(self._codes.values()):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            # In turns: the kernel's own timeout ends at 24 days.
            for key, _ in self._selector.select(None if left is None else min(left, 3600.0)):
                self._attend(key.fd, key.data)

    def _attend(self, file: int, what: "int | _Stream") -> None:
        if isinstance(what, _Stream):
            with contextlib.suppress(BlockingIOError):  # woken for nothing
                if not what.read():
                    self._selector.unregister(file)
        elif what == _HOLDER:
            raise LabError("the process that holds the lab has ended: its hosts have no network")
        else:
            self._selector.unregister(file)
            self._codes[what] = reap(self._processes[what])

    def _result(self, host: int) -> Result:
        stdout, stderr = self._streams[host]
        return Result(host, self._processes[host].returncode, stdout.text(), stderr.text())

    def _all_streams(self) -> Iterable[_Stream]:
        return (stream for pair in self._streams for stream in pair)

    def _close(self) -> None:
        self._selector.close()
        for watch in self._watches:
            os.close(watch)
        for process in self._processes:
            for file in (process.stdout, process.stderr):
                assert file is not None
                file.close()


def _streams(host: int, process: Popen, on_line: OnLine | None) -> tuple[_Stream, _Stream]:
    assert process.stdout is not None
    assert process.stderr is not None
    return (
        _Stream(host, "stdout", process.stdout.fileno(), on_line),
        _Stream(host, "stderr", process.stderr.fileno(), on_line),
    )
