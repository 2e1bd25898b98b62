"""all_gather and broadcast: what one rank has, for all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.collectives.algorithm import StreamAlgorithm, ToAll
from thinwire.collectives.allreduce import check_writable
from thinwire.collectives.channel import place_of
from thinwire.collectives.exchange import Exchange, describe, describe_all
from thinwire.collectives.footprint import Footprint, overlap
from thinwire.collectives.handle import Handle
from thinwire.collectives.memory import guard
from thinwire.collectives.message import LENGTH, Expected, max_message_bytes, unbundle
from thinwire.collectives.options import Group, Options, Timeout
from thinwire.collectives.reduction import FlatTensors, Reduction, cut
from thinwire.collectives.stream import in_stream
from thinwire.collectives.transport import Transport
from thinwire.compressors import Compressor, LocalCompressor, local_of
from thinwire.compressors.compiling import uses_of
from thinwire.frames.code import Extent
from thinwire.kernels import Key
from thinwire.kernels.compiling import KernelUse


def all_gather(
    output: Tensor | Sequence[Tensor],
    input: Tensor,
    compressor: Compressor | str,
    *,
    residual: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """The tensors of all ranks on all ranks, compressed on the way.

    Every rank ends with the same bits: in the place of its own tensor, too, stands what the others
    could decode of it.

    Args:
        output: one tensor of P times as many elements as each input, or a list of P tensors; the
            inputs may then differ in length.
        input: this rank's tensor. It is not changed.
        residual: what earlier calls left out of `input`.
        group, async_op, max_bytes, timeout, key: as for `all_reduce`.

    Returns:
        A handle, already ended unless `async_op`; its future holds `output`.
    """
    options = Options.of(group, max_bytes=max_bytes, timeout=timeout)
    exchange = AllGather(output, input, residual, local_of(compressor), options, key)
    return exchange.start(async_op)


class AllGather(Exchange):
    def __init__(
        self,
        output: Tensor | Sequence[Tensor],
        input: Tensor,
        residual: Tensor | None,
        compressor: LocalCompressor,
        options: Options,
        key: Key | None,
    ) -> None:
        compressor.check_input(input, residual)
        outputs = [output] if isinstance(output, Tensor) else list(output)
        check_writable(outputs, [residual])
        what = f"all_gather of {describe(input)} with {compressor}"
        super().__init__("all_gather", [input, *outputs], options, result=output, what=what)
        self._places = self._places_in(output, input)
        self._input, self._residual, self._compressor = input, residual, compressor
        self._key = self.key(compressor, key)
        self.details = (
            ("output", describe_all(self._places)),
            ("compressor", str(compressor)),
        )

    def _places_in(self, output: Tensor | Sequence[Tensor], input: Tensor) -> list[Tensor]:
        """Where each rank's tensor goes."""
        size = self.size
        if isinstance(output, Tensor):
            if output.numel() != size * input.numel() or not output.is_contiguous():
                raise ValueError(
                    f"output must be contiguous with {size} x {input.numel()} elements, got "
                    f"{describe(output)}"
                )
            flat, n = output.detach().view(-1), input.numel()
            places = [flat[i * n : (i + 1) * n] for i in range(size)]
        else:
            places = [place.detach() for place in output]
        if len(places) != size:
            raise ValueError(f"output must be {size} tensors, one for each rank, got {len(places)}")
        own = places[self.rank]
        if own.numel() != input.numel():
            raise ValueError(
                f"output[{self.rank}] must be like the input, {describe(input)}, got "
                f"{describe(own)}"
            )
        for i, place in enumerate(places):
            if place.dtype != input.dtype:
                raise ValueError(f"output[{i}] must be {input.dtype} too, got {describe(place)}")
        return places

    def alone(self) -> None:
        (place,) = self._places
        place.copy_(self._input.detach().reshape(place.shape))

    def kernel_uses(self) -> list[KernelUse]:
        return uses_of([self._compressor], [self._input.dtype], self.device)

    def footprint(self) -> Footprint | None:
        return Footprint([self._input, self._residual, *self._places])

    def prepare(self) -> None:
        self.handle.account.collective = "all_gather"
        self._flat = FlatTensors([self._input], [self._residual], [self._compressor], [self._key])
        reduction = Reduction(self._flat.parts, 1.0, self.options.max_bytes)
        guard("all_gather", reduction, self.size)
        self._algorithm = in_stream(GatherPayloads(reduction, self.rank, self.size, self._places))
        self._algorithm.prepare()

    def exchange(self, transport: Transport) -> None:
        self._algorithm.exchange(transport)
        self.handle.account.finite = self._algorithm.finite

    def finish(self) -> None:
        self._algorithm.finish()
        self._flat.write_back(tensors=False)


class GatherPayloads(StreamAlgorithm, ToAll):
    """Every rank's tensor on all of them, or a slice of each.

    Args:
        reduction: this rank's tensor: nothing is summed.
        places: where each rank's goes.
        lost: whose values are not all finite, a set that slices share.
    """

    def __init__(
        self,
        reduction: Reduction,
        rank: int,
        size: int,
        places: Sequence[Tensor],
        lost: set[int] | None = None,
    ) -> None:
        super().__init__(reduction, rank, size)
        (self._part,) = reduction.parts
        self._places, self._lost = places, set() if lost is None else lost

    to_each = None

    @property
    def to_all(self) -> ToAll:
        return self

    @property
    def in_one(self) -> bool:
        """Where a tensor would be read after another was written over it, and where one is not
        contiguous."""
        own = self._places[self.rank].data_ptr() == self._part.x.data_ptr()
        mixed = not own and any(overlap(self._part.x, place) for place in self._places)
        return mixed or not all(place.is_contiguous() for place in self._places)

    def sliced(self, count: int) -> "list[GatherPayloads]":
        """The same for each of so many slices of all tensors, or for fewer: itself where these
        differ in length."""
        if any(place.numel() != self._part.x.numel() for place in self._places):
            return [self]
        if self.in_one:
            return [self] * len(self.reduction.sliced(count))
        columns = zip(
            *(
                cut([self._part._replace(x=place.view(-1), r=None)], count)
                for place in self._places
            ),
            strict=True,
        )
        return [
            GatherPayloads(each, self.rank, self.size, [part.x for (part,) in column], self._lost)
            for each, column in zip(
                self.reduction.sliced(count),
                (column for column in columns if column[0]),
                strict=True,
            )
        ]

    def prepare(self) -> None:
        self._payload = self._part.draft()
        self._message = self.reduction.bundle([self._part], [self._payload])

    def exchange(self, transport: Transport) -> None:
        records = transport.meet([self._message.numel()], along=self._message)
        lengths = [record.numbers[0] for record in records]
        longest = [max_message_bytes([each]) for each in self._expected]
        transport.checked(LENGTH, lengths, longest)
        messages = transport.gather(self._message, lengths, records)
        with transport.clock("decode"):
            self._open(messages)

    # As one slice of several.

    def max_bytes_to_all(self) -> int:
        return max_message_bytes([self._part.expected])

    def message(self) -> tuple[Tensor, bool]:
        return self._message, not self._payload.non_finite

    def take_all(self, received: list[Tensor], finite: bool) -> None:
        self._open(received)

    def finish(self) -> None:
        if self.rank not in self._lost:
            self._part.settle(self._payload)
        for i, (place, theirs) in enumerate(zip(self._places, self._received, strict=True)):
            if i in self._lost:
                place.fill_(torch.nan)
            else:
                theirs.restore(place)

    @property
    def _expected(self) -> list[Expected]:
        local = self._part.local
        return [Expected(Extent(place.dtype, place.numel()), local) for place in self._places]

    def _open(self, messages: Sequence[Tensor]) -> None:
        pairs = zip(messages, self._expected, strict=True)
        self._received = [unbundle(message, [each])[0] for message, each in pairs]
        self._lost |= {i for i, theirs in enumerate(self._received) if theirs.non_finite}
        self.finite = not self._lost


def broadcast(
    tensor: Tensor,
    compressor: Compressor | str,
    *,
    src: int = 0,
    residual: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    key: Key | None = None,
) -> Handle:
    """One rank's tensor on all ranks, compressed on the way, in place.

    The source, too, ends with what the others could decode, so that all have the same bits.

    Args:
        tensor: what is sent on the source, and where it goes on all ranks.
        src: global rank of the source, as in torch.distributed.
        residual: on the source, what earlier calls left out; not used elsewhere.
        group, async_op, max_bytes, timeout, key: as for `all_reduce`.

    Returns:
        A handle, already ended unless `async_op`; its future holds `tensor`.
    """
    options = Options.of(group, max_bytes=max_bytes, timeout=timeout)
    exchange = Broadcast(tensor, src, residual, local_of(compressor), options, key)
    return exchange.start(async_op)


class Broadcast(Exchange):
    def __init__(
        self,
        tensor: Tensor,
        src: int,
        residual: Tensor | None,
        compressor: LocalCompressor,
        options: Options,
        key: Key | None,
    ) -> None:
        compressor.check_input(tensor, residual)
        check_writable([tensor], [residual])
        what = f"broadcast of {describe(tensor)} with {compressor}"
        super().__init__("broadcast", [tensor], options, result=tensor, what=what)
        self._root = place_of(self.group, src)
        self._is_source = self.rank == self._root
        self._tensor, self._residual = tensor, residual if self._is_source else None
        self._compressor = compressor
        self._key = self.key(compressor, key)
        self.details = (
            ("tensor", describe(tensor)),
            ("compressor", str(compressor)),
            ("src", str(src)),
        )

    def kernel_uses(self) -> list[KernelUse]:
        return uses_of([self._compressor], [self._tensor.dtype], self.device)

    def prepare(self) -> None:
        self.handle.account.collective = "broadcast"
        self._flat = FlatTensors([self._tensor], [self._residual], [self._compressor], [self._key])
        (self._part,) = self._flat.parts
        reduction = Reduction(self._flat.parts, 1.0, self.options.max_bytes)
        guard("broadcast", reduction, self.size)
        self._message: Tensor | None = None
        if self._is_source:
            self._payload = self._part.draft()
            self._message = reduction.bundle(reduction.parts, [self._payload])

    def exchange(self, transport: Transport) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        own = nothing if self._message is None else self._message
        records = transport.meet([own.numel()], along=own)
        lengths = [record.numbers[0] for record in records]
        transport.checked(LENGTH, lengths, max_message_bytes([self._part.expected]))
        message = transport.broadcast(self._message, lengths[self._root], self._root, records)
        with transport.clock("decode"):
            (self._received,) = unbundle(message, [self._part.expected])
        self.handle.account.finite = not self._received.non_finite

    def finish(self) -> None:
        if self._is_source:
            self._part.settle(self._payload)
        self._received.restore(self._part.x)
        self._flat.write_back()
