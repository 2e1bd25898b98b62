"""sparse: chosen elements go to the rank that owns their region, sums of the largest come back.

After Ok-Topk (Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, 2022).

1. Pick positions and values of x + r (k of them on this rank).
2. Meet: exchange quantiles of the positions; their means divide the tensor into P regions that hold
   about equally many chosen elements.
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
from thinwire.collectives.memory import check_real
from thinwire.collectives.message import bundle, unbundle
from thinwire.collectives.talk import Talk
from thinwire.collectives.work import Part, Work
from thinwire.compressors import SparseCompressor
from thinwire.compressors.base import add_narrower
from thinwire.frames import Payload
from thinwire.frames.code import Extent
from thinwire.frames.payload import add_all
from thinwire.kernels import Key

Chosen = tuple[Tensor, Tensor]  # ascending positions, their values


def sparse(talk: Talk, work: Work) -> None:
    with talk.preparing():
        part, chosen = _joined(work)
        count = 0 if chosen is None else chosen[0].numel()
        numel, size = part.x.numel(), talk.members.size
        quantiles = _quantiles(chosen, numel, size) if chosen is not None else []
    said = talk.meet([chosen is None, count], quantiles)
    if chosen is None or any(one.numbers[0] for one in said):
        talk.account.finite = False
        part.x.fill_(torch.nan)
        _divided(work, part)
        return
    edges = [
        0,
        *(sum(column) // size for column in zip(*(o.words[:-1] for o in said), strict=True)),
    ]
    keep = -(-sum(one.numbers[1] for one in said) // size // size)
    _Regions(talk, work, part, [*edges, numel]).exchange(chosen, keep)
    _divided(work, part)


class _Regions:
    """The tensor divided by `edges` into one region for each member."""

    def __init__(self, talk: Talk, work: Work, part: Part, edges: list[int]) -> None:
        self.talk, self.work = talk, work
        assert isinstance(work.compressor, SparseCompressor)
        self.compressor, self.weight = work.compressor, work.weight
        self.part, self.edges = part, edges
        self.me = talk.members.index
        self.extents = [Extent(part.x.dtype, hi - lo) for lo, hi in pairwise(edges)]

    def exchange(self, chosen: Chosen, keep: int) -> None:
        talk, me = self.talk, self.me
        with talk.preparing():
            pieces = self._split(chosen)
            nothing = torch.empty(0, dtype=torch.uint8, device=talk.device)
            sent: list[Payload | None] = [
                None if j == me else self.compressor.enclose(*piece, extent, self._key(j))
                for j, (piece, extent) in enumerate(zip(pieces, self.extents, strict=True))
            ]
            messages = [nothing if p is None else bundle([p]) for p in sent]
            check_real("sparse", self.work, messages, talk.members.size)
        said = talk.meet([], [m.numel() for m in messages])
        received = talk.swap(messages, [one.words[me] for one in said])
        del messages
        with talk.preparing():
            total = self._sum(pieces[me], received)
            kept = self._kept(total, keep)
            message = bundle([kept])
        said = talk.meet([message.numel(), kept.non_finite])
        talk.account.finite = not any(one.numbers[1] for one in said)
        results = talk.gather(message, [one.numbers[0] for one in said])
        with talk.clock("decode"):
            fingerprint = self.compressor.fingerprint
            opened = [
                unbundle(m, [extent], fingerprint)[0]
                for m, extent in zip(results, self.extents, strict=True)
            ]
            if talk.account.finite:
                self._settle(sent, pieces[me], total, kept)
            for payload, (lo, hi) in zip(opened, pairwise(self.edges), strict=True):
                payload.restore(self.part.x[lo:hi])

    def _key(self, index: int) -> Key:
        return self.part.key.derive(index)

    def _split(self, chosen: Chosen) -> list[Chosen]:
        positions, values = chosen
        bounds = torch.tensor(self.edges, dtype=positions.dtype, device=positions.device)
        cuts = torch.searchsorted(positions, bounds).tolist()
        return [
            (positions[a:b] - lo, values[a:b])
            for (a, b), lo in zip(pairwise(cuts), self.edges, strict=False)
        ]

    def _sum(self, own: Chosen, received: list[Tensor]) -> Tensor:
        extent = self.extents[self.me]
        total = torch.zeros(extent.numel, dtype=self.part.real, device=self.talk.device)
        kernels.on(total.device).scatter_add(total, *own, weight=1.0, fresh=False, plus=None)
        fingerprint = self.compressor.fingerprint
        payloads = [
            unbundle(m, [extent], fingerprint)[0] for j, m in enumerate(received) if j != self.me
        ]
        add_all(payloads, total)
        return total

    def _kept(self, total: Tensor, keep: int) -> Payload:
        """The largest sums of the own region, weighted, encoded."""
        extent = self.extents[self.me]
        keep = min(keep, extent.numel)
        positions, values = _nothing(total)
        if keep:
            found = kernels.on(total.device).top_k(total, None, keep)
            if found is None:
                return self.compressor.flagged(extent, total.device)
            there = found[1] != 0
            positions, values = found[0][there], found[1][there] * self.weight
        key = self._key(self.talk.members.size)
        return self.compressor.enclose(positions, values, extent, key)

    def _settle(
        self, sent: list[Payload | None], own: Chosen, total: Tensor, kept: Payload
    ) -> None:
        r = self.part.r
        if r is None:
            return
        add_narrower(r, self.part.x)
        for payload, (lo, hi) in zip(sent, pairwise(self.edges), strict=True):
            if payload is not None:
                payload.add_to(r[lo:hi], -1.0)
        mine = r[self.edges[self.me] : self.edges[self.me + 1]]
        kernels.on(r.device).scatter_add(mine, *own, weight=-1.0, fresh=False, plus=None)
        mine.add_(total)
        kept.add_to(mine, -1.0 / self.weight)


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


def _joined(work: Work) -> tuple[Part, Chosen | None]:
    """All tensors as one, and what was chosen in each; copies only if there are several."""
    compressor = work.compressor
    assert isinstance(compressor, SparseCompressor)
    picks = [compressor.pick(p.x, residual=p.r, key=p.key) for p in work.parts]
    if len(picks) == 1:
        return work.parts[0], picks[0]
    offset, positions, values = 0, [], []
    for part, pick in zip(work.parts, picks, strict=True):
        if pick is not None:
            positions.append(pick[0].long() + offset)
            values.append(pick[1])
        offset += part.x.numel()
    chosen = (torch.cat(positions), torch.cat(values)) if len(positions) == len(picks) else None
    x = torch.cat([part.x for part in work.parts])
    r = None
    if any(part.r is not None for part in work.parts):
        r = torch.cat(
            [p.x.new_zeros(p.x.numel(), dtype=p.real) if p.r is None else p.r for p in work.parts]
        )
    return Part(x, r, work.parts[0].key), chosen


def _divided(work: Work, part: Part) -> None:
    """Give each tensor its stretch of what `_joined` put together."""
    if len(work.parts) == 1:
        return
    offset = 0
    for own in work.parts:
        end = offset + own.x.numel()
        own.x.copy_(part.x[offset:end])
        if own.r is not None and part.r is not None:
            own.r.copy_(part.r[offset:end])
        offset = end
