"""Chains: what one stage sends as values goes through the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.compressors.base import Compressor, Encoded, LocalCompressor, Request, not_local
from thinwire.compressors.lossless import Lossless
from thinwire.compressors.sparsifiers import (
    Selection,
    SparseCompressor,
    Sparsifier,
    encode_selection,
    raw_values,
)
from thinwire.compressors.tiered import Tiered
from thinwire.frames.code import Extent
from thinwire.frames.positions import max_position_bytes
from thinwire.frames.values import Raw
from thinwire.kernels import Key

MOST_STAGES = 4


@dataclass(frozen=True, repr=False)
class Chain(LocalCompressor):
    """Several compressors one after the other, written with ``|``.

    A sparsifier's values go through the next stage; its positions travel beside them. `Lossless` as
    the last stage squeezes everything before it. The residual gets all that any stage left out.

    Args:
        stages: two to four compressors.

    Example:
        >>> import thinwire as tw
        >>> tw.TopK(0.01) | tw.OneBit()
        TopK(ratio=0.01, chunk=None) | OneBit(block=1024)
    """

    stages: tuple[LocalCompressor, ...]
    name: ClassVar[str] = "chain"

    def __new__(cls, stages: Sequence[LocalCompressor] = ()) -> "Chain":
        """What begins with a sparsifier is sparse, so it is a `SparseChain`."""
        sparse = cls is Chain and stages and isinstance(stages[0], Sparsifier)
        return super().__new__(SparseChain if sparse else cls)

    def __post_init__(self) -> None:
        if not 2 <= len(self.stages) <= MOST_STAGES:
            raise ValueError(f"Chain: two to {MOST_STAGES} stages, got {len(self.stages)}")
        *firsts, last = self.stages
        for stage, following in zip(firsts, self.stages[1:], strict=True):
            if isinstance(stage, Lossless):
                raise ValueError(f"Chain: Lossless must come last, not before {following!r}")
            if not isinstance(stage, Sparsifier) and not isinstance(following, Lossless):
                raise ValueError(
                    f"Chain: {stage!r} sends no plain values, so only Lossless may follow it, "
                    f"not {following!r}"
                )
        if isinstance(last, Tiered) and len(self.stages) > 2:
            raise ValueError("Chain: Tiered may follow one stage at most")

    @classmethod
    def of(cls, *parts: Compressor) -> "Chain":
        """A chain of compressors and chains."""
        stages: list[LocalCompressor] = []
        for part in parts:
            if not isinstance(part, LocalCompressor):
                raise TypeError(f"{not_local(part)}, so it cannot be chained")
            stages += part.stages if isinstance(part, Chain) else [part]
        return cls(tuple(stages))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.stages))

    def __str__(self) -> str:
        return "|".join(map(str, self.stages))

    @property
    def summable(self) -> bool:
        return all(stage.summable for stage in self.stages)

    @property
    def leaves_out(self) -> bool:
        return self.stages[0].leaves_out

    @property
    def random(self) -> bool:
        return any(stage.random for stage in self.stages)

    @property
    def unbiased(self) -> bool:
        return all(stage.unbiased for stage in self._lossy)

    @property
    def wants_residual(self) -> bool:
        return any(stage.wants_residual for stage in self._lossy)

    @property
    def grain(self) -> int | None:
        first, *others = self._lossy or self.stages
        # Values that are left go on to the next stage in other places than before.
        return first.grain if all(stage.grain == 1 for stage in others) else None

    @property
    def common_key(self) -> bool:
        return any(stage.common_key for stage in self.stages)

    def max_section_bytes(self, extent: Extent) -> int:
        # What does not get smaller is not zipped.
        return _most_through(self._lossy, extent)

    def encode_flat(self, request: Request) -> Encoded | None:
        encoded = _through(self._lossy)(request)
        return self._squeezed(encoded, Extent(request.dtype, request.numel))

    @property
    def _lossy(self) -> list[LocalCompressor]:
        return [stage for stage in self.stages if not isinstance(stage, Lossless)]

    def _squeezed(self, encoded: Encoded | None, extent: Extent) -> Encoded | None:
        last = self.stages[-1]
        return (
            encoded
            if encoded is None or not isinstance(last, Lossless)
            else last.zip(encoded, extent)
        )


@dataclass(frozen=True, repr=False)
class SparseChain(Chain, SparseCompressor):
    """A chain that begins with a sparsifier."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.stages[0], Sparsifier):
            raise ValueError(f"SparseChain: {self.stages[0]!r} does not send single elements")

    def max_chosen(self, numel: int) -> int:
        return self._first.max_chosen(numel)

    def max_enclosed_bytes(self, count: int, extent: Extent) -> int:
        few = Extent(extent.dtype, count)
        rest = self._lossy[1:]
        values = _most_through(rest, few) if rest else Raw().section_bytes(few)
        return max_position_bytes(count, extent.numel) + values

    @property
    def _first(self) -> Sparsifier:
        first = self.stages[0]
        assert isinstance(first, Sparsifier)
        return first

    def choose(self, request: Request) -> tuple[Tensor, Tensor] | None:
        return self._first.choose(request)

    def encode_chosen(
        self, positions: Tensor, values: Tensor, extent: Extent, key: Key
    ) -> Encoded | None:
        rest = self._lossy[1:]
        through = _through(rest) if rest else raw_values
        encoded = encode_selection(Selection(positions, values), extent, key, through)
        return self._squeezed(encoded, extent)


def _through(stages: list[LocalCompressor]) -> Callable[[Request], Encoded | None]:
    """The encoding of the first stage with its values going through the others."""
    first, *rest = stages
    if not rest:
        return first.encode_flat
    assert isinstance(first, Sparsifier)
    return lambda request: first.encode_through(request, _through(rest))


def _most_through(stages: list[LocalCompressor], extent: Extent) -> int:
    """Most bytes of sections that `_through` makes."""
    first, *rest = stages
    if not rest:
        return first.max_section_bytes(extent)
    assert isinstance(first, Sparsifier)
    count = first.max_chosen(extent.numel)
    values = _most_through(rest, Extent(extent.dtype, count))
    return max_position_bytes(count, extent.numel) + values
