"""Direct sums: a tensor averaged in place, posted and waited for by the caller's own thread.

No meeting, no other thread, no copy: what the backend's own all-reduce costs. The price is that
ranks do not compare their calls, so whoever posts a direct sum must know that all others post the
same one next. What they compare, beside the sums, is a number: that of the step. Deaths and time
limits are noticed as in an exchange; a tensor whose sum was lost is undefined.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.channel import channel_of, process_group
from thinwire.collectives.connect import GivenUpError
from thinwire.collectives.handle import Handle
from thinwire.collectives.link import Transfer
from thinwire.collectives.options import Options
from thinwire.errors import MismatchError, PeerError


class DirectSums:
    """The direct sums of a group, one after the other.

    Args:
        options: the group and the time limit.
        device: of the tensors.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        group = process_group(options.group)
        self._channel = channel_of(group, device)
        self._limit = options.timeout or self._channel.members.timeout
        self._weight = 1.0 / group.size()
        self._ended = 0.0  # when the last of them did
        self._pace = float("inf")  # seconds for a byte, of the last one that was waited for

    @property
    def possible(self) -> bool:
        """Whether the group is connected, by a backend that posts sums without waiting."""
        link = self._channel.link
        return link is not None and not link.closed and link.takes_shorter

    def agree(self, step: int, doubts: bool) -> "Agreement":
        """Begin to compare the number of a step, and whether any rank has doubts."""
        return Agreement(self, step, doubts)

    def average(self, tensor: Tensor) -> "DirectHandle":
        """Begin to average a tensor over the group, in place."""
        begin = time.perf_counter()
        tensor.mul_(self._weight)
        end = time.perf_counter()
        what = f"direct sum of {tensor.numel():,} elements"
        handle = self.start(tensor, dist.ReduceOp.SUM, what)
        handle.account.seconds["encode"] = end - begin
        return handle

    def start(
        self, tensor: Tensor, op: Any, what: str, check: Callable[[], None] = lambda: None
    ) -> "DirectHandle":
        """Begin a reduction in place; `check` is called when it has ended well."""
        link = self._channel.link
        if link is None or link.closed:
            raise PeerError("the group has lost its connections")
        lane = link.beside("direct", self._limit, counts=False)
        before = (lane.bytes_sent, lane.bytes_received, lane.network_bytes)
        transfer = lane.start_all_reduce(tensor, op, self._limit)
        self._channel.begin_direct(transfer)
        handle = DirectHandle(self, what, transfer, check)
        account = handle.account
        account.collective, account.tensor_bytes = "summable", [tensor.nbytes]
        account.bytes_sent = lane.bytes_sent - before[0]
        account.bytes_received = lane.bytes_received - before[1]
        account.network_bytes = lane.network_bytes - before[2]
        return handle

    def ended(self, transfer: Transfer) -> None:
        """A transfer has ended, well or not."""
        self._channel.end_direct(transfer)

    def note_lost(self, error: BaseException) -> None:
        """Later exchanges of the group say why there can be none."""
        self._channel.note_lost(str(error) or type(error).__name__)

    def close(self, error: BaseException) -> None:
        """Close the connections: the others may wait for a sum that this rank will not take part
        in."""
        self.note_lost(error)
        if self._channel.link is not None:
            self._channel.link.close()

    def seconds_of(self, transfer: Transfer, num_bytes: int, waited: bool) -> float:
        """How long a sum was under way, without the time in which one before it was.

        Args:
            waited: somebody saw its end; otherwise it had ended at some time before, and has taken
                as long as others of its size at most.
        """
        begin, end = transfer.span
        seconds = max(0.0, end - max(begin, self._ended))
        self._ended = max(self._ended, end)
        if waited:
            self._pace = seconds / max(1, num_bytes)
        return min(seconds, self._pace * num_bytes)


class Agreement:
    """What ranks compare beside direct sums.

    Attributes:
        handle: ends with MismatchError where ranks are in different steps.
    """

    def __init__(self, sums: DirectSums, step: int, doubts: bool) -> None:
        numbers = self._numbers = torch.tensor([step, -step, int(doubts)])

        def check() -> None:
            most, least = int(numbers[0]), -int(numbers[1])
            if most != least:
                raise MismatchError(
                    f"ranks disagree in one call, step: {least} on some ranks but {most} on others"
                )

        what = f"comparison of step {step}"
        self.handle = sums.start(numbers, dist.ReduceOp.MAX, what, check)

    @property
    def doubts(self) -> bool:
        """Whether any rank has some, when the handle has ended."""
        return bool(self._numbers[2])


class DirectHandle(Handle):
    """Whoever waits for it carries it out."""

    def __init__(
        self, sums: DirectSums, what: str, transfer: Transfer, check: Callable[[], None]
    ) -> None:
        super().__init__(None, what)
        self._sums, self._check = sums, check
        self._transfer: Transfer | None = transfer

    def wait(self, timeout: float | None = None) -> None:
        """As that of any handle, without a timeout of its own: the sum has one."""
        self.wait_until_ended()
        super().wait()

    def wait_until_ended(self) -> None:
        """Ctrl-C comes out of this, and the sum goes on: it can be waited for again."""
        transfer = self._transfer
        if transfer is not None:
            error: Exception | None = None
            waited = not transfer.look()
            try:
                transfer.wait()
                self._check()
            except GivenUpError:
                error = PeerError("given up: the process group or the interpreter has ended")
            except Exception as raised:
                error = raised
            self._transfer = None
            self._sums.ended(transfer)
            if isinstance(error, PeerError):
                self._sums.note_lost(error)
                self.account.lost = True
            elif error is None:
                (num_bytes,) = self.account.tensor_bytes
                seconds = self._sums.seconds_of(transfer, num_bytes, waited)
                self.account.seconds["network"] = seconds
            self._end(error)
        super().wait_until_ended()
