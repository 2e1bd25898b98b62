"""What came out of a run, and how one goes wrong.

ThinwireError
└── LabError              a lab cannot be made here, or has broken down
    ├── HostFailedError   a program on a host ended with an exit code other than 0
    └── RunTimeoutError   programs did not end in time (also a TimeoutError)
"""

import signal
from dataclasses import dataclass

from thinwire.errors import ThinwireError

_LAST_LINES = 15


@dataclass(frozen=True)
class Result:
    """What the program of one host left."""

    host: int
    exit_code: int  # as of subprocess: negative is the number of the signal that ended it
    stdout: str
    stderr: str


class LabError(ThinwireError):
    """A lab cannot be made here, or has broken down; the message says why."""


class HostFailedError(LabError):
    """A program ended with an exit code other than 0, and the others were ended for it.

    `host` is the first that did; `results` are those of all hosts, as far as they came. A rank that
    loses its peer fails too, and sometimes is the quicker: all that failed by themselves are shown.
    """

    def __init__(self, host: int, results: list[Result]) -> None:
        self.host, self.exit_code, self.results = host, results[host].exit_code, results
        ours = (-signal.SIGTERM, -signal.SIGKILL)
        also = [r for r in results if r.host != host and r.exit_code not in (0, *ours)]
        super().__init__("\n".join(_told(result) for result in (results[host], *also)))


class RunTimeoutError(LabError, TimeoutError):
    """Programs did not end in time and were ended: those of the hosts `late`."""

    def __init__(self, seconds: float, late: list[int], results: list[Result]) -> None:
        self.late, self.results = late, results
        told = [f"  host {host}: {_last_lines(results[host], 1)}" for host in late]
        super().__init__("\n".join([f"not done after {seconds:g} s, last words:", *told]))


def ending(result: Result) -> str:
    """How a program that failed has ended."""
    code = result.exit_code
    how = f"was ended by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    return f"host {result.host} {how}"


def _told(result: Result) -> str:
    return f"{ending(result)}:\n{_last_lines(result, _LAST_LINES)}"


def _last_lines(result: Result, number: int) -> str:
    lines = (result.stderr.strip() or result.stdout.strip() or "(no output)").splitlines()
    return "\n".join(lines[-number:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
