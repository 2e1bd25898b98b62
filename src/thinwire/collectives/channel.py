"""A few threads and one link for each (process, group): all exchanges of a group, in order.

Ranks agree on the order of exchanges because each submits them in program order. Where several
wait, up to `AT_ONCE` of them are under way at a time, each with a thread and connections of its
own, if they share no memory: so compressing a layer, sending the one before and adding up what came
of a third overlap, and while one waits for what comes from afar, others move their data.
`thinwire.collectives.order` sees to it that ranks agree. The link is made with the first exchange,
its lanes when first used. A channel ends with its process group, with the interpreter, or with the
first exchange that loses a peer.
"""

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire import torch_internals
from thinwire.collectives.connect import LOOK, GivenUpError, Members, Pulse, join_all
from thinwire.collectives.handle import Handle
from thinwire.collectives.link import Link
from thinwire.collectives.options import Options
from thinwire.collectives.order import AT_ONCE, Order, Ordered, Turn
from thinwire.collectives.watch import reap
from thinwire.errors import PeerError, ThinwireError

ENDED = "the process group has been destroyed"
IDLE_CHECK = 1.0  # seconds between two looks whether the process group still exists
LOOKED_OVER = 16  # handles of a thread before those that were waited for are let go
GRACE = 1.0  # seconds that exchanges get to end when their group or the interpreter does
PATIENCE = 10.0  # seconds that threads then have to close their connections, on a busy machine


class Runnable(Ordered, Protocol):
    """What a channel carries out; see `thinwire.collectives.exchange.Exchange`."""

    handle: Handle
    options: Options

    def prepare_early(self) -> None: ...

    def run(self, link: Link, limit: timedelta, turn: Turn | None) -> None: ...

    def complete(self, link: Link, judged_late: bool) -> None: ...


class Direct(Protocol):
    """What a thread posts and waits for by itself; see `thinwire.collectives.direct`."""

    def leave(self) -> None: ...


class Channel:
    """The threads and the link of one group; `submit` is all that others call."""

    def __init__(self, members: Members, alive: Callable[[], bool]) -> None:
        self.members = members
        self.pid = os.getpid()
        self.count = 0  # exchanges submitted so far: equal on all ranks of a sound program
        self.logged: set[tuple[str, str]] = set()  # choices of collectives
        self._alive = alive
        self._order = Order()
        # Something for each exchange, so that a thread looks for its turn; None for it to end.
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []  # made when one thread is not enough
        self._link: Link | None = None
        self._end: float | None = None  # when to give up, once that is known
        self._lost: str | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._caller: threading.Thread | None = None  # inside a call that waits
        # What each thread has started and not waited for.
        self._background: dict[threading.Thread, Started] = {}
        self._direct: set[Direct] = set()  # of threads that post and wait by themselves
        self.thread = threading.Thread(
            target=self._run, name=f"thinwire {members.name}", daemon=True
        )
        self.thread.start()

    def submit(self, exchange: Runnable) -> None:
        """Queue an exchange; its handle ends when it has ended.

        Until somebody has waited for the handle, exchanges of other threads are refused.
        """
        with self._lock:
            self._submit(exchange)
            self._background.setdefault(threading.current_thread(), Started()).add(exchange.handle)

    def call(self, exchange: Runnable) -> None:
        """Queue an exchange and wait for it; until this returns, those of other threads are
        refused."""
        with self._lock:
            self._submit(exchange)
            before, self._caller = self._caller, threading.current_thread()
        try:
            exchange.handle.wait()
        finally:
            self._caller = before

    def _submit(self, exchange: Runnable) -> None:
        if self._end is not None:
            raise PeerError(ENDED)
        self._check_thread(exchange.handle.what)
        self.count += 1
        self._enqueue(exchange)

    def _enqueue(self, exchange: Runnable) -> None:
        self._order.join(exchange)
        threads = 1 + len(self._helpers)
        if threads < AT_ONCE and threads < self._order.waiting:
            name = f"{self.thread.name} {threads}"
            helper = threading.Thread(target=self._help, name=name, daemon=True)
            with contextlib.suppress(RuntimeError):  # there may be no more: fewer do, too
                helper.start()
                self._helpers.append(helper)
        self._calls.put(True)

    def _check_thread(self, what: str) -> None:
        """Refuse an exchange beside one of another thread: on another rank it might come first."""
        me, caller = threading.current_thread(), self._caller
        if me is self.thread or me in self._helpers:
            return
        if caller is not None and caller is not me:
            does = "is inside a call"
        else:
            caller = self._other_than(me)
            if caller is None:
                return
            does = "has not yet waited for one that it started"
        raise RuntimeError(
            f"{what} was called in thread {me.name!r} while thread {caller.name!r} {does} on the "
            "same process group: other ranks may order the two differently, and results would get "
            "mixed up. Use a group in one thread at a time, or make one for each thread "
            "(torch.distributed.new_group)"
        )

    def _other_than(self, me: threading.Thread) -> threading.Thread | None:
        """A thread that has not waited for what it started, in no order with this one."""
        for thread in [each for each in self._background if each is not me]:
            if not self._background[thread].any_open:
                del self._background[thread]
            elif not _ordered(me, thread):
                return thread
        return None

    @property
    def link(self) -> Link | None:
        """The connections, once there has been an exchange."""
        return self._link

    def begin_direct(self, direct: Direct) -> None:
        """Something of the caller's own is under way on these connections."""
        with self._lock:
            self._direct.add(direct)

    def end_direct(self, direct: Direct) -> None:
        """It has ended, well or not."""
        with self._lock:
            self._direct.discard(direct)

    def note_lost(self, why: str) -> None:
        """The connections were lost elsewhere."""
        self._lost = self._lost or why

    def close(self) -> None:
        """Let the thread end; what was submitted gets a moment to end before it."""
        with self._lock:
            if self._end is None:
                self._end = time.monotonic() + GRACE
            self._calls.put(None)

    def stream(self, device: torch.device) -> "torch.cuda.Stream":
        """The stream that this channel's work on a CUDA device runs on."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _given_up(self) -> bool:
        return self._end is not None and time.monotonic() > self._end

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=IDLE_CHECK)
            except queue.Empty:
                if not self._alive():
                    break
                self._carry_out_all()  # whose caller was interrupted
                self._tidy_up()
                continue
            self._carry_out_all()
            if call is None:
                break
        self._calls.put(None)
        for helper in self._helpers:
            helper.join()
        self._refuse_the_rest()
        with self._lock:
            left, self._direct = self._direct, set()
        for direct in left:
            direct.leave()  # nobody may wait for it any more, and its group would
        if self._link is not None:
            self._link.close(farewell=True)
        self._linger()

    def _help(self) -> None:
        """What another thread does."""
        while self._calls.get() is not None:
            self._carry_out_all()
        self._calls.put(None)  # for the next thread

    def _linger(self) -> None:
        """Stay until operations that were left behind have ended, at the latest with their time
        limits, so that their connections are destroyed; not while the interpreter ends."""
        while reap() and not _exiting.wait(LOOK):
            pass

    def _tidy_up(self) -> None:
        """Nothing is to do: close what nobody needs any more."""
        forget_ended()
        if self._link is None or self._link.closed or self._direct or self._order.waiting:
            return
        if self._link.neighbour_left:
            # The neighbour on the other side learns of it in the same way.
            self._lost = f"one of ranks {self.members.others} has left the group"
            self._link.close(farewell=True)

    def _refuse_the_rest(self) -> None:
        """What was submitted at the last moment must end, too."""
        with self._lock:
            self._end = time.monotonic()
        while (turn := self._order.take()) is not None:
            exchange: Any = turn.exchange
            self._order.stop(turn, moved=False)
            exchange.handle._end(PeerError(ENDED))
            self._order.end(turn)

    def _carry_out_all(self) -> None:
        while (turn := self._order.take()) is not None:
            self._carry_out(turn)
            del turn  # it holds tensors

    def _carry_out(self, turn: Turn) -> None:
        """All of an exchange, while other threads may be at others."""
        exchange: Any = turn.exchange
        error = error_of(lambda: self._take_part(exchange, turn))
        self._order.stop(turn, moved=error is None)
        seconds = exchange.handle.account.seconds
        if "network" in seconds:
            seconds["network"] = self._order.alone(turn)
        error = self._come_to_an_end(exchange, turn.released, error)
        self._order.note_ending(turn)
        exchange.handle._end(error)
        self._order.end(turn)
        error = None  # its traceback holds this frame, and with it the process group

    def _take_part(self, exchange: Runnable, turn: Turn) -> None:
        if self._order.may_prepare(turn):
            exchange.prepare_early()
            turn.note_prepared()
        self._order.begin(turn)
        self._check_connections()
        limit = exchange.options.timeout or self.members.timeout
        link = self._connect(limit)
        if turn.lane:
            link = link.beside(f"lane {turn.lane}", AT_ONCE * limit, counts=False)
        self._run_exchange(exchange, link, limit, turn)

    def _check_connections(self) -> None:
        if self._given_up():
            raise GivenUpError
        if self._lost is not None:
            raise PeerError(f"the group lost its connections in an earlier call: {self._lost}")

    def _connect(self, limit: timedelta) -> Link:
        """The link, made when first asked for."""
        if self._link is None:
            try:
                self._link = Link(self.members, limit, self._given_up)
            except ThinwireError as error:
                self._lost = str(error)
                raise
        return self._link

    def _run_exchange(
        self, exchange: Runnable, link: Link, limit: timedelta, turn: Turn | None
    ) -> None:
        before = (link.bytes_sent, link.bytes_received, link.network_bytes)
        try:
            exchange.run(link, limit, turn)
        finally:
            account = exchange.handle.account
            account.bytes_sent = link.bytes_sent - before[0]
            account.bytes_received = link.bytes_received - before[1]
            account.network_bytes = link.network_bytes - before[2]

    def _come_to_an_end(
        self, exchange: Runnable, judged_late: bool, error: BaseException | None
    ) -> BaseException | None:
        """Finish what has come, or not; what went wrong."""
        link = self._link
        if error is None and judged_late:
            error = error_of(self._check_connections)
        if error is None:
            assert link is not None
            error = error_of(lambda: exchange.complete(link, judged_late))
        # One that went well says nothing about connections that the next has lost meanwhile.
        if error is not None and self._lost is None and link is not None and link.closed:
            self._lost = str(error)
        exchange.handle.account.lost = self._lost is not None
        return error


class Started:
    """The handles that a thread has started, until somebody has waited for them."""

    def __init__(self) -> None:
        self._handles: list[weakref.ref[Handle]] = []
        self._look_over_at = LOOKED_OVER

    def add(self, handle: Handle) -> None:
        if len(self._handles) >= self._look_over_at:
            self._handles = list(filter(_is_open, self._handles))
            # Twice as many as are left: however many are open, one costs the same.
            self._look_over_at = LOOKED_OVER + 2 * len(self._handles)
        self._handles.append(weakref.ref(handle))

    @property
    def any_open(self) -> bool:
        """Whether one of them has not been waited for."""
        return any(map(_is_open, self._handles))


def error_of(work: Callable[[], None]) -> BaseException | None:
    """What a stage raises."""
    try:
        work()
    except GivenUpError:
        return PeerError("given up: the process group or the interpreter has ended")
    except BaseException as error:
        return error
    return None


def _is_open(reference: "weakref.ref[Handle]") -> bool:
    handle = reference()
    return handle is not None and handle.open


def _ordered(one: threading.Thread, other: threading.Thread) -> bool:
    """Whether the exchanges of two threads come in one order: those of a thread alone do, and so do
    those of autograd's own threads, which work for whoever waits inside backward()."""
    foreign = threading._DummyThread  # not started by Python
    return one is other or isinstance(one, foreign) or isinstance(other, foreign)


# Threads that have not been seen to end, each with its channel. A thread that is about to end still
# runs destructors of torch, so it must not take itself out. The channel is the thread's own: kept
# here, it would keep the store and the network device of a group that is gone.
_running: list[tuple[threading.Thread, weakref.ref[Channel]]] = []
_channels: weakref.WeakKeyDictionary[Any, dict[str, Channel]]
_channels = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_exiting = threading.Event()  # the interpreter ends


def forget_ended() -> None:
    """Let go of channels and connections that have ended, and of gloo's threads with them."""
    reap()
    with _lock:
        _running[:] = [each for each in _running if each[0].is_alive()]


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


def members_of(
    group: dist.ProcessGroup, device: torch.device, places: Sequence[int] = (), suffix: str = ""
) -> Members:
    """Who takes part in the exchanges of a channel; see `channel_of`."""
    ranks = dist.get_process_group_ranks(group)
    index = dist.get_rank(group)
    name = f"{group.group_name}/{device.type}"
    if places:
        name += "/" + "-".join(map(str, places)) + suffix
        index, ranks = places.index(index), [ranks[place] for place in places]
    backend = torch_internals.backend_of(group, device)
    return Members(name, tuple(ranks), index, backend, Pulse(group))


def channel_of(
    group: dist.ProcessGroup,
    device: torch.device,
    places: Sequence[int] = (),
    *,
    kind: type[Channel] = Channel,
    suffix: str = "",
) -> Channel:
    """The channel of a process group for tensors on a device, made when first asked for.

    Args:
        group: as from `process_group`.
        device: of the tensors; groups may have different backends for CPU and CUDA.
        places: of some members, for a channel between these alone.
        kind: of channel.
        suffix: of its name, where there is more than one over the same members.
    """
    name = f"{device.type} {places} {suffix}"
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
            forget_ended()
            reference = weakref.ref(group)
            members = members_of(group, device, places, suffix)
            found = own[name] = kind(members, lambda: _exists(reference))
            _running.append((found.thread, weakref.ref(found)))
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
    _exiting.set()
    for _, reference in _running:
        channel = reference()
        if channel is not None and channel.pid == os.getpid():
            channel.close()
        del channel
    end = time.monotonic() + GRACE + PATIENCE
    for thread, _ in _running:
        thread.join(max(0.0, end - time.monotonic()))  # at once in a forked child, which has none
    join_all(end)
