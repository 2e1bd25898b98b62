"""A slow network on this machine, to try distributed training over: see docs/lab.md.

`Lab` is what to use. `topology` says what it is made of; `holder` and `network` make it, in a
process of their own; `host` and `enter` bring a program into it; `run` runs one on every host.
"""

from thinwire.lab.host import Counters, Host
from thinwire.lab.lab import Lab, why_not
from thinwire.lab.rate import parse_rate
from thinwire.lab.results import HostFailedError, LabError, Result, RunTimeoutError

__all__ = [
    "Counters",
    "Host",
    "HostFailedError",
    "Lab",
    "LabError",
    "Result",
    "RunTimeoutError",
    "parse_rate",
    "why_not",
]
