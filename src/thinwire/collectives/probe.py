"""How long this group's connections take: for a meeting, and for bytes."""

import time
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.collectives.exchange import Exchange
from thinwire.collectives.options import Options
from thinwire.collectives.transport import Transport

SHORTER = 4  # times as long as the short sums are the long ones


class ProbeSize(NamedTuple):
    """How thoroughly a link is timed.

    Args:
        num_bytes: of the longer tensor that is summed.
        tries: sums of each length, of which the shortest counts.
    """

    num_bytes: int
    tries: int

    @property
    def meetings(self) -> int:
        """That are timed."""
        return 2 * self.tries - 1


class LinkProbe(Exchange):
    """Times some meetings and sums on the connections that exchanges use.

    All ranks have come when the clock starts, so a rank that is late does not look like a slow
    link. The seconds of a real exchange hold the waiting for it, which on a fast link is most of
    them.

    Sums of two lengths tell what waiting takes, for distance or for a core, and what bytes take: it
    is the same waiting in both.

    Args:
        size: how thoroughly.
        device: where the group's tensors are.

    Attributes:
        meeting, moving, moving_part: seconds of the shortest meeting, long sum and short sum, when
            it has ended; 0 in a group of one. Whatever else the machine does only makes them
            longer.
    """

    def __init__(self, size: ProbeSize, device: torch.device, options: Options) -> None:
        nothing = torch.empty(0, device=device)
        super().__init__("probe", [nothing], options, what="probe of the link")
        self.probe_size = size
        self.meeting = self.moving = self.moving_part = 0.0
        self.details = (("bytes", str(size.num_bytes)), ("tries", str(size.tries)))

    def prepare(self) -> None:
        self._values = torch.zeros(self.probe_size.num_bytes // 4, device=self.device)

    def exchange(self, transport: Transport) -> None:
        transport.meet()
        times = [time.perf_counter()]
        for _ in range(self.probe_size.meetings):
            transport.meet()
            times.append(time.perf_counter())
        self.meeting = min(b - a for a, b in pairwise(times))
        part = self._values[: self._values.numel() // SHORTER]
        # Not timed: what a link lets pass at once after a pause is used up.
        transport.reduce(part, dist.ReduceOp.SUM)
        times = [time.perf_counter()]
        for _ in range(self.probe_size.tries):
            for values in (self._values, part):
                transport.reduce(values, dist.ReduceOp.SUM)
                times.append(time.perf_counter())
        took = [b - a for a, b in pairwise(times)]
        self.moving, self.moving_part = min(took[::2]), min(took[1::2])

    def finish(self) -> None:
        del self._values
