"""What sparsifiers share: positions and values, with the values in a code of their own."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from thinwire.compressors.base import Compressor, Encoded, Request, narrow
from thinwire.frames.code import Code, Extent
from thinwire.frames.codes import Raw, Seeded, Sparse
from thinwire.frames.codes.sparse import write_positions
from thinwire.kernels import Key


class Selection(NamedTuple):
    """What is to be sent, and how a reader knows where it belongs."""

    positions: Tensor
    values: Tensor
    drawn: Key | None = None  # the reader draws the positions itself from this key
    chance: int = 0  # of each position in units of 2^-32, with `drawn`; 0: exactly so many


@lru_cache(maxsize=256)
def _exact(ratio: float) -> Fraction:
    return Fraction(repr(ratio))


def kept(numel: int, ratio: float) -> int:
    """k = max(1, ceil(numel * ratio)), never above numel; 0.07 means 7/100, not its float."""
    exact = _exact(ratio)
    return min(numel, max(1, -(-numel * exact.numerator // exact.denominator)))


def raw_values(request: Request) -> Encoded:
    """The end of a chain: values in the tensor's own type."""
    return Encoded(Raw(), (narrow(request.x, request.dtype),))


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Sends some elements as they are and the rest not at all; implements `select`."""

    @abstractmethod
    def select(self, request: Request) -> Selection | None:
        """Positions (ascending) and values of x + r; None if it is not finite throughout."""

    def encode_flat(self, request: Request) -> Encoded | None:
        return self.encode_through(request, raw_values)

    @property
    def sparse(self) -> bool:
        return True

    def choose(self, request: Request) -> tuple[Tensor, Tensor] | None:
        selection = self.select(request)
        return None if selection is None else (selection.positions, selection.values)

    def encode_chosen(
        self, positions: Tensor, values: Tensor, extent: Extent, key: Key
    ) -> Encoded | None:
        return encode_selection(Selection(positions, values), extent, key, raw_values)

    def encode_through(
        self, request: Request, encode_values: Callable[[Request], Encoded | None]
    ) -> Encoded | None:
        """Encode with the values going through a further stage."""
        selection = self.select(request)
        if selection is None:
            return None
        extent = Extent(request.dtype, request.numel)
        return encode_selection(selection, extent, request.key, encode_values)


def encode_selection(
    selection: Selection,
    extent: Extent,
    key: Key,
    encode_values: Callable[[Request], Encoded | None],
) -> Encoded | None:
    """Positions and values as a code, the values going through a further stage."""
    positions, values, drawn, chance = selection
    count = positions.numel()
    inner = Request(values, None, extent.dtype, key.substream())
    encoded = encode_values(inner) if count else raw_values(inner)
    if encoded is None:
        return None
    code, sections, known = encoded
    if known is None:
        known = code.open(sections, Extent(extent.dtype, count))
    outer: Code
    if drawn is not None:
        outer = Seeded(count, chance, *drawn, code)
        return Encoded(outer, sections, (positions, known))
    settings, written = write_positions(positions, extent.numel)
    outer = Sparse(count, inner=code, **settings)
    return Encoded(outer, (written, *sections), (positions, known))
