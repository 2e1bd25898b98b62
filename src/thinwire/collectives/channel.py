"""One FIFO thread and one link for each (process, group): all exchanges of a group, in order.

Ranks agree on the order of exchanges because each submits them in program order and one thread
carries them out. The link is made with the first exchange. A channel ends with its process group,
with the interpreter, or with the first exchange that loses a peer.
"""

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from thinwire import torch_internals
from thinwire.collectives.handle import Handle
from thinwire.collectives.link import GivenUpError, Link, Members
from thinwire.collectives.options import Options
from thinwire.errors import PeerError, ThinwireError

IDLE_CHECK = 1.0  # seconds between two looks whether the process group still exists
GRACE = 1.0  # seconds that exchanges get to end when their group or the interpreter does
PATIENCE = 10.0  # seconds that threads then have to close their connections, on a busy machine


class Runnable(Protocol):
    """What a channel carries out; see `thinwire.collectives.exchange.Exchange`."""

    handle: Handle
    options: Options

    def run(self, link: Link, limit: timedelta) -> None: ...


class Pair(NamedTuple):
    """Two members of a group, and a tag: each such pair has a channel of its own."""

    sender: int
    receiver: int
    tag: int


class Channel:
    """The thread and the link of one group; `submit` is all that others call."""

    def __init__(self, members: Members, alive: Callable[[], bool]) -> None:
        self.members = members
        self.pid = os.getpid()
        self.count = 0  # exchanges submitted so far: equal on all ranks of a sound program
        self.logged: set[tuple[str, str]] = set()  # choices of collectives
        self._alive = alive
        self._exchanges: queue.SimpleQueue[Runnable | None] = queue.SimpleQueue()
        self._link: Link | None = None
        self._end: float | None = None  # when to give up, once that is known
        self._lost: str | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"thinwire {members.name}", daemon=True
        )
        self._thread.start()

    def submit(self, exchange: Runnable) -> None:
        """Queue an exchange; its handle ends when it has ended."""
        with self._lock:
            if self._end is not None:
                raise PeerError("the process group has been destroyed")
            self.count += 1
            self._exchanges.put(exchange)

    def close(self) -> None:
        """Let the thread end; what was submitted gets a moment to end before it."""
        with self._lock:
            if self._end is None:
                self._end = time.monotonic() + GRACE
            self._exchanges.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout)

    def stream(self, device: torch.device) -> "torch.cuda.Stream":
        """The stream that this channel's work on a CUDA device runs on."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _given_up(self) -> bool:
        return self._end is not None and time.monotonic() > self._end

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                item = self._exchanges.get(timeout=IDLE_CHECK)
            except queue.Empty:
                if self._alive():
                    continue
                break
            if item is None:
                break
            self._carry_out(item)
            del item  # it holds tensors
        self._refuse_the_rest()
        if self._link is not None:
            self._link.close(farewell=True)

    def _refuse_the_rest(self) -> None:
        """What was submitted at the last moment must end, too."""
        with self._lock:
            self._end = time.monotonic()
            while not self._exchanges.empty():
                late = self._exchanges.get()
                if late is not None:
                    late.handle._end(PeerError("the process group has been destroyed"))

    def _carry_out(self, exchange: Runnable) -> None:
        handle = exchange.handle
        error: BaseException | None = None
        try:
            self._run_exchange(exchange)
        except GivenUpError:
            error = PeerError("given up: the process group or the interpreter has ended")
        except BaseException as caught:
            error = caught
        if self._lost is None and self._link is not None and self._link.closed:
            self._lost = str(error)
        handle.account.lost = self._lost is not None
        handle._end(error)
        error = None  # its traceback holds this frame, and with it the process group

    def _run_exchange(self, exchange: Runnable) -> None:
        timeout = exchange.options.timeout or self.members.timeout
        if self._given_up():
            raise GivenUpError
        if self._lost is not None:
            raise PeerError(f"the group lost its connections in an earlier call: {self._lost}")
        if self._link is None:
            try:
                self._link = Link(self.members, timeout, self._given_up)
            except ThinwireError as error:
                self._lost = str(error)
                raise
        link = self._link
        before = (link.bytes_sent, link.bytes_received, link.network_bytes)
        try:
            exchange.run(link, timeout)
        finally:
            account = exchange.handle.account
            account.bytes_sent = link.bytes_sent - before[0]
            account.bytes_received = link.bytes_received - before[1]
            account.network_bytes = link.network_bytes - before[2]


# Whose threads have not been seen to end. A thread that is about to end still runs destructors of
# torch, so it must not take itself out.
_running: list[Channel] = []
_channels: weakref.WeakKeyDictionary[Any, dict[str, Channel]]
_channels = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group meant: the default one for None."""
    if not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    if group is outside or dist.get_rank(group) < 0:
        raise ValueError("this rank does not belong to the group")
    assert group is not None, "torch.distributed is initialized"
    return group


def place_of(group: dist.ProcessGroup, rank: int) -> int:
    """A global rank's place in a group."""
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise ValueError(f"rank {rank!r} is not part of the group of ranks {ranks}")
    return ranks.index(rank)


def members_of(group: dist.ProcessGroup, device: torch.device, pair: Pair | None = None) -> Members:
    """Who takes part in the exchanges of a channel; see `channel_of`."""
    ranks = dist.get_process_group_ranks(group)
    index = dist.get_rank(group)
    name = f"{group.group_name}/{device.type}"
    if pair is not None:
        name += f"/{pair.sender}-{pair.receiver}/{pair.tag}"
        index = (pair.sender, pair.receiver).index(index)
        ranks = [ranks[pair.sender], ranks[pair.receiver]]
    return Members(name, tuple(ranks), index, torch_internals.backend_of(group, device))


def channel_of(group: dist.ProcessGroup, device: torch.device, pair: Pair | None = None) -> Channel:
    """The channel of a process group for tensors on a device, made when first asked for.

    Args:
        group: as from `process_group`.
        device: of the tensors; groups may have different backends for CPU and CUDA.
        pair: for a channel between two members of the group alone.
    """
    name = f"{device.type} {pair}"
    with _lock:
        own = _channels.setdefault(group, {})
        found = own.get(name)
        if found is not None and found.pid != os.getpid():
            raise RuntimeError(
                "this process was forked from the one that connected this process group: its "
                "connections are the parent's. Start processes with 'spawn', or call "
                "torch.distributed.init_process_group in each of them"
            )
        if found is None or found.ended:
            reference = weakref.ref(group)
            members = members_of(group, device, pair)
            found = own[name] = Channel(members, lambda: _exists(reference))
            _running[:] = [each for each in _running if not each.ended] + [found]
            weakref.finalize(group, found.close)
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        return found


def _exists(reference: "weakref.ref[Any]") -> bool:
    group = reference()
    if group is None or not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def _close_all() -> None:
    """A thread must not be inside torch when the interpreter goes."""
    own = [channel for channel in _running if channel.pid == os.getpid()]
    for channel in own:
        channel.close()
    end = time.monotonic() + GRACE + PATIENCE
    for channel in own:
        channel.join(max(0.0, end - time.monotonic()))
