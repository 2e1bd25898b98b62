"""Why a method failed, in a line."""

import re

from thinwire.lab import HostFailedError, Result

_ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)")
# What the others say when a rank has gone.
_CONSEQUENCE = re.compile(r"[Cc]onnection|Broken pipe|PeerError|store|ECONN|socket")
_TIMEOUT = re.compile(r"Timeout \([\d:.]+\)!")
_LONGEST = 2000


def reason(error: HostFailedError, patience: float) -> str:
    """What went wrong first, from what the ranks said on standard error."""
    if error.exit_code < 0:
        return (
            str(error).splitlines()[0].rstrip(":")
        )  # a signal: what others say is its consequence
    ours = [error.results[error.host]]
    ours += [result for result in error.results if result.host != error.host]
    said = [line for result in ours if (line := _last_error(result))]
    for line in said:
        if not _CONSEQUENCE.search(line):
            return line[:_LONGEST]
    if any(_TIMEOUT.search(result.stderr) for result in ours):
        return f"no step within {patience:g} s: it hangs"
    if said:
        return said[0][:_LONGEST]
    return str(error)[:_LONGEST]


def _last_error(result: Result) -> str | None:
    for line in reversed(result.stderr.splitlines()):
        match = _ERROR.match(line.strip())
        if match:
            return match[1].strip()
    return None
