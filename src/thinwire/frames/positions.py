"""Codes of some positions of a tensor and their values. Everything else is zero (`Sparse`,
`Seeded`), or what another code says (`Overlay`)."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start
from thinwire.kernels import Key

PLAIN, BITMAP, RICE = 0, 1, 2
EXACTLY = 0  # `chance` 0: exactly `count` positions


def plain_dtype(numel: int) -> torch.dtype:
    """The type of plainly written positions."""
    return torch.int32 if numel < 1 << 31 else torch.int64


class Scattered(Code):
    """Base of codes that put `count` values at positions; subclasses hold the two fields."""

    count: int
    inner: Code  # of the values

    def check_count(self, extent: Extent) -> None:
        """No more values than elements; no values at all are always written plainly."""
        if self.count > extent.numel:
            raise FrameError(f"{self.count} positions in a tensor of {extent.numel} elements")
        if not self.count and not self.inner.verbatim:
            raise FrameError("no values in a code for numbers")

    def inner_extent(self, extent: Extent) -> Extent:
        return Extent(extent.dtype, self.count)

    @abstractmethod
    def position_bytes(self, extent: Extent) -> int:
        """Most memory that finding the positions takes, they themselves included."""

    def scratch_bytes(self, extent: Extent) -> int:
        own = self.inner_extent(extent)
        values = self.count * own.real.itemsize
        return self.position_bytes(extent) + values + self.inner.scratch_bytes(own)

    def picked(self, opened: Any, extent: Extent) -> tuple[Tensor, Tensor]:
        """(positions, values)."""
        positions, inner = opened
        own = self.inner_extent(extent)
        return positions, self.inner.values(inner, own, positions.device)

    def held(self, opened: Any, extent: Extent) -> tuple[Tensor, Tensor] | None:
        positions, inner = opened
        few = self.inner.held(inner, self.inner_extent(extent))
        return self.picked(opened, extent) if few is None else (positions[few[0].long()], few[1])

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        positions, values = self.picked(opened, extent)
        kernels.on(out.device).scatter_add(
            out, positions, values, weight=weight, fresh=start.fresh, plus=start.plus
        )


@dataclass(frozen=True)
class Sparse(Scattered):
    """Positions that are written down.

    Sections: the positions in one of three forms, then the sections of the values.

    Form 0: each position as a 32-bit (64-bit from 2^31 elements on) integer. Form 1: a bitmap in
    64-bit words. Form 2: Golomb-Rice coded gaps, `unary_words` words of quotients and then the
    remainders of `parameter` bits.
    """

    count: int
    form: int
    parameter: int
    unary_words: int
    inner: Code
    id: ClassVar[int] = 4

    def check(self, extent: Extent) -> None:
        self.check_count(extent)
        if self.form not in (PLAIN, BITMAP, RICE):
            raise FrameError(f"unknown form {self.form} of positions")
        if self.parameter > 48 or (self.form != RICE and (self.parameter or self.unary_words)):
            raise FrameError(f"Rice parameter {self.parameter} makes no sense here")
        # All quotients together are at most the tensor's length shifted by the parameter.
        most = self.count + (extent.numel >> min(self.parameter, 64))
        if self.parameter > extent.numel.bit_length() or 64 * (self.unary_words - 1) > most:
            raise FrameError(f"longer Rice codes than {self.count} positions can have")
        if (64 * self.unary_words) << self.parameter >= 1 << 62:
            raise FrameError("Rice codes that leave 64-bit integers")
        self.inner.check(self.inner_extent(extent))

    def sections(self, extent: Extent) -> list[Section]:
        if self.form == PLAIN:
            own = Section(plain_dtype(extent.numel), self.count)
        elif self.form == BITMAP:
            own = Section(torch.int64, -(-extent.numel // 64))
        else:
            own = Section(torch.int64, self.unary_words + -(-self.count * self.parameter // 64))
        return [own, *self.inner.sections(self.inner_extent(extent))]

    def position_bytes(self, extent: Extent) -> int:
        # Decoded, and once more while they are compared or put together.
        return 2 * self.count * plain_dtype(extent.numel).itemsize

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        positions = self._positions(sections[0], extent.numel)
        return positions, self.inner.open(sections[1:], self.inner_extent(extent))

    def _positions(self, section: Tensor, numel: int) -> Tensor:
        kernel = kernels.on(section.device)
        if self.form == PLAIN:
            # A copy: what is checked here must not change with the frame's memory later.
            positions = section.clone()
            ascending = self.count < 2 or bool((positions[1:] > positions[:-1]).all())
            if self.count and (
                not ascending or int(positions[0]) < 0 or int(positions[-1]) >= numel
            ):
                raise FrameError("positions are not ascending or lie outside the tensor")
            return positions
        if self.form == BITMAP:
            found = kernel.bitmap_decode(section, self.count, numel)
        else:
            found = kernel.rice_decode(section, self.count, self.parameter, self.unary_words, numel)
        if found is None:
            raise FrameError(f"positions: not exactly {self.count} that lie inside the tensor")
        decoded: Tensor = found
        return decoded


def max_position_bytes(count: int, numel: int) -> int:
    """The longest section that `write_positions` makes of so many positions."""
    return min(Section(plain_dtype(numel), count).num_bytes, 8 * -(-numel // 64))


def write_positions(positions: Tensor, numel: int) -> tuple[dict[str, int], Tensor]:
    """Positions in their smallest form: the parameters of `Sparse`, and the section."""
    count = positions.numel()
    kernel = kernels.on(positions.device)
    plain = Section(plain_dtype(numel), count).num_bytes
    bitmap = 8 * -(-numel // 64)
    parameter = unary_words = rice = 0
    if count:
        # ln 2 times the mean gap is the best divisor for geometric gaps; others are near.
        guess = max(0, int(0.69 * numel / count).bit_length() - 1)
        parameter, quotients = kernel.rice_parameter(positions, guess)
        unary_words = -(-(quotients + count) // 64)
        rice = 8 * (unary_words + -(-count * parameter // 64))
    if plain <= min(bitmap, rice):
        settings = {"form": PLAIN, "parameter": 0, "unary_words": 0}
        return settings, positions.to(plain_dtype(numel))
    if bitmap <= rice:
        settings = {"form": BITMAP, "parameter": 0, "unary_words": 0}
        return settings, kernel.bitmap_encode(positions, numel)
    settings = {"form": RICE, "parameter": parameter, "unary_words": unary_words}
    return settings, kernel.rice_encode(positions, parameter, unary_words)


@dataclass(frozen=True)
class Seeded(Scattered):
    """Positions that the reader draws itself from the key: no index is sent.

    Sections: those of the values.

    With chance 0, `count` distinct positions of the keyed permutation; otherwise each position
    whose random word is below `chance`. Both are specified with the wire format.
    """

    count: int
    chance: int
    seed: int
    step: int
    tensor: int
    stream: int
    inner: Code
    id: ClassVar[int] = 5

    def check(self, extent: Extent) -> None:
        self.check_count(extent)
        if self.chance > 1 << 32:
            raise FrameError("a probability above one")
        try:
            self.key.checked()
        except ValueError as error:
            raise FrameError(str(error)) from None
        self.inner.check(self.inner_extent(extent))

    @property
    def key(self) -> Key:
        return Key(self.seed, self.step, self.tensor, self.stream)

    def sections(self, extent: Extent) -> list[Section]:
        return self.inner.sections(self.inner_extent(extent))

    def position_bytes(self, extent: Extent) -> int:
        width = plain_dtype(extent.numel).itemsize
        if self.chance == EXACTLY:
            # Up to two numbers are permuted for each that lies below n, then put together.
            return 4 * (self.count + 256) * width
        # How many are drawn is known when they have been: eight standard deviations above the mean.
        mean = extent.numel * self.chance >> 32
        return min(extent.numel, mean + 8 * math.isqrt(mean) + 64) * width

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        device = sections[0].device
        kernel = kernels.on(device)
        if self.chance == EXACTLY:
            positions = kernel.random_positions(extent.numel, self.count, self.key, device)
        else:
            chance = self.chance / 2**32
            positions = kernel.bernoulli_positions(extent.numel, chance, self.key, device)
            if positions.numel() != self.count:
                raise FrameError(f"the key draws {positions.numel()} positions, not {self.count}")
        return positions, self.inner.open(sections, self.inner_extent(extent))


@dataclass(frozen=True)
class Overlay(Code):
    """The sum of two codes over the same tensor: a coarse one for all, a fine one on top for a few.

    Sections: those of the lower code, then those of the upper.
    """

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

    def scratch_bytes(self, extent: Extent) -> int:
        return self.lower.scratch_bytes(extent) + self.upper.scratch_bytes(extent)

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

    def held(self, opened: Any, extent: Extent) -> tuple[Tensor, Tensor] | None:
        codes = zip((self.lower, self.upper), opened, strict=True)
        found = [code.held(each, extent) for code, each in codes]
        if found[0] is None or found[1] is None:
            return None
        both = torch.cat([found[0][0], found[1][0]])
        positions, at = torch.unique(both, return_inverse=True)
        values = found[0][1].new_zeros(positions.numel())
        return positions, values.index_add_(0, at, torch.cat([found[0][1], found[1][1]]))
