"""The hook of a DistributedDataParallel model: what it does with each bucket.

    hook(bucket)       pieces -> plan -> exchanges on the group's own thread; backward goes on
    end of an exchange (on that thread) buckets whose tensors are all there are handed to DDP
    end of backward    wait for all exchanges, note what went wrong
    after DDP's end    raise it, as itself

The last two run as callbacks of the autograd engine, queued with the last bucket: the first before
DDP finishes its buckets, the second after it.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels
from thinwire.collectives.exchange import Refusal
from thinwire.collectives.handle import Handle
from thinwire.compressors import Compressor
from thinwire.errors import MismatchError, PeerError
from thinwire.feedback.base import Update
from thinwire.kernels import Key
from thinwire.parallel.plan import Piece, PlannedExchange, Planner
from thinwire.parallel.replicas import ReplicaCheck
from thinwire.parallel.wire import Layout, Wire
from thinwire.policies.base import Measured
from thinwire.reducer.exchange import Driver, UnitExchange
from thinwire.reducer.unit import Unit
from thinwire.reducer.units import UNCOMPRESSED
from thinwire.telemetry import span
from thinwire.torch_internals import queue_callback

log = logging.getLogger("thinwire")
ATTRIBUTE = "_thinwire_hook"  # of a DDP module that has one
REPLAYS = 2  # DDP has formed its final buckets after so many backward passes

GradBucket = Any  # torch.distributed.GradBucket has no types
Future = torch.futures.Future[Tensor]


class Scaler(Protocol):
    """A torch.amp.GradScaler, or the like."""

    def get_scale(self) -> float: ...


class RegisteredHook:
    """DDP takes one hook for ever: this one asks whether a wire is attached."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.current: DDPHook | None = None


def _call(
    registered: RegisteredHook,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP insists on this annotation
) -> torch.futures.Future[Tensor]:
    if registered.current is None:
        return allreduce_hook(registered.group, bucket)
    return registered.current(bucket)


class DDPHook:
    """Exchanges the buckets of a model, and tells its wire of each step.

    Args:
        wire: of the model.
        names: of the parameters, by their id.
        parameters: those that are trained, by name.
        planner: of the exchanges of a step.
        find_unused: whether parameters may be unused on all ranks.
        scaler: of the loss.
        check_every: compare the replicas every so many steps.
    """

    def __init__(
        self,
        wire: Wire,
        names: Mapping[int, str],
        parameters: Mapping[str, Tensor],
        planner: Planner,
        *,
        find_unused: bool = False,
        scaler: Scaler | None = None,
        check_every: int = 0,
    ) -> None:
        self._wire, self._names, self._parameters = wire, names, parameters
        self._planner, self._scaler = planner, scaler
        self._find_unused, self._check_every = find_unused, check_every
        self._reducer = wire._reducer
        self._replayed: Layout = []  # the buckets of the step that a loaded state comes from
        self._replays = 0
        self._layout: Layout = []  # the buckets of the last whole step
        self._sparse: set[str] = set()
        self._ended = time.perf_counter()  # the last backward pass
        self._registered: RegisteredHook | None = None
        self._undo: Callable[[], None] | None = None
        self._pass = self._new_pass()

    # Coming to a model and leaving it.

    def attach(self, ddp: DistributedDataParallel) -> None:
        registered: RegisteredHook | None = getattr(ddp, ATTRIBUTE, None)
        if registered is None:
            registered = RegisteredHook(ddp.process_group)
            try:
                ddp.register_comm_hook(registered, _call)
            except RuntimeError as error:
                if "comm_hook" not in str(error):
                    raise
                raise ValueError(
                    "this model has a communication hook already, and DDP takes only one: attach "
                    "to a DistributedDataParallel model without one"
                ) from error
            setattr(ddp, ATTRIBUTE, registered)
        if registered.current is not None:
            raise ValueError("this model has a wire already: call its detach() first")
        registered.current = self
        self._registered = registered

    def undo_on_detach(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def detach(self) -> None:
        if self._registered is not None:
            self._registered.current = None
            self._registered = None
        if self._undo is not None:
            self._undo()
            self._undo = None

    # Checkpoints keep the buckets of a step: so the next process plans the same exchanges.

    @property
    def layout(self) -> Layout:
        return self._replayed or self._layout

    def replay(self, layout: Layout) -> None:
        self._replayed, self._layout, self._replays = layout, layout, 0

    # A backward pass.

    def __call__(self, bucket: GradBucket) -> Future:
        """Called by DDP with each bucket; the future holds the averages."""
        buffer = bucket.buffer()
        future: Future = (
            torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda
            else torch.futures.Future()
        )  # fmt: skip
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        dense = buffer.to_dense() if buffer.is_sparse else None
        try:
            if bucket.index() == 0:
                self._begin()
        except Exception as error:
            self._fail(error, bucket.parameters()[0])
        self._pass.expect(_Bucket(future, buffer, dense, set(names)))
        try:
            if not self._pass.errors:
                gradients = bucket.gradients() if dense is None else [dense]
                self._receive(dict(zip(names, gradients, strict=True)), bucket, dense is not None)
        except Exception as error:
            self._fail(error, bucket.parameters()[0])
        if self._pass.errors:
            self._pass.give_up()
        if bucket.is_last() and not queue_callback(self._finish):
            # Not in a backward pass: a rank that has joined the others early.
            self._finish()
        return future

    def _new_pass(self) -> "BackwardPass":
        return BackwardPass(self._wire, self._scaler is not None, self._find_unused)

    def _begin(self) -> None:
        for handle in self._pass.handles:  # of a backward pass that was broken off
            handle.wait_until_ended()
        self._pass = self._new_pass()
        self._wire._begin_step(1.0 if self._scaler is None else float(self._scaler.get_scale()))
        self._planner.begin()
        if self._check_every and self._wire.step % self._check_every == 0:
            counts = queue_callback(lambda: None)  # else this rank has joined and is behind
            check = ReplicaCheck(self._parameters, self._reducer.options, counts)
            self._pass.follow(check.start(async_op=True), set())

    def _fail(self, error: Exception, tensor: Tensor) -> None:
        """This rank cannot go on with the pass: the others are told in their next exchange."""
        self._pass.errors.append(error)
        refusal = Refusal(error, tensor, self._reducer.options)
        self._pass.follow(refusal.start(async_op=True), set())

    def _receive(self, arrived: dict[str, Tensor], bucket: GradBucket, sparse: bool) -> None:
        here = self._pass
        here.arrived.update(arrived)
        pieces = [Piece(name, g.nbytes, g.dtype, sparse) for name, g in arrived.items()]
        here.pieces.update({piece.name: piece for piece in pieces})
        here.layout.append(list(arrived))
        if sparse:
            for piece in pieces:
                self._note_sparse(piece)
        due: list[PlannedExchange] = []
        if not self._replayed:
            due = self._planner.add(pieces, bucket.is_last())
        while here.replayed < len(self._replayed):  # those of the loaded buckets that are whole
            names = self._replayed[here.replayed]
            if not here.arrived.keys() >= set(names):
                break
            here.replayed += 1
            last = here.replayed == len(self._replayed)
            due += self._planner.add([here.pieces[name] for name in names], last)
        for planned in due:
            self._send(planned)

    def _send(self, planned: PlannedExchange) -> None:
        arrived, compressor = self._pass.arrived, planned.compressor
        units = [
            Unit(names, [arrived[name] for name in names], names[0] in planned.uncompressed)
            for names in planned.units
        ]
        exchange = self._reducer.start(
            units, UNCOMPRESSED if compressor is None else compressor, self._pass
        )
        self._pass.exchanges.append(exchange)
        self._pass.follow(exchange.handle, planned.names)

    def _note_sparse(self, piece: Piece) -> None:
        if piece.name not in self._sparse:
            self._sparse.add(piece.name)
            size = piece.num_bytes / 1e6
            log.warning(
                "%s has sparse gradients: it is sent dense, %.1f MB per step", piece.name, size
            )

    # The end of a backward pass.

    def _finish(self) -> None:
        begin = time.perf_counter()
        with span("wait"):
            self._pass.wait()
        end = time.perf_counter()
        ledger = self._reducer.ledger
        ledger.add_seconds("waiting", end - begin)
        ledger.fold()
        ledger.end_step()
        done, self._pass = self._pass, self._new_pass()
        before, self._ended = self._ended, end
        try:
            if not done.errors:
                self._commit(done)
                measured = Measured(end - before, begin - done.begin, end - begin, *done.totals())
                self._wire._choices.end(self._wire.step, measured)
        except Exception as error:
            done.errors.append(error)
        done.give_up()
        if not done.errors:
            return
        # With find_unused_parameters DDP itself would now wait for ranks that are lost.
        lost = self._find_unused and any(handle.account.lost for handle in done.handles)
        if lost or not queue_callback(lambda: _raise_first(done.errors)):
            _raise_first(done.errors)

    def _commit(self, done: "BackwardPass") -> None:
        """The whole step went well."""
        if done.defers_commit and done.all_finite():
            for exchange in done.exchanges:
                exchange.commit()
        if self._replayed:
            self._replays += 1
            if self._replays >= REPLAYS or done.layout == self._replayed:
                self._replayed = []
        else:
            self._layout = done.layout
        self._wire._end_step()


class SkippedError(PeerError):
    """Not sent, as an earlier exchange of the same pass failed on all ranks."""


@dataclass
class _Bucket:
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


class BackwardPass(Driver):
    """What has arrived, what was sent, what went wrong in one backward pass.

    When an exchange fails in a way that all ranks know of (they met, and disagreed or heard that
    one cannot go on), none of them sends the rest of the pass. So ranks that plan different numbers
    of exchanges come together again in the next one.
    """

    def __init__(self, wire: Wire, defers_commit: bool, skips_unused: bool) -> None:
        self.defers_commit, self.skips_unused = defers_commit, skips_unused
        self.begin = time.perf_counter()
        self.arrived: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self.layout: Layout = []
        self.replayed = 0  # buckets of a loaded layout that are whole
        self.exchanges: list[UnitExchange] = []
        self.handles: list[Handle] = []  # of the exchanges and of all else
        self.errors: list[BaseException] = []
        self._wire = wire
        self._buckets: list[_Bucket] = []
        self._failed = False
        self._lock = threading.Lock()

    def admit(self) -> None:
        if self._failed:
            raise SkippedError("not sent: an exchange before it failed")

    def inspect(self, unit: Unit, update: Update, compressor: Compressor, key: Key) -> None:
        self._wire._inspect(unit, update, compressor, key)

    def expect(self, bucket: _Bucket) -> None:
        with self._lock:
            self._buckets.append(bucket)

    def follow(self, handle: Handle, names: set[str]) -> None:
        """Have buckets completed with the exchanges of their tensors."""
        self.handles.append(handle)

        def ended(handle: Handle) -> None:
            error = handle.exception()
            if isinstance(error, MismatchError | PeerError) or handle.account.announced:
                self._failed = True
            self._complete(names)

        handle.when_ended(ended)

    def give_up(self) -> None:
        """Complete what is left: DDP must be able to end its pass."""
        self._complete(None)

    def _complete(self, names: set[str] | None) -> None:
        """These tensors are there; None for all."""
        with self._lock:
            for bucket in self._buckets:
                bucket.names -= bucket.names if names is None else names
            ready = [bucket for bucket in self._buckets if not bucket.names]
            self._buckets = [bucket for bucket in self._buckets if bucket.names]
        for bucket in ready:
            result = bucket.buffer
            if bucket.dense is not None:
                result = bucket.dense.to_sparse(bucket.buffer.sparse_dim())
            bucket.future.set_result(result)

    def wait(self) -> None:
        """Return when everything has ended; notes what failed."""
        for handle in self.handles:
            handle.wait_until_ended()
            error = handle.exception()
            if error is not None and not isinstance(error, SkippedError):
                self.errors.append(error)

    def totals(self) -> tuple[float, float, float]:
        """Seconds on the network and with compression, and bytes, of all exchanges."""
        accounts = [exchange.handle.account for exchange in self.exchanges]
        seconds = [account.seconds for account in accounts]
        network = sum(each.get("network", 0.0) for each in seconds)
        codec = sum(each.get("encode", 0.0) + each.get("decode", 0.0) for each in seconds)
        return network, codec, float(sum(account.network_bytes for account in accounts))

    def all_finite(self) -> bool:
        """Whether the optimizer will take this step: the same answer on all ranks, who have the
        same averages."""
        if not all(exchange.handle.account.finite for exchange in self.exchanges):
            return False
        # Uncompressed sums were not looked at.
        summed = [e for e in self.exchanges if e.handle.collective in ("summable", "none")]
        for piece in (piece for e in summed for unit in e.units for piece in unit.pieces):
            flat = piece.reshape(-1)
            if flat.dtype in (torch.float16, torch.bfloat16):
                flat = flat.float()
            if not kernels.on(flat.device).all_finite(flat, None):
                return False
        return True


def _raise_first(errors: list[BaseException]) -> None:
    """Raise the first error as itself; the others are noted."""
    first, *others = errors
    for other in others:
        if str(other) != str(first):
            first.add_note(f"also: {type(other).__name__}: {other}")
    raise first
