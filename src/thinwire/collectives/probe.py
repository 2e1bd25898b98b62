"""How long this group's connections take: for a meeting, and for bytes."""

import time
from itertools import pairwise

import torch
import torch.distributed as dist

from thinwire.collectives.exchange import Exchange
from thinwire.collectives.options import Options
from thinwire.collectives.transport import Transport

MEETINGS, SUMS = 5, 3  # that are timed


class LinkProbe(Exchange):
    """Times some meetings and sums on the connections that exchanges use.

    All ranks have come when the clock starts, so a rank that is late does not look like a slow
    link. The seconds of a real exchange hold the waiting for it, which on a fast link is most of
    them.

    Args:
        num_bytes: of the tensor that is summed.
        device: where the group's tensors are.

    Attributes:
        meeting, moving: seconds of the shortest meeting and sum, when it has ended; 0 in a group of
            one. Whatever else the machine does only makes them longer.
    """

    def __init__(self, num_bytes: int, device: torch.device, options: Options) -> None:
        nothing = torch.empty(0, device=device)
        super().__init__("probe", [nothing], options, what="probe of the link")
        self.num_bytes = num_bytes
        self.meeting = self.moving = 0.0
        self.details = (("bytes", str(num_bytes)),)

    def prepare(self) -> None:
        self._values = torch.zeros(self.num_bytes // 4, device=self.device)

    def exchange(self, transport: Transport) -> None:
        transport.meet()
        times = [time.perf_counter()]
        for _ in range(MEETINGS):
            transport.meet()
            times.append(time.perf_counter())
        self.meeting = min(b - a for a, b in pairwise(times))
        times = times[-1:]
        for _ in range(SUMS):
            transport.reduce(self._values, dist.ReduceOp.SUM)
            times.append(time.perf_counter())
        self.moving = min(b - a for a, b in pairwise(times))

    def finish(self) -> None:
        del self._values
