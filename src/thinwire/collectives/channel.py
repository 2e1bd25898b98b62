"""One FIFO thread and one link for each (process, group): all exchanges of a group, in order.

Ranks agree on the order of exchanges because each submits them in program order and one thread
carries them out. While one moves its data, a second thread prepares the next and a third finishes
the one before, if they share no memory: so compressing a layer, sending the one before and adding
up what came of a third overlap. No more than one is prepared ahead, and one left to be finished.
The link is made with the first exchange. A channel ends with its process group, with the
interpreter, or with the first exchange that loses a peer.
"""

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire import torch_internals
from thinwire.collectives.connect import LOOK, GivenUpError, Members, Pulse, join_all
from thinwire.collectives.handle import Handle
from thinwire.collectives.link import Link
from thinwire.collectives.options import Options
from thinwire.collectives.watch import reap
from thinwire.errors import PeerError, ThinwireError

_NOTHING = object()
IDLE_CHECK = 1.0  # seconds between two looks whether the process group still exists
LOOKED_OVER = 16  # handles of a thread from which on those that were waited for are let go
GRACE = 1.0  # seconds that exchanges get to end when their group or the interpreter does
PATIENCE = 10.0  # seconds that threads then have to close their connections, on a busy machine


class Runnable(Protocol):
    """What a channel carries out; see `thinwire.collectives.exchange.Exchange`."""

    handle: Handle
    options: Options
    looks_back: bool

    def run(self, link: Link, limit: timedelta) -> None: ...

    def complete(self, link: Link) -> None: ...

    def prepare_early(self) -> None: ...

    def may_run_beside(self, other: Any) -> bool: ...


class Direct(Protocol):
    """What a thread posts and waits for by itself; see `thinwire.collectives.direct`."""

    def leave(self) -> None: ...


class Channel:
    """The thread and the link of one group; `submit` is all that others call."""

    def __init__(self, members: Members, alive: Callable[[], bool]) -> None:
        self.members = members
        self.pid = os.getpid()
        self.count = 0  # exchanges submitted so far: equal on all ranks of a sound program
        self.logged: set[tuple[str, str]] = set()  # choices of collectives
        self._alive = alive
        self._exchanges: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None at the end
        self._moving: Runnable | None = None  # what is under way, once it is prepared
        self._next: deque[Any] = deque()  # at most one that was taken from the queue ahead of time
        self._preparing: Future[None] | None = None  # the preparation of that
        self._preparer = _Worker(f"thinwire {members.name} preparer")
        self._finishing: Runnable | None = None  # what has come and is being written
        self._finished: Future[None] | None = None  # the end of that
        self._finisher = _Worker(f"thinwire {members.name} finisher")
        self._link: Link | None = None
        self._end: float | None = None  # when to give up, once that is known
        self._lost: str | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._caller: threading.Thread | None = None  # inside a call that waits
        # What each thread has started and not waited for.
        self._background: dict[threading.Thread, list[weakref.ref[Handle]]] = {}
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
            own = self._background.setdefault(threading.current_thread(), [])
            if len(own) >= LOOKED_OVER:
                own[:] = filter(_is_open, own)
            own.append(weakref.ref(exchange.handle))

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
            raise PeerError("the process group has been destroyed")
        self._check_thread(exchange.handle.what)
        self.count += 1
        self._exchanges.put(exchange)
        self._prepare_next()

    def _check_thread(self, what: str) -> None:
        """Refuse an exchange beside one of another thread: on another rank it might come first."""
        me, caller = threading.current_thread(), self._caller
        if me is self.thread or me is self._finisher.thread:
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
            if not any(map(_is_open, self._background[thread])):
                del self._background[thread]
            elif not _ordered(me, thread):
                return thread
        return None

    def look_ahead(self, moving: Runnable) -> None:
        """Called by the exchange that is under way when it is prepared: the next may be, too."""
        with self._lock:
            self._moving = moving
            self._prepare_next()

    def _prepare_next(self) -> None:
        """Have the next exchange prepared while one moves its data and another is finished."""
        if self._moving is None or self._preparing is not None or self._end is not None:
            return
        if not self._next:
            try:
                self._next.append(self._exchanges.get_nowait())
            except queue.Empty:
                return
        (following,) = self._next
        under_way = [each for each in (self._moving, self._finishing) if each is not None]
        if following is not None and all(map(following.may_run_beside, under_way)):
            # None if the interpreter ends: it is prepared when its turn comes.
            self._preparing = self._preparer.start(following.prepare_early)

    def _take_next(self) -> Any:
        """The next exchange, prepared if that has begun; None at the end.

        Raises:
            queue.Empty: there is none for some time.
        """
        with self._lock:
            self._moving = None
            preparing, self._preparing = self._preparing, None
            item = self._next.popleft() if self._next else _NOTHING
        if preparing is not None:
            preparing.result()
        return self._exchanges.get(timeout=IDLE_CHECK) if item is _NOTHING else item

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
            self._exchanges.put(None)

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
                item = self._take_next()
            except queue.Empty:
                if self._alive():
                    self._tidy_up()
                    continue
                break
            if item is None:
                break
            self._carry_out(item)
            del item  # it holds tensors
        self._wait_for_finisher()
        self._refuse_the_rest()
        self._preparer.shutdown()
        self._finisher.shutdown()
        with self._lock:
            left, self._direct = self._direct, set()
        for direct in left:
            direct.leave()  # nobody may wait for it any more, and its group would
        if self._link is not None:
            self._link.close(farewell=True)
        self._linger()

    def _linger(self) -> None:
        """Stay until operations that were left behind have ended, at the latest with their time
        limits, so that their connections are destroyed; not while the interpreter ends."""
        while reap() and not _exiting.wait(LOOK):
            pass

    def _tidy_up(self) -> None:
        """Nothing is to do: close what nobody needs any more."""
        forget_ended()
        if self._link is None or self._link.closed or self._direct:
            return
        if self._link.neighbour_left:
            # The neighbour on the other side learns of it in the same way.
            self._lost = f"one of ranks {self.members.others} has left the group"
            self._link.close(farewell=True)

    def _refuse_the_rest(self) -> None:
        """What was submitted at the last moment must end, too."""
        with self._lock:
            self._end = time.monotonic()
            late = [*self._next]
            self._next.clear()
            while not self._exchanges.empty():
                late.append(self._exchanges.get())
            for exchange in late:
                if exchange is not None:
                    self._refuse(exchange)

    def _refuse(self, exchange: Runnable) -> None:
        exchange.handle._end(PeerError("the process group has been destroyed"))

    def _carry_out(self, exchange: Runnable) -> None:
        finishing = self._finishing
        if exchange.looks_back or (
            finishing is not None and not exchange.may_run_beside(finishing)
        ):
            self._wait_for_finisher()
        del finishing
        error = _error_of(lambda: self._run_exchange(exchange))
        self._wait_for_finisher()  # exchanges end in their order
        if error is None and self._is_followed():
            with self._lock:
                self._finishing = exchange
            self._finished = self._finisher.start(lambda: self._end_exchange(exchange, None))
            if self._finished is not None:
                return
        self._end_exchange(exchange, error)
        error = None  # its traceback holds this frame, and with it the process group

    def _is_followed(self) -> bool:
        """Whether another exchange waits for its turn."""
        with self._lock:
            return bool(self._next) or not self._exchanges.empty()

    def _end_exchange(self, exchange: Runnable, error: BaseException | None) -> None:
        """Finish what has come, or not, and tell whoever waits."""
        link = self._link
        if error is None:
            assert link is not None
            error = _error_of(lambda: exchange.complete(link))
        # One that went well says nothing about connections that the next has lost meanwhile.
        if error is not None and self._lost is None and link is not None and link.closed:
            self._lost = str(error)
        exchange.handle.account.lost = self._lost is not None
        with self._lock:
            self._finishing = None
            self._prepare_next()  # may have waited for this one's memory
        exchange.handle._end(error)
        error = None

    def _wait_for_finisher(self) -> None:
        finished, self._finished = self._finished, None
        if finished is not None:
            finished.result()

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


class _Worker:
    """A thread of its own, from the first time that there is something to do."""

    def __init__(self, name: str) -> None:
        self.thread: threading.Thread | None = None
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[], None]) -> Future[None] | None:
        """Have it done; None if the interpreter ends, and with it all threads."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, self._name, self._begin)
        try:
            return self._pool.submit(work)
        except RuntimeError:
            return None

    def _begin(self) -> None:
        self.thread = threading.current_thread()

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _error_of(work: Callable[[], None]) -> BaseException | None:
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
