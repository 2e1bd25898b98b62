"""sparse: chosen elements go to the rank that owns their region, sums of the largest come back.

After Ok-Topk (Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, 2022).

1. Pick positions and values of x + r (k of them on this rank).
2. Meet: exchange quantiles of the positions; their means divide the tensor into P regions that hold
   about equally many chosen elements. Where messages are short anyway, regions are of one length,
   and nobody meets.
3. Each rank sends every owner the elements of its region; the owner sums them.
4. Each owner keeps the k / P largest sums of its region and sends those to all.
5. Residual <- (x + r) - what was sent; an owner adds the sums that it did not keep, so nothing that
   was dropped for all is lost. Tensor <- weight * the kept sums.

2 k (P - 1) / P elements leave each rank, however many ranks there are.
"""

from itertools import pairwise

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.algorithm import Algorithm
from thinwire.collectives.memory import check_real
from thinwire.collectives.message import LENGTH, bundle, unbundle
from thinwire.collectives.reduction import Part, Reduction
from thinwire.collectives.transport import Transport
from thinwire.compressors import SparseCompressor
from thinwire.compressors.base import add_narrower
from thinwire.frames import Payload
from thinwire.frames.code import Extent
from thinwire.frames.header import LONGEST_HEADER
from thinwire.frames.payload import add_all
from thinwire.kernels import Key

Chosen = tuple[Tensor, Tensor]  # ascending positions, their values


class SparseRegions(Algorithm):
    """The tensors as one, divided into a region for each member."""

    def __init__(self, reduction: Reduction, rank: int, size: int) -> None:
        super().__init__(reduction, rank, size)
        assert isinstance(reduction.compressor, SparseCompressor)
        self.compressor = reduction.compressor

    def prepare(self) -> None:
        self._part, self._chosen = _joined(self.reduction.parts, self.compressor)
        self._numel = self._part.x.numel()

    def exchange(self, transport: Transport) -> None:
        self._results: list[Payload] = []
        numel, size = self._numel, self.size
        most = self.compressor.max_payload_bytes(numel, self._part.x.dtype)
        if most <= transport.room:
            edges = [numel * j // size for j in range(1, size)]
        else:
            edges = self._balanced_edges(transport)
        if not self.finite:
            return
        self._edges = [0, *edges, numel]
        self._extents = [Extent(self._part.x.dtype, hi - lo) for lo, hi in pairwise(self._edges)]
        counts = self._send_to_owners(transport)
        if self.finite:
            self._send_to_all(transport, -(-sum(counts) // size // size))

    def _balanced_edges(self, transport: Transport) -> list[int]:
        """Step 2: where regions begin that hold about equally many chosen elements."""
        chosen = self._chosen
        with transport.preparing():
            quantiles = [] if chosen is None else _quantiles(chosen, self._numel, self.size)
        records = transport.meet([chosen is None], quantiles)
        self.finite = not any(record.numbers[0] for record in records)
        if not self.finite:
            return []
        for lo, hi in pairwise(
            [[0] * self.size, *zip(*(one.words for one in records), strict=True)]
        ):
            steps = [b - a for a, b in zip(lo, hi, strict=True)]
            transport.checked("a step between quantiles", steps, self._numel)
        transport.checked("a last quantile", [one.words[-1] for one in records], self._numel)
        columns = zip(*(record.words[:-1] for record in records), strict=True)
        return [sum(column) // self.size for column in columns]

    def _max_bytes(self, count: int) -> list[int]:
        """The longest message with at most so many elements of each region."""
        return [
            LONGEST_HEADER + self.compressor.max_enclosed_bytes(min(count, extent.numel), extent)
            for extent in self._extents
        ]

    def _send_to_owners(self, transport: Transport) -> list[int]:
        """Step 3: the chosen elements of each region to its owner, and the sums of the own one;
        how many each rank has chosen."""
        me, chosen = self.rank, self._chosen
        with transport.preparing():
            pieces = [] if chosen is None else self._split(chosen)
            nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
            self._sent: list[Payload | None] = [
                None if j == me else self.compressor.enclose(*piece, extent, self._key(j))
                for j, (piece, extent) in enumerate(zip(pieces, self._extents, strict=bool(pieces)))
            ]
            messages = [nothing if p is None else bundle([p]) for p in self._sent]
            messages += [nothing] * (self.size - len(messages))
            check_real("sparse", self.reduction, messages, self.size)
        count = 0 if chosen is None else chosen[0].numel()
        lengths = [message.numel() for message in messages]
        records = transport.meet([chosen is None, count], lengths, along=messages)
        self.finite = not any(record.numbers[0] for record in records)
        counts = [record.numbers[1] for record in records]
        if not self.finite:
            return counts
        transport.checked("chosen elements", counts, self._numel)
        transport.checked_words(LENGTH, records, self._max_bytes(max(counts)))
        longest = max(length for record in records for length in record.words)
        lengths = [record.words[me] for record in records]
        received = transport.swap(messages, lengths, records, longest)
        del messages
        with transport.preparing():
            self._own = pieces[me]
            self._total = self._sum(received)
        return counts

    def _send_to_all(self, transport: Transport, keep: int) -> None:
        """Step 4: the largest sums of the own region to all."""
        with transport.preparing():
            self._kept = self._largest(keep)
            message = bundle([self._kept])
        records = transport.meet([message.numel(), self._kept.non_finite], along=message)
        lengths = [record.numbers[0] for record in records]
        transport.checked(LENGTH, lengths, self._max_bytes(keep))
        self.finite = not any(record.numbers[1] for record in records)
        messages = transport.gather(message, lengths, records)
        with transport.clock("decode"):
            fingerprint = self.compressor.fingerprint
            self._results = [
                unbundle(m, [extent], fingerprint)[0]
                for m, extent in zip(messages, self._extents, strict=True)
            ]

    def finish(self) -> None:
        if not self._results:
            self.fill_with_nan()
            return
        if self.finite:
            self._settle()
        for payload, (lo, hi) in zip(self._results, pairwise(self._edges), strict=True):
            payload.restore(self._part.x[lo:hi])
        _divided(self.reduction, self._part)

    def _key(self, index: int) -> Key:
        return self._part.key.derive(index)

    def _split(self, chosen: Chosen) -> list[Chosen]:
        positions, values = chosen
        bounds = torch.tensor(self._edges, dtype=positions.dtype, device=positions.device)
        cuts = torch.searchsorted(positions, bounds).tolist()
        return [
            (positions[a:b] - lo, values[a:b])
            for (a, b), lo in zip(pairwise(cuts), self._edges, strict=False)
        ]

    def _sum(self, received: list[Tensor]) -> Tensor:
        extent = self._extents[self.rank]
        total = torch.zeros(extent.numel, dtype=self._part.real, device=self.device)
        kernels.on(total.device).scatter_add(total, *self._own, weight=1.0, fresh=False, plus=None)
        fingerprint = self.compressor.fingerprint
        payloads = [
            unbundle(m, [extent], fingerprint)[0] for j, m in enumerate(received) if j != self.rank
        ]
        add_all(payloads, total)
        return total

    def _largest(self, keep: int) -> Payload:
        """The largest sums of the own region, weighted, encoded."""
        extent, total = self._extents[self.rank], self._total
        keep = min(keep, extent.numel)
        positions, values = _nothing(total)
        if keep:
            found = kernels.on(total.device).top_k(total, None, keep)
            if found is None:
                return self.compressor.flagged(extent, total.device)
            there = found[1] != 0
            positions, values = found[0][there], found[1][there] * self.weight
        return self.compressor.enclose(positions, values, extent, self._key(self.size))

    def _settle(self) -> None:
        r = self._part.r
        if r is None:
            return
        add_narrower(r, self._part.x)
        for payload, (lo, hi) in zip(self._sent, pairwise(self._edges), strict=True):
            if payload is not None:
                payload.add_to(r[lo:hi], -1.0)
        mine = r[self._edges[self.rank] : self._edges[self.rank + 1]]
        kernels.on(r.device).scatter_add(mine, *self._own, weight=-1.0, fresh=False, plus=None)
        mine.add_(self._total)
        self._kept.add_to(mine, -1.0 / self.weight)


def _nothing(like: Tensor) -> Chosen:
    return torch.empty(0, dtype=torch.int32, device=like.device), like[:0]


def _quantiles(chosen: Chosen, numel: int, size: int) -> list[int]:
    """The positions below which 1/P, 2/P, ... of the chosen lie."""
    positions = chosen[0]
    count = positions.numel()
    if not count:
        return [numel * j // size for j in range(1, size + 1)]
    at = torch.tensor([count * j // size for j in range(1, size)], device=positions.device)
    return [*positions[at].tolist(), numel]


def _joined(parts: list[Part], compressor: SparseCompressor) -> tuple[Part, Chosen | None]:
    """All tensors as one, and what was chosen in each; copies only if there are several."""
    picks = [compressor.pick(p.x, residual=p.r, key=p.key) for p in parts]
    if len(picks) == 1:
        return parts[0], picks[0]
    offset, positions, values = 0, [], []
    for part, pick in zip(parts, picks, strict=True):
        if pick is not None:
            positions.append(pick[0].long() + offset)
            values.append(pick[1])
        offset += part.x.numel()
    chosen = (torch.cat(positions), torch.cat(values)) if len(positions) == len(picks) else None
    x = torch.cat([part.x for part in parts])
    r = None
    if any(part.r is not None for part in parts):
        r = torch.cat(
            [p.x.new_zeros(p.x.numel(), dtype=p.real) if p.r is None else p.r for p in parts]
        )
    return Part(x, r, parts[0].key), chosen


def _divided(reduction: Reduction, part: Part) -> None:
    """Give each tensor its stretch of what `_joined` put together."""
    if len(reduction.parts) == 1:
        return
    offset = 0
    for own in reduction.parts:
        end = offset + own.x.numel()
        own.x.copy_(part.x[offset:end])
        if own.r is not None and part.r is not None:
            own.r.copy_(part.r[offset:end])
        offset = end
