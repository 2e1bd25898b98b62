"""The wire of one DDP model: what its hook does with each bucket.

    hook(bucket)       pieces -> plan -> exchanges on the group's own thread; backward goes on
    end of backward    wait for all exchanges, hand the results to DDP, remember what was left out
    after DDP's end    raise what went wrong, as itself

The last two run as callbacks of the autograd engine, queued with the last bucket: the first before
DDP finishes its buckets, the second after it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.handle import Handle
from thinwire.feedback import EF14
from thinwire.methods.reducer import DENSE, Exchange, Reducer
from thinwire.methods.unit import Unit
from thinwire.telemetry import span
from thinwire.training.measure import Measurer
from thinwire.training.planner import Order, Piece, Planner
from thinwire.training.replicas import start_check
from thinwire.training.summary import stats_of, table_of

log = logging.getLogger("thinwire")
REPLAYS = 2  # DDP has formed its final buckets after so many backward passes

Future = torch.futures.Future[Tensor]
GradBucket = Any  # torch.distributed.GradBucket has no types


class Wire:
    """What `thinwire.attach` returns: the connection of a model to the other ranks.

    Attributes:
        step: backward passes with an exchange so far.
        reducer: compressor, feedback and what is remembered of each tensor.
    """

    def __init__(
        self,
        reducer: Reducer,
        planner: Planner,
        names: Mapping[int, str],
        parameters: Mapping[str, Tensor],
        *,
        group: Any,
        scaler: Any = None,
        check_every: int = 0,
        measure_every: int = 0,
    ) -> None:
        self.reducer = reducer
        self.step = 0
        self._planner, self._names, self._parameters = planner, names, parameters
        self._group, self._scaler = group, scaler
        self._check_every, self._measure_every = check_every, measure_every
        self._measurer = Measurer(reducer.ledger)
        self._scale: float | None = None
        self._replay: list[Order] = []  # the plan of the step that a loaded state comes from
        self._replays = 0
        self._layout: list[Order] = []  # the plan of the last whole step
        self._writers: list[tuple[Any, int]] = []
        self._sparse: set[str] = set()
        self._socket: Any = None  # set by attach
        self._clear()

    def __repr__(self) -> str:
        state = "detached" if self._socket is None else f"step {self.step}"
        return f"<thinwire: {self.reducer!r}, {len(self._parameters)} tensors, {state}>"

    def detach(self) -> None:
        """Let the model exchange its gradients as DDP does by itself.

        What is remembered stays here: to attach anew and go on with it, load this wire's state_dict
        into the new one.
        """
        if self._socket is not None:
            self._socket.wire = None
            self._socket = None

    def stats(self) -> dict[str, Any]:
        """Bytes, seconds and errors so far, for each tensor and in total; see docs/ddp.md."""
        return stats_of(self)

    def summary(self, rows: int = 20) -> str:
        """The same as a table: the `rows` tensors that sent most, and the total."""
        return table_of(stats_of(self), rows)

    def log_to(self, writer: Any, every: int = 10) -> None:
        """Write totals to TensorBoard after every so many steps.

        Args:
            writer: a torch.utils.tensorboard.SummaryWriter, or whatever has its add_scalar.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"{type(writer).__name__} has no add_scalar")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every!r}")
        self._writers.append((writer, every))

    def reset(self) -> None:
        """Forget what was left out so far."""
        self.reducer.reset()

    # The hook.

    def carry(self, bucket: GradBucket) -> Future:
        """Called by DDP with each bucket; the future holds the averages."""
        buffer = bucket.buffer()
        future: Future = (
            torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda
            else torch.futures.Future()
        )  # fmt: skip
        try:
            if bucket.index() == 0:
                self._begin()
            self._receive(bucket, future)
        except Exception as error:
            self._errors.append(error)
        if bucket.is_last() and not self._queue(self._finish):
            self._finish()  # not in a backward pass: a rank that has joined the others early
        return future

    def _clear(self) -> None:
        self._arrived: dict[str, Tensor] = {}
        self._futures: list[tuple[Future, Tensor, Tensor | None]] = []
        self._exchanges: list[Exchange] = []
        self._checks: list[Handle] = []
        self._errors: list[BaseException] = []
        self._planner.begin()

    def _begin(self) -> None:
        for exchange in self._exchanges:  # of a backward pass that was broken off
            exchange.handle.ended()
        self._clear()
        self.step += 1
        if self._scaler is not None:
            scale = float(self._scaler.get_scale())
            if self._scale is not None and scale != self._scale:
                self.reducer.scale(scale / self._scale)
            self._scale = scale
        if self._check_every and self.step % self._check_every == 0:
            self._checks.append(start_check(self._parameters, self._group))

    def _receive(self, bucket: GradBucket, future: Future) -> None:
        buffer = bucket.buffer()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        if buffer.is_sparse:
            dense = buffer.to_dense()
            self._futures.append((future, buffer, dense))
            gradients = [dense]
            self._note_sparse(names[0], dense)
        else:
            self._futures.append((future, buffer, None))
            gradients = bucket.gradients()
        pieces = []
        for name, gradient in zip(names, gradients, strict=True):
            self._arrived[name] = gradient
            pieces.append(Piece(name, gradient.nbytes, gradient.dtype))
        due = self._planner.add(pieces, bucket.is_last())
        if self._replay:
            due = self._replayed()
        for order in due:
            self._send(order)

    def _replayed(self) -> list[Order]:
        """The orders of the loaded plan whose turn has come."""
        done = len(self._exchanges)
        due: list[Order] = []
        for order in self._replay[done:]:
            if not order.names <= self._arrived.keys():
                break
            due.append(order)
        return due

    def _send(self, order: Order) -> None:
        units = [Unit(names, [self._arrived[name] for name in names]) for names in order.units]
        # Not the first step, which may be special (EF21 sends it uncompressed).
        measured = self._measure_every and (self.step - 2) % self._measure_every == 0
        self._exchanges.append(
            self.reducer.start(
                units,
                DENSE if order.compressor is None else order.compressor,
                later=self._scaler is not None,
                measure=self._measurer if measured and order.compressor is not None else None,
            )
        )

    # The end of a backward pass.

    def _queue(self, callback: Any) -> bool:
        """Have the autograd engine call this when its backward pass ends, if there is one."""
        try:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(callback)
        except RuntimeError:
            return False
        return True

    def _finish(self) -> None:
        begin = time.perf_counter()
        with span("wait"):
            for handle in [*(exchange.handle for exchange in self._exchanges), *self._checks]:
                handle.ended()
                error = handle.exception()
                if error is not None:
                    self._errors.append(error)
        ledger = self.reducer.ledger
        ledger.add_seconds("waiting", time.perf_counter() - begin)
        ledger.fold()
        if not self._errors:
            self._settle()
        futures, errors = self._futures, self._errors
        self._clear()
        raised = errors and self._queue(lambda: _raise(errors))
        for future, buffer, dense in futures:
            if errors and not raised:
                future.set_exception(errors[0])  # type: ignore[arg-type]
            else:
                future.set_result(buffer if dense is None else _like(buffer, dense))

    def _settle(self) -> None:
        """The whole step went well."""
        if self._scaler is not None and self._all_finite():
            for exchange in self._exchanges:
                exchange.commit()
        plan = self._planner.orders
        if self._replay:
            self._replays += 1
            if self._replays >= REPLAYS or plan == self._replay:
                self._replay = []
        else:
            self._layout = plan
        for writer, every in self._writers:
            if self.step % every == 0:
                self._write(writer)

    def _all_finite(self) -> bool:
        """Whether the optimizer will take this step: the same answer on all ranks, who have the
        same averages."""
        if not all(exchange.handle.account.finite for exchange in self._exchanges):
            return False
        dense = [e for e in self._exchanges if e.handle.collective in ("summable", "none")]
        for piece in (piece for e in dense for unit in e.units for piece in unit.pieces):
            flat = piece.reshape(-1)
            if flat.dtype in (torch.float16, torch.bfloat16):
                flat = flat.float()
            if not kernels.on(flat.device).all_finite(flat, None):
                return False
        return True

    def _write(self, writer: Any) -> None:
        found = stats_of(self, norms=False)
        for name in ("ratio", "bytes_sent", "bytes_in", "relative_error"):
            value = found["total"][name]
            if value is not None:
                writer.add_scalar(f"thinwire/{name}", value, self.step)
        for kind, seconds in found["seconds"].items():
            writer.add_scalar(f"thinwire/seconds/{kind}", seconds, self.step)

    def _note_sparse(self, name: str, dense: Tensor) -> None:
        if name not in self._sparse:
            self._sparse.add(name)
            log.warning(
                "%s has sparse gradients: it travels dense, %.1f MB a step",
                name,
                dense.nbytes / 1e6,
            )

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later as if nothing had happened.

        Every rank saves its own: residuals differ. Tensors and plain values only, so that
        ``torch.load(..., weights_only=True)`` reads it. For torch.distributed.checkpoint see
        `stateful`.
        """
        layout = self._replay or self._layout
        return {
            "version": 1,
            "step": self.step,
            "scale": self._scale,
            "layout": [[list(unit) for unit in order.units] for order in layout],
            "dense": [order.compressor is None for order in layout],
            "reducer": self.reducer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state_dict` was taken.

        Args:
            state: of this rank. When the number of ranks has changed: the list of all ranks' states
                (the same on every rank). Each rank then goes on with the mean of what they
                remembered, so that what is yet to be sent stays the same for the average.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states:
            raise ValueError("no state to load")
        for one in states:
            if one.get("version") != 1:
                raise ValueError(
                    f"not the state of a wire of this version: version {one.get('version')!r}"
                )
        first = states[0]
        self.reducer.load_state_dict(
            first["reducer"] if isinstance(state, Mapping) else [s["reducer"] for s in states]
        )
        self.step, self._scale = first["step"], first["scale"]
        self._replay, self._replays = self._read_layout(first), 0
        self._layout = self._replay

    def _read_layout(self, state: Mapping[str, Any]) -> list[Order]:
        orders = []
        for units, dense in zip(state["layout"], state["dense"], strict=True):
            names = tuple(tuple(unit) for unit in units)
            unknown = [name for unit in names for name in unit if name not in self._parameters]
            if unknown:
                raise ValueError(f"the state has a parameter {unknown[0]!r}, the model has not")
            compressor = None if dense else self._planner.compressor_of(names[0][0])
            orders.append(Order(compressor, names))
        if {name for order in orders for name in order.names} != self._parameters.keys():
            return []  # taken before the first step, or of another model: plan anew
        return orders

    def remembered(self) -> dict[str, Tensor]:
        """The parameters of which something may be remembered."""
        if not isinstance(self.reducer.feedback, EF14):
            return dict(self._parameters) if self.reducer.feedback.parts else {}
        choose = self._planner.compressor_of
        return {n: p for n, p in self._parameters.items() if choose(n) is not None}

    def stateful(self, path: Any = None) -> Any:
        """This wire for torch.distributed.checkpoint: ``dcp.save({"wire": wire.stateful()}, ...)``.

        Args:
            path: of the checkpoint, for loading one that may come from another number of ranks.
        """
        from thinwire.training.checkpoint import Checkpoint

        return Checkpoint(self, path)


def _raise(errors: list[BaseException]) -> None:
    """Raise the first error as itself; the others are noted."""
    first, *others = errors
    for other in others:
        if str(other) != str(first):
            first.add_note(f"also: {type(other).__name__}: {other}")
    raise first


def _like(buffer: Tensor, dense: Tensor) -> Tensor:
    return dense.to_sparse(buffer.sparse_dim())
