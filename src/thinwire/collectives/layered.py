"""The memory of the hierarchical collective: what a member holds, and a limit above which it is
refused."""

from typing import NamedTuple

from thinwire.collectives.carry import chosen, kind
from thinwire.collectives.memory import (
    MOST_ROUNDS,
    Estimate,
    Load,
    Phase,
    estimate,
    largest,
    refuse,
)
from thinwire.collectives.nodes import Layers
from thinwire.collectives.work import Work
from thinwire.compressors import SparseCompressor


class Held(NamedTuple):
    """What a member holds while sums go between nodes.

    Args:
        payloads: bytes of the inner payloads it has sent, until residuals are settled.
        sums: bytes of the node's sum of its shard, and of what is not sent of it.
    """

    payloads: float
    sums: float

    @classmethod
    def of(cls, work: Work, layers: Layers, place: int) -> "Held":
        inner = Load.of(work.parts, layers.inner)
        sent, own = _shares(layers, place)
        kept = sent * inner.draft if cls.keeps(work, layers) else 0.0
        remembered = inner.sums if any(part.r is not None for part in work.parts) else 0.0
        wide = inner.dense if inner.converted else inner.sums
        return cls(kept, own * (wide + remembered))

    @staticmethod
    def keeps(work: Work, layers: Layers) -> bool:
        """Whether the payloads sent inside are needed again: they may have left something out."""
        exact = layers.inner.lossless and all(part.real == part.x.dtype for part in work.parts)
        return layers.remembers and not exact and any(p.r is not None for p in work.parts)

    @property
    def num_bytes(self) -> int:
        return int(self.payloads + self.sums)

    @property
    def phase(self) -> Phase:
        return {"payloads kept": self.payloads, "the node's sum": self.sums}


def between(work: Work, layers: Layers) -> str:
    """The collective that goes between nodes."""
    return chosen(work, len(layers.places), 1 / layers.num_shards)


def guard_layers(work: Work, layers: Layers, place: int, size: int) -> None:
    """Refuse an exchange that would take more than the limit on this rank."""
    if work.limit is None:
        return
    rounds, need = 1, estimate_layers(work, layers, place)
    while need.num_bytes > work.limit and rounds < MOST_ROUNDS:
        rounds *= 2
        need = estimate_layers(work, layers, place, rounds)
    if need.num_bytes > work.limit:
        raise refuse("hierarchical", need, work.limit, size)


def estimate_layers(work: Work, layers: Layers, place: int, rounds: int = 1) -> Estimate:
    """Peak extra bytes on one rank, with so many rounds between nodes if "gather" goes there."""
    return largest(_phases(work, layers, place, rounds))


def _shares(layers: Layers, place: int) -> tuple[float, float]:
    """Of the tensor: what a member sends to owners in its node, and what it owns."""
    node, count = layers.places[layers.node_of(place)], layers.num_shards
    own = 1 / count if node.index(place) < count else 0.0
    return 1 - own, own


def _phases(work: Work, layers: Layers, place: int, rounds: int) -> list[Phase]:
    inner, outer = Load.of(work.parts, layers.inner), Load.of(work.parts, work.compressor)
    held = Held.of(work, layers, place)
    sent, own = _shares(layers, place)
    others = len(layers.places[layers.node_of(place)]) - 1
    count = layers.num_shards
    drafts = {"payloads of shards": sent * inner.draft}
    received = {"received": others * own * inner.frame}
    # A sparse result has at most the elements that all nodes have sent.
    frame, draft = inner.frame, inner.draft
    if isinstance(work.compressor, SparseCompressor):
        frame = min(frame, len(layers.places) * outer.frame)
        draft = min(draft, len(layers.places) * outer.draft)
    result = {"result": own * (draft + frame), "copies": others * own * frame}
    phases: list[Phase] = [
        drafts | {"encoding": inner.passing / count, "messages": sent * inner.frame},
        drafts | {"messages, joined": 2 * sent * inner.frame} | received,
        received | {"opened": others * own * inner.opened} | held.phase,
        held.phase | result | {"results": sent * frame},
    ]
    if own:
        collective = kind(between(work, layers), work)
        middle = estimate(collective, outer.part(own), len(layers.places), rounds)
        phases.append(held.phase | dict(middle.items))
    return phases
