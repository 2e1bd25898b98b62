"""Values at positions that the reader draws itself from the key: no index travels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import Code, Extent, Section
from thinwire.frames.codes.sparse import Scattered
from thinwire.kernels import Key

EXACTLY = 0  # `chance` 0: exactly `count` positions


@dataclass(frozen=True)
class Seeded(Scattered):
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
        self.check_count(extent)
        if self.chance > 1 << 32:
            raise FrameError("a probability above one")
        try:
            self.key.checked()
        except ValueError as error:
            raise FrameError(str(error)) from None
        self.inner.check(self.inner_extent(extent))

    @property
    def key(self) -> Key:
        return Key(self.seed, self.step, self.tensor, self.stream)

    def sections(self, extent: Extent) -> list[Section]:
        return self.inner.sections(self.inner_extent(extent))

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
        return positions, self.inner.open(sections, self.inner_extent(extent))
