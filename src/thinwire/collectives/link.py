"""The connections of one group, for exchanges of plain bytes and sums.

A link is a process group of its own over the same ranks, so that nothing here can get mixed up with
the collectives that the user's program runs at the same time.

A link can have branches: connections of some members alone, or more of all. They belong to it: what
they move counts there unless another thread has them for itself, and whoever loses one of them
loses all, so that members who wait elsewhere learn of it. Threads may use branches side by side;
each of them is used by one thread at a time.

Everything waits in short steps, so that a thread that waits can be told to give up: a thread that
sits inside torch when the interpreter ends takes the process down with a crash.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import torch_internals
from thinwire.collectives.connect import Connecting, GivenUpError, Members
from thinwire.collectives.watch import Watch, end
from thinwire.errors import PeerError

STEP = timedelta(milliseconds=50)
MOST_KEPT = 1 << 28  # bytes
MESSAGE = 96  # bytes that gloo adds to a message: its own header and that of the answer, measured
CLOSED = "the connections were closed in another part of the exchange"


class BackendRefusedError(RuntimeError):
    """The backend does not take the type or the reduction, on all ranks alike."""


class Posted(NamedTuple):
    """An operation that is under way, and the group that carries it out."""

    group: Any
    pending: torch_internals.PendingOperation


class Link:
    """Collectives on flat tensors; every method returns when this rank's part is complete.

    Args:
        members: who takes part.
        limit: how long to wait until all are connected.
        stopped: asked while waiting; when it says True, `GivenUpError` is raised.
        whole: the link that this is a branch of.
        made: connections that are there already.
    """

    def __init__(
        self,
        members: Members,
        limit: timedelta,
        stopped: Callable[[], bool],
        whole: "Link | None" = None,
        made: Connecting | None = None,
    ) -> None:
        self.members = members
        self.bytes_sent = 0
        self.bytes_received = 0
        self.network_bytes = 0
        self._stopped = stopped
        self._scratch: list[Tensor] = []  # of all branches
        self.pins_memory = False  # what is received in memory of the host goes on to a device
        self._waits_in_steps = members.backend.name == "gloo"
        self._watch: Watch | None = None
        self._whole = whole
        self._why = ""  # the connections were lost
        self._counts = True  # what this moves counts for the whole, too
        self._root: Link = self if whole is None else whole._root
        self._branches: dict[str, Link] = {}
        self._lock = threading.Lock()
        self._group: Any = None
        if made is None:
            self._connect(limit)
        else:
            self._group, self._watch = made.group, made.watch

    def subgroup(self, places: tuple[int, ...], limit: timedelta) -> "Link":
        """The connections of some members alone, in this order; made when first asked for.

        All of them must ask, and then wait for each other at most `limit`.
        """
        whole = self.members
        ranks, index = tuple(whole.ranks[place] for place in places), places.index(whole.index)
        return self._branch("-".join(map(str, places)), ranks, index, limit)

    def beside(self, name: str, limit: timedelta, *, counts: bool = True) -> "Link":
        """More connections of all members, for what must not wait behind other data.

        Args:
            counts: what they move counts here, too.
        """
        return self._branch(name, self.members.ranks, self.members.index, limit, counts)

    def _branch(
        self,
        name: str,
        ranks: tuple[int, ...],
        index: int,
        limit: timedelta,
        counts: bool = True,
    ) -> "Link":
        if name not in self._branches:
            members = replace(
                self.members, name=f"{self.members.name}/{name}", ranks=ranks, index=index
            )
            try:
                branch = self._branches[name] = Link(members, limit, self._stopped, whole=self)
            except PeerError:
                self.close()
                raise
            branch._counts = counts
            if self.closed:  # meanwhile, by another thread
                branch._drop()
        return self._branches[name]

    def all_gather(self, mine: Tensor, limit: timedelta) -> Tensor:
        """The members' tensors, all of one length, one after the other."""
        size = self.members.size
        out = self._room(mine, size * mine.numel())
        moved = (size - 1) * mine.nbytes
        self._count(moved, moved, 2 * (size - 1))
        group = self._open_group()
        self._finish(limit, Posted(group, torch_internals.all_gather(group, out, mine, limit)))
        return out

    def all_to_all(
        self, outgoing: Tensor, sent: Sequence[int], received: Sequence[int], limit: timedelta
    ) -> Tensor:
        """sent[j] elements to member j, received[j] from it, in the members' order."""
        out = self._room(outgoing, sum(received))
        own, width = self.members.index, outgoing.dtype.itemsize
        others = self.members.size - 1
        self._count(
            width * (sum(sent) - sent[own]), width * (sum(received) - received[own]), others
        )
        # Not under a name: an error that is kept would keep the connections with it.
        self._finish(limit, self._post_all_to_all(out, outgoing, received, sent, limit))
        return out

    def all_to_all_both_ways(
        self, outgoing: Tensor, sent: Sequence[int], received: Sequence[int], limit: timedelta
    ) -> Tensor:
        """The same for long messages, none to oneself; all members must call this.

        gloo has one connection for a pair of members, and a receiver's word that it is ready waits
        there behind what it sends itself: whoever is late gets its data only when it has sent its
        own. So what goes up, to members of higher numbers, and what goes down have connections of
        their own (docs/decisions/0025).
        """
        out = self._room(outgoing, sum(received))
        width, others = outgoing.dtype.itemsize, self.members.size - 1
        self._count(width * sum(sent), width * sum(received), 2 * others)
        self._finish(limit, *self._post_both_ways(out, outgoing, received, sent, limit))
        return out

    def start_all_to_all(
        self,
        outgoing: Tensor,
        sent: Sequence[int],
        rooms: Sequence[int],
        head: int,
        limit: timedelta,
    ) -> "Transfer":
        """The same, without waiting: rooms[j] bytes for what member j sends, which may be less. Of
        these, `head` are zero before anything comes. `note_received` counts what did."""
        out = self._room(outgoing, sum(rooms))
        rows = list(torch.split(out, list(rooms)))
        for row in rows:
            row[:head].zero_()
        self._count(sum(sent), 0, 2 * (self.members.size - 1))
        return Transfer(self, limit, rows, self._post_both_ways(out, outgoing, rooms, sent, limit))

    def start_all_gather(self, mine: Tensor, limit: timedelta) -> "Transfer":
        """All members' tensors of one length, without waiting, on connections of their own."""
        lane, size = self.beside("ring", limit), self.members.size
        out = self._room(mine, size * mine.numel())
        moved = (size - 1) * mine.nbytes
        self._count(moved, moved, 2 * (size - 1))
        group = lane._open_group()
        posted = Posted(group, torch_internals.all_gather(group, out, mine, limit))
        return Transfer(self, limit, list(out.view(size, -1)), (posted,))

    def start_all_reduce(self, tensor: Tensor, op: Any, limit: timedelta) -> "Transfer":
        """The backend's own reduction in place, without waiting."""
        moved, messages = ring_sum(tensor.nbytes, self.members.size)
        self._count(moved, moved, messages)
        group = self._open_group()
        posted = Posted(group, torch_internals.all_reduce(group, tensor, op, limit))
        return Transfer(self, limit, [tensor], (posted,))

    def _post_both_ways(
        self,
        out: Tensor,
        outgoing: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        limit: timedelta,
    ) -> tuple[Posted, Posted]:
        size, me = self.members.size, self.members.index
        assert not sent[me] + received[me]
        down = self.beside("down", limit)
        higher, lower = [j > me for j in range(size)], [j < me for j in range(size)]
        from_lower, to_lower = sum(received[:me]), sum(sent[:me])
        up = self._post_all_to_all(
            out[:from_lower],
            outgoing[to_lower:],
            _where(lower, received),
            _where(higher, sent),
            limit,
        )
        return up, down._post_all_to_all(
            out[from_lower:],
            outgoing[:to_lower],
            _where(higher, received),
            _where(lower, sent),
            limit,
        )

    def _post_all_to_all(
        self,
        out: Tensor,
        outgoing: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        limit: timedelta,
    ) -> Posted:
        group = self._open_group()
        return Posted(
            group, torch_internals.all_to_all(group, out, outgoing, received, sent, limit)
        )

    @property
    def takes_shorter(self) -> bool:
        """Whether a message may be shorter than what its receiver has room for."""
        return self._waits_in_steps

    def all_to_all_shorter(
        self, outgoing: Tensor, sent: Sequence[int], room: int, head: int, limit: timedelta
    ) -> Tensor:
        """sent[j] bytes to member j, none to oneself; a row of `room` bytes for each other member,
        of which it has filled as many as it sent. The rest is zero up to `head`, then anything.

        Nobody has to know how much the others send: only that it is not more than `room`. gloo
        posts all messages at once, so this takes one hop, where its all-gather is a ring of P - 1.
        `note_received` has to be called when lengths are known.
        """
        me, others = self.members.index, self.members.size - 1
        out = self._room(outgoing, others * room)
        rows = out.view(others, room)
        rows[:, :head].zero_()
        received = [0 if j == me else room for j in range(others + 1)]
        self._count(sum(sent), 0, others)
        self._finish(limit, self._post_all_to_all(out, outgoing, received, sent, limit))
        return rows

    def note_received(self, num_bytes: int) -> None:
        """How much `all_to_all_shorter` has received."""
        self._count(0, num_bytes, 0)

    def all_reduce(self, tensor: Tensor, op: Any, limit: timedelta) -> None:
        """The backend's own reduction, in place."""
        moved, messages = ring_sum(tensor.nbytes, self.members.size)
        self._count(moved, moved, messages)
        group = self._open_group()
        self._finish(limit, Posted(group, torch_internals.all_reduce(group, tensor, op, limit)))

    def broadcast(self, tensor: Tensor, root: int, limit: timedelta) -> None:
        """The root's content for all, in place; down a binomial tree."""
        size = self.members.size
        place = (self.members.index - root) % size
        children = _children(place, size)
        self._count(children * tensor.nbytes, tensor.nbytes if place else 0, children)
        group = self._open_group()
        self._finish(limit, Posted(group, torch_internals.broadcast(group, tensor, root, limit)))

    def _room(self, like: Tensor, count: int) -> Tensor:
        """Memory to receive in, of a tensor's type and device."""
        return torch.empty(count, dtype=like.dtype, device=like.device, pin_memory=self.pins_memory)

    def scratch(self, like: Tensor) -> Tensor:
        """Memory of a tensor's length and type, the caller's own.

        Who is done with it gives it to `keep`, for the next: fresh memory of this size costs more
        than copying.
        """
        root = self._root
        with root._lock:
            kept = root._scratch.pop() if root._scratch else None
        if kept is None or kept.device != like.device or kept.numel() < like.nbytes:
            kept = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        return kept[: like.nbytes].view(like.dtype)

    def keep(self, scratch: Tensor) -> None:
        """Nobody needs this memory of `scratch` any more."""
        whole = torch.empty(0, dtype=torch.uint8, device=scratch.device)
        whole.set_(scratch.untyped_storage())
        root = self._root
        with root._lock:
            if sum(each.nbytes for each in root._scratch) + whole.nbytes <= MOST_KEPT:
                root._scratch.append(whole)

    @property
    def closed(self) -> bool:
        return self._group is None

    @property
    def watch(self) -> Watch | None:
        return self._watch

    @property
    def neighbour_left(self) -> bool:
        """Whether a member has left for good: nothing more can be exchanged."""
        return self._watch is not None and self._watch.neighbour_left

    def close(self, farewell: bool = False) -> None:
        """Close the connections: whoever waits for this rank learns of it at once."""
        if self._whole is not None:
            self._root.close(farewell)
            return
        self._drop()
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(farewell)

    def _drop(self) -> None:
        self._group = None
        for branch in list(self._branches.values()):
            branch._drop()

    def _open_group(self) -> Any:
        group = self._group
        if group is None:
            raise PeerError(self._root._why or CLOSED)
        return group

    def _count(self, sent: int, received: int, messages: int) -> None:
        with self._lock:
            self.bytes_sent += sent
            self.network_bytes += sent + (MESSAGE * messages if self._waits_in_steps else 0)
            self.bytes_received += received
        if self._whole is not None and self._counts:
            self._whole._count(sent, received, messages)

    def _alarmed(self) -> bool:
        watch = self._root._watch
        return watch is not None and watch.alarmed()

    def _finish(self, limit: timedelta, *posted: Posted) -> None:
        """Return when all these operations are complete.

        Raises:
            PeerError: one of them is not, and never will be; the connections are closed.
        """
        lost, interrupted = None, False
        try:
            for _, pending in posted:
                lost = lost or self._wait(pending, limit)
        except KeyboardInterrupt:  # of a caller's own thread, who may wait again
            interrupted = True
            raise
        finally:
            for group, pending in () if interrupted else posted:
                if not pending.is_completed():
                    end(group, pending)
        if lost is not None:
            # Not under a name: an error that is kept would keep the connections.
            del posted, group, pending
            self._root._why = self._root._why or lost
            self.close()
            raise PeerError(lost)

    def _wait(self, pending: Any, limit: timedelta) -> str | None:
        """None when an operation is complete, or why it never will be."""
        try:
            while not self._done(pending):
                if self._stopped():
                    raise GivenUpError
                if self._alarmed():
                    return self._reason("a process has ended", limit)
                if self.closed:
                    return self._root._why or CLOSED
        except RuntimeError as error:
            if self._waits_in_steps and not _is_loss(error):
                raise BackendRefusedError(str(error)) from error
            return self._reason(str(error), limit)
        return None

    def _done(self, pending: Any) -> bool:
        if not self._waits_in_steps:
            pending.wait()
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            return True
        try:
            pending.wait(STEP)
        except RuntimeError:
            if not pending.is_completed():
                return False
            pending.wait()  # may have ended well just after the step
        return True

    def _reason(self, error: str, limit: timedelta) -> str:
        others = self.members.others
        if "imed out" in error:
            seconds = limit.total_seconds()
            return f"no answer from one of ranks {others} within {seconds:g} s ({error})"
        return f"lost the connection to one of ranks {others} ({error})"

    def _connect(self, limit: timedelta) -> None:
        members = self.members
        if self._waits_in_steps:
            connecting = Connecting(members, watched=self._whole is None)  # one ring for all
            connecting.wait(limit, lambda: self._check_interruption(limit))
            self._group, self._watch = connecting.group, connecting.watch
            return
        try:
            self._group = dist.new_group(
                list(members.ranks),
                timeout=members.timeout,
                backend=members.backend.name,
                use_local_synchronization=True,
                group_desc=f"thinwire {members.name}",
            )
        except RuntimeError as error:
            raise PeerError(
                f"could not connect to all of ranks {members.ranks}: {error}"
            ) from error

    def _check_interruption(self, limit: timedelta) -> None:
        if self._stopped():
            raise GivenUpError
        if self._alarmed():
            raise PeerError(self._reason("a process has ended", limit))
        if self._whole is not None and self._root.closed:
            raise PeerError(self._root._why or CLOSED)


class Transfer:
    """Messages under way.

    Args:
        link: whose connections carry them.
        limit: how long to wait for them.
        rows: where those of each member arrive.
        posted: the operations.
    """

    def __init__(
        self, link: Link, limit: timedelta, rows: list[Tensor], posted: tuple[Posted, ...]
    ) -> None:
        self._link, self._limit, self._rows, self._posted = link, limit, rows, posted
        self._begun, self._arrived = time.perf_counter(), 0.0

    def wait(self) -> list[Tensor]:
        """What has come, when all of it has. Ctrl-C leaves it under way, to be waited for again."""
        self.look()
        try:
            self._link._finish(self._limit, *self._posted)
        except KeyboardInterrupt:
            raise
        except BaseException:
            self._posted = ()  # an error that is kept must not keep the connections
            raise
        self._posted = ()
        self._arrived = self._arrived or time.perf_counter()
        return self._rows

    def look(self) -> bool:
        """Whether all has come; notes the time if so."""
        if not self._arrived and all(pending.is_completed() for _, pending in self._posted):
            self._arrived = time.perf_counter()
        return bool(self._arrived)

    @property
    def span(self) -> tuple[float, float]:
        """From when to when it was under way, as far as somebody looked; after `wait`."""
        return self._begun, self._arrived

    def leave(self) -> None:
        """Nobody waits for it any more."""
        for group, pending in self._taken():
            if not pending.is_completed():
                end(group, pending)

    def _taken(self) -> tuple[Posted, ...]:
        posted, self._posted = self._posted, ()
        return posted


def ring_sum(num_bytes: int, size: int) -> tuple[int, int]:
    """Bytes that each of so many members sends in the backend's all-reduce, and the messages."""
    return 2 * (size - 1) * num_bytes // size, 4 * (size - 1)


def _is_loss(error: RuntimeError) -> bool:
    """Whether gloo complains of the network."""
    return any(sign in str(error) for sign in ("gloo/", "imed out", "timeout", "onnect"))


def _where(chosen: Sequence[bool], lengths: Sequence[int]) -> list[int]:
    return [length if there else 0 for there, length in zip(chosen, lengths, strict=True)]


def _children(place: int, size: int) -> int:
    """How many others a place in a binomial tree sends to."""
    count, reach = 0, 1
    while reach < size:
        if place < reach and place + reach < size:
            count += 1
        reach *= 2
    return count
