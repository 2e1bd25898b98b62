"""8-bit floats (e4m3, without infinities) with one scale a block."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start
from thinwire.frames.codes.raw import plain_add


@dataclass(frozen=True)
class Scaled8(Code):
    """Sections: scales, then one byte an element; value = float8(byte) * scale."""

    block: int
    id: ClassVar[int] = 3

    def check(self, extent: Extent) -> None:
        if self.block < 1:
            raise FrameError("a block of 8-bit floats has no elements")

    def sections(self, extent: Extent) -> list[Section]:
        return [
            Section(extent.real, -(-extent.numel // self.block)),
            Section(torch.uint8, extent.numel),
        ]

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        scales, data = opened
        values = data.view(torch.float8_e4m3fn).to(extent.real)
        block = min(self.block, max(1, extent.numel))
        plain_add(scale_blocks(values, scales, block), out, weight, start)


def scale_blocks(values: Tensor, factors: Tensor, block: int) -> Tensor:
    """Multiply each block of a flat tensor by its factor, in place."""
    whole = values.numel() // block * block
    rows = values[:whole].view(-1, block)
    rows.mul_(factors[: len(rows)].unsqueeze(1))
    values[whole:].mul_(factors[len(rows) :])
    return values
