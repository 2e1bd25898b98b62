"""A slow network on this machine, to try distributed training over: see docs/lab.md.

`Lab` is what to use. `topology` says what it is made of; `holder` and `network` make it, in a
process of their own, of `parts` and `switches`; `host` and `enter` bring a program into it; `run`
runs one on every host; `orphans` ends what was left all the same.
"""

from thinwire.lab.host import Counters, Host
from thinwire.lab.lab import Lab, why_not
from thinwire.lab.orphans import Orphan, clean
from thinwire.lab.rate import parse_rate, read_links
from thinwire.lab.results import HostFailedError, LabError, Result, RunTimeoutError

__all__ = [
    "Counters",
    "Host",
    "HostFailedError",
    "Lab",
    "LabError",
    "Orphan",
    "Result",
    "RunTimeoutError",
    "clean",
    "parse_rate",
    "read_links",
    "why_not",
]
