"""How members of a link come together and connect, within one time limit.

Everything that may block is done in a thread of its own: a store that does not answer and gloo
while it connects can be told nothing. Whoever waits here looks at the clock and at the pulse of the
others meanwhile, and leaves that thread behind if it must.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire import torch_internals
from thinwire.collectives.watch import Watch
from thinwire.errors import PeerError
from thinwire.torch_internals import Backend

LOOK = 0.05  # seconds between two looks at the clock
PULSE = 1.0  # seconds between two looks whether others are still there
FIRST_PULSE = 0.2  # seconds until the first
NEWS = 0.5  # seconds until one connection knows what another has noticed
COMPILING = 900.0  # seconds that others wait for a rank that compiles kernels, at most
LEAVING = 2.0  # seconds in which a rank that has left its group may still complete exchanges


class GivenUpError(Exception):
    """The waiting thread was told to give up."""


class Pulse:
    """Whether members of a gloo process group are still there, as its own connections know it.

    A rank that dies before it has connected here leaves no trace in the store. But the user's
    group is connected, and gloo notices when a process at the other end goes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Those of these global ranks whose process has ended, or has left the group."""
        group = self._group()
        if group is None:
            return []
        try:
            places = {rank: dist.get_group_rank(group, rank) for rank in ranks}
            if not torch_internals.connects_at_once(group):
                return []
        except (KeyError, RuntimeError, ValueError):  # this process has left the group itself
            return []
        return [
            rank
            for rank, place in places.items()
            if torch_internals.connection_closed(group, place)
        ]


@dataclass(frozen=True)
class Members:
    """Who takes part in a link, and what is needed to make it."""

    name: str  # the same on all members, different for every link over one store
    ranks: tuple[int, ...]  # global ranks, in the group's order
    index: int  # this process's place in `ranks`
    backend: Backend  # of the process group, for this kind of device
    pulse: Pulse  # of the process group

    @property
    def timeout(self) -> timedelta:
        """How long to wait for others, unless a call says otherwise."""
        return self.backend.timeout

    @property
    def size(self) -> int:
        return len(self.ranks)

    def own_store(self) -> Any:
        """Of this caller alone: who waits for a key keeps all others from the same connection."""
        shared = self.backend.store
        return shared.clone() if hasattr(shared, "clone") else shared

    @property
    def may_branch(self) -> bool:
        """Whether several threads can connect at a time: `own_store` is really one's own."""
        return hasattr(self.backend.store, "clone")

    def compiling_key(self, index: int) -> str:
        """Where a member tells that it compiles kernels: above zero for as long as it does."""
        return f"thinwire/compiling/{self.name}/{index}"

    @property
    def others(self) -> list[int]:
        """The global ranks of all but this one."""
        return [rank for i, rank in enumerate(self.ranks) if i != self.index]


class Connecting:
    """Connections in the making.

    Args:
        members: who takes part.
        watched: make the ring of watches, too.

    Attributes:
        group: a gloo group of the members, once there is one.
        watch: this member's part of the ring.
        missing: global ranks that have not come yet.
    """

    def __init__(self, members: Members, watched: bool) -> None:
        self.group: Any = None
        self.watch: Watch | None = None
        self.missing = members.others
        self._members, self._watched = members, watched
        self._error: Exception | None = None
        self._abandoned = self._finished = False
        self._lock = threading.Lock()
        self._end = self._latest = float("inf")
        self._limit = 0.0
        self._next_pulse = time.monotonic() + FIRST_PULSE
        self._gone: tuple[list[int], float] = ([], 0.0)  # who, and since when
        self._thread = threading.Thread(
            target=self._run, name=f"thinwire connecting {members.name}", daemon=True
        )
        self._thread.start()
        with _threads_lock:
            _threads[:] = [each for each in _threads if each.is_alive()] + [self._thread]

    def wait(self, limit: timedelta, interrupted: Callable[[], None]) -> None:
        """Return when all are connected.

        Args:
            limit: for all of it.
            interrupted: asked now and then; what it raises ends the waiting.

        Raises:
            PeerError: time is up, a member is gone, or gloo could not connect.
        """
        self._limit = limit.total_seconds()
        self._end = time.monotonic() + self._limit
        self._latest = self._end + COMPILING
        try:
            while self._thread.is_alive():
                self._thread.join(LOOK)
                if self._thread.is_alive():
                    interrupted()
                    self._check_pulse()
                    self._check_time(limit)
        except BaseException:
            self.abandon()
            raise
        self._check_result()

    def ready(self) -> bool:
        """Whether all are connected, without waiting.

        Raises:
            PeerError: a member is gone, or gloo could not connect.
        """
        if self._thread.is_alive():
            self._check_pulse()
            return False
        self._check_result()
        return True

    def abandon(self) -> None:
        """Leave it: the thread ends by itself, at once if it does not sit inside gloo."""
        with self._lock:
            self._abandoned = True
        if self._finished:
            self._discard()
        self._thread.join(2 * LOOK)

    def _discard(self) -> None:
        """Close what nobody will use; the destructor of a watch would wait for its neighbour."""
        watch, self.watch, self.group = self.watch, None, None
        if watch is not None:
            watch.close(farewell=False)

    def _check_result(self) -> None:
        if self._error is not None:
            gone, end = self._members.pulse.gone(self._members.others), time.monotonic() + NEWS
            while not gone and time.monotonic() < end:
                time.sleep(LOOK)
                gone = self._members.pulse.gone(self._members.others)
            raise (
                self._lost(gone)
                if gone
                else PeerError(
                    f"could not connect to all of ranks {self._members.ranks}: {self._error}"
                )
            ) from self._error

    def _check_pulse(self) -> None:
        now = time.monotonic()
        if now < self._next_pulse:
            return
        gone = self._members.pulse.gone(self._members.others)
        before, since = self._gone
        if not any(rank in before for rank in gone):
            before, since = gone, now
        elif now - since >= LEAVING:
            # Without those who left because of them.
            raise self._lost([rank for rank in gone if rank in before])
        self._gone, self._next_pulse = (before, since), now + (LEAVING if gone else PULSE)

    def _lost(self, gone: list[int]) -> PeerError:
        return PeerError(
            f"lost {named(gone)}: the process has ended, or has left the group, before it was "
            "connected"
        )

    def _check_time(self, limit: timedelta) -> None:
        if time.monotonic() > self._end:
            raise PeerError(
                f"no answer from {named(self.missing or self._members.others)} within "
                f"{limit.total_seconds():g} s: "
                f"{'not yet in this call' if self.missing else 'stopped while connecting'}"
            )

    # In the thread.

    def _run(self) -> None:
        try:
            self._connect()
        except Exception as error:
            self._error = error
        with self._lock:
            self._finished = not self._abandoned
        if not self._finished:
            self._discard()

    def _connect(self) -> None:
        members = self._members
        own = members.own_store()
        made = own.add(f"thinwire/made/{members.name}/{members.index}", 1)
        store = torch_internals.prefixed(f"thinwire/{members.name}/{made}", own)
        if not self._assemble(store, own):
            return

        def connect(name: str, place: int, size: int) -> Any:
            own_store = torch_internals.prefixed(name, store)
            devices = members.backend.network_devices
            limit = min(max(self._end - time.monotonic(), 1e-3), members.timeout.total_seconds())
            return torch_internals.gloo_group(
                own_store, place, size, devices, timedelta(seconds=limit)
            )

        group = connect("data", members.index, members.size)
        if self._watched:
            self.watch = Watch(connect, members.index, members.size)
        self.group = group

    def _assemble(self, store: Any, shared: Any) -> bool:
        """Return when all members have come; False if nobody waits for that any more.

        A member that compiles kernels has more time to come.
        """
        members = self._members
        store.set(f"here/{members.index}", "1")
        missing = [i for i in range(members.size) if i != members.index]
        pause = 1e-3
        while missing and not self._abandoned:
            missing = [i for i in missing if not store.check([f"here/{i}"])]
            self.missing = [members.ranks[i] for i in missing]
            if missing:
                if any(shared.add(members.compiling_key(i), 0) > 0 for i in missing):
                    self._have_patience()
                time.sleep(pause)
                pause = min(2 * pause, LOOK)
        return not self._abandoned

    def _have_patience(self) -> None:
        """Somebody compiles: the time limit begins when that has ended."""
        later = time.monotonic() + self._limit
        if later < self._latest:
            self._end = max(self._end, later)


# Threads that connect. One that was left behind inside gloo must be waited for when the interpreter
# ends, like those of channels.
_threads: list[threading.Thread] = []
_threads_lock = threading.Lock()


def join_all(end: float) -> None:
    """Wait for all threads that connect, until a time of the monotonic clock."""
    for thread in _threads:
        thread.join(max(0.0, end - time.monotonic()))


def named(ranks: Sequence[int]) -> str:
    """The ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
