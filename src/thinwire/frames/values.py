"""Codes of plain values: in the tensor's own type (`Raw`), in a narrower one (`Narrow`, `Scaled8`),
or none at all (`NonFinite`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start

# Elements; torch works on so few without its thread pool, whose barriers cost milliseconds each
# when another process has one of the cores.
PIECE = 3 << 13
NARROW = {1: torch.float16, 2: torch.bfloat16}


def begin(out: Tensor, start: Start) -> None:
    """Do what `start` says, for codes whose add is not one pass over the whole tensor."""
    if start.fresh:
        out.zero_()
    elif start.plus is not None and start.plus.dtype == out.dtype:
        out.add_(start.plus)
    elif start.plus is not None:  # torch would widen the whole of it first
        for lo in range(0, out.numel(), PIECE):
            out[lo : lo + PIECE].add_(start.plus[lo : lo + PIECE])


def plain_add(values: Tensor, out: Tensor, weight: float, start: Start) -> None:
    """out += weight * values with one rounding for the product and one for the sum.

    Values of another type go piece by piece, so that their converted form stays in the cache.
    """
    others = [values] if start.plus is None else [values, start.plus]
    alike = all(each.dtype == out.dtype for each in others)
    step = max(1, out.numel()) if alike else PIECE
    for lo in range(0, out.numel(), step):
        here = slice(lo, lo + step)
        plus = None if start.plus is None else start.plus[here]
        _add_piece(values[here], out[here], weight, Start(start.fresh, plus))


def _add_piece(values: Tensor, out: Tensor, weight: float, start: Start) -> None:
    if start.fresh and weight == 1:
        out.copy_(values)
        return
    begin(out, start)
    if not out.is_floating_point():
        out.add_(values, alpha=int(weight))
    elif abs(weight) == 1:  # with any other weight torch may fuse product and sum
        out.add_(values.to(out.dtype), alpha=weight)
    else:
        out.add_(values.to(out.dtype).mul(weight))


@dataclass(frozen=True)
class Raw(Code):
    """One section: the elements."""

    id: ClassVar[int] = 1

    @property
    def verbatim(self) -> bool:
        return True

    def check(self, extent: Extent) -> None:
        pass

    def sections(self, extent: Extent) -> list[Section]:
        return [Section(extent.dtype, extent.numel)]

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        truth = extent.dtype == torch.bool and extent.numel > 0
        if truth and int(sections[0].view(torch.uint8).max()) > 1:
            raise FrameError("a truth value is neither 0 nor 1")
        return tuple(sections)

    def values(self, opened: Any, extent: Extent, device: torch.device) -> Tensor:
        values: Tensor = opened[0].to(extent.real)
        return values

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        plain_add(opened[0], out, weight, start)


@dataclass(frozen=True)
class Narrow(Code):
    """One section: the elements as float16 (kind 1) or bfloat16 (kind 2)."""

    kind: int
    id: ClassVar[int] = 2

    def check(self, extent: Extent) -> None:
        if self.kind not in NARROW:
            raise FrameError(f"unknown narrow type {self.kind}")

    def sections(self, extent: Extent) -> list[Section]:
        return [Section(NARROW[self.kind], extent.numel)]

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        plain_add(opened[0], out, weight, start)


@dataclass(frozen=True)
class Scaled8(Code):
    """8-bit floats (e4m3, without infinities): value = float8(byte) * scale.

    Sections: a scale for each block, then one byte per element.
    """

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

    def scratch_bytes(self, extent: Extent) -> int:
        return extent.numel * extent.real.itemsize

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


@dataclass(frozen=True)
class NonFinite(Code):
    """What a lossy compressor sends of a tensor that holds NaN or infinity: no sections.

    Every element reads as NaN.
    """

    id: ClassVar[int] = 0

    def check(self, extent: Extent) -> None:
        raise FrameError("a code without content stands inside another")

    def sections(self, extent: Extent) -> list[Section]:
        return []

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        out.fill_(math.nan)
