"""Levels above a minimum: value = level * scale + low."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start
from thinwire.frames.codes.uniform import blocks, check_block, fit


@dataclass(frozen=True)
class Affine(Code):
    """Sections: lows, scales, then the levels packed into `width` bits each."""

    width: int
    block: int
    id: ClassVar[int] = 8

    def check(self, extent: Extent) -> None:
        if not 1 <= self.width <= 8:
            raise FrameError(f"levels of {self.width} bits")
        check_block(self.block)

    def sections(self, extent: Extent) -> list[Section]:
        rows = blocks(self.block, extent.numel)
        return [
            Section(extent.real, rows),
            Section(extent.real, rows),
            Section(torch.uint8, -(-extent.numel * self.width // 8)),
        ]

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        lows, scales, levels = opened
        kernels.on(out.device).add_affine(
            out,
            levels,
            lows,
            scales,
            width=self.width,
            block=fit(self.block, extent.numel),
            weight=weight,
            fresh=start.fresh,
            plus=start.plus,
        )
