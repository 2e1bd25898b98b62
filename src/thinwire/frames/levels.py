"""Codes of levels: small integers and what turns them into numbers, one scale for each block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start

TRITS = 0  # width 0: three levels, five to a byte
BIAS = 1100  # added to `top`, so that the parameter is never negative


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
    """Levels around zero: value = (level - limit) * scale.

    Sections: scales, then the levels packed into `width` bits each (0: five to a byte).
    """

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


@dataclass(frozen=True)
class Elias(Code):
    """Levels around zero, entropy-coded: value = (level - limit) * scale.

    Sections: scales, then 64-bit words, `unary_words` of unary parts and then the binary ones.

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

    def scratch_bytes(self, extent: Extent) -> int:
        return extent.numel  # levels, a byte each

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


@dataclass(frozen=True)
class Affine(Code):
    """Levels above a minimum: value = level * scale + low.

    Sections: lows, scales, then the levels packed into `width` bits each.
    """

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


@dataclass(frozen=True)
class PairCode(Code):
    """Few bits per element that choose by two numbers of their block.

    Sections: the two numbers for each block, then the bits of all elements.
    """

    block: int
    width: ClassVar[int]  # bits of an element
    kernel: ClassVar[str]  # that adds what they stand for

    def check(self, extent: Extent) -> None:
        check_block(self.block)

    def sections(self, extent: Extent) -> list[Section]:
        return [
            Section(extent.real, 2 * blocks(self.block, extent.numel)),
            Section(torch.uint8, -(-extent.numel * self.width // 8)),
        ]

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        pairs, bits = opened
        add = getattr(kernels.on(out.device), self.kernel)
        add(
            out,
            bits,
            pairs.view(-1, 2),
            block=fit(self.block, extent.numel),
            weight=weight,
            fresh=start.fresh,
            plus=start.plus,
        )


@dataclass(frozen=True)
class Pairs(PairCode):
    """One bit per element that chooses between two values, (low, high): 1 reads as high."""

    id: ClassVar[int] = 9
    width: ClassVar[int] = 1
    kernel: ClassVar[str] = "add_pairs"


@dataclass(frozen=True)
class SignedPairs(PairCode):
    """Two bits per element, a sign and which of two magnitudes, (small, large): bit 1 reads as
    large, bit 0 as a minus sign."""

    id: ClassVar[int] = 13
    width: ClassVar[int] = 2
    kernel: ClassVar[str] = "add_signed_pairs"


@dataclass(frozen=True)
class Powers(Code):
    """Signed powers of two below a common top, a byte each.

    One section: bit 7 is the sign, bits 0 to 6 are a code c: 0 for c = 0, else 2^(top + c - 127).
    """

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
