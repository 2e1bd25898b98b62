"""Which tensors of a bucket are exchanged together, and how.

The plan of a step follows from the buckets alone, so all ranks make the same one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from thinwire.compressors import Compressor, JointCompressor

GRANULARITIES = ("bucket", "tensor")
# Bytes of uncompressed tensors that are worth an exchange before the last bucket.
DENSE_ENOUGH = 1 << 20


def check_granularity(granularity: str) -> None:
    """Refuse what is none."""
    if granularity not in GRANULARITIES:
        known = " or ".join(map(repr, GRANULARITIES))
        raise ValueError(f"granularity must be {known}, got {granularity!r}")


class Piece(NamedTuple):
    """A tensor as it lies in a bucket."""

    name: str
    num_bytes: int
    dtype: torch.dtype
    sparse: bool = False  # a sparse gradient, made dense


class PlannedExchange(NamedTuple):
    """One exchange: tensors of a unit are compressed together.

    Args:
        compressor: None for uncompressed.
        units: names of tensors.
        uncompressed: those of them that a joint compressor leaves uncompressed.
    """

    compressor: Compressor | None
    units: tuple[tuple[str, ...], ...]
    uncompressed: frozenset[str] = frozenset()

    @property
    def names(self) -> set[str]:
        return {name for unit in self.units for name in unit}


class Planner:
    """Plans one step after the other.

    Args:
        choose: the compressor of a tensor, None for uncompressed.
        granularity: "bucket" compresses all tensors of a bucket as one, "tensor" each by itself.
    """

    def __init__(self, choose: Callable[[str], Compressor | None], granularity: str) -> None:
        check_granularity(granularity)
        self._choose, self._granularity = choose, granularity
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._dense: list[Piece] = []
        self._joint: dict[Compressor, list[str]] = {}

    def add(self, bucket: list[Piece], last: bool) -> list[PlannedExchange]:
        """What is to be sent now that these tensors are there too."""
        by_compressor: dict[Compressor, list[str]] = {}
        for piece in bucket:
            compressor = None if piece.sparse else self._choose(piece.name)
            if compressor is None:
                self._dense.append(piece)
            elif isinstance(compressor, JointCompressor):
                self._joint.setdefault(compressor, []).append(piece.name)
            else:
                by_compressor.setdefault(compressor, []).append(piece.name)
        due = [PlannedExchange(c, self._units(names)) for c, names in by_compressor.items()]
        if last:  # what all ranks find together, they find for all tensors at once
            for compressor, names in self._joint.items():
                # Uncompressed tensors go with the first of them, in its first sum.
                uncompressed = [piece.name for piece in self._dense]
                names += uncompressed
                self._dense = []
                units = tuple((name,) for name in names)
                due.append(PlannedExchange(compressor, units, frozenset(uncompressed)))
            self._joint = {}
        if self._dense and (last or sum(p.num_bytes for p in self._dense) >= DENSE_ENOUGH):
            by_type: dict[torch.dtype, list[str]] = {}
            for piece in self._dense:
                by_type.setdefault(piece.dtype, []).append(piece.name)
            due.append(PlannedExchange(None, tuple(map(tuple, by_type.values()))))
            self._dense = []
        return due

    def _units(self, names: list[str]) -> tuple[tuple[str, ...], ...]:
        if self._granularity == "bucket":
            return (tuple(names),)
        return tuple((name,) for name in names)
