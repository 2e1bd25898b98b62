"""Direct sums: tensors averaged in place, posted and waited for by the caller's own thread.

No meeting, no other thread, no copy: what the backend's own all-reduce costs. The price is that
ranks do not compare their calls, so whoever posts a direct sum must know that all others post the
same one next. What they may compare, beside the sums, is a number: that of the step. Deaths and
time limits are noticed as in an exchange; a tensor whose sum was lost is undefined.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.channel import channel_of, process_group
from thinwire.collectives.connect import GivenUpError
from thinwire.collectives.handle import Handle
from thinwire.collectives.link import MESSAGE, Link, Transfer, ring_sum
from thinwire.collectives.options import Options
from thinwire.errors import MismatchError, PeerError


class DirectSums:
    """The direct sums of a group, one pass after the other.

    Args:
        options: the group and the time limit.
        device: of the tensors.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        group = process_group(options.group)
        self.channel = channel_of(group, device)
        self.limit = options.timeout or self.channel.members.timeout
        self.weight = 1.0 / group.size()
        self._ended = 0.0  # when the last of them did
        self._pace = float("inf")  # seconds for a byte, of the last one that was waited for

    @property
    def possible(self) -> bool:
        """Whether the group is connected, by a backend that posts sums without waiting."""
        link = self.channel.link
        return link is not None and not link.closed and link.takes_shorter

    def begin(self) -> "DirectPass":
        """For the sums of one pass."""
        return DirectPass(self)

    def elsewhere(self, lengths: Iterable[int]) -> Handle:
        """Sums of so many bytes each that somebody else has carried out, on other connections of
        the same ranks: what they came to, as far as that is known."""
        handle, size = Handle(None, "sums of DDP's own"), self.channel.members.size
        account = handle.account
        account.collective, account.exchanges = "summable", 0
        for length in lengths:
            moved, messages = ring_sum(length, size)
            account.bytes_sent += moved
            account.bytes_received += moved
            account.network_bytes += moved + MESSAGE * messages
            account.exchanges += 1
        handle._end()
        return handle

    def lane(self) -> Link:
        """The connections that carry them."""
        link = self.channel.link
        if link is None or link.closed:
            raise PeerError("the group has lost its connections")
        return link.beside("direct", self.limit, counts=False)

    def note_lost(self, error: BaseException) -> None:
        """Later exchanges of the group say why there can be none."""
        self.channel.note_lost(str(error) or type(error).__name__)

    def close(self, error: BaseException) -> None:
        """Close the connections: the others may wait for a sum that this rank will not take part
        in."""
        self.note_lost(error)
        if self.channel.link is not None:
            self.channel.link.close()

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


class DirectPass(Handle):
    """The sums of one pass: whoever waits for it carries them out.

    It ends with MismatchError where ranks that compare are in different steps.
    """

    def __init__(self, sums: DirectSums) -> None:
        super().__init__(None, "direct sums")
        self._sums = sums
        self._lane: Link | None = None
        self._under_way: list[tuple[Transfer, int]] = []  # with the bytes of each
        self._numbers: Tensor | None = None
        self._before = (0, 0, 0)  # of the lane: bytes sent, received, on the network
        self._failure: Exception | None = None
        account = self.account
        account.collective, account.exchanges = "summable", 0
        account.seconds.update(encode=0.0, network=0.0)

    def compare(self, step: int, doubts: bool) -> None:
        """Begin to compare the number of a step, and whether any rank has doubts."""
        self._numbers = torch.tensor([step, -step, int(doubts)])
        self._post(self._numbers, dist.ReduceOp.MAX)

    @property
    def doubts(self) -> bool:
        """Whether any rank has some, as far as ranks compared in this pass; when it has ended."""
        return self._numbers is not None and bool(self._numbers[2])

    def average(self, tensor: Tensor) -> None:
        """Begin to average a tensor over the group, in place."""
        begin = time.perf_counter()
        tensor.mul_(self._sums.weight)
        self.account.seconds["encode"] += time.perf_counter() - begin
        self._post(tensor, dist.ReduceOp.SUM)
        self.account.exchanges += 1

    def _post(self, tensor: Tensor, op: Any) -> None:
        lane = self._lane
        if lane is None:
            lane = self._lane = self._sums.lane()
            self._before = (lane.bytes_sent, lane.bytes_received, lane.network_bytes)
            self._sums.channel.begin_direct(self)
        transfer = lane.start_all_reduce(tensor, op, self._sums.limit)
        self._under_way.append((transfer, tensor.nbytes))

    def leave(self) -> None:
        """Nobody waits for it any more."""
        for transfer, _ in self._under_way:
            transfer.leave()

    def wait(self, timeout: float | None = None) -> None:
        """As that of any handle, without a timeout of its own: the sums have one."""
        self.wait_until_ended()
        super().wait()

    def wait_until_ended(self) -> None:
        """Ctrl-C comes out of this, and the sums go on: they can be waited for again."""
        if not self._ended.is_set():
            while self._under_way:
                error = self._take_next()
                self._failure = self._failure or error
                del self._under_way[0]
            self._close_account()
            self._end(self._failure)
        super().wait_until_ended()

    def _take_next(self) -> Exception | None:
        """Wait for the next sum; what was wrong with it."""
        transfer, num_bytes = self._under_way[0]
        waited = not transfer.look()
        error: Exception | None = None
        try:
            (tensor,) = transfer.wait()
            if tensor is self._numbers:
                _check(tensor)
        except GivenUpError:
            error = PeerError("given up: the process group or the interpreter has ended")
        except Exception as raised:
            error = raised
        if error is None:
            self.account.seconds["network"] += self._sums.seconds_of(transfer, num_bytes, waited)
        elif isinstance(error, PeerError):
            self._sums.note_lost(error)
            self.account.lost = True
        return error

    def _close_account(self) -> None:
        lane, account = self._lane, self.account
        if lane is not None:
            self._sums.channel.end_direct(self)
            sent, received, on_network = self._before
            account.bytes_sent = lane.bytes_sent - sent
            account.bytes_received = lane.bytes_received - received
            account.network_bytes = lane.network_bytes - on_network


def _check(numbers: Tensor) -> None:
    most, least = int(numbers[0]), -int(numbers[1])
    if most != least:
        raise MismatchError(
            f"ranks disagree in one call, step: {least} on some ranks but {most} on others"
        )
