"""summable: the backend's own all-reduce on what the compressor leaves of the tensor.

1. Draft the payload of C(x + r); all ranks draw with the same key, so equal places mean equal
   positions.
2. Meet: compare the calls, exchange the largest magnitude of float16 values.
3. All-reduce the values of the payloads, in their own type.
4. Residual <- (x + r) - own payload; tensor <- weight * decoded sum.

2 (P - 1) / P payloads leave each rank. Sums of float16 that could overflow are scaled down by a
power of two on the way.
"""

import dataclasses
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.talk import Talk
from thinwire.collectives.work import Work
from thinwire.frames import Payload
from thinwire.frames.code import Start


def summable(talk: Talk, work: Work, op: Any = dist.ReduceOp.SUM) -> None:
    if is_dense(work):
        dense(talk, work, op)
        return
    compressor = work.compressor
    with talk.preparing():
        payloads = [part.draft(compressor) for part in work.parts]
        sound = not any(p.non_finite for p in payloads)
        rooms = _pooled([_values(p) for p in payloads]) if sound else {}
        peak = _peak(rooms.get(torch.float16))
    said = talk.meet([not sound, _to_bits(peak)])
    if any(one.numbers[0] for one in said):
        talk.account.finite = False
        for part in work.parts:
            part.x.fill_(torch.nan)
        return
    shrink = _shrink(sum(_from_bits(one.numbers[1]) for one in said))
    totals: dict[torch.dtype, Tensor] = {}
    for dtype, room in rooms.items():
        if dtype == torch.float16 and shrink != 1:
            room.mul_(shrink)
        totals[dtype] = talk.reduce(room, dist.ReduceOp.SUM)
    with talk.clock("decode"):
        for part, payload in zip(work.parts, payloads, strict=True):
            part.settle(compressor, payload)
            values = _values(payload)
            total, totals[values.dtype] = totals[values.dtype].tensor_split([values.numel()])
            grown = work.weight / (shrink if values.dtype == torch.float16 else 1.0)
            result = dataclasses.replace(payload, sections=(total,), known=None)
            result.add_to(part.x, grown, Start(fresh=True))


def is_dense(work: Work) -> bool:
    """Whether the tensors themselves are what travels."""
    return work.compressor.lossless and all(part.r is None for part in work.parts)


def dense(talk: Talk, work: Work, op: Any) -> None:
    """Nothing to encode. What fails leaves the tensors as they were: one is backed up, several are
    reduced in a copy, which has to be made anyway."""
    if len(work.parts) > 1:
        _pooled_dense(talk, work, op)
        return
    (part,) = work.parts
    with talk.preparing():
        backup = talk.link.room(part.x).copy_(part.x)
    talk.meet()
    first, last = _weights(part.x.dtype, work.weight)
    try:
        if first != 1:
            part.x.mul_(first)
        total = talk.reduce(part.x, op)
    except BaseException:
        part.x.copy_(backup)
        raise
    with talk.clock("decode"):
        if total.data_ptr() != part.x.data_ptr():
            part.x.copy_(total)
        if last != 1:
            part.x.mul_(last)


def _pooled_dense(talk: Talk, work: Work, op: Any) -> None:
    with talk.preparing():
        rooms = _pooled([part.x for part in work.parts])
    talk.meet()
    totals = {}
    for dtype, room in rooms.items():
        first, _ = _weights(dtype, work.weight)
        totals[dtype] = talk.reduce(room.mul_(first) if first != 1 else room, op)
    with talk.clock("decode"):
        for part in work.parts:
            pool = totals[part.x.dtype]
            total, totals[part.x.dtype] = pool.tensor_split([part.x.numel()])
            _, last = _weights(part.x.dtype, work.weight)
            torch.mul(total, last, out=part.x) if last != 1 else part.x.copy_(total)


def _weights(dtype: torch.dtype, weight: float) -> tuple[float, float]:
    """What to multiply with before and after the sum: an average of float16 fits where the sum may
    not."""
    return (weight, 1.0) if dtype == torch.float16 else (1.0, weight)


def _values(payload: Payload) -> Tensor:
    """What adds up: the one section of a payload of summable codes."""
    (values,) = payload.sections
    return values


def _pooled(tensors: list[Tensor]) -> dict[torch.dtype, Tensor]:
    """Copies of the tensors, those of one type in one piece."""
    pools: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        pools.setdefault(tensor.dtype, []).append(tensor)
    return {dtype: torch.cat(pool) for dtype, pool in pools.items()}


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
