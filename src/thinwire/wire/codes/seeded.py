"""Values at positions that the reader draws itself from the key: no index travels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.kernels import Key
from thinwire.wire.code import KEEP, Code, Extent, Section, Start
from thinwire.wire.codes.sparse import check_values, scatter

EXACTLY = 0  # `chance` 0: exactly `count` positions


@dataclass(frozen=True)
class Seeded(Code):
    """Sections: those of the values.

    With chance 0, `count` distinct positions of the keyed permutation; otherwise each position
    whose random word is below `chance`. Both are specified with the wire format.
    """

    count: int
    chance: int
    seed: int
    step: int
    tensor: int
    stream: int
    inner: Code
    id: ClassVar[int] = 5

    def check(self, extent: Extent) -> None:
        if self.count > extent.numel:
            raise FrameError(f"{self.count} positions in a tensor of {extent.numel} elements")
        if self.chance > 1 << 32:
            raise FrameError("a probability above one")
        try:
            self.key.checked()
        except ValueError as error:
            raise FrameError(str(error)) from None
        check_values(self.inner, self._inner_extent(extent))

    @property
    def key(self) -> Key:
        return Key(self.seed, self.step, self.tensor, self.stream)

    def _inner_extent(self, extent: Extent) -> Extent:
        return Extent(extent.dtype, self.count)

    def sections(self, extent: Extent) -> list[Section]:
        return self.inner.sections(self._inner_extent(extent))

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        device = sections[0].device
        kernel = kernels.on(device)
        if self.chance == EXACTLY:
            positions = kernel.random_positions(extent.numel, self.count, self.key, device)
        else:
            chance = self.chance / 2**32
            positions = kernel.bernoulli_positions(extent.numel, chance, self.key, device)
            if positions.numel() != self.count:
                raise FrameError(f"the key draws {positions.numel()} positions, not {self.count}")
        return positions, self.inner.open(sections, self._inner_extent(extent))

    def picked(self, opened: Any, extent: Extent) -> tuple[Tensor, Tensor]:
        """(positions, values)."""
        positions, inner = opened
        own = self._inner_extent(extent)
        return positions, self.inner.values(inner, own, positions.device)

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        scatter(*self.picked(opened, extent), out, weight, start)
