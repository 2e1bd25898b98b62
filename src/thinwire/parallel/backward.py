"""One backward pass of a DDP model, seen from its hook."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.handle import Handle
from thinwire.errors import MismatchError, PeerError
from thinwire.parallel.planner import Piece
from thinwire.reducer.exchange import Exchange

Future = torch.futures.Future[Tensor]


class SpoiledError(PeerError):
    """Not sent, as an earlier exchange of the same pass failed on all ranks."""


@dataclass
class Bucket:
    """A bucket that DDP waits for.

    Args:
        future: what DDP waits on.
        buffer: where the averages come to be.
        dense: a sparse buffer as a dense tensor, in which they come to be instead.
        names: tensors that are still under way.
    """

    future: Future
    buffer: Tensor
    dense: Tensor | None
    names: set[str]


class Pass:
    """What has arrived, what was sent, what went wrong.

    When an exchange fails in a way that all ranks know of (they met, and disagreed or heard that
    one cannot go on), none of them sends the rest of the pass. So ranks that plan different numbers
    of exchanges come together again in the next one.
    """

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.arrived: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self.buckets: list[list[str]] = []  # names, in the order of arrival
        self.replayed = 0  # buckets of a loaded layout that are whole
        self.exchanges: list[Exchange] = []
        self.handles: list[Handle] = []  # of the exchanges and of all else
        self.errors: list[BaseException] = []
        self._buckets: list[Bucket] = []
        self._spoiled = False
        self._lock = threading.Lock()

    def expect(self, bucket: Bucket) -> None:
        with self._lock:
            self._buckets.append(bucket)

    def gate(self) -> None:
        """Called before an exchange talks to anybody."""
        if self._spoiled:
            raise SpoiledError("not sent: an exchange before it failed")

    def follow(self, handle: Handle, names: set[str]) -> None:
        """Have buckets completed with the exchanges of their tensors."""
        self.handles.append(handle)

        def ended(handle: Handle) -> None:
            error = handle.exception()
            if isinstance(error, MismatchError | PeerError) or handle.account.told:
                self._spoiled = True
            self._complete(lambda bucket: bucket.names.difference_update(names))

        handle.when_ended(ended)

    def give_up(self) -> None:
        """Complete what is left: DDP must be able to end its pass."""
        self._complete(lambda bucket: bucket.names.clear())

    def wait(self) -> None:
        """Return when everything has ended; notes what failed."""
        for handle in self.handles:
            handle.ended()
            error = handle.exception()
            if error is not None and not isinstance(error, SpoiledError):
                self.errors.append(error)

    def came_to(self) -> tuple[float, float, float]:
        """Seconds on the network and with compression, and bytes, of all exchanges."""
        accounts = [exchange.handle.account for exchange in self.exchanges]
        seconds = [account.seconds for account in accounts]
        network = sum(each.get("network", 0.0) for each in seconds)
        codec = sum(each.get("encode", 0.0) + each.get("decode", 0.0) for each in seconds)
        return network, codec, float(sum(account.wire_bytes for account in accounts))

    def _complete(self, update: Callable[[Bucket], Any]) -> None:
        with self._lock:
            for bucket in self._buckets:
                update(bucket)
            ready = [bucket for bucket in self._buckets if not bucket.names]
            self._buckets = [bucket for bucket in self._buckets if bucket.names]
        for bucket in ready:
            result = bucket.buffer
            if bucket.dense is not None:
                result = bucket.dense.to_sparse(bucket.buffer.sparse_dim())
            bucket.future.set_result(result)


def queue_callback(callback: Callable[[], None]) -> bool:
    """Have the autograd engine call this when its backward pass ends; False if there is none."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def raise_first(errors: list[BaseException]) -> None:
    """Raise the first error as itself; the others are noted."""
    first, *others = errors
    for other in others:
        if str(other) != str(first):
            first.add_note(f"also: {type(other).__name__}: {other}")
    raise first
