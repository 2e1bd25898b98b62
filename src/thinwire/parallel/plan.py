"""Which tensors of a bucket are exchanged together, and how.

The plan of a step follows from the buckets and the choices alone, so all ranks make the same one.
As many tensors as possible share an exchange, each with its compressor: an exchange costs a round
and a call, whatever its size.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from thinwire.collectives.choose import alike, choose, rides_along
from thinwire.collectives.scatter import SCATTER
from thinwire.compressors import Compressor, JointCompressor, LocalCompressor

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


class PlannedUnit(NamedTuple):
    """Tensors that are compressed together.

    Args:
        names: of the tensors.
        compressor: None for uncompressed.
    """

    names: tuple[str, ...]
    compressor: Compressor | None


class PlannedExchange(NamedTuple):
    """One exchange of several units, each with its compressor.

    Args:
        exact: no node may round what is uncompressed in it.
    """

    units: tuple[PlannedUnit, ...]
    exact: bool = False

    @property
    def names(self) -> set[str]:
        return {name for unit in self.units for name in unit.names}

    @property
    def compressed(self) -> bool:
        """Whether something of it is."""
        return any(unit.compressor is not None for unit in self.units)


class Planner:
    """Plans one step after the other.

    Args:
        choose: the compressor of a tensor, None for uncompressed.
        granularity: "bucket" compresses those tensors of a bucket as one that have the same
            compressor, "tensor" each by itself.
        size: of the group.
        collective: that was asked for.
        apart: uncompressed tensors share no exchange with compressed ones, which a NaN in one of
            them would make NaN too.
    """

    def __init__(
        self,
        choose: Callable[[str], Compressor | None],
        granularity: str,
        *,
        size: int,
        collective: str = "auto",
        apart: bool = False,
    ) -> None:
        check_granularity(granularity)
        self._choose, self._granularity = choose, granularity
        self._size, self._collective, self._apart = size, collective, apart
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._dense: list[Piece] = []
        self._joint: list[PlannedUnit] = []

    def add(self, bucket: list[Piece], last: bool) -> list[PlannedExchange]:
        """What is to be sent now that these tensors are there too."""
        payloads: dict[LocalCompressor, list[Piece]] = {}
        sums: dict[LocalCompressor, list[Piece]] = {}  # those that the backend can add up
        for piece in bucket:
            compressor = None if piece.sparse else self._choose(piece.name)
            if compressor is None:
                self._dense.append(piece)
            elif isinstance(compressor, JointCompressor):
                self._joint.append(PlannedUnit((piece.name,), compressor))
            else:
                assert isinstance(compressor, LocalCompressor)
                summed = compressor.summable and self._collective in ("auto", "summable")
                (sums if summed else payloads).setdefault(compressor, []).append(piece)
        due = []
        for sharing in self._sharing(payloads):
            units = self._units(sharing)
            if self._rides_along(sharing, sums):
                units += self._units(sums) + self._dense_units()
                sums = {}
            due.append(units)
        if sums:
            due.append(self._units(sums) + self._dense_units())
        if last and self._joint:  # what all ranks find together, they find for all tensors at once
            due.append(self._joint + self._dense_units())
            self._joint = []
        if self._dense and (last or _num_bytes(self._dense) >= DENSE_ENOUGH):
            due.append(self._dense_units(together=True))
        return [PlannedExchange(tuple(units)) for units in due]

    def _sharing(
        self, payloads: dict[LocalCompressor, list[Piece]]
    ) -> list[dict[LocalCompressor, list[Piece]]]:
        """Those that can share an exchange: all, unless the collective takes only what is alike."""
        groups: list[dict[LocalCompressor, list[Piece]]] = []
        for compressor, own in payloads.items():
            for group in groups:
                if self._collective != "sparse" or alike([*group, compressor]):
                    group[compressor] = own
                    break
            else:
                groups.append({compressor: own})
        return groups

    def _rides_along(
        self,
        payloads: dict[LocalCompressor, list[Piece]],
        sums: dict[LocalCompressor, list[Piece]],
    ) -> bool:
        """Whether what the backend could add up goes with the payloads."""
        if self._collective == SCATTER:
            return True  # which moves the same bytes of all
        if self._collective == "hierarchical":
            return False  # a node's inner compressor would round them
        likely = self._collective
        if likely == "auto":
            likely = choose(list(payloads), _max_bytes(payloads), self._size)
        if likely == "sparse":
            return False  # it carries nothing else
        dense = 0 if self._apart else _num_bytes(self._dense)
        return rides_along(_max_bytes(sums) + dense, self._size)

    def _units(self, pieces: dict[LocalCompressor, list[Piece]]) -> list[PlannedUnit]:
        if self._granularity == "bucket":
            return [PlannedUnit(tuple(p.name for p in own), c) for c, own in pieces.items()]
        return [PlannedUnit((piece.name,), c) for c, own in pieces.items() for piece in own]

    def _dense_units(self, together: bool = False) -> list[PlannedUnit]:
        """The uncompressed tensors that have come, those of a type as one; none if they go apart.

        Args:
            together: in an exchange of their own.
        """
        if self._apart and not together:
            return []
        by_type: dict[torch.dtype, list[str]] = {}
        for piece in self._dense:
            by_type.setdefault(piece.dtype, []).append(piece.name)
        self._dense = []
        return [PlannedUnit(tuple(names), None) for names in by_type.values()]


def _num_bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def _max_bytes(pieces: dict[LocalCompressor, list[Piece]]) -> int:
    """Most that these can come to, compressed."""
    return sum(
        compressor.max_payload_bytes(piece.num_bytes // piece.dtype.itemsize, piece.dtype)
        for compressor, own in pieces.items()
        for piece in own
    )
