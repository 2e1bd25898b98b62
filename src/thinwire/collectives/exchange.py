"""One exchange with the other ranks of a group, from the call to its result."""

import contextlib
import functools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.channel import Channel, channel_of, process_group
from thinwire.collectives.compiling import compile_among
from thinwire.collectives.connect import GivenUpError
from thinwire.collectives.footprint import Footprint
from thinwire.collectives.handle import Handle
from thinwire.collectives.link import BackendRefusedError, Link
from thinwire.collectives.options import Options
from thinwire.collectives.order import Turn
from thinwire.collectives.transport import LISTED, Call, Transport
from thinwire.compressors import Compressor
from thinwire.errors import MismatchError, PeerError, ReplicaError
from thinwire.kernels import Key
from thinwire.kernels.compiling import KernelUse
from thinwire.telemetry import span

Details = tuple[tuple[str, str], ...]  # (what, in words)
# Errors that all ranks get, or that come with closed connections.
KNOWN_TO_ALL = (BackendRefusedError, GivenUpError, MismatchError, PeerError, ReplicaError)


class Exchange(ABC):
    """What the thread of a group's channel carries out, stage by stage:

    0. `admit`     whether to take part at all, by what came of exchanges before. Where one goes
                   beside those, asked before `finish`: whether what came is to be written.
    1. `enter`     may ask the other ranks first.
    2. `prepare`   reads tensors and makes what is to be sent. What fails here on one rank is told
                   to the others.
    3. `exchange`  meets the others and moves data, until this rank holds, opened and checked, all
                   that it will write.
    4. `finish`    writes results and residuals; the next exchange may be under way by then.

    Nothing of the caller's is written before `finish`: what fails earlier has changed nothing.
    What fails after `prepare` and was not announced closes the connections: the other ranks may
    have succeeded, and must not go on with replicas that differ.

    A subclass fills `details`: what ranks must agree in, besides the name of the call.

    Attributes:
        looks_back: `admit` asks for the results of earlier exchanges, which must have ended then.
        batch: of exchanges that one failure may end, which is that of `admit`; None without such.

    Args:
        name: of the call, "all_reduce".
        tensors: that it is about: they must be on one device.
        options: the group and the limits.
        result: what the handle's future holds in the end.
        what: the exchange in words, for errors and logs.
    """

    looks_back = False
    batch: object = None

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        options: Options,
        *,
        result: Any = None,
        what: str = "",
    ) -> None:
        group = process_group(options.group)
        # An error that is kept keeps this object by its traceback, but must not keep the
        # group: torch crashes when the interpreter ends before a group does.
        self.name = name
        self.options = options if options.group is None else replace(options, group=None)
        self.size, self.rank = group.size(), group.rank()
        self.device = _one_device(tensors)
        self.details: Details = ()
        self.handle = Handle(result, what or name)
        self._global_rank = dist.get_rank()
        self._group = weakref.ref(group)
        self._prepared = False
        self._early_error: Exception | None = None
        self._channel: Channel | None = None
        self._ready: torch.cuda.Event | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "the caller holds the group until the exchange has started"
        return group

    @property
    def channel(self) -> Channel:
        if self._channel is None:
            self._channel = self._find_channel()
        return self._channel

    def _find_channel(self) -> Channel:
        return channel_of(self.group, self.device)

    def key(self, compressor: Compressor, key: Key | None) -> Key:
        """The key to draw with: counted if none is given, one for each rank unless shared."""
        if key is None:
            key = Key() if self.size == 1 else Key(step=self.channel.count % (1 << 32))
        key = key.checked()
        return key if compressor.common_key else key.derive(self.rank)

    def start(self, async_op: bool = False) -> Handle:
        """Queue it; wait for it unless it is to run in the background."""
        if self.size == 1:
            self.handle.account.collective = "none"
            self.handle._end(self._alone())
        else:
            if self.device.type == "cuda":
                self._ready = torch.cuda.current_stream(self.device).record_event()
            # Now, not within the time limits of the other ranks.
            compile_among(self.channel.members, self.kernel_uses())
            if async_op:
                self.channel.submit(self)
            else:
                self.channel.call(self)
        if not async_op:
            self.handle.wait()
        return self.handle

    def _alone(self) -> Exception | None:
        try:
            self.alone()
        except Exception as error:
            return error
        return None

    def kernel_uses(self) -> list[KernelUse]:
        """What must have been compiled before it begins."""
        return []

    # The stages.

    def admit(self) -> None:
        """Called first; what it raises ends the exchange on this rank, and nobody is told: it must
        be the same on all."""
        return None

    def enter(self, transport: Transport) -> None:
        """Called before anything is prepared."""
        return None

    @abstractmethod
    def prepare(self) -> None:
        """Make what is to be sent; nothing of the caller's is written."""

    @abstractmethod
    def exchange(self, transport: Transport) -> None:
        """Send and receive; nothing of the caller's is written."""

    @abstractmethod
    def finish(self) -> None:
        """Write results and residuals."""

    def alone(self) -> None:
        """The same in a group of one rank, in place of all stages."""
        return None

    def run(self, link: Link, limit: timedelta, turn: Turn | None = None) -> None:
        """Called by a thread of the channel: all stages but the last.

        Args:
            turn: in the channel's order, if it has one.
        """
        call = Call(self.name, self.details)
        with self._on_own_stream(), self._telling(link):
            if turn is None or not turn.released:
                self.admit()
            transport = Transport(link, limit, call, self.handle.account, self.device, turn)
            self.enter(transport)
            with transport.preparing():
                self._prepare_once()
            if turn is not None:
                turn.note_prepared()
            self.exchange(transport)

    def complete(self, link: Link, judged_late: bool = False) -> None:
        """The last stage, when `run` went well; the next exchange may be under way.

        Args:
            judged_late: the first one, too.
        """
        if judged_late:
            with self._telling(link):
                self.admit()
        begin, seconds = time.perf_counter(), self.handle.account.seconds
        with self._on_own_stream(), self._telling(link), span("decode"):
            self.finish()
        seconds["decode"] = seconds.get("decode", 0.0) + time.perf_counter() - begin

    @contextlib.contextmanager
    def _telling(self, link: Link) -> Iterator[None]:
        """What fails inside is told to the others, unless they know."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                error.add_note(f"in {self.handle!r} on rank {self._global_rank}")
            if not isinstance(error, KNOWN_TO_ALL) and not self.handle.account.announced:
                # The others may have gone on, or wait for this rank: closed connections tell them.
                link.close()
            raise

    def footprint(self) -> Footprint | None:
        """What its stages read and write; None if that is not known."""
        return None

    def may_run_beside(self, other: "Exchange") -> bool:
        """Whether stages of this one may run while others of an earlier exchange do.

        Not if that could see what this one writes, or write what this one reads; not where a limit
        counts the memory of one exchange; not on CUDA, where the two have one stream.
        """
        limits = self.options.max_bytes, other.options.max_bytes
        if limits != (None, None) or self.device.type == "cuda":
            return False
        mine, others = self._reach, other._reach
        return mine is not None and others is not None and not mine.meets(others)

    @functools.cached_property
    def _reach(self) -> Footprint | None:
        return self.footprint()

    def prepare_early(self) -> None:
        """`prepare` before its turn, or before the others have come; what it raises comes out
        then."""
        begin = time.perf_counter()
        try:
            with self._on_own_stream():
                self.prepare()
        except Exception as error:
            self._early_error = error
        self._prepared = True
        self.handle.account.seconds["encode"] = time.perf_counter() - begin

    def confirm(self) -> None:
        """Called at its turn if it was prepared before: raises if it should not go on after all."""
        return None

    def _prepare_once(self) -> None:
        if self._early_error is not None:
            raise self._early_error
        if self._prepared:
            self.confirm()
        else:
            self.prepare()

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """The channel's own CUDA stream, so that what the caller goes on with runs beside it."""
        if self._ready is None:
            yield
            return
        stream = self.channel.stream(self.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            try:
                yield
            finally:  # after a failure too: what was begun uses the caller's tensors
                stream.synchronize()


class Refusal(Exchange):
    """Takes part in the next exchange of the group only to tell that this rank cannot go on.

    Args:
        batch: which that exchange is of.
    """

    def __init__(
        self, error: Exception, tensor: Tensor, options: Options, batch: object = None
    ) -> None:
        super().__init__("refusal", [tensor], options, what="refusal of an exchange")
        self._error, self.batch = error, batch

    def prepare(self) -> None:
        raise self._error

    def exchange(self, transport: Transport) -> None:
        raise AssertionError("prepare has raised")

    def finish(self) -> None:
        raise AssertionError("prepare has raised")

    def alone(self) -> None:
        raise self._error


def _one_device(tensors: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"all tensors of a call must be on one device, got {found}")
    (device,) = devices
    return device


# What ranks compare, in words.


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


def describe_compressors(
    compressors: Sequence[Compressor], names: Sequence[str] | None = None
) -> str:
    """The one of all tensors, or those of each, as a list that `MismatchError` compares item by
    item."""
    first = compressors[0]
    if all(each is first or each == first for each in compressors):
        return str(first)
    shown = [f"tensor {i}" for i in range(len(compressors))] if names is None else names
    return LISTED.join(f"{c} for {name}" for c, name in zip(compressors, shown, strict=True))


def describe_key(compressors: Sequence[Compressor], keys: Sequence[Key]) -> Details:
    """The key, where ranks must agree in it."""
    for compressor, key in zip(compressors, keys, strict=True):
        if compressor.common_key:
            return (("key", f"{key.seed}/{key.step}/{key.tensor}"),)
    return ()
