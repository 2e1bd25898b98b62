"""all_reduce and all_reduce_coalesced."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.algorithm import Algorithm
from thinwire.collectives.exchange import (
    Details,
    Exchange,
    describe_all,
    describe_compressors,
    describe_key,
    describe_residuals,
)
from thinwire.collectives.flat import algorithm_for, collective_for
from thinwire.collectives.footprint import Footprint, overlap
from thinwire.collectives.handle import Handle
from thinwire.collectives.hierarchical import Hierarchical
from thinwire.collectives.memory import guard
from thinwire.collectives.nodes import NodeLayout
from thinwire.collectives.options import SENDERS, Group, NodesGiven, Options, ReduceOp, Timeout
from thinwire.collectives.reduction import FlatTensors, Reduction
from thinwire.collectives.stream import in_stream
from thinwire.collectives.transport import Transport
from thinwire.compressors import Compressor, compressor_of
from thinwire.compressors.base import FLOATS, check_dense
from thinwire.compressors.compiling import uses_of
from thinwire.kernels import Key
from thinwire.kernels.compiling import KernelUse

log = logging.getLogger("thinwire")
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")  # of torch.distributed
COMPRESSED = ("SUM", "AVG", SENDERS)  # what a lossy compressor can be used with


def all_reduce(
    tensor: Tensor,
    compressor: Compressor | str,
    *,
    residual: Tensor | None = None,
    op: ReduceOp = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    collective: str = "auto",
    nodes: NodesGiven = None,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """Sum or average a tensor over the ranks of a group, compressed on the way, in place.

    All ranks of the group call this with the same arguments and their own tensors. Every rank ends
    with the same bits. When the call fails, tensor and residual are as before it.

    Args:
        tensor: float32, float64, float16 or bfloat16, of any shape and strides.
        compressor: a compressor or its spec, ``"topk:0.01"``.
        residual: what earlier calls left out, of the tensor's shape, float32 (float64 for a float64
            tensor), zero at first. It is added before compression and then holds what was not sent.
            With "twoshot", "sparse" and "hierarchical" it also holds what this rank, as the owner
            of a shard or region, did not send of the sum: summed over ranks nothing is lost.
        op: SUM or AVG, as a ``torch.distributed.ReduceOp`` or a name ("sum", "avg"), or "senders":
            the mean of each element over the ranks that sent it, zero where none did. Where all
            ranks send the same elements that is AVG. NoCompression without a residual takes every
            op and type that the backend takes.
        group: a process group; None is the default group. A group of one rank returns at once.
        async_op: return at once; the tensor and the residual belong to the call until the handle
            has ended. Calls of one group are carried out in the order they were made.
        collective: "gather", "summable", "twoshot", "sparse", "joint" or "hierarchical"; "auto"
            takes the one that moves the fewest bytes (see `thinwire.collectives.choose`), or
            "hierarchical" if `nodes` are given, and ``handle.collective`` says which.
        nodes: who shares a node, for "hierarchical": how many ranks per node (consecutive ones of
            the world), lists of ranks ``[[0, 1], [2, 3, 4]]``, a DeviceMesh of two dimensions, or
            `thinwire.Nodes`, which also says what is sent inside nodes. With one node its inner
            compressor does all; with one rank per node `compressor` does, through a flat
            collective.
        max_bytes: most extra memory that the call may take on this rank, as a number or "512MiB";
            by default what THINWIRE_MAX_BYTES says, else no limit. "gather" goes in rounds to stay
            below it; what cannot is refused before anything is sent.
        timeout: seconds after which ranks that do not answer make the call fail; by default the
            group's own.
        key: for compressors that draw random numbers; by default the number of the call.

    Returns:
        A handle, already ended unless `async_op`.

    Raises:
        MismatchError: ranks called with different arguments; all of them get this.
        PeerError: another rank died, did not answer in time or failed.
        MemoryLimitError: see `max_bytes`.

    Example:
        >>> import torch, torch.distributed as dist, thinwire as tw
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> gradient, residual = torch.ones(4), torch.zeros(4)
        >>> handle = tw.all_reduce(gradient, "topk:0.5", residual=residual, op="avg")
        >>> handle.is_completed(), gradient
        (True, tensor([1., 1., 1., 1.]))
        >>> dist.destroy_process_group()
    """
    options = Options.of(
        group, collective=collective, nodes=nodes, max_bytes=max_bytes, timeout=timeout
    )
    exchange = AllReduce(
        "all_reduce",
        [tensor],
        [residual],
        [compressor_of(compressor)],
        options,
        op=op,
        key=key,
        result=tensor,
    )
    return exchange.start(async_op)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    compressor: Compressor | str | Sequence[Compressor | str],
    *,
    residuals: Sequence[Tensor | None] | None = None,
    op: ReduceOp = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    collective: str = "auto",
    nodes: NodesGiven = None,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """`all_reduce` of several tensors in one exchange.

    Each tensor is compressed by itself, with its own residual; types may differ (not with
    "sparse"). The other arguments are those of `all_reduce`.

    Args:
        compressor: for all tensors, or a list with one for each. PowerSGD and ARCTopK share an
            exchange with each other and with "none". A NaN in one of the tensors makes all of them
            NaN, unless all are sent uncompressed.
    """
    tensors = list(tensors)
    compressors = _one_for_each(compressor, len(tensors))
    given = [None] * len(tensors) if residuals is None else list(residuals)
    if len(given) != len(tensors):
        raise ValueError(f"{len(given)} residuals for {len(tensors)} tensors")
    if not tensors:
        raise ValueError("all_reduce_coalesced needs at least one tensor")
    options = Options.of(
        group, collective=collective, nodes=nodes, max_bytes=max_bytes, timeout=timeout
    )
    exchange = AllReduce(
        "all_reduce_coalesced",
        tensors,
        given,
        compressors,
        options,
        op=op,
        key=key,
        result=tensors,
    )
    return exchange.start(async_op)


def _one_for_each(
    given: Compressor | str | Sequence[Compressor | str], count: int
) -> list[Compressor]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [compressor_of(given)] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} compressors for {count} tensors")
    return [compressor_of(each) for each in given]


class AllReduce(Exchange):
    """The exchange behind both calls, behind every reducer and every optimizer that exchanges.

    Args:
        name: of the call, for errors and logs.
        tensors, residuals: one residual, or None, for each tensor.
        compressors: of each tensor.
        details: more that ranks must agree in.

    Attributes:
        names: of the tensors, for errors; None for their places.
        shapes: where the tensors are flattened ones, those of the originals.
        recalled: what a joint compressor finds again in the next call, for each tensor.
    """

    names: Sequence[str] | None = None
    shapes: Sequence[torch.Size] | None = None
    recalled: Sequence[dict[str, Tensor]] | None = None

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        compressors: Sequence[Compressor],
        options: Options,
        *,
        op: ReduceOp = "avg",
        key: Key | None = None,
        result: Any = None,
        details: Details = (),
    ) -> None:
        self.compressors = compressors
        self._op = op_name(op)
        check_operands(self._op, compressors, tensors, residuals)
        check_writable(tensors, residuals)
        options.check(compressors, self._op)
        self._collective = options.collective
        if self._op not in COMPRESSED and self._collective not in ("auto", "summable"):
            raise ValueError(f"{self._op} goes through 'summable' only, not {self._collective!r}")
        if self._collective == "sparse" and len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError("'sparse' takes tensors of one type: call it once for each type")
        words, shown = describe_compressors(compressors, self.names), describe_all(tensors)
        what = f"{name} of {shown[:80]} with {words[:80]}"
        super().__init__(name, tensors, options, result=result, what=what)
        self._tensors, self._residuals = tensors, residuals
        self._nodes: NodeLayout | None = None
        if self.size == 1:
            return
        if options.nodes is not None:
            self._nodes = options.nodes.layout(self.group)
            check_operands(self._op, [self._nodes.inner] * len(tensors), tensors, residuals)
        # What is done, where that is not what was asked for.
        self._used_compressors, self._used_collective = compressors, self._collective
        if self._nodes is not None and self._nodes.flat:
            self._used_collective = "auto"
            if len(self._nodes.places) == 1:
                self._used_compressors = [self._nodes.inner] * len(tensors)
        # Payloads that add up are of the same elements on all ranks.
        chosen = any(each.leaves_out and not each.summable for each in compressors)
        self._senders = self._op == SENDERS and chosen
        if self._senders:
            self._used_collective = "gather"
        self._keys = [self.key(each, key) for each in self._used_compressors]
        self.details = (
            ("tensor", shown),
            ("compressor", words),
            ("op", self._op),
            ("collective", self._collective),
            ("residual", describe_residuals(residuals)),
            *describe_key(self._used_compressors, self._keys),
            *(() if self._nodes is None else self._nodes.details),
            *details,
        )

    def kernel_uses(self) -> list[KernelUse]:
        used = [*self._used_compressors, *(() if self._nodes is None else (self._nodes.inner,))]
        return uses_of(used, {tensor.dtype for tensor in self._tensors}, self.device)

    def footprint(self) -> Footprint | None:
        return Footprint([*self._tensors, *self._residuals])

    def prepare(self) -> None:
        self._flat = FlatTensors(
            self._tensors, self._residuals, self._used_compressors, self._keys, self.shapes
        )
        self._algorithm = self._chosen_algorithm(
            Reduction(
                self._flat.parts,
                1.0 / self.size if self._op in ("AVG", SENDERS) else 1.0,
                self.options.max_bytes,
                self.recalled,
                "SUM" if self._op in COMPRESSED else self._op,
                self._senders,
            )
        )
        self._algorithm.prepare()

    def _chosen_algorithm(self, reduction: Reduction) -> Algorithm:
        collective = self._used_collective
        if collective == "auto":
            collective = collective_for(reduction, self.size)
        self.handle.account.collective = collective
        if collective == "hierarchical":
            assert self._nodes is not None
            found = Hierarchical(reduction, self.rank, self.size, self._nodes)
            self._log_once(collective, f", nodes {self._nodes}, {found.between} between them")
            return found
        if collective != "gather":  # which goes in rounds, if it must
            guard(collective, reduction, self.size)
        self._log_once(collective, "" if self._nodes is None else f", nodes {self._nodes}")
        return in_stream(algorithm_for(collective, reduction, self.rank, self.size))

    def exchange(self, transport: Transport) -> None:
        algorithm = self._algorithm
        algorithm.exchange(transport)
        self.handle.account.finite = algorithm.finite
        self.handle.account.tensor_bytes = algorithm.reduction.sent
        if isinstance(algorithm, Hierarchical):
            self.handle.account.between_bytes = algorithm.between_bytes

    def finish(self) -> None:
        self._algorithm.finish()
        self._flat.write_back()

    def _log_once(self, collective: str, more: str) -> None:
        logged = self.channel.logged
        if (self.handle.what, collective) not in logged:
            logged.add((self.handle.what, collective))
            log.info("%s: %s over %d ranks%s", self.handle.what, collective, self.size, more)


def op_name(op: ReduceOp) -> str:
    """The name of a ReduceOp, or of what a user wrote for one."""
    if isinstance(op, str):
        name, known = op.upper(), (*OPS, SENDERS)
        if name in known:
            return name
        raise ValueError(f"op must be one of {', '.join(known).lower()}, got {op!r}")
    for name in OPS if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType) else ():
        if op == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(f"op must be a torch.distributed.ReduceOp or its name, got {op!r}")


def check_operands(
    op: str,
    compressors: Sequence[Compressor],
    tensors: Sequence[Tensor],
    residuals: Sequence[Tensor | None],
) -> None:
    """Refuse what would be wrong: no lossy compressor knows the smallest or the product."""
    for compressor, tensor, r in zip(compressors, tensors, residuals, strict=True):
        uncompressed = compressor.lossless and compressor.summable and r is None
        check_dense(type(compressor).__name__, tensor)
        if op not in COMPRESSED and not uncompressed:
            raise ValueError(
                f"{compressor} takes SUM and AVG, not {op}: use 'none' without a residual"
            )
        if op in ("AVG", SENDERS) and tensor.dtype not in FLOATS:
            raise TypeError(f"an average of {tensor.dtype} is not a {tensor.dtype}: use SUM")
        if not uncompressed:
            compressor.check_input(tensor, r)


def check_writable(tensors: Sequence[Tensor], residuals: Sequence[Tensor | None]) -> None:
    """Refuse tensors and residuals that cannot take a result."""
    given = [residual for residual in residuals if residual is not None]
    for each in [*tensors, *given]:
        if not each.is_contiguous() and any(
            n > 1 and step == 0 for n, step in zip(each.shape, each.stride(), strict=True)
        ):
            raise ValueError("several elements of the tensor share one place: clone() it first")
        if each.is_inference():
            raise ValueError(
                "an inference tensor cannot be changed by another thread: clone() it outside of "
                "torch.inference_mode() first"
            )
    for residual in given:
        if any(overlap(tensor, residual) for tensor in tensors):
            raise ValueError("a residual lies in the memory of its tensor: give it its own")
