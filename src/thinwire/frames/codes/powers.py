"""Signed powers of two below a common top, a byte each."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start

BIAS = 1100  # added to `top`, so that the parameter is never negative


@dataclass(frozen=True)
class Powers(Code):
    """One section: bit 7 the sign, bits 0 to 6 a code c; 0 for c = 0, else 2^(top + c - 127)."""

    biased_top: int
    id: ClassVar[int] = 10

    def check(self, extent: Extent) -> None:
        if not -1000 <= self.biased_top - BIAS <= 1024:
            raise FrameError(f"powers of two up to 2^{self.biased_top - BIAS}")

    def sections(self, extent: Extent) -> list[Section]:
        return [Section(torch.uint8, extent.numel)]

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        (codes,) = opened
        exponent = torch.arange(128, dtype=torch.float64) + (self.biased_top - BIAS - 127)
        half = torch.exp2(exponent).to(extent.real)
        half[0] = 0
        table = torch.cat([half, -half]).to(out.device)
        kernels.on(out.device).add_powers(
            out, codes, table, weight=weight, fresh=start.fresh, plus=start.plus
        )
