"""reduce_scatter: for callers that want one shard of the sum (`thinwire.collectives.scatter`)."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.allreduce import check_operands, check_writable, op_name
from thinwire.collectives.exchange import (
    Exchange,
    describe_all,
    describe_key,
    describe_residuals,
)
from thinwire.collectives.footprint import Footprint
from thinwire.collectives.handle import Handle
from thinwire.collectives.memory import guard
from thinwire.collectives.options import Group, Options, ReduceOp, Timeout
from thinwire.collectives.reduction import FlatTensors, Reduction
from thinwire.collectives.scatter import SCATTER, Scatter
from thinwire.collectives.stream import in_stream
from thinwire.collectives.transport import Transport
from thinwire.compressors import Compressor, LocalCompressor, local_of
from thinwire.compressors.compiling import uses_of
from thinwire.frames.payload import flat_view
from thinwire.kernels import Key
from thinwire.kernels.compiling import KernelUse


def reduce_scatter(
    output: Tensor,
    input: Tensor | Sequence[Tensor],
    compressor: Compressor | str,
    *,
    residual: Tensor | Sequence[Tensor | None] | None = None,
    op: ReduceOp = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """The sum or average over ranks of what each has for this rank, compressed on the way.

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
    options = Options.of(group, max_bytes=max_bytes, timeout=timeout)
    exchange = ReduceScatter(output, input, residual, local_of(compressor), options, op, key)
    return exchange.start(async_op)


class ReduceScatter(Exchange):
    def __init__(
        self,
        output: Tensor,
        input: Tensor | Sequence[Tensor],
        residual: Tensor | Sequence[Tensor | None] | None,
        compressor: LocalCompressor,
        options: Options,
        op: ReduceOp,
        key: Key | None,
    ) -> None:
        operation = op_name(op)
        if operation not in ("SUM", "AVG"):
            raise ValueError(f"reduce_scatter takes SUM and AVG, got {operation}")
        inputs = [input] if isinstance(input, Tensor) else list(input)
        residuals = _as_list(residual, len(inputs))
        check_operands(operation, [compressor] * len(inputs), inputs, residuals)
        check_writable([output], residuals)
        what = f"reduce_scatter of {describe_all(inputs)[:80]} with {compressor}"
        super().__init__("reduce_scatter", [output, *inputs], options, result=output, what=what)
        self._check_shapes(output, inputs, listed=not isinstance(input, Tensor))
        self._output, self._inputs, self._residuals = output.detach(), inputs, residuals
        self._compressor = compressor
        self._weight = 1.0 / self.size if operation == "AVG" else 1.0
        self._key = self.key(compressor, key)
        self.details = (
            ("input", describe_all(inputs)),
            ("compressor", str(compressor)),
            ("op", operation),
            ("residual", describe_residuals(residuals)),
            *describe_key([compressor], [self._key]),
        )

    def _check_shapes(self, output: Tensor, inputs: Sequence[Tensor], listed: bool) -> None:
        size = self.size
        if listed and len(inputs) != size:
            raise ValueError(f"input must be {size} tensors, one for each rank, got {len(inputs)}")
        mine = inputs[self.rank] if listed else inputs[0]
        wanted = mine.numel() if listed else mine.numel() / size
        if output.numel() != wanted or output.dtype != mine.dtype:
            raise ValueError(
                f"output must have {wanted:g} elements of {mine.dtype}, one shard of the input, "
                f"got {output.numel()} of {output.dtype}"
            )

    def alone(self) -> None:
        self._output.copy_(self._inputs[0].detach().reshape(self._output.shape))

    def kernel_uses(self) -> list[KernelUse]:
        return uses_of([self._compressor], [self._output.dtype], self.device)

    def footprint(self) -> Footprint | None:
        return Footprint([self._output, *self._inputs, *self._residuals])

    def prepare(self) -> None:
        self.handle.account.collective = SCATTER
        count = len(self._inputs)
        self._flat = FlatTensors(
            self._inputs, self._residuals, [self._compressor] * count, [self._key] * count
        )
        reduction = Reduction(self._flat.parts, self._weight, self.options.max_bytes)
        guard(SCATTER, reduction, self.size)
        # One tensor in equal parts, or as many tensors as there are ranks.
        shards = [[part] for part in reduction.parts] if len(reduction.parts) > 1 else None
        into, self._write_output = flat_view(self._output)
        self._algorithm = in_stream(Scatter(reduction, self.rank, self.size, shards, [into]))
        self._algorithm.prepare()

    def exchange(self, transport: Transport) -> None:
        self._algorithm.exchange(transport)
        self.handle.account.finite = self._algorithm.finite

    def finish(self) -> None:
        self._algorithm.finish()
        self._write_output()
        self._flat.write_back(tensors=False)


def _as_list(residual: Tensor | Sequence[Tensor | None] | None, count: int) -> list[Tensor | None]:
    if residual is None:
        return [None] * count
    given: list[Tensor | None] = []
    given += [residual] if isinstance(residual, Tensor) else residual
    if len(given) != count:
        raise ValueError(f"{len(given)} residuals for {count} inputs")
    return given
