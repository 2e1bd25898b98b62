"""reduce_scatter: the first half of two-shot, for callers that want one shard of the sum."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.handle import Handle
from thinwire.collectives.memory import guard, limit_of
from thinwire.collectives.ops import check, op_name, weight_of
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
from thinwire.collectives.twoshot import settle_shards, sum_shards, swap_shards
from thinwire.collectives.work import Part, Work, share
from thinwire.compressors import Compressor, local_of
from thinwire.kernels import Key


def reduce_scatter(
    output: Tensor,
    input: Tensor | Sequence[Tensor],
    compressor: Compressor | str,
    *,
    residual: Tensor | Sequence[Tensor | None] | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """The sum or average over ranks of what each has for this rank, compressed on the way.

    1. Draft a payload for every other rank's shard; meet (lengths); all-to-all.
    2. Output <- weight * (x + r of this rank as it is, plus the decoded shards of the others).
    3. Residual <- (x + r) - payload for the shards of others, zero for the own shard.

    (P - 1) / P payloads leave each rank.

    Args:
        output: where the own shard of the sum goes.
        input: one tensor of P times as many elements as each output, or a list of P tensors, of
            which the j-th goes to rank j; these may differ in length. It is not changed.
        residual: like `input`, float32 (float64 for float64): what earlier calls left out.
        op, group, async_op, max_bytes, timeout, key: as for `all_reduce`; SUM and AVG only.

    Returns:
        A handle, already ended unless `async_op`; its future holds `output`.
    """
    compressor = local_of(compressor)
    operation = op_name(op)
    if operation not in ("SUM", "AVG"):
        raise ValueError(f"reduce_scatter takes SUM and AVG, got {operation}")
    limit, span = limit_of(max_bytes), span_of(timeout)
    listed = not isinstance(input, Tensor)
    inputs = [input] if isinstance(input, Tensor) else list(input)
    residuals = _as_list(residual, len(inputs))
    check(operation, compressor, inputs, residuals)
    session = Session(group, [output, *inputs])
    size, me = session.size, session.rank
    if listed and len(inputs) != size:
        raise ValueError(f"input must be {size} tensors, one for each rank, got {len(inputs)}")
    mine = inputs[me] if listed else inputs[0]
    wanted = mine.numel() if listed else mine.numel() / size
    if output.numel() != wanted or output.dtype != mine.dtype:
        raise ValueError(
            f"output must have {wanted:g} elements of {mine.dtype}, one shard of the input, got "
            f"{output.numel()} of {output.dtype}"
        )
    handle = Handle(output, f"reduce_scatter of {describe_all(inputs)[:80]} with {compressor}")
    if size == 1:
        handle.account.collective = "none"
        output.detach().copy_(inputs[0].detach().reshape(output.shape))
        handle.end()
        return handle
    drawn = session.key(compressor, key)
    details = (
        ("input", describe_all(inputs)),
        ("compressor", str(compressor)),
        ("op", operation),
        ("residual", describe_residuals(residuals)),
        *describe_key(compressor, drawn),
    )

    def job(talk: Talk) -> None:
        handle.account.collective = "reduce_scatter"
        with talk.preparing():
            weight = weight_of(operation, size)
            work = Work.of(inputs, residuals, compressor, drawn, weight, changes=False, limit=limit)
            guard("reduce_scatter", work, size)
            shards = _shards(work.parts, size)
            finite = shards[me][0].finite
        sent, received, sound = swap_shards(talk, work, shards, "reduce_scatter", finite)
        with talk.clock("decode"):
            (total,) = sum_shards(work, shards[me], received)
            if sound:
                settle_shards(work, shards, sent)
                own = shards[me][0].r
                if own is not None:
                    own.zero_()
            if weight != 1:
                total.mul_(weight)
            output.detach().copy_(total.view_as(output))
            work.done()

    return session.begin(handle, Call("reduce_scatter", details), job, span, async_op)


def _as_list(residual: Tensor | Sequence[Tensor | None] | None, count: int) -> list[Tensor | None]:
    if residual is None:
        return [None] * count
    given: list[Tensor | None] = []
    given += [residual] if isinstance(residual, Tensor) else residual
    if len(given) != count:
        raise ValueError(f"{len(given)} residuals for {count} inputs")
    return given


def _shards(parts: list[Part], size: int) -> list[list[Part]]:
    if len(parts) > 1:
        return [[part] for part in parts]
    (part,) = parts
    return [[part.cut(*share(part.x.numel(), j, size), part.key.derive(j))] for j in range(size)]
