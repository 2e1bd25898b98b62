"""The wire of a loop of one's own: named tensors in, their averages out."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire import check
from thinwire.collectives.handle import Account, Handle
from thinwire.collectives.options import Group, NodesGiven, Timeout
from thinwire.compressors import Compressor, JointCompressor
from thinwire.feedback import Feedback
from thinwire.formatting import plural
from thinwire.parallel.configuration import CompressorGiven, Configuration, Scaler
from thinwire.parallel.plan import Piece, PlannedExchange, Planner
from thinwire.parallel.replicas import ReplicaCheck
from thinwire.parallel.step import ExchangeStep, first_of
from thinwire.parallel.wire import Layout, Wire
from thinwire.policies.base import Measured, TensorInfo
from thinwire.telemetry import Ledger
from thinwire.torch_internals import is_dtensor

if TYPE_CHECKING:
    from thinwire.parallel.checkpoint import Checkpoint


class Reducer(Wire):
    """Averages named tensors over a group, compressed, and remembers what was left out.

    All that `attach` does for a DistributedDataParallel model, for a training loop of one's own:
    each call of `average` is a step. Compression and communication run on a thread of their own.
    Errors come out of `average`, or of its handle.

    Args:
        compressor: a compressor or a policy that chooses one, or the spec of either ("topk:0.01",
            "auto", see docs/policies.md); a method or its spec ("dgc:0.001", see `thinwire
            methods`); or a function from a tensor's name to a compressor or its spec, or to None
            for uncompressed.
        feedback: what is remembered of what was left out: "none", "ef14", "ef21", "ef21m:0.1" or an
            object; "auto" is EF14, or none where nothing is lost or the compressor is unbiased (and
            TernGrad).
        collective, group, max_bytes, timeout: as for `thinwire.all_reduce`.
        nodes: as for `thinwire.all_reduce`: ``nodes=8`` for eight ranks per node adds tensors up
            inside nodes and compresses only what goes between them, which is also what `feedback`
            is about then.
        min_numel: tensors with fewer than two dimensions or with fewer elements than this are sent
            uncompressed, together; 0, the default, compresses all that is given.
        exclude: patterns of names, as in a shell ("embed*", "*.head.*"), of tensors that are sent
            uncompressed. Each must match something in the first call.
        scaler: the GradScaler, if there is one: residuals follow its scale and stay as they were
            in steps that it skips (at the cost of a second copy of the residuals). Average
            gradients before they are unscaled.
        optimizer: that takes the averages; needed by "dgc", which takes its momentum over. "auto"
            goes by it, and sparse or 1-bit tensors for one like Adam give a warning.
        seed: for compressors that draw random numbers; the same on all ranks.
        check_every: compare the averages of all ranks every so many steps; 0 for never.
        measure_every: steps between two measurements of the compression error; 0 for never.

    Attributes:
        step: calls of `average` so far.

    Example:
        >>> import torch, torch.distributed as dist, thinwire as tw
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> reducer = tw.Reducer("topk:0.01", feedback="ef14")
        >>> gradients = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
        >>> reducer.average(gradients).is_completed()
        True
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        compressor: CompressorGiven,
        *,
        feedback: Feedback | str = "auto",
        collective: str = "auto",
        nodes: NodesGiven = None,
        group: Group = None,
        min_numel: int = 0,
        exclude: str | Sequence[str] = (),
        scaler: Scaler | None = None,
        optimizer: Optimizer | None = None,
        max_bytes: int | str | None = None,
        timeout: Timeout = None,
        seed: int = 0,
        check_every: int = 0,
        measure_every: int = 100,
    ) -> None:
        everything = check.is_whole(min_numel) and min_numel == 0
        super().__init__(
            Configuration.of(
                compressor,
                group,
                feedback=feedback,
                collective=collective,
                nodes=nodes,
                min_numel=None if everything else min_numel,
                exclude=exclude,
                scaler=scaler,
                optimizer=optimizer,
                seed=seed,
                max_bytes=max_bytes,
                timeout=timeout,
                check_every=check_every,
                measure_every=measure_every,
            )
        )
        self._open: AverageHandle | None = None  # of the last call, until all is done after it
        self._ended = time.perf_counter()  # the last call
        self._detached = False
        self._take_momentum()

    def __repr__(self) -> str:
        return repr(self._reducer)

    @property
    def compressor(self) -> Compressor:
        """What tensors are sent with; that of a policy in the end, or at its strongest."""
        return self._reducer.compressor

    @property
    def feedback(self) -> Feedback:
        return self._reducer.feedback

    @property
    def ledger(self) -> Ledger:
        """Bytes and seconds of the exchanges that have ended."""
        self._reducer.ledger.fold()
        return self._reducer.ledger

    def detach(self) -> None:
        """Give the optimizer its momentum back, if that was taken over, and average no more.

        What is remembered stays here: to go on with it, load this reducer's state_dict into a new
        one.
        """
        super().detach()
        self._detached = True

    def average(
        self, tensors: Mapping[str, Tensor], *, together: bool = False, async_op: bool = False
    ) -> Handle:
        """Average tensors over the group, in place.

        All ranks pass the same names in the same order: best all tensors of a step in one call.
        Other calls may have other names; what is remembered of each tensor waits for its next
        turn. A policy that keeps numbers of each tensor starts anew when new names come.

        One compressor for all tensors makes one exchange; when that fails, the tensors and what is
        remembered of them are as before. Where a policy or `exclude` makes several exchanges, the
        one that failed has changed nothing, but those before it may have been averaged.

        Args:
            tensors: by name.
            together: compress them as one: the largest elements of all tensors, not of each. Where
                a policy chooses PowerSGD for a tensor, that is compressed by itself all the same.
            async_op: return at once; the tensors belong to the call until the handle has ended.
                Where a policy learns, all ranks wait for their handles in the same order.
        """
        if self._detached:
            raise ValueError("this reducer is detached: make a new one and load its state_dict()")
        _check_tensors(tensors, together)
        self._close(wait=False)
        self._expect(tensors)
        step = AveragingStep(self)
        first = next(iter(tensors.values()))
        self._begin(step, first)
        try:
            if not step.errors:
                for planned in self._planned(tensors, together):
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
        planner = Planner(self._compressor_of, "bucket" if together else "tensor")
        pieces = [Piece(name, tensor.nbytes, tensor.dtype) for name, tensor in tensors.items()]
        plan = planner.add(pieces, last=True)
        # What a policy may choose later must not end a training.
        for planned in plan if together and self._choices.fixed else ():
            if isinstance(planned.compressor, JointCompressor):
                raise ValueError(
                    f"{planned.compressor} sees each tensor by itself: leave out together=True"
                )
        return plan

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
            self.ledger.add_seconds("waiting", step.waited)
            if step.errors:
                return
            step.commit()
            measured = Measured(step.ended - before, step.window, step.waited, *step.totals())
            self._choices.end(step.step, measured)
        self._end_step()

    def _expected(self) -> None:
        return None  # a call has any names

    def _read_layout(self, given: Any) -> Layout:
        return []  # and no buckets

    def stateful(self, path: Any = None) -> "Checkpoint":
        """This reducer for torch.distributed.checkpoint: ``dcp.save({"reducer":
        reducer.stateful()}, ...)``.

        That loads into tensors which are there, so tensors must have been averaged once, also
        before loading; `state_dict` and `load_state_dict` do without.

        Args:
            path: of the checkpoint, for loading one that may come from another number of ranks.
        """
        if not self._tensors:
            raise ValueError(
                "this reducer does not know its tensors yet, and torch.distributed.checkpoint "
                "loads into tensors that are there: average them once before, or use "
                "state_dict() and load_state_dict()"
            )
        return super().stateful(path)


class AveragingStep(ExchangeStep):
    """The exchanges of one call of `Reducer.average`.

    Attributes:
        ended: when the last exchange did.
        window: seconds from the call until somebody waited for it.
        waited: seconds that somebody waited.
    """

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer)
        self._began = self.ended = time.perf_counter()
        self._first_wait: float | None = None
        self.waited = 0.0

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

    def __init__(self, reducer: Reducer, step: AveragingStep, tensors: list[Tensor]) -> None:
        super().__init__(tensors, f"average of {plural(len(tensors), 'tensor')}")
        self.step = step
        self._reducer = reducer
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
            if self.is_completed() and self._reducer._open is self:
                self._reducer._close(wait=True)

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


def _check_tensors(tensors: Any, together: bool) -> None:
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
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
    if together and len(kinds) > 1:
        raise ValueError(f"together: tensors of one type and device, got {kinds}")
