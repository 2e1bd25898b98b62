"""What every call does before and around its exchange."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.channel import Channel, channel_of, process_group
from thinwire.collectives.handle import Handle
from thinwire.collectives.link import Link
from thinwire.collectives.talk import Call, Talk
from thinwire.compressors import Compressor
from thinwire.kernels import Key

Group = Any  # torch.distributed.ProcessGroup, or None for the default one
LONGEST = 1e9  # seconds; gloo counts in 64-bit nanoseconds
Timeout = float | timedelta | None


class Session:
    """A group as one call sees it."""

    def __init__(
        self, group: Group, tensors: Sequence[Tensor], between: tuple[int, int, int] | None = None
    ) -> None:
        self.group = process_group(group)
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self._who = dist.get_rank()
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "none"
            raise ValueError(f"all tensors of a call must be on one device, got {found}")
        (self.device,) = devices
        self._between = between

    @property
    def channel(self) -> Channel:
        return channel_of(self.group, self.device, self._between)

    def key(self, compressor: Compressor, key: Key | None) -> Key:
        """The key to draw with: counted if none is given, one for each rank unless shared."""
        key = Key(step=self.channel.count % (1 << 32)) if key is None else key.checked()
        return key if compressor.common_key else key.derive(self.rank)

    def begin(
        self,
        handle: Handle,
        call: Call,
        job: Callable[[Talk], None],
        timeout: timedelta | None,
        async_op: bool,
    ) -> Handle:
        """Queue the job; wait for it unless it is to run in the background."""
        ready = (
            torch.cuda.current_stream(self.device).record_event() if _cuda(self.device) else None
        )

        def run(link: Link, limit: timedelta) -> None:
            # The thread's own stream, so that what the caller goes on with runs beside it.
            with torch.cuda.stream(channel.stream(self.device) if ready is not None else None):
                if ready is not None:
                    torch.cuda.current_stream(self.device).wait_event(ready)
                try:
                    job(Talk(link, limit, call, handle.account, self.device))
                except Exception as error:
                    error.add_note(f"in {handle!r} on rank {self._who}")
                    raise
                if ready is not None:
                    torch.cuda.current_stream(self.device).synchronize()

        channel = self.channel
        # An error that somebody keeps must not keep the group: torch crashes when the interpreter
        # ends before a group does.
        self.group = None
        channel.submit(handle, run, timeout)
        if not async_op:
            handle.wait()
        return handle


def _cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def span_of(timeout: Timeout) -> timedelta | None:
    """A timeout as a positive timedelta."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < LONGEST:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return timedelta(seconds=seconds)


def describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def describe_all(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(describe, tensors))


def describe_residuals(residuals: Sequence[Tensor | None]) -> str:
    """Which tensors have one: with and without, compressors may send different things."""
    given = [residual is not None for residual in residuals]
    if len(set(given)) == 1:
        return "given" if given[0] else "none"
    return " ".join("given" if each else "none" for each in given)


def describe_key(compressor: Compressor, key: Key) -> tuple[tuple[str, str], ...]:
    """The key, where ranks must agree in it."""
    return (("key", f"{key.seed}/{key.step}/{key.tensor}"),) if compressor.common_key else ()
