"""The sum of two codes over the same tensor: a coarse one for all, a fine one on top for a few."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start


@dataclass(frozen=True)
class Overlay(Code):
    """Sections: those of the lower code, then those of the upper."""

    lower: Code
    upper: Code
    id: ClassVar[int] = 11

    def check(self, extent: Extent) -> None:
        if any(isinstance(code, Overlay) for code in self.descendants()):
            raise FrameError("an overlay within an overlay")
        self.lower.check(extent)
        self.upper.check(extent)

    def sections(self, extent: Extent) -> list[Section]:
        return self.lower.sections(extent) + self.upper.sections(extent)

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        own = len(self.lower.sections(extent))
        return (
            self.lower.open(sections[:own], extent),
            self.upper.open(sections[own:], extent),
        )

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        lower, upper = opened
        self.lower.add(lower, extent, out, weight, start)
        self.upper.add(upper, extent, out, weight)
