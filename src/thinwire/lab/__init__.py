"""Programs on several hosts of this machine: over slow links (`Lab`) or loopback (`Loopback`).

How a lab lives and dies (docs/guides/lab.md): the process that opens one, its owner, checks what
is asked for (`topology`) and starts a second process, the holder (`holder`). That one alone makes
the namespaces, switches and links (`network`) and keeps them open; nothing else does, so they are
gone when it is. Where links have delay, jitter or loss (`distance`), it starts a third process that
carries the packets (`forwarder`) and is killed with it. The owner asks the holder things over a
pipe (`lab`) and starts programs (`programs`) through a small script that enters a host's namespace
and asks the kernel to be killed with the owner (`enter`). A run ends them all when one fails, time
is up or Ctrl-C is pressed. At the end of the block, or when the owner dies in whatever way, the
pipe closes: the holder kills what still runs in its namespaces and goes. Only if both are killed
together can a program remain that had asked not to be; `clean` (`cleaning`) finds it by a variable
in its environment. `Loopback` shares all of this but the holder and the namespaces.
"""

from thinwire.lab.cleaning import Orphan, clean
from thinwire.lab.lab import Counters, Lab, Lateness, Loopback, why_not
from thinwire.lab.programs import (
    Cluster,
    Host,
    HostFailedError,
    LabError,
    OnLine,
    Result,
    RunTimeoutError,
)
from thinwire.lab.topology import parse_link, parse_loss, parse_rate, parse_time, read_links

__all__ = [
    "Cluster",
    "Counters",
    "Host",
    "HostFailedError",
    "Lab",
    "LabError",
    "Lateness",
    "Loopback",
    "OnLine",
    "Orphan",
    "Result",
    "RunTimeoutError",
    "clean",
    "parse_link",
    "parse_loss",
    "parse_rate",
    "parse_time",
    "read_links",
    "why_not",
]
