"""The wire of one DDP model: what its hook does with each bucket.

    hook(bucket)       pieces -> plan -> exchanges on the group's own thread; backward goes on
    end of an exchange (on that thread) buckets whose tensors are all there are handed to DDP
    end of backward    wait for all exchanges, note what went wrong
    after DDP's end    raise it, as itself

The last two run as callbacks of the autograd engine, queued with the last bucket: the first before
DDP finishes its buckets, the second after it.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.reduce import refuse
from thinwire.collectives.start import Timeout
from thinwire.compressors import Compressor
from thinwire.feedback import EF14
from thinwire.feedback.base import Turn
from thinwire.kernels import Key
from thinwire.parallel.backward import Bucket, Future, Pass, queue_callback, raise_first
from thinwire.parallel.measure import Measurer
from thinwire.parallel.planner import Order, Piece, Planner
from thinwire.parallel.replicas import start_check
from thinwire.parallel.steering import Steering
from thinwire.parallel.summary import explanation_of, stats_of, table_of
from thinwire.policies.base import Decision, Measured, Policy
from thinwire.policies.layerwise import Layerwise
from thinwire.reducer.reducer import DENSE, Reducer
from thinwire.reducer.unit import Unit
from thinwire.telemetry import span

log = logging.getLogger("thinwire")
REPLAYS = 2  # DDP has formed its final buckets after so many backward passes

GradBucket = Any  # torch.distributed.GradBucket has no types
Look = Callable[[Unit, Turn, Compressor, Key], None]
Layout = list[list[str]]  # names of the tensors in each bucket, in the order of arrival


class Wire:
    """What `thinwire.attach` returns: the connection of a model to the other ranks.

    Attributes:
        step: backward passes with an exchange so far.
        reducer: compressor, feedback and what is remembered of each tensor.
        steering: the policy at work.
    """

    def __init__(
        self,
        reducer: Reducer,
        steering: Steering,
        granularity: str,
        names: Mapping[int, str],
        parameters: Mapping[str, Tensor],
        *,
        group: Any,
        timeout: Timeout = None,
        census: bool = False,
        scaler: Any = None,
        check_every: int = 0,
        measure_every: int = 0,
    ) -> None:
        self.reducer, self.steering = reducer, steering
        self.step = 0
        self._planner = Planner(steering.compressor_of, granularity)
        self._names, self._parameters = names, parameters
        self._group, self._timeout, self._scaler = group, timeout, scaler
        self._census = census  # whether parameters may be unused on all ranks
        self._check_every, self._measure_every = check_every, measure_every
        self._measurer = Measurer(reducer.ledger)
        self.on_detach: Callable[[], None] | None = None
        self._scale = 1.0  # of the loss, and with it of all that is remembered
        self._replay: Layout = []  # the buckets of the step that a loaded state comes from
        self._replays = 0
        self._layout: Layout = []  # the buckets of the last whole step
        self._ended = time.perf_counter()  # the last backward pass
        self._writers: list[tuple[Any, int]] = []
        self._sparse: set[str] = set()
        self._socket: Any = None  # set by attach
        self._pass = Pass()

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
            if self.on_detach is not None:
                self.on_detach()
                self.on_detach = None

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

    @property
    def policy(self) -> Policy:
        """That chooses each tensor's compressor."""
        return self.steering.policy

    @property
    def decisions(self) -> list[Decision]:
        """What the policy has changed, and why; the last thousand."""
        return list(self.steering.journal.decisions)

    def settings(self) -> Layerwise:
        """What each tensor travels with now, as a policy of its own, to be saved or attached."""
        return self.steering.settings()

    def observe(self, value: float) -> None:
        """Tell an `Accuracy` policy what a validation came to; on all ranks or some."""
        self.steering.chooser.observe(float(value))

    def explain(self) -> str:
        """In plain words: what travels how, why, and what it brings."""
        return explanation_of(self)

    # The hook.

    def carry(self, bucket: GradBucket) -> Future:
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
        self._pass.expect(Bucket(future, buffer, dense, set(names)))
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

    def _begin(self) -> None:
        for handle in self._pass.handles:  # of a backward pass that was broken off
            handle.ended()
        self._pass = Pass()
        self.step += 1
        self.steering.begin(self.step)
        self._planner.begin()
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale != self._scale:
            self.reducer.scale(scale / self._scale)
            self.steering.chooser.scale(scale / self._scale)
            self._scale = scale
        if self._check_every and self.step % self._check_every == 0:
            counts = queue_callback(lambda: None)  # else this rank has joined and is behind
            check = start_check(self._parameters, self._group, self._timeout, counts)
            self._pass.follow(check, set())

    def _fail(self, error: Exception, tensor: Tensor) -> None:
        """This rank cannot go on with the pass: the others are told in their next exchange."""
        self._pass.errors.append(error)
        self._pass.follow(refuse(error, tensor, self._group, self._timeout), set())

    def _receive(self, arrived: dict[str, Tensor], bucket: GradBucket, sparse: bool) -> None:
        here = self._pass
        here.arrived.update(arrived)
        pieces = [Piece(name, g.nbytes, g.dtype, sparse) for name, g in arrived.items()]
        here.pieces.update({piece.name: piece for piece in pieces})
        here.buckets.append(list(arrived))
        if sparse:
            for piece in pieces:
                self._note_sparse(piece)
        due: list[Order] = []
        if not self._replay:
            due = self._planner.add(pieces, bucket.is_last())
        while here.replayed < len(self._replay):  # those of the loaded buckets that are whole
            names = self._replay[here.replayed]
            if not here.arrived.keys() >= set(names):
                break
            here.replayed += 1
            last = here.replayed == len(self._replay)
            due += self._planner.add([here.pieces[name] for name in names], last)
        for order in due:
            self._send(order)

    def _send(self, order: Order) -> None:
        arrived, compressor = self._pass.arrived, order.compressor
        plain = order.plain
        units = [Unit(n, [arrived[name] for name in n], n[0] in plain) for n in order.units]
        exchange = self.reducer.start(
            units,
            DENSE if compressor is None else compressor,
            later=self._scaler is not None,
            gate=self._pass.gate,
            census=self._census,
            measure=self._measuring(compressor),
        )
        self._pass.exchanges.append(exchange)
        self._pass.follow(exchange.handle, order.names)

    def _measuring(self, compressor: Compressor | None) -> Look | None:
        """Who looks at what is about to be sent."""
        # Not the first step, which may be special (EF21 sends it uncompressed).
        due = self._measure_every and (self.step - 2) % self._measure_every == 0
        errors = self._measurer if due and compressor is not None else None
        watcher = self.steering.watcher(self.step)
        if watcher is None:
            return errors

        def look(unit: Unit, turn: Turn, used: Compressor, key: Key) -> None:
            watcher(unit, turn)
            if errors is not None:
                errors(unit, turn, used, key)

        return look

    # The end of a backward pass.

    def _finish(self) -> None:
        begin = time.perf_counter()
        with span("wait"):
            self._pass.wait()
        end = time.perf_counter()
        ledger = self.reducer.ledger
        ledger.add_seconds("waiting", end - begin)
        ledger.fold()
        done, self._pass = self._pass, Pass()
        before, self._ended = self._ended, end
        try:
            if not done.errors:
                self._settle(done)
                measured = Measured(end - before, begin - done.begin, end - begin, *done.came_to())
                self.steering.end(self.step, measured)
        except Exception as error:
            done.errors.append(error)
        done.give_up()
        if not done.errors:
            return
        # With find_unused_parameters DDP itself would now wait for ranks that are lost.
        lost = self._census and any(handle.account.lost for handle in done.handles)
        if lost or not queue_callback(lambda: raise_first(done.errors)):
            raise_first(done.errors)

    def _settle(self, done: Pass) -> None:
        """The whole step went well."""
        if self._scaler is not None and self._all_finite(done):
            for exchange in done.exchanges:
                exchange.commit()
        if self._replay:
            self._replays += 1
            if self._replays >= REPLAYS or done.buckets == self._replay:
                self._replay = []
        else:
            self._layout = done.buckets
        for writer, every in self._writers:
            if self.step % every == 0:
                self._write(writer)

    def _all_finite(self, done: Pass) -> bool:
        """Whether the optimizer will take this step: the same answer on all ranks, who have the
        same averages."""
        if not all(exchange.handle.account.finite for exchange in done.exchanges):
            return False
        dense = [e for e in done.exchanges if e.handle.collective in ("summable", "none")]
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

    def _note_sparse(self, piece: Piece) -> None:
        if piece.name not in self._sparse:
            self._sparse.add(piece.name)
            size = piece.num_bytes / 1e6
            log.warning(
                "%s has sparse gradients: it travels dense, %.1f MB a step", piece.name, size
            )

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later as if nothing had happened.

        Every rank saves its own: residuals differ. Tensors and plain values only, so that
        ``torch.load(..., weights_only=True)`` reads it. For torch.distributed.checkpoint see
        `stateful`.
        """
        return {
            "version": 1,
            "step": self.step,
            "scale": self._scale,
            "layout": [list(names) for names in self._replay or self._layout],
            "policy": self.steering.state(),
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
        layout = self._read_layout(first)  # refuses what does not fit before anything changes
        self.reducer.load_state_dict(
            first["reducer"] if isinstance(state, Mapping) else [s["reducer"] for s in states]
        )
        self.steering.load(first["policy"], first["step"])
        self.step, self._scale = first["step"], first["scale"] or 1.0
        self._replay, self._layout, self._replays = layout, layout, 0

    def _read_layout(self, state: Mapping[str, Any]) -> Layout:
        layout = [list(names) for names in state["layout"]]
        known = {name for names in layout for name in names}
        unknown = [name for names in layout for name in names if name not in self._parameters]
        if unknown:
            raise ValueError(
                f"the state has a parameter {unknown[0]!r} that the model has not, or does not "
                "train any more"
            )
        # Taken before the first step, or of another model: plan anew.
        return layout if known == self._parameters.keys() else []

    def remembered(self) -> dict[str, Tensor]:
        """The parameters of which something may be remembered."""
        if not isinstance(self.reducer.feedback, EF14):
            return dict(self._parameters) if self.reducer.feedback.parts else {}
        governed = self.steering.targets
        return {name: p for name, p in self._parameters.items() if name in governed}

    def stateful(self, path: Any = None) -> Any:
        """This wire for torch.distributed.checkpoint: ``dcp.save({"wire": wire.stateful()}, ...)``.

        Args:
            path: of the checkpoint, for loading one that may come from another number of ranks.
        """
        from thinwire.parallel.checkpoint import Checkpoint

        return Checkpoint(self, path)
