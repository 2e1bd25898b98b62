"""Levels around zero: value = (level - limit) * scale."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start

TRITS = 0  # width 0: three levels, five to a byte


def blocks(block: int, numel: int) -> int:
    """How many blocks there are; block 0 is the whole tensor."""
    return 1 if block == 0 else -(-numel // block)


def fit(block: int | None, numel: int) -> int | None:
    """A block for kernels, no longer than the tensor; None (or 0) is the whole tensor."""
    return min(block, max(8, -(-numel // 8) * 8)) if block else None


def check_block(block: int) -> None:
    if block % 8:
        raise FrameError(f"a block of {block} elements is not a multiple of 8")


def check_levels(limit: int, width: int) -> None:
    room = 3 if width == TRITS else 1 << min(width, 9)
    if width > 8 or limit < 1 or 2 * limit + 1 > room:
        raise FrameError(f"levels up to {limit} do not go into {width} bits")


@dataclass(frozen=True)
class Uniform(Code):
    """Sections: scales, then the levels packed into `width` bits each (0: five to a byte)."""

    width: int
    limit: int
    block: int
    id: ClassVar[int] = 6

    def check(self, extent: Extent) -> None:
        check_levels(self.limit, self.width)
        check_block(self.block)
        if self.width == TRITS and self.block:
            raise FrameError("five levels to a byte need one scale for the whole tensor")

    def sections(self, extent: Extent) -> list[Section]:
        n = extent.numel
        size = -(-n // 5) if self.width == TRITS else -(-n * self.width // 8)
        return [Section(extent.real, blocks(self.block, n)), Section(torch.uint8, size)]

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        scales, levels = opened
        kernels.on(out.device).add_uniform(
            out,
            levels,
            scales,
            limit=self.limit,
            width=self.width,
            block=fit(self.block, extent.numel),
            weight=weight,
            fresh=start.fresh,
            plus=start.plus,
        )
