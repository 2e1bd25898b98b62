"""The connections of one group, for exchanges of plain bytes and sums.

A link is a process group of its own over the same ranks, so that nothing here can get mixed up with
the collectives that the user's program runs at the same time.

The link of a subgroup connects some of the members alone. It belongs to the link of all: what it
moves counts there, and whoever loses one of them loses all, so that members who wait elsewhere
learn of it.

Everything waits in short steps, so that a thread that waits can be told to give up: a thread that
sits inside torch when the interpreter ends takes the process down with a crash.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

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


class BackendRefusedError(RuntimeError):
    """The backend does not take the type or the reduction, on all ranks alike."""


class Link:
    """Collectives on flat tensors; every method returns when this rank's part is complete.

    Args:
        members: who takes part.
        limit: how long to wait until all are connected.
        stopped: asked while waiting; when it says True, `GivenUpError` is raised.
        whole: the link of all, of which these are some.
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
        self._scratch: Tensor | None = None
        self.pins_memory = False  # what is received in memory of the host goes on to a device
        self._waits_in_steps = members.backend.name == "gloo"
        self._watch: Watch | None = None
        self._whole = whole
        self._subgroups: dict[tuple[int, ...], Link] = {}
        self._group: Any = None
        if made is None:
            self._connect(limit)
        else:
            self._group, self._watch = made.group, made.watch

    def subgroup(self, places: tuple[int, ...], limit: timedelta) -> "Link":
        """The connections of some members alone, in this order; made when first asked for.

        All of them must ask, and then wait for each other at most `limit`.
        """
        if places not in self._subgroups:
            whole = self.members
            members = replace(
                whole,
                name=f"{whole.name}/{'-'.join(map(str, places))}",
                ranks=tuple(whole.ranks[place] for place in places),
                index=places.index(whole.index),
            )
            try:
                self._subgroups[places] = Link(members, limit, self._stopped, whole=self)
            except PeerError:
                self.close()
                raise
        return self._subgroups[places]

    def all_gather(self, mine: Tensor, limit: timedelta) -> Tensor:
        """The members' tensors, all of one length, one after the other."""
        size = self.members.size
        out = self._room(mine, size * mine.numel())
        moved = (size - 1) * mine.nbytes
        self._count(moved, moved, 2 * (size - 1))
        self._finish(torch_internals.all_gather(self._group, out, mine, limit), limit)
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
        self._finish(
            torch_internals.all_to_all(self._group, out, outgoing, received, sent, limit), limit
        )
        return out

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
        self._finish(
            torch_internals.all_to_all(self._group, out, outgoing, received, sent, limit), limit
        )
        return rows

    def note_received(self, num_bytes: int) -> None:
        """How much `all_to_all_shorter` has received."""
        self._count(0, num_bytes, 0)

    def all_reduce(self, tensor: Tensor, op: Any, limit: timedelta) -> None:
        """The backend's own reduction, in place."""
        size = self.members.size
        moved = 2 * (size - 1) * tensor.nbytes // size
        self._count(moved, moved, 4 * (size - 1))
        self._finish(torch_internals.all_reduce(self._group, tensor, op, limit), limit)

    def broadcast(self, tensor: Tensor, root: int, limit: timedelta) -> None:
        """The root's content for all, in place; down a binomial tree."""
        size = self.members.size
        place = (self.members.index - root) % size
        children = _children(place, size)
        self._count(children * tensor.nbytes, tensor.nbytes if place else 0, children)
        self._finish(torch_internals.broadcast(self._group, tensor, root, limit), limit)

    def _room(self, like: Tensor, count: int) -> Tensor:
        """Memory to receive in, of a tensor's type and device."""
        return torch.empty(count, dtype=like.dtype, device=like.device, pin_memory=self.pins_memory)

    def scratch(self, like: Tensor) -> Tensor:
        """Memory of a tensor's length and type, valid until the next call of this.

        Kept from one exchange to the next: fresh memory of this size costs more than copying.
        """
        if like.nbytes > MOST_KEPT:
            return torch.empty_like(like)
        kept = self._scratch
        if kept is None or kept.device != like.device or kept.numel() < like.nbytes:
            kept = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
            self._scratch = kept
        return kept[: like.nbytes].view(like.dtype)

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
            self._whole.close(farewell)
            return
        self._group = None
        for subgroup in self._subgroups.values():
            subgroup._group = None
        if self._watch is not None:
            self._watch.close(farewell)
            self._watch = None

    def _count(self, sent: int, received: int, messages: int) -> None:
        self.bytes_sent += sent
        self.network_bytes += sent + (MESSAGE * messages if self._waits_in_steps else 0)
        self.bytes_received += received
        if self._whole is not None:
            self._whole._count(sent, received, messages)

    def _alarmed(self) -> bool:
        watch = self._watch if self._whole is None else self._whole._watch
        return watch is not None and watch.alarmed()

    def _finish(self, pending: Any, limit: timedelta) -> None:
        lost = None
        try:
            while not self._done(pending):
                if self._stopped():
                    end(self._group, pending)
                    raise GivenUpError
                if self._alarmed():
                    lost = self._reason("a process has ended", limit)
                    end(self._group, pending)
                    break
        except RuntimeError as error:
            if self._waits_in_steps and not _is_loss(error):
                raise BackendRefusedError(str(error)) from error
            lost = self._reason(str(error), limit)
        if lost is not None:
            # Outside of the except block: an error that is kept would keep the connections.
            del pending
            self.close()
            raise PeerError(lost)

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


def _is_loss(error: RuntimeError) -> bool:
    """Whether gloo complains of the network."""
    return any(sign in str(error) for sign in ("gloo/", "imed out", "timeout", "onnect"))


def _children(place: int, size: int) -> int:
    """How many others a place in a binomial tree sends to."""
    count, reach = 0, 1
    while reach < size:
        if place < reach and place + reach < size:
            count += 1
        reach *= 2
    return count
