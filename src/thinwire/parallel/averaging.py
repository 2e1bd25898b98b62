"""A wire whose driver gives it tensors by name, a call for each step."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.exchange import Details
from thinwire.collectives.handle import Account, Handle
from thinwire.compressors import JointCompressor
from thinwire.formatting import plural
from thinwire.parallel.configuration import Configuration
from thinwire.parallel.plan import Piece, PlannedExchange
from thinwire.parallel.replicas import ReplicaCheck
from thinwire.parallel.step import ExchangeStep, SkippedError, first_of
from thinwire.parallel.wire import Layout, Wire
from thinwire.policies.base import Measured, TensorInfo
from thinwire.torch_internals import is_dtensor


class AveragingWire(Wire):
    """Averages the tensors of a call, and keeps what has to be done after it.

    Compression and communication run on a thread of their own. What comes after a call is done by
    whoever waits for it first, or by the next call.
    """

    # Whether a call that fails must leave all residuals as they were: then what is sent compressed
    # comes last, and what takes several such exchanges is remembered when all of them have ended.
    _all_or_nothing = False

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self._open: AverageHandle | None = None  # of the last call, until all is done after it
        self._ended = time.perf_counter()  # the last call
        self._detached = False

    def detach(self) -> None:
        super().detach()
        self._detached = True

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later as if nothing had happened; see `Wire.state_dict`.

        The last call is waited for.
        """
        self._close(wait=True)  # with a scaler, what it has left out is only then remembered
        return super().state_dict()

    def _average(
        self, tensors: Mapping[str, Tensor], *, together: bool = False, async_op: bool = False
    ) -> "AverageHandle":
        """Average tensors over the group, in place; see `Reducer.average`."""
        self._close(wait=False)
        self._expect(tensors)
        step = AveragingStep(self)
        first = next(iter(tensors.values()))
        self._begin(step, first)
        try:
            if not step.errors:
                exchanges = self._planned(tensors, together)
                if self._all_or_nothing:
                    exchanges.sort(key=lambda planned: planned.compressed)
                    step.defers_commit |= sum(p.compressed for p in exchanges) > 1
                for planned in exchanges:
                    step.send(planned, tensors)
                self._check_averages(step, tensors)
        except Exception as error:
            if not step.handles:  # nobody has heard of this call
                self.step -= 1
                raise
            step.fail(error, first)
        handle = self._open = AverageHandle(self, step, list(tensors.values()))
        if not async_op:
            handle.wait()
        return handle

    def _step_details(self) -> Details:
        """What ranks must agree in, besides the tensors."""
        return ()

    def _expect(self, tensors: Mapping[str, Tensor]) -> None:
        """Have choices for these tensors."""
        new: dict[str, TensorInfo] = {}
        for name, tensor in tensors.items():
            known, like = self._tensors.get(name), self._parameters.get(name)
            if known is None or like is None:
                new[name] = TensorInfo(name, tensor.shape, tensor.dtype)
            elif _kind(like) != _kind(tensor):
                new[name] = known._replace(shape=tensor.shape, dtype=tensor.dtype)
        if not new:
            return
        if not self._tensors:
            self._configuration.check_exclude(tensors, "tensor")
        # Shape, type and device of a tensor, in the memory of one element.
        likes = {name: tensors[name].new_zeros(()).expand(info.shape) for name, info in new.items()}
        self._learn_tensors(new, likes)

    def _begin(self, step: "AveragingStep", tensor: Tensor) -> None:
        """Begin a step; a policy that fails here may not have failed on other ranks."""
        try:
            self._begin_step()
        except Exception as error:
            step.fail(error, tensor)
        step.step = self.step

    def _planned(self, tensors: Mapping[str, Tensor], together: bool) -> list[PlannedExchange]:
        """The exchanges of a call: those of a last bucket."""
        planner = self._planner("bucket" if together else "tensor", apart=self._all_or_nothing)
        pieces = [Piece(name, tensor.nbytes, tensor.dtype) for name, tensor in tensors.items()]
        exact = self._exact(pieces)
        plan = [planned._replace(exact=True) for planned in planner.add(exact, last=True)]
        plan += planner.add([piece for piece in pieces if piece not in exact], last=True)
        # What a policy may choose later must not end a training.
        units = [unit for planned in plan for unit in planned.units]
        for unit in units if together and self._choices.fixed else ():
            if isinstance(unit.compressor, JointCompressor):
                raise ValueError(
                    f"{unit.compressor} sees each tensor by itself: leave out together=True"
                )
        return plan

    def _exact(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those that no node may round, and that have an exchange of their own for it."""
        return []

    def _check_averages(self, step: "AveragingStep", tensors: Mapping[str, Tensor]) -> None:
        every = self._configuration.check_every
        if every and self.step % every == 0:
            check = ReplicaCheck(tensors, self._reducer.options, what="averages", driver=step)
            step.follow(check.start(async_op=True), set())

    def _close(self, wait: bool) -> None:
        """Do what comes after a call, once.

        Args:
            wait: for its exchanges; otherwise only if something depends on how they ended, the same
                on all ranks.
        """
        handle, self._open = self._open, None
        if handle is None:
            return
        step = handle.step
        if wait or step.defers_commit or self._choices.due(step.step):
            handle.wait_until_ended()
            before, self._ended = self._ended, step.ended
            self._reducer.ledger.add_seconds("waiting", step.waited)
            if step.errors:
                return
            self._reducer.ledger.fold()
            self._reducer.ledger.end_step()
            step.commit()
            measured = Measured(step.ended - before, step.window, step.waited, *step.totals())
            self._choices.end(step.step, measured)
        self._end_step()

    def _read_layout(self, given: Any) -> Layout:
        return []  # and no buckets


class AveragingStep(ExchangeStep):
    """The exchanges of one call.

    Attributes:
        ended: when the last exchange did.
        window: seconds from the call until somebody waited for it.
        waited: seconds that somebody waited.
    """

    def __init__(self, wire: AveragingWire) -> None:
        super().__init__(wire)
        self.details += wire._step_details()
        self.looks_back = wire._all_or_nothing
        self._began = self.ended = time.perf_counter()
        self._first_wait: float | None = None
        self.waited = 0.0

    def admit(self) -> None:
        super().admit()
        # What ended before is the same on all ranks: they all go on, or none of them.
        if self.looks_back and not self.all_finite():
            raise SkippedError("not sent: what was sent before it is not finite")

    @property
    def window(self) -> float:
        end = self.ended if self._first_wait is None else min(self._first_wait, self.ended)
        return end - self._began

    def note_wait(self, begin: float, end: float) -> None:
        """Somebody waited for the call."""
        if self._first_wait is None:
            self._first_wait = begin
        self.waited += end - begin


class AverageHandle(Handle):
    """Of all exchanges of a call: ends with the last of them, with the first error among them."""

    def __init__(self, wire: AveragingWire, step: AveragingStep, tensors: list[Tensor]) -> None:
        super().__init__(tensors, f"average of {plural(len(tensors), 'tensor')}")
        self.step = step
        self._averaging = wire
        self._missing = len(step.handles)
        self._counting = threading.Lock()
        if len(step.handles) == 1:
            self.account = step.handles[0].account
        for handle in step.handles:
            handle.when_ended(self._one_ended)

    def wait(self, timeout: float | None = None) -> None:
        begin = time.perf_counter()
        try:
            super().wait(timeout)
        finally:
            self.step.note_wait(begin, time.perf_counter())
            if self.is_completed() and self._averaging._open is self:
                self._averaging._close(wait=True)

    def _one_ended(self, handle: Handle) -> None:
        with self._counting:
            self._missing -= 1
            if self._missing:
                return
        step = self.step
        step.wait()  # notes the errors
        step.ended = time.perf_counter()
        if len(step.handles) > 1:
            _add_up([each.account for each in step.handles], self.account)
        self._end(first_of(step.errors) if step.errors else None)


def _add_up(accounts: list[Account], total: Account) -> None:
    """What several exchanges came to."""
    total.collective = "+".join(dict.fromkeys(a.collective for a in accounts if a.collective))
    for account in accounts:
        total.bytes_sent += account.bytes_sent
        total.bytes_received += account.bytes_received
        total.network_bytes += account.network_bytes
        total.between_bytes += account.between_bytes
        total.finite &= account.finite
        total.announced |= account.announced
        total.lost |= account.lost
        for kind, seconds in account.seconds.items():
            total.seconds[kind] = total.seconds.get(kind, 0.0) + seconds


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def check_tensors(tensors: Any) -> None:
    """Refuse what cannot be averaged."""
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise TypeError(f"average takes tensors by name, {{'weight': tensor}}, got a {kind}")
    if not tensors:
        raise ValueError("average needs at least one tensor")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a string, got {name!r}")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if is_dtensor(tensor):
            raise TypeError(
                f"{name}: a DTensor, of which each rank holds a part: pass its .to_local() if each "
                "rank averages its own shard with its counterpart, as replicas of HSDP do"
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: a sparse tensor, call to_dense() first")


def check_together(who: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse what cannot be compressed as one."""
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
    if len(kinds) > 1:
        raise ValueError(f"{who}: tensors of one type and device, got {kinds}")
