"""send and recv: one compressed tensor from one rank to another.

Each direction between two ranks, and each tag, has a channel of its own: messages of one channel
arrive in the order they were sent, and a receive that waits holds up nothing else.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.channel import place_of, process_group
from thinwire.collectives.handle import Handle
from thinwire.collectives.message import bundle
from thinwire.collectives.start import Group, Session, Timeout, describe, span_of
from thinwire.collectives.talk import Call, Talk
from thinwire.collectives.work import Work
from thinwire.compressors import Compressor, local_of
from thinwire.errors import FrameError
from thinwire.frames import unpack
from thinwire.kernels import Key

SENDER, RECEIVER = 0, 1


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
    compressor = local_of(compressor)
    compressor.check_input(tensor, residual)
    session = _session(group, tensor, dst, tag, sending=True)
    drawn = session.key(compressor, key)
    handle = Handle(tensor, f"send of {describe(tensor)} to rank {dst} with {compressor}")

    def job(talk: Talk) -> None:
        handle.account.collective = "send"
        with talk.preparing():
            work = Work.of([tensor], [residual], compressor, drawn, changes=False)
            (part,) = work.parts
            payload = part.draft(compressor)
            message = bundle([payload])
            nothing = message[:0]
        talk.meet([message.numel()])
        talk.swap([nothing, message], [0, 0])
        with talk.clock("encode"):
            part.settle(compressor, payload)
            work.done()

    return session.begin(handle, _call(tensor), job, span_of(timeout), async_op=True)


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
    session = _session(group, tensor, src, tag, sending=False)
    handle = Handle(tensor, f"recv of {describe(tensor)} from rank {src}")

    def job(talk: Talk) -> None:
        handle.account.collective = "recv"
        length = talk.meet()[SENDER].numbers[0]
        nothing = torch.empty(0, dtype=torch.uint8, device=talk.device)
        message = talk.swap([nothing, nothing], [length, 0])[SENDER]
        with talk.clock("decode"):
            payload = unpack(message, max_numel=tensor.numel())
            if payload.numel != tensor.numel() or payload.dtype != tensor.dtype:
                raise FrameError(
                    f"expected {describe(tensor)}, the message holds {payload.numel} elements of "
                    f"{payload.dtype}"
                )
            payload.restore(tensor.detach())

    return session.begin(handle, _call(tensor), job, span_of(timeout), async_op=True)


def _session(group: Any, tensor: Tensor, peer: int, tag: int, sending: bool) -> Session:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
    if isinstance(tag, bool) or not isinstance(tag, int) or tag < 0:
        raise ValueError(f"tag must be a non-negative integer, got {tag!r}")
    group = process_group(group)
    me, other = dist.get_rank(group), place_of(group, peer)
    if me == other:
        raise ValueError(f"rank {peer} cannot send to itself")
    return Session(group, [tensor], (me, other, tag) if sending else (other, me, tag))


def _call(tensor: Tensor) -> Call:
    return Call("send and recv", (("tensor", describe(tensor)),))
