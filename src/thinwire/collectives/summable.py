"""summable: the backend's own all-reduce on what the compressor leaves of the tensor.

1. Draft the payload of C(x + r); all ranks draw with the same key, so equal places mean equal
   positions.
2. Meet: compare the calls, exchange the largest magnitude of float16 values; a few values come
   along.
3. All-reduce the values of the payloads, in their own type, unless all have come.
4. Residual <- (x + r) - own payload; tensor <- weight * decoded sum.

2 (P - 1) / P payloads leave each rank. Sums of float16 that could overflow are scaled down by a
power of two on the way.
"""

import dataclasses
import struct
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.algorithm import Algorithm
from thinwire.collectives.transport import Transport
from thinwire.frames import Payload
from thinwire.frames.code import Start


class BackendSum(Algorithm):
    def prepare(self) -> None:
        self._payloads = [part.draft() for part in self.reduction.parts]
        self.finite = not any(payload.non_finite for payload in self._payloads)
        self._pools = pooled([_values(p) for p in self._payloads]) if self.finite else {}
        if self.finite:
            self.reduction.count(self.reduction.parts, [_values(p).nbytes for p in self._payloads])
        self._peak = _peak(self._pools.get(torch.float16))
        self._shrink = 1.0

    def exchange(self, transport: Transport) -> None:
        # Sums of float16 are scaled when the peaks are known.
        half = torch.float16 in self._pools
        along = None if half or not self.finite else transport.summands(self._pools)
        records = transport.meet([not self.finite, _to_bits(self._peak)], along=along)
        self.finite = not any(record.numbers[0] for record in records)
        if not self.finite:
            return
        peaks = [_from_bits(record.numbers[1]) for record in records]
        transport.checked("a largest magnitude", peaks, torch.finfo(torch.float16).max)
        self._shrink = _shrink(sum(peaks))
        if self._shrink != 1:
            self._pools[torch.float16].mul_(self._shrink)
        self._pools = transport.sum(self._pools, records)

    def finish(self) -> None:
        if not self.finite:
            self.fill_with_nan()
            return
        sums = _unpooled(self._pools, [_values(p) for p in self._payloads])
        for part, payload, total in zip(self.reduction.parts, self._payloads, sums, strict=True):
            part.settle(payload)
            grown = self.weight / (self._shrink if total.dtype == torch.float16 else 1.0)
            result = dataclasses.replace(payload, sections=(total,), known=None)
            result.add_to(part.x, grown, Start(fresh=True))


class UncompressedSum(Algorithm):
    """The tensors themselves, with nothing to encode.

    They are reduced in a copy, never in place: an operation that fails, or that was given up and
    goes on in the background, leaves the tensors as they were.
    """

    def prepare(self) -> None:
        # The copy lies in a scratch buffer of the link, which comes with the transport.
        self._scratch: Tensor | None = None
        self.reduction.count(self.reduction.parts, [part.x.nbytes for part in self.reduction.parts])

    def exchange(self, transport: Transport) -> None:
        with transport.preparing():
            self._pools = self._copied(transport)
        if self.reduction.op == "SUM":
            records = transport.meet(along=transport.summands(self._pools))
            self._pools = transport.sum(self._pools, records)
            return
        transport.meet()
        op = getattr(dist.ReduceOp, self.reduction.op)
        for dtype, pool in self._pools.items():
            self._pools[dtype] = transport.reduce(pool, op)

    def _copied(self, transport: Transport) -> dict[torch.dtype, Tensor]:
        parts = self.reduction.parts
        if len(parts) == 1:
            self._scratch = transport.link.scratch(parts[0].x).copy_(parts[0].x)
            self._link = weakref.ref(transport.link)
            pools = {parts[0].x.dtype: self._scratch}
        else:
            pools = pooled([part.x for part in parts])
        for dtype, pool in pools.items():
            first, _ = _weights(dtype, self.weight)
            if first != 1:
                pool.mul_(first)
        return pools

    def finish(self) -> None:
        parts = self.reduction.parts
        for part, total in zip(parts, _unpooled(self._pools, [p.x for p in parts]), strict=True):
            _, last = _weights(part.x.dtype, self.weight)
            torch.mul(total, last, out=part.x) if last != 1 else part.x.copy_(total)
        link = None if self._scratch is None else self._link()
        if link is not None and self._scratch is not None:
            link.keep(self._scratch)
        self._scratch, self._pools = None, {}


def _weights(dtype: torch.dtype, weight: float) -> tuple[float, float]:
    """What to multiply with before and after the sum: an average of float16 fits where the sum may
    not."""
    return (weight, 1.0) if dtype == torch.float16 else (1.0, weight)


def _values(payload: Payload) -> Tensor:
    """What adds up: the one section of a payload of summable codes."""
    (values,) = payload.sections
    return values


def pooled(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
    """Copies of the tensors, those of one type in one piece."""
    pools: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        pools.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    return {dtype: torch.cat(pool) for dtype, pool in pools.items()}


def _unpooled(pools: dict[torch.dtype, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The stretch of each tensor in what `pooled` put together."""
    rest, found = dict(pools), []
    for tensor in like:
        own, rest[tensor.dtype] = rest[tensor.dtype].tensor_split([tensor.numel()])
        found.append(own)
    return found


def _peak(values: Tensor | None) -> float:
    if values is None or not values.numel():
        return 0.0
    low, high = values.aminmax()
    return max(-float(low), float(high))


def _shrink(total: float) -> float:
    """The power of two that brings a sum of magnitudes into float16's range."""
    factor = 1.0
    while total * factor > torch.finfo(torch.float16).max:
        factor /= 2
    return factor


def _to_bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _from_bits(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
