"""What a lossy compressor sends of a tensor that holds NaN or infinity: just that."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start


@dataclass(frozen=True)
class NonFinite(Code):
    """No sections; every element reads as NaN."""

    id: ClassVar[int] = 0

    def check(self, extent: Extent) -> None:
        raise FrameError("a code without content stands inside another")

    def sections(self, extent: Extent) -> list[Section]:
        return []

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        out.fill_(math.nan)
