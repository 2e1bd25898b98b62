"""send and recv: one compressed tensor from one rank to another.

Each direction between two ranks has a channel of its own (`pairs`): messages of one tag arrive in
the order they were sent, and a receive that waits holds up nothing else.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.allreduce import check_writable
from thinwire.collectives.channel import Channel, place_of, process_group
from thinwire.collectives.exchange import Exchange, describe
from thinwire.collectives.handle import Handle
from thinwire.collectives.message import LENGTH
from thinwire.collectives.options import Group, Options, Timeout
from thinwire.collectives.pairs import NAME, RECEIVER, SENDER, Pair, pair_channel_of
from thinwire.collectives.reduction import FlatTensors
from thinwire.collectives.transport import Record, Transport
from thinwire.compressors import Compressor, LocalCompressor, local_of
from thinwire.compressors.compiling import uses_of
from thinwire.errors import FrameError
from thinwire.frames import longest_frame, pack, unpack
from thinwire.frames.code import Extent
from thinwire.kernels import Key
from thinwire.kernels.compiling import KernelUse


def send(
    tensor: Tensor,
    compressor: Compressor | str,
    *,
    dst: int,
    residual: Tensor | None = None,
    group: Group = None,
    tag: int = 0,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """Send a tensor, compressed; returns when the receiver has it.

    Args:
        tensor: what to send. It is not changed.
        dst: global rank of the receiver, which calls `recv` or `irecv`.
        residual: what earlier sends left out.
        tag: messages with different tags do not wait for each other.
        group, timeout, key: as for `all_reduce`.

    Raises:
        MismatchError: the receiver expects another type or shape; it gets the same.
        PeerError: the receiver died or did not call in time.
    """
    handle = isend(
        tensor,
        compressor,
        dst=dst,
        residual=residual,
        group=group,
        tag=tag,
        timeout=timeout,
        key=key,
    )
    handle.wait()
    return handle


def isend(
    tensor: Tensor,
    compressor: Compressor | str,
    *,
    dst: int,
    residual: Tensor | None = None,
    group: Group = None,
    tag: int = 0,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """`send` in the background: the tensor and residual belong to it until the handle has ended."""
    options = Options.of(group, timeout=timeout)
    return Send(tensor, dst, tag, residual, local_of(compressor), options, key).start(True)


def recv(
    tensor: Tensor,
    *,
    src: int,
    group: Group = None,
    tag: int = 0,
    timeout: Timeout = None,
) -> Handle:
    """Receive what `send` sends, into a tensor of the same shape and type.

    Args:
        tensor: where it goes.
        src: global rank of the sender.
        tag, group, timeout: as for `send`. No compressor: the message says how it is to be read.
    """
    handle = irecv(tensor, src=src, group=group, tag=tag, timeout=timeout)
    handle.wait()
    return handle


def irecv(
    tensor: Tensor,
    *,
    src: int,
    group: Group = None,
    tag: int = 0,
    timeout: Timeout = None,
) -> Handle:
    """`recv` in the background: the tensor belongs to it until the handle has ended."""
    options = Options.of(group, timeout=timeout)
    return Receive(tensor, src, tag, options).start(True)


class PairExchange(Exchange):
    """Takes place between two members alone."""

    def __init__(self, tensor: Tensor, pair: Pair, options: Options, what: str) -> None:
        super().__init__(NAME, [tensor], options, result=tensor, what=what)
        self.pair = pair
        self.details = (("tensor", describe(tensor)),)

    def _find_channel(self) -> Channel:
        return pair_channel_of(self.group, self.device, self.pair)


class Send(PairExchange):
    def __init__(
        self,
        tensor: Tensor,
        dst: int,
        tag: int,
        residual: Tensor | None,
        compressor: LocalCompressor,
        options: Options,
        key: Key | None,
    ) -> None:
        compressor.check_input(tensor, residual)
        what = f"send of {describe(tensor)} to rank {dst} with {compressor}"
        me, other = _places(tensor, dst, tag, options)
        super().__init__(tensor, Pair(me, other, tag), options, what)
        self._tensor, self._residual, self._compressor = tensor, residual, compressor
        self._key = self.key(compressor, key)

    def kernel_uses(self) -> list[KernelUse]:
        return uses_of([self._compressor], [self._tensor.dtype], self.device)

    def prepare(self) -> None:
        self.handle.account.collective = "send"
        self._flat = FlatTensors([self._tensor], [self._residual], [self._compressor], [self._key])
        self._payload = self._flat.parts[0].draft()
        self._message = pack(self._payload)
        self.handle.account.finite = not self._payload.non_finite

    def exchange(self, transport: Transport) -> None:
        nothing = self._message[:0]
        messages = [nothing, self._message]
        records = _meet(transport, messages, self._payload.extent)
        transport.swap(messages, [0, 0], records)

    def finish(self) -> None:
        self._flat.parts[0].settle(self._payload)
        self._flat.write_back(tensors=False)


class Receive(PairExchange):
    def __init__(self, tensor: Tensor, src: int, tag: int, options: Options) -> None:
        me, other = _places(tensor, src, tag, options)
        check_writable([tensor], [])
        what = f"recv of {describe(tensor)} from rank {src}"
        super().__init__(tensor, Pair(other, me, tag), options, what)
        self._tensor = tensor.detach()

    def prepare(self) -> None:
        self.handle.account.collective = "recv"

    def exchange(self, transport: Transport) -> None:
        extent = Extent(self._tensor.dtype, self._tensor.numel())
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        records = _meet(transport, [nothing, nothing], extent)
        lengths = [records[SENDER].numbers[0], 0]
        message = transport.swap([nothing, nothing], lengths, records)[SENDER]
        tensor = self._tensor
        with transport.clock("decode"):
            self._payload = unpack(message, max_numel=tensor.numel())
            if self._payload.numel != tensor.numel() or self._payload.dtype != tensor.dtype:
                raise FrameError(
                    f"expected {describe(tensor)}, the message holds {self._payload.numel} "
                    f"elements of {self._payload.dtype}"
                )

        self.handle.account.finite = not self._payload.non_finite

    def finish(self) -> None:
        self._payload.restore(self._tensor)


def _meet(transport: Transport, messages: list[Tensor], extent: Extent) -> list[Record]:
    """The records with the lengths of messages; the receiver does not know the compressor."""
    records = transport.meet([messages[RECEIVER].numel()], along=messages)
    transport.checked(LENGTH, [record.numbers[0] for record in records], longest_frame(extent))
    return records


def _places(tensor: Tensor, peer: int, tag: int, options: Options) -> tuple[int, int]:
    """The own place and the other's in the group."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
    if isinstance(tag, bool) or not isinstance(tag, int) or tag < 0:
        raise ValueError(f"tag must be a non-negative integer, got {tag!r}")
    group = process_group(options.group)
    me, other = dist.get_rank(group), place_of(group, peer)
    if me == other:
        raise ValueError(f"rank {peer} cannot send to itself")
    return me, other
