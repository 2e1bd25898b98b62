"""The wire of a loop of one's own: named tensors in, their averages out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from thinwire import check
from thinwire.collectives.handle import Handle
from thinwire.collectives.options import Group, NodesGiven, Timeout
from thinwire.compressors import Compressor
from thinwire.feedback import Feedback
from thinwire.parallel.averaging import AveragingWire, check_tensors, check_together
from thinwire.parallel.configuration import CompressorGiven, Configuration, Scaler
from thinwire.telemetry import Ledger

if TYPE_CHECKING:
    from thinwire.parallel.checkpoint import Checkpoint


class Reducer(AveragingWire):
    """Averages named tensors over a group, compressed, and remembers what was left out.

    All that `attach` does for a DistributedDataParallel model, for a training loop of one's own:
    each call of `average` is a step. Compression and communication run on a thread of their own.
    Errors come out of `average`, or of its handle.

    Args:
        compressor: a compressor or a policy that chooses one, or the spec of either ("topk:0.01",
            "auto", see docs/guides/policies.md); a method or its spec ("dgc:0.001", see `thinwire
            methods`); or a function from a tensor's name to a compressor or its spec, or to None
            for uncompressed.
        feedback: what is remembered of what was left out: "none", "ef14", "ef21", "ef21m:0.1" or an
            object; "auto" is EF14, or none where nothing is lost or the compressor is unbiased (and
            TernGrad).
        collective, group, max_bytes, timeout: as for `thinwire.all_reduce`.
        nodes: as for `thinwire.all_reduce`: ``nodes=8`` for eight ranks per node adds tensors up
            inside nodes and compresses only what goes between them, which is also what `feedback`
            is about then.
        average: "world" is the mean over all ranks, "senders" that of each element over the ranks
            that sent it, where compressors leave elements out. What one of P ranks has sent is then
            not divided by P, so steps are larger (see docs/guides/ddp.md). "senders" goes through
            "gather", without `nodes`.
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
        average: str = "world",
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
                average=average,
                max_bytes=max_bytes,
                timeout=timeout,
                check_every=check_every,
                measure_every=measure_every,
            )
        )
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
        check_tensors(tensors)
        if together:
            check_together("together", tensors)
        return self._average(tensors, together=together, async_op=async_op)

    def _expected(self) -> Mapping[str, Tensor] | None:
        return None  # a call has any names

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
