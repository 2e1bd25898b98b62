"""all_reduce and all_reduce_coalesced."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.carry import carry, chosen, kind
from thinwire.collectives.choose import COLLECTIVES, suits
from thinwire.collectives.handle import Account, Handle
from thinwire.collectives.hierarchical import hierarchical
from thinwire.collectives.layered import between, guard_layers
from thinwire.collectives.memory import guard, limit_of
from thinwire.collectives.nodes import Layers, Nodes, layers_of
from thinwire.collectives.ops import check, check_writable, op_name, weight_of
from thinwire.collectives.start import (
    Group,
    Session,
    Timeout,
    describe_all,
    describe_key,
    describe_residuals,
    span_of,
)
from thinwire.collectives.talk import Call, Talk
from thinwire.collectives.work import Work
from thinwire.compressors import Compressor, compressor_of
from thinwire.kernels import Key

log = logging.getLogger("thinwire")


def all_reduce(
    tensor: Tensor,
    compressor: Compressor | str,
    *,
    residual: Tensor | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    collective: str = "auto",
    nodes: Nodes = None,
    inner: Compressor | str = "none",
    inner_feedback: str = "ef14",
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """Sum or average a tensor over all ranks of a group, compressed on the way, in place.

    All ranks end with the same bits. When the call fails, tensor and residual are as before it.

    Args:
        tensor: float32, float64, float16 or bfloat16, of any shape and strides.
        compressor: a compressor or its spec, ``"topk:0.01"``.
        residual: what earlier calls left out, of the tensor's shape, float32 (float64 for a float64
            tensor), zero at first. It is added before compression and then holds what was not sent.
            With "twoshot", "sparse" and "hierarchical" it also holds what this rank, as the owner
            of a shard or region, did not send of the sum: summed over ranks nothing is lost.
        op: SUM or AVG, as a ``torch.distributed.ReduceOp`` or a name ("sum", "avg"). NoCompression
            without a residual takes every op and type that the backend takes.
        group: a process group; None is the default group. A group of one rank returns at once.
        async_op: return at once; the tensor and the residual belong to the call until the handle
            has ended. Calls of one group are carried out in the order they were made.
        collective: "gather", "summable", "twoshot", "sparse", "joint" or "hierarchical"; "auto"
            takes the one that moves the fewest bytes (see `thinwire.collectives.choose`), or
            "hierarchical" if `nodes` are given, and ``handle.collective`` says which.
        nodes: who shares a node, for "hierarchical": how many ranks a node (consecutive ones of the
            world), lists of ranks ``[[0, 1], [2, 3, 4]]``, or a DeviceMesh of two dimensions,
            (nodes, ranks inside). None is what LOCAL_WORLD_SIZE says, which torchrun sets. With one
            node, `inner` does all; with one rank a node, `compressor` does, through a flat
            collective.
        inner: the compressor inside nodes: "none", "cast:bf16" or another one that sends all
            elements and draws nothing.
        inner_feedback: "ef14" keeps in the residual what `inner` rounds off, too; "none" does not.
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
    return start(
        "all_reduce",
        [tensor],
        compressor,
        [residual],
        tensor,
        op=op,
        group=group,
        async_op=async_op,
        collective=collective,
        nodes=nodes,
        inner=inner,
        inner_feedback=inner_feedback,
        max_bytes=max_bytes,
        timeout=timeout,
        key=key,
    )


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    compressor: Compressor | str,
    *,
    residuals: Sequence[Tensor | None] | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    collective: str = "auto",
    nodes: Nodes = None,
    inner: Compressor | str = "none",
    inner_feedback: str = "ef14",
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """`all_reduce` of several tensors in one exchange.

    Each tensor is compressed by itself, with its own residual; types may differ (not with
    "sparse"). The other arguments are those of `all_reduce`.
    """
    tensors = list(tensors)
    given = [None] * len(tensors) if residuals is None else list(residuals)
    if len(given) != len(tensors):
        raise ValueError(f"{len(given)} residuals for {len(tensors)} tensors")
    if not tensors:
        raise ValueError("all_reduce_coalesced needs at least one tensor")
    return start(
        "all_reduce_coalesced",
        tensors,
        compressor,
        given,
        tensors,
        op=op,
        group=group,
        async_op=async_op,
        collective=collective,
        nodes=nodes,
        inner=inner,
        inner_feedback=inner_feedback,
        max_bytes=max_bytes,
        timeout=timeout,
        key=key,
    )


def start(
    name: str,
    tensors: Sequence[Tensor],
    compressor: Compressor | str,
    residuals: Sequence[Tensor | None],
    result: Any,
    *,
    op: Any,
    group: Group,
    async_op: bool,
    collective: str,
    max_bytes: int | str | None,
    timeout: Timeout,
    key: Key | None,
    nodes: Nodes = None,
    inner: Compressor | str = "none",
    inner_feedback: str = "ef14",
    about: tuple[tuple[str, str], ...] = (),
    gate: Callable[[Talk], None] | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[Account], None] | None = None,
    shapes: Sequence[torch.Size] | None = None,
    recall: Sequence[dict[str, Tensor]] | None = None,
) -> Handle:
    """What both calls above do, with room for feedback around it.

    Args:
        about: more that ranks must agree in, as (what, in words).
        gate: called by the thread that carries out the exchange before anything else; what it
            raises ends the exchange on this rank. It may ask the other ranks something first.
        before, after: called by the thread that carries out the exchange, before it reads tensors
            and residuals and after it has written them. `after` is not called when the exchange
            failed. A group of one rank calls neither.
        shapes: where the tensors are flattened ones, those of the originals.
        recall: what a joint compressor finds again in the next call, for each tensor.
    """
    compressor = compressor_of(compressor)
    operation = op_name(op)
    check(operation, compressor, tensors, residuals)
    check_writable([*tensors, *residuals])
    limit, span = limit_of(max_bytes), span_of(timeout)
    collective = check_collective(collective, compressor, nodes, inner)
    if operation not in ("SUM", "AVG") and collective not in ("auto", "summable"):
        raise ValueError(f"{operation} goes through 'summable' only, not {collective!r}")
    if collective == "sparse" and len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError("'sparse' takes tensors of one type: call it once for each type")
    session = Session(group, tensors)
    handle = Handle(result, f"{name} of {describe_all(tensors)[:80]} with {compressor}")
    if session.size == 1:
        handle.account.collective = "none"
        handle.end()
        return handle
    layers: Layers | None = None
    details: tuple[tuple[str, str], ...] = ()
    if collective == "hierarchical":
        layers = layers_of(nodes, inner, inner_feedback, session.group)
        check(operation, layers.inner, tensors, residuals)
        details = layers.details
    carried, way = compressor, collective  # what is done, where that is not what was asked for
    if layers is not None and layers.flat:
        carried, way = (layers.inner if len(layers.places) == 1 else compressor), "auto"
    drawn = session.key(carried, key)
    call = Call(
        name,
        (
            ("tensor", describe_all(tensors)),
            ("compressor", str(compressor)),
            ("op", operation),
            ("collective", collective),
            ("residual", describe_residuals(residuals)),
            *describe_key(carried, drawn),
            *details,
            *about,
        ),
    )
    noted = session.channel.noted

    def job(talk: Talk) -> None:
        if gate is not None:
            gate(talk)
        with talk.preparing():
            if before is not None:
                before()
            weight = weight_of(operation, session.size)
            work = Work.of(
                tensors,
                residuals,
                carried,
                drawn,
                weight,
                limit=limit,
                shapes=shapes,
                recall=recall,
            )
            used = chosen(work, session.size) if way == "auto" else way
            inter = ""
            if layers is not None and used == "hierarchical":
                inter = between(work, layers)
                guard_layers(work, layers, session.rank, session.size)
            elif used != "gather":
                guard(kind(used, work), work, session.size)
        handle.account.collective = used
        if (handle.what, used) not in noted:
            noted.add((handle.what, used))
            where = f", nodes {layers}" if layers is not None else ""
            where += f", {inter} between them" if inter else ""
            log.info("%s: %s over %d ranks%s", handle.what, used, session.size, where)
        if layers is not None and used == "hierarchical":
            hierarchical(talk, work, layers, inter)
        else:
            carry(used, talk, work, operation)
        with talk.clock("decode"):
            work.done()
            if after is not None:
                after(handle.account)

    return session.begin(handle, call, job, span, async_op)


def refuse(error: Exception, tensor: Tensor, group: Group, timeout: Timeout) -> Handle:
    """Take part in the next exchange of the group only to say that this rank cannot go on."""
    session = Session(group, [tensor])
    handle = Handle(None, "refusal of an exchange")
    if session.size == 1:
        handle.end(error)
        return handle

    def job(talk: Talk) -> None:
        with talk.preparing():
            raise error

    return session.begin(handle, Call("refusal", ()), job, span_of(timeout), async_op=True)


def check_collective(
    collective: str, compressor: Compressor, nodes: Nodes = None, inner: Compressor | str = "none"
) -> str:
    """The collective that is meant; refuses one that a compressor cannot go through."""
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {collective!r}")
    given = "nodes" if nodes is not None else "inner" if str(inner) != "none" else None
    if given is not None and collective not in ("auto", "hierarchical"):
        raise ValueError(f"{given}= is for the collective 'hierarchical', not {collective!r}")
    if nodes is not None or str(inner) != "none":
        collective = "hierarchical"
    unsuited = None if collective == "auto" else suits(collective, compressor)
    if unsuited is not None:
        raise ValueError(f"{compressor} cannot go through {collective!r}: {unsuited}")
    return collective
