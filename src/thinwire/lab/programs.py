"""Programs on hosts: how they are started, followed and ended, and what comes out of a run.

`Cluster.run` is the one way in which thinwire runs a program on several hosts, of a lab or of this
machine's loopback. How it goes wrong:

ThinwireError
└── LabError              a lab cannot be made here, or has broken down
    ├── HostFailedError   a program on a host ended with an exit code other than 0
    └── RunTimeoutError   programs did not end in time (also a TimeoutError)
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from thinwire.errors import ThinwireError
from thinwire.lab.cleaning import VARIABLE, this_process

Popen = subprocess.Popen[bytes]
File = int | IO[Any] | None  # as subprocess takes them
Word = str | os.PathLike[str]
OnLine = Callable[[int, str, str], object]  # host, "stdout" or "stderr", the line without its end

_ENTER = Path(__file__).with_name("enter.py")
_GRACE_SECONDS = 3.0  # between asking a program to terminate and killing it
_LAST_LINES = 15
_LOOK_SECONDS = 0.05  # where the system cannot tell us that a process has ended, we look so often


# What comes out


@dataclass(frozen=True)
class Result:
    """What the program of one host left."""

    host: int
    exit_code: int  # as of subprocess: negative is the number of the signal that ended it
    stdout: str
    stderr: str

    @property
    def ending(self) -> str:
        """How the program has ended."""
        code = self.exit_code
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        return f"host {self.host} {how if code else 'ended well'}"

    def last_lines(self, number: int) -> str:
        lines = (self.stderr.strip() or self.stdout.strip() or "(no output)").splitlines()
        return "\n".join(lines[-number:])


class LabError(ThinwireError):
    """A lab cannot be made here, or has broken down; the message says why."""


Ended = Callable[[], LabError]


class HostFailedError(LabError):
    """A program ended with an exit code other than 0, and the others were ended for it.

    `host` is the first that did; `results` are those of all hosts, as far as they came. A rank that
    loses its peer fails too, and sometimes is the quicker: all that failed by themselves are shown.
    """

    def __init__(self, host: int, results: list[Result]) -> None:
        self.host, self.exit_code, self.results = host, results[host].exit_code, results
        ours = (-signal.SIGTERM, -signal.SIGKILL)
        also = [r for r in results if r.host != host and r.exit_code not in (0, *ours)]
        told = [f"{r.ending}:\n{r.last_lines(_LAST_LINES)}" for r in (results[host], *also)]
        super().__init__("\n".join(told))


class RunTimeoutError(LabError, TimeoutError):
    """Programs did not end in time and were ended: those of the hosts `late`."""

    def __init__(self, seconds: float, late: list[int], results: list[Result]) -> None:
        self.late, self.results = late, results
        told = [f"  host {host}: {results[host].last_lines(1)}" for host in late]
        super().__init__("\n".join([f"not done after {seconds:g} s, last words:", *told]))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Starting and ending


class Starter:
    """The thread that starts all programs of a cluster, and the list of them.

    The kernel ends a program when the *thread* that started it ends, so this must be one that lasts
    as long as the cluster, not the caller's.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thinwire-lab")
        self._started: list[Popen] = []

    def start(self, command: Sequence[str], **options: Any) -> Popen:
        """Start a program; the options are those of subprocess.Popen."""
        return self._thread.submit(self._start, command, options).result()

    def _start(self, command: Sequence[str], options: dict[str, Any]) -> Popen:
        self._started = [process for process in self._started if process.returncode is None]
        # Noted here and not by the caller, whom Ctrl-C may call away in between.
        self._started.append(subprocess.Popen(command, **options))
        return self._started[-1]

    def close(self) -> None:
        """End all that were started."""
        try:
            self._thread.submit(lambda: None).result()  # the last start, if one is under way
            end(self._started)
        finally:
            self._thread.shutdown()


def end(processes: Iterable[Popen]) -> None:
    """Ask all to terminate, then kill what is left of them and of what they started."""
    running = [process for process in processes if process.returncode is None]
    try:
        for process in running:
            os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        while not all(map(has_ended, running)) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        for process in running:
            reap(process)


def has_ended(process: Popen) -> bool:
    """Whether a program has ended, without waiting for it: until then its number stays its own."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):  # macOS
        return process.poll() is not None
    try:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, how) is not None
    except ChildProcessError:
        return True


def reap(process: Popen) -> int:
    """Kill a program with all that it started in its session, if need be, and get its exit code."""
    if process.returncode is None or not hasattr(os, "waitid"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


# Hosts


@dataclass(frozen=True)
class Host:
    """A place where programs run: `address` on `interface`, `lo`, and in a lab nothing else."""

    number: int
    rack: int
    address: str
    interface: str
    # The process that holds the host's namespace, and its open file; None: this process's own.
    _namespace: tuple[int, int] | None = field(repr=False)
    _starter: Starter = field(repr=False)

    def start(
        self,
        argv: Sequence[Word],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Word | None = None,
        stdin: File = subprocess.DEVNULL,
        stdout: File = None,
        stderr: File = None,
    ) -> Popen:
        """Start a program on this host. It ends with the lab at the latest.

        Args:
            argv: the program and its arguments.
            env: variables on top of this process's own and, in a lab, of GLOO_SOCKET_IFNAME and
                THINWIRE_RACK.
            cwd: the directory to start in; this process's own if None.
            stdin, stdout, stderr: as subprocess.Popen takes them.
        """
        program, *arguments = [os.fspath(word) for word in argv]
        whole = {**os.environ, **(env or {})}
        if self._namespace is not None:
            place = {"GLOO_SOCKET_IFNAME": self.interface, "THINWIRE_RACK": str(self.rack)}
            whole = {**os.environ, **place, **(env or {}), VARIABLE: str(this_process())}
        here = cwd is None or os.sep not in program
        if here and shutil.which(program, path=whole.get("PATH")) is None:
            raise FileNotFoundError(f"host {self.number}: no program {program!r} to start")
        command = [program, *arguments]
        if sys.platform == "linux":  # elsewhere nothing can kill it with us, nor are there labs
            keys = [str(number) for number in (os.getpid(), *(self._namespace or (0, 0)))]
            command = [sys.executable, "-I", "-S", str(_ENTER), *keys, *command]
        return self._starter.start(
            command,
            env=whole,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            # Out of the terminal's reach: on Ctrl-C it is we who end it.
            start_new_session=True,
        )


class Cluster(ABC):
    """Hosts on which programs are run: `Lab` and `Loopback`. Open while its block lasts."""

    # Processes without which a lab's hosts have no network, and what to raise when one has ended.
    _needed: Mapping[int, Ended] = {}
    _closing: ExitStack | None = None  # None: not open

    @abstractmethod
    def _open(self, closing: ExitStack) -> list[Host]:
        """Make the hosts; what must be undone at the end of the block goes to `closing`."""

    def __enter__(self) -> Self:
        if self._closing is not None:
            raise LabError(f"this {type(self).__name__} is open already")
        with ExitStack() as closing:
            self._hosts = self._open(closing)
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._closing is not None
        closing, self._closing = self._closing, None
        closing.close()

    @property
    def hosts(self) -> Sequence[Host]:
        """In the order of their ranks."""
        if self._closing is None:
            name = type(self).__name__
            raise LabError(f"this {name} is not open: with {name}(...) as {name.lower()}: ...")
        return self._hosts

    @abstractmethod
    def _variables(self) -> list[dict[str, str]]:
        """What torchrun would set, for each host; new for each run."""

    def run(
        self,
        argv: Sequence[Word],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Word | None = None,
        timeout: float | None = None,
        on_line: OnLine | None = None,
    ) -> list[Result]:
        """Run one program on every host, as torchrun would.

        Each gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
        in a lab GLOO_SOCKET_IFNAME and THINWIRE_RACK. None is left when this returns or raises,
        also not after Ctrl-C.

        Args:
            argv: the program and its arguments.
            env: variables on top of this process's own and of those above.
            cwd: the directory to start in.
            timeout: seconds after which all are ended.
            on_line: called with the host's number, "stdout" or "stderr", and each line as it comes.

        Raises:
            HostFailedError: a program ended with an exit code other than 0; the rest were ended.
            RunTimeoutError: the timeout has passed.
        """
        processes: list[Popen] = []
        try:
            for host, variables in zip(self.hosts, self._variables(), strict=True):
                processes.append(
                    host.start(
                        argv,
                        env={**variables, **(env or {})},
                        cwd=cwd,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
            run = Run(processes, self._needed, on_line)
        except BaseException:
            end(processes)
            raise
        return run.finish(timeout)


# Following


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

    def __init__(
        self, processes: list[Popen], needed: Mapping[int, Ended], on_line: OnLine | None
    ) -> None:
        self._processes = processes
        self._codes: dict[int, int] = {}  # in the order in which they ended
        self._streams = [_streams(host, process, on_line) for host, process in enumerate(processes)]
        self._selector = selectors.DefaultSelector()
        self._watches: list[int] = []
        self._told_of_ends = hasattr(os, "pidfd_open")  # by Linux
        if self._told_of_ends:
            for pid, ended in needed.items():
                try:
                    self._watch(os.pidfd_open(pid), ended)
                except ProcessLookupError:
                    raise ended() from None
            for host, process in enumerate(processes):
                self._watch(os.pidfd_open(process.pid), host)
        for stream in self._all_streams():
            self._selector.register(stream.file, selectors.EVENT_READ, stream)

    def _watch(self, process: int, what: "int | Ended") -> None:
        self._watches.append(process)
        self._selector.register(process, selectors.EVENT_READ, what)

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
            turn = 3600.0 if self._told_of_ends else _LOOK_SECONDS
            for key, _ in self._selector.select(turn if left is None else min(left, turn)):
                self._attend(key.fd, key.data)
            if not self._told_of_ends:
                for host, process in enumerate(self._processes):
                    if host not in self._codes and has_ended(process):
                        self._codes[host] = reap(process)

    def _attend(self, file: int, what: "int | Ended | _Stream") -> None:
        if isinstance(what, _Stream):
            with contextlib.suppress(BlockingIOError):  # woken for nothing
                if not what.read():
                    self._selector.unregister(file)
        elif callable(what):
            raise what()
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
