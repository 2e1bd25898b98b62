"""One bit an element that chooses between two values."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.frames.code import KEEP, Code, Extent, Section, Start
from thinwire.frames.codes.uniform import blocks, check_block, fit


@dataclass(frozen=True)
class Pairs(Code):
    """Sections: (low, high) for each block, then one bit an element: 1 reads as high."""

    block: int
    id: ClassVar[int] = 9

    def check(self, extent: Extent) -> None:
        check_block(self.block)

    def sections(self, extent: Extent) -> list[Section]:
        return [
            Section(extent.real, 2 * blocks(self.block, extent.numel)),
            Section(torch.uint8, -(-extent.numel // 8)),
        ]

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        pairs, bits = opened
        kernels.on(out.device).add_pairs(
            out,
            bits,
            pairs.view(-1, 2),
            block=fit(self.block, extent.numel),
            weight=weight,
            fresh=start.fresh,
            plus=start.plus,
        )
