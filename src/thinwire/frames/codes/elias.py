"""Levels around zero, entropy-coded: value = (level - limit) * scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start
from thinwire.frames.codes.uniform import blocks, check_block, check_levels, fit


@dataclass(frozen=True)
class Elias(Code):
    """Sections: scales, then 64-bit words, `unary_words` of unary parts and then the binary ones.

    Levels 0, +1, -1, +2, ... have the numbers 1, 2, 3, 4, ... and are their Elias-gamma codes.
    """

    limit: int
    block: int
    unary_words: int
    binary_words: int
    id: ClassVar[int] = 7

    def check(self, extent: Extent) -> None:
        check_levels(self.limit, 8)
        check_block(self.block)
        if extent.numel > 64 * self.unary_words:
            raise FrameError(f"{self.unary_words} words cannot hold {extent.numel} levels")
        if max(self.unary_words, self.binary_words) > -(-extent.numel // 8):
            raise FrameError(f"more words than {extent.numel} levels can fill")

    def sections(self, extent: Extent) -> list[Section]:
        return [
            Section(extent.real, blocks(self.block, extent.numel)),
            Section(torch.int64, self.unary_words + self.binary_words),
        ]

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        scales, words = sections
        kernel = kernels.on(words.device)
        levels = kernel.elias_decode(words, self.unary_words, extent.numel, self.limit)
        if levels is None:
            raise FrameError(f"not exactly {extent.numel} levels within {self.limit}")
        return scales, levels

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        scales, levels = opened
        kernels.on(out.device).add_uniform(
            out,
            levels,
            scales,
            limit=self.limit,
            width=8,
            block=fit(self.block, extent.numel),
            weight=weight,
            fresh=start.fresh,
            plus=start.plus,
        )
