"""The hook of a DistributedDataParallel model: what it does with each bucket.

    hook(bucket)       pieces -> plan -> exchanges on the group's own thread; backward goes on
    end of an exchange (on that thread) buckets whose tensors are all there are handed to DDP
    end of backward    wait for all exchanges, note what went wrong
    after DDP's end    raise it, as itself

The last two run as callbacks of the autograd engine, queued with the last bucket: the first before
DDP finishes its buckets, the second after it.

Where nothing of a pass is compressed and ranks have agreed in that before, buckets are averaged
directly, as DDP itself would (docs/decisions/0033). Where a policy has no use for a pass either,
DDP itself carries it out (docs/decisions/0034).
"""

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.channel import process_group
from thinwire.collectives.direct import DirectPass, DirectSums
from thinwire.collectives.handle import Handle
from thinwire.compressors import Compressor, NoCompression
from thinwire.compressors.base import FLOATS
from thinwire.errors import MismatchError, PeerError
from thinwire.feedback import EF14, NoFeedback
from thinwire.feedback.base import Update
from thinwire.kernels import Key
from thinwire.parallel.hookless import HooklessPasses
from thinwire.parallel.optimizer_watch import OptimizerWatch
from thinwire.parallel.plan import Piece, PlannedExchange, Planner
from thinwire.parallel.replicas import ReplicaCheck
from thinwire.parallel.step import ExchangeStep, raise_first
from thinwire.parallel.wire import Layout, Wire
from thinwire.policies.base import Measured
from thinwire.reducer.unit import Unit
from thinwire.reducer.units import UNCOMPRESSED
from thinwire.telemetry import Parcel, Parts, parts_of, span
from thinwire.torch_internals import ignored_by_ddp, queue_callback, register_hook, reset_ddp

log = logging.getLogger("thinwire")
ATTRIBUTE = "_thinwire_hook"  # of a DDP module that has one
REPLAYS = 2  # DDP has formed its final buckets after so many backward passes
SETTLED = 2  # passes without compression in which ranks have met, before one in which they do not
COMPARED = 32  # passes after which they meet again
COMPARED_OF_DDP = 4 * COMPARED  # the same, where nothing of ours was added up

GradBucket = Any  # torch.distributed.GradBucket has no types
Future = torch.futures.Future[Tensor]


class RegisteredHook:
    """DDP takes one hook for ever: this one asks whether a wire is attached.

    It is kept on the DDP module, which torch.save, copy.deepcopy and whatever is built on them (an
    AveragedModel) copy with all its attributes. DDP gives a copy a reducer of its own, without a
    hook: so a copy finds None here.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.current: DDPHook | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _call(
    registered: RegisteredHook,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP insists on this annotation
) -> torch.futures.Future[Tensor]:
    if registered.current is None:
        return allreduce_hook(registered.group, bucket)
    return registered.current(bucket)


def hook_of(model: Any) -> "DDPHook | None":
    """The hook of the wire that is attached to a DDP model."""
    registered: RegisteredHook | None = getattr(model, ATTRIBUTE, None)
    return None if registered is None else registered.current


class DDPHook:
    """Exchanges the buckets of a model, and tells its wire of each step.

    Args:
        wire: of the model.
        everything: all parameters of the model, by name. DDP goes on sending those that were frozen
            after it was made.
        parameters: those of them that are trained.
        planner: of the exchanges of a step.
        find_unused: whether parameters may be unused on all ranks.
    """

    def __init__(
        self,
        wire: Wire,
        everything: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        planner: Planner,
        *,
        find_unused: bool = False,
    ) -> None:
        self.wire, self._everything, self._parameters = wire, everything, parameters
        self._names = {id(parameter): name for name, parameter in everything.items()}
        self._planner, self._find_unused = planner, find_unused
        self._check_every = wire._configuration.check_every
        self._reducer = wire._reducer
        self._replayed: Layout = []  # the buckets of the step that a loaded state comes from
        self._replays = 0
        self._layout: Layout = []  # the buckets of the last whole step
        self._sparse: set[str] = set()
        self._ended = time.perf_counter()  # the last backward pass
        self._sums: DirectSums | None = None
        self._parts: tuple[Layout, list[Parts]] = ([], [])  # of the tensors in these buckets
        self._hookless: HooklessPasses | None = None
        self._left: tuple[Layout, Handle] | None = None  # what DDP's own sums of these come to
        self._heard: DirectPass | None = None  # a comparison beside them, under way
        self._uncompressed = 0  # passes in a row, as far as they went well
        self._met = 0  # of these, before the last one in which ranks met
        self._registered: RegisteredHook | None = None
        self._watch: OptimizerWatch | None = None
        self._ddp: Callable[[], DistributedDataParallel | None] = lambda: None
        self._pass = self._new_pass()

    # Coming to a model and leaving it.

    def attach(self, ddp: DistributedDataParallel) -> None:
        registered: RegisteredHook | None = getattr(ddp, ATTRIBUTE, None)
        if registered is None:
            registered = RegisteredHook(ddp.process_group)
            try:
                register_hook(ddp, registered, _call)
            except RuntimeError as error:
                if "comm_hook" not in str(error):
                    raise
                raise ValueError(
                    "this model has a communication hook already, and DDP takes only one: attach "
                    "to a DistributedDataParallel model without one"
                ) from error
            setattr(ddp, ATTRIBUTE, registered)
        if registered.current is not None:
            raise ValueError(
                f"this model has a wire already, {registered.current.wire!r}: tw.wire_of(model) "
                "returns it, call its detach() first"
            )
        registered.current = self
        self._registered = registered
        self._ddp = weakref.ref(ddp)  # which holds this hook
        self._watch = OptimizerWatch(self._parameters, self.wire)

    def detach(self) -> None:
        self._go_through_hook()
        if self._registered is not None:
            self._registered.current = None
            self._registered = None
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    # Checkpoints keep the buckets of a step: so the next process plans the same exchanges. Its DDP
    # may have been made when other parameters were frozen: only those that are trained are kept.

    @property
    def layout(self) -> Layout:
        return self._replayed or self._trained(self._layout)

    def _trained(self, layout: Layout) -> Layout:
        trained = ([name for name in names if name in self._parameters] for names in layout)
        return [names for names in trained if names]

    def replay(self, layout: Layout) -> None:
        self._go_through_hook()
        self._replayed, self._layout, self._replays = layout, layout, 0

    # A backward pass.

    def __call__(self, bucket: GradBucket) -> Future:
        """Called by DDP with each bucket; the future holds the averages."""
        # Ctrl-C too is raised when DDP has ended its pass: in the middle of one DDP cannot go on.
        try:
            if bucket.index() == 0:
                self._begin()
        except BaseException as error:
            self._fail(error, bucket)
        direct = self._pass.direct is not None
        future = self._sum_directly(bucket) if direct else self._exchange(bucket)
        if bucket.is_last() and not queue_callback(self._finish):
            # Not in a backward pass: a rank that has joined the others early.
            self._finish()
        return future

    def _sum_directly(self, bucket: GradBucket) -> Future:
        """The future is complete at once: `_finish` waits for the sum before DDP looks at it."""
        buffer = bucket.buffer()
        try:
            if not self._pass.errors:
                self._pass.send_directly(buffer)
        except BaseException as error:
            self._fail(error, bucket)
        future: Future = torch.futures.Future()
        future.set_result(buffer)
        return future

    def _exchange(self, bucket: GradBucket) -> Future:
        buffer = bucket.buffer()
        future: Future = (
            torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda
            else torch.futures.Future()
        )  # fmt: skip
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        dense = buffer.to_dense() if buffer.is_sparse else None
        self._pass.expect(_Bucket(future, buffer, dense, set(names)))
        try:
            if not self._pass.errors:
                gradients = bucket.gradients() if dense is None else [dense]
                self._receive(dict(zip(names, gradients, strict=True)), bucket, dense is not None)
        except BaseException as error:
            self._fail(error, bucket)
        if self._pass.errors:
            self._pass.give_up()
        return future

    def _fail(self, error: BaseException, bucket: GradBucket) -> None:
        """This rank cannot go on with the pass."""
        here = self._pass
        known = isinstance(error, MismatchError | PeerError)
        known = known or self.wire._choices.is_known(error)
        unmet = not here.decided and self._uncompressed >= SETTLED and not known
        if here.direct is None and not unmet:
            here.fail(error, bucket.parameters()[0])
            return
        # The others add up, or may do so, without having met: only closed connections reach them.
        here.errors.append(error)
        here.lost = True
        self._direct_sums.close(error)

    def _new_pass(self) -> "BackwardPass":
        return BackwardPass(self.wire, self._find_unused)

    def _begin(self) -> None:
        self._end_interrupted_pass()
        if self._pass.begin:
            self._pass = self._new_pass()
        here, choices = self._pass, self.wire._choices
        here.begin = time.perf_counter()
        if self._watch is not None and self._watch.done:
            self._stop_watching()
        self.wire._begin_step()
        step = here.step = self.wire.step
        here.plain = self._is_plain(step)
        passes = self._uncompressed
        # Not by the step: ranks that differ in it must find each other. And not where policies ask
        # what a step takes: most take less.
        meets = passes < SETTLED or (passes - self._met >= COMPARED and not choices.due(step))
        if not here.plain:
            self._uncompressed = 0
        elif meets or not self._direct_sums.possible:
            self._met = passes
        else:
            here.go_directly(self._direct_sums)
        here.decided = True
        if here.direct is None:
            self._planner.begin()
        elif passes % choices.listens_every == 0:
            here.direct.compare(step, choices.doubts)
        if self._check_every and step % self._check_every == 0:
            counts = queue_callback(lambda: None)  # else this rank has joined and is behind
            check = ReplicaCheck(self._parameters, self._reducer.options, counts)
            here.follow(check.start(async_op=True), set())

    @property
    def _direct_sums(self) -> DirectSums:
        if self._sums is None:
            device = next(iter(self._parameters.values())).device
            self._sums = DirectSums(self._reducer.options, device)
        return self._sums

    def _is_plain(self, step: int) -> bool:
        """Whether a step does nothing that DDP would not do by itself; alike on all ranks."""
        choices = self.wire._choices
        return (
            self._nothing_waits
            and not choices.watches(step)
            and all(
                isinstance(choices.compressor_of(name), NoCompression | None)
                for name in self._parameters
            )
        )

    @property
    def _nothing_waits(self) -> bool:
        """Whether a step could be plain, as far as earlier ones have left nothing for it to do."""
        return (
            self._can_be_plain
            and not (self._replayed or self._sparse)
            and not self._reducer.states.remember()
        )

    @functools.cached_property
    def _can_be_plain(self) -> bool:
        options = self._reducer.options
        return (
            process_group(options.group).size() > 1
            and options.nodes is None
            and options.collective in ("auto", "summable")
            and isinstance(self._reducer.feedback, EF14 | NoFeedback)
            and all(
                parameter.dtype in FLOATS and parameter.device.type == "cpu"
                for parameter in self._parameters.values()
            )
        )

    # Passes without the hook.

    def _decide_on_the_next(self) -> None:
        """Whether the next pass goes through the hook; alike on all ranks."""
        step, passes, choices = self.wire.step + 1, self._uncompressed, self.wire._choices
        idle, idle_when_heard = choices.idle(step), choices.idle_when_heard(step)
        if (
            passes > SETTLED
            and (idle or idle_when_heard)
            and passes - self._met < COMPARED_OF_DDP
            and not (self._check_every and step % self._check_every == 0)
            and self._nothing_waits
            and self._direct_sums.possible
            and self._may_leave_out_hook
        ):
            assert self._hookless is not None
            if not idle:
                self._hookless.decide_later(self._hear_first)
                return
            if self._hookless.next or self._would_reduce_the_same:
                self._hookless.begin()
                return
        self._go_through_hook()

    @property
    def _would_reduce_the_same(self) -> bool:
        """Whether a reducer that is made now has the parameters of the first: it takes those that
        are trained at that moment, and somebody may have frozen some for a while."""
        ddp = self._ddp()
        ignored = set() if ddp is None else ignored_by_ddp(ddp)
        trained = {
            name
            for name, parameter in self._everything.items()
            if parameter.requires_grad and id(parameter) not in ignored
        }
        return trained == {name for names in self._layout for name in names}

    def _hear_first(self) -> None:
        """A forward pass begins, after a step in which ranks told each other their numbers."""
        self.wire._choices.hear()
        self._decide_on_the_next()

    @functools.cached_property
    def _may_leave_out_hook(self) -> bool:
        """Whether DDP by itself does all that was asked for: it has limits of its own, and a second
        reducer takes memory."""
        ddp, configuration, options = self._ddp(), self.wire._configuration, self._reducer.options
        asked = (options.timeout, options.max_bytes, configuration.scaler)
        if ddp is None or any(each is not None for each in asked):
            return False
        if not HooklessPasses.possible(ddp):
            return False
        first = next(iter(self._parameters.values()))
        self._hookless = HooklessPasses(
            ddp, first, self._count_pass_of_ddp, self._end_pass_of_ddp, self._hear
        )
        log.info("%s: steps in which it has nothing to do are left to DDP itself", self.wire.policy)
        return True

    def _go_through_hook(self) -> None:
        if self._hookless is not None:
            self._hookless.end()

    def _count_pass_of_ddp(self) -> None:
        """DDP itself carries out a pass."""
        ledger, layout, choices = self._reducer.ledger, self._layout, self.wire._choices
        listens = self._uncompressed % choices.listens_every == 0
        self._uncompressed += 1
        self.wire._skip_step()
        if self._left is None or self._left[0] is not layout:
            sizes = [sum(self._everything[name].nbytes for name in names) for names in layout]
            self._left = (layout, self._direct_sums.elsewhere(sizes))
        ledger.note_again(self._left[1], self._parts_of_layout())
        ledger.steps_of_ddp += 1
        if listens:
            self._heard = self._direct_sums.begin()
            self._heard.compare(self.wire.step, choices.doubts)
        else:
            self._decide_on_the_next()

    def _end_pass_of_ddp(self, waited: float) -> None:
        before, self._ended = self._ended, time.perf_counter()
        ledger = self._reducer.ledger
        ledger.add_seconds("waiting", waited)
        ledger.end_step()
        # Nobody has timed its sums: no policy learns from this step, but one may come to doubt.
        measured = Measured(self._ended - before, 0.0, waited, 0.0, 0.0, 0.0, 0.0)
        self.wire._choices.end(self.wire.step, measured)
        self._hear()
        self.wire._end_step()

    def _hear(self) -> None:
        """What ranks have told each other beside a pass of DDP's own."""
        heard = self._heard
        if heard is None:
            return
        try:
            heard.wait()
        except Exception:
            self._heard, self._uncompressed = None, 0
            self._go_through_hook()
            raise
        self._heard = None
        if heard.doubts:
            self.wire._choices.ask_next(self.wire.step)
        self._decide_on_the_next()

    def _end_interrupted_pass(self) -> None:
        """What Ctrl-C left under way: if all went well the other ranks have counted the step."""
        left = self._pass
        left.wait_until_ended()
        if not left.interrupted:
            return
        self._pass = self._new_pass()
        if any(handle.exception() is not None for handle in left.handles):
            self._uncompressed = 0
            return
        self._uncompressed += left.plain
        self._commit(left)
        now = time.perf_counter()
        before, self._ended = self._ended, now
        measured = Measured(now - before, now - left.begin, 0.0, *left.totals())
        self.wire._choices.end(self.wire.step, measured, left.asked)
        self._decide_on_the_next()
        self.wire._end_step()

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
        if self._replayed and bucket.is_last():  # of parameters that are not trained
            known = {name for names in self._replayed for name in names}
            others = [piece for name, piece in here.pieces.items() if name not in known]
            due += self._planner.add(others, True)
        for planned in due:
            here.send(planned, here.arrived)

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
        try:
            with span("wait"):
                self._pass.wait()
        except BaseException as interrupt:
            self._pass.interrupted = True
            self._pass.give_up()
            self._wait_before_the_next_forward()
            self._raise_when_ddp_has_ended([interrupt, *self._pass.errors], waits_in_vain=True)
            return
        end = time.perf_counter()
        ledger = self._reducer.ledger
        ledger.add_seconds("waiting", end - begin)
        if self._pass.direct is None:
            ledger.fold()
        ledger.end_step()
        done, self._pass = self._pass, self._new_pass()
        before, self._ended = self._ended, end
        # By the exchanges alone: what fails in the following may fail on this rank only.
        went_well = not done.errors
        self._uncompressed = self._uncompressed + 1 if done.plain and went_well else 0
        try:
            if went_well:
                self._commit(done)
                measured = Measured(end - before, begin - done.begin, end - begin, *done.totals())
                # Before what may fail on this rank alone: the others wait for its numbers.
                self.wire._choices.end(self.wire.step, measured, done.asked)
                self.wire._end_step()
        except Exception as error:
            done.errors.append(error)
        if went_well:
            self._decide_on_the_next()
        done.give_up()
        if not done.errors:
            return
        lost = done.lost or any(handle.account.lost for handle in done.handles)
        self._raise_when_ddp_has_ended(done.errors, waits_in_vain=lost)

    def _wait_before_the_next_forward(self) -> None:
        """The exchange that is under way still uses DDP's buffers: a new pass must not."""
        ddp = self._ddp()
        if ddp is None:
            return

        def wait(*_: Any) -> None:
            self._end_interrupted_pass()
            if self._hookless is not None and self._hookless.undecided:
                self._hear_first()  # torch calls no hook that is added while it calls hooks
            removable.remove()

        removable = ddp.register_forward_pre_hook(wait)

    def _raise_when_ddp_has_ended(self, errors: list[BaseException], waits_in_vain: bool) -> None:
        """Raise the first of these errors when DDP has completed its buckets.

        With find_unused_parameters DDP first waits for all ranks by itself. Where that may be in
        vain the error is raised now, and DDP is told to forget the pass.
        """
        ddp = self._ddp()
        if waits_in_vain and ddp is not None and _waits_for_ranks(ddp):
            reset_ddp(ddp)
            raise_first(errors)
        if not queue_callback(lambda: raise_first(errors)):
            raise_first(errors)

    def _commit(self, done: "BackwardPass") -> None:
        """The whole step went well."""
        if done.direct is not None:
            self._reducer.ledger.note_again(done.direct, self._parts_of_layout())
            return
        done.commit()
        if self._replayed:
            self._replays += 1
            if self._replays >= REPLAYS or self._trained(done.layout) == self._replayed:
                self._replayed = []
        else:
            self._layout = done.layout

    def _parts_of_layout(self) -> list[Parts]:
        """What a direct pass adds up: the same buckets as the pass before it."""
        layout, parts = self._parts
        if layout is not self._layout:
            names = tuple(name for bucket in self._layout for name in bucket)
            parcel = Parcel(names, [self._everything[name] for name in names])
            parts = parts_of([parcel], [UNCOMPRESSED])
            self._parts = (self._layout, parts)
        return parts


def _waits_for_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether DDP ends each pass with a reduction of its own."""
    return bool(ddp.find_unused_parameters) and not ddp.static_graph


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


class BackwardPass(ExchangeStep):
    """What has arrived, what was sent, what went wrong in one backward pass."""

    def __init__(self, wire: Wire, skips_unused: bool) -> None:
        super().__init__(wire, skips_unused)
        self.begin = 0.0  # when the first bucket came
        self.arrived: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self.layout: Layout = []
        self.replayed = 0  # buckets of a loaded layout that are whole
        self.interrupted = False  # by Ctrl-C, while exchanges were under way
        self.plain = False  # nothing of it is compressed
        self.decided = False  # whether ranks meet in it
        self.lost = False  # this rank has closed the connections
        self.direct: DirectPass | None = None  # if ranks do not meet in it either
        self._buckets: list[_Bucket] = []
        self._lock = threading.Lock()

    def inspect(self, unit: Unit, update: Update, compressor: Compressor, key: Key) -> None:
        self.confirm()
        super().inspect(unit, update, compressor, key)

    def confirm(self) -> None:
        if self.interrupted:
            raise InterruptedError("KeyboardInterrupt")  # the gradients are the user's again

    def go_directly(self, sums: DirectSums) -> None:
        """Ranks do not meet in this pass."""
        self.direct = sums.begin()
        self.handles.append(self.direct)

    @property
    def asked(self) -> bool:
        """Whether some rank wants to hear from all, as far as they have told each other."""
        return self.direct is not None and self.direct.doubts

    def send_directly(self, buffer: Tensor) -> None:
        """Begin to average a bucket in place."""
        assert self.direct is not None
        self.direct.average(buffer)

    def totals(self) -> tuple[float, float, float, float]:
        if self.direct is None:
            return super().totals()
        account = self.direct.account
        seconds = account.seconds
        sums = float(account.exchanges)
        return seconds["network"], seconds["encode"], float(account.network_bytes), sums

    def expect(self, bucket: _Bucket) -> None:
        with self._lock:
            self._buckets.append(bucket)

    def arrive(self, names: set[str]) -> None:
        self._complete(names)

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

    def wait_until_ended(self) -> None:
        for handle in self.handles:
            handle.wait_until_ended()
