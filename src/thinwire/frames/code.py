"""A code: how compressed data lies in sections, and how it is added to a tensor again.

A code is all that a reader needs; which compressor wrote it, and by what rule it chose, is not part
of it. Top-K, Random-K and Threshold share the code `Sparse`; Quantize, QSGD and TernGrad share
`Uniform`. Codes nest: the values of a `Sparse` are described by a code of their own. In a header, a
code is its id and its parameters as varints.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from thinwire.errors import FrameError

MOST = 1 << 64  # no number in a header reaches this


_DIGITS = [bytes([digit]) for digit in range(0x80)]


def varint(value: int) -> bytes:
    """An integer in [0, 2^64) as little-endian base-128 digits (LEB128)."""
    if 0 <= value < 0x80:
        return _DIGITS[value]
    if not 0 <= value < MOST:
        raise ValueError(f"varint: {value} is not in [0, 2^64)")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Reader:
    """Reads a header from front to back; FrameError when it ends too early."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def byte(self) -> int:
        if self.at >= len(self._data):
            raise FrameError("the frame ends within its header")
        self.at += 1
        return self._data[self.at - 1]

    def take(self, count: int) -> bytes:
        """So many bytes."""
        if count > len(self._data) - self.at:
            raise FrameError("the frame ends within its header")
        self.at += count
        return self._data[self.at - count : self.at]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            digit = self.byte()
            value |= (digit & 0x7F) << shift
            if digit < 0x80:
                if value >= MOST or (digit == 0 and shift):
                    break
                return value
        raise FrameError(f"a number in the header is malformed (byte {self.at})")


class Section(NamedTuple):
    """The element type and length of one section."""

    dtype: torch.dtype
    numel: int

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def as_bytes(section: Tensor) -> Tensor:
    """The memory of a section as uint8."""
    flat = section.contiguous()
    if flat.dim() != 1 or flat.numel() < 2:
        # A tensor of no or one element counts as contiguous whatever its stride says.
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of scales, residuals and arithmetic: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Extent(NamedTuple):
    """What a code describes: so many elements of a type."""

    dtype: torch.dtype
    numel: int

    @property
    def real(self) -> torch.dtype:
        """The type of scales and of arithmetic."""
        return wide_type(self.dtype)


class Start(NamedTuple):
    """What happens to a tensor before a payload is added to it, within the same pass."""

    fresh: bool = False  # it is zeroed
    plus: Tensor | None = None  # this tensor is added, of the same type or a half one


KEEP = Start()


@functools.cache
def _names(code: type["Code"]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(code))


@dataclass(frozen=True)
class Code(ABC):
    """Base of all codes. Fields that are integers are its parameters, fields that are codes nest.

    A subclass has an `id` of its own and states its sections; all lengths follow from the
    parameters and the extent, so that a frame needs no table of lengths.
    """

    id: ClassVar[int]

    @property
    def verbatim(self) -> bool:
        """Whether the values are there to the last bit in the tensor's own type."""
        return False

    def write(self) -> bytes:
        """The record of this code: its id, its integers as varints, then the nested records."""
        record, nested = [bytes((self.id,))], []
        for value in self._values():
            if isinstance(value, int):
                record.append(varint(int(value)))
            elif isinstance(value, Code):
                nested.append(value.write())
        return b"".join(record + nested)

    @classmethod
    def read(cls, reader: Reader, nested: Any) -> Self:
        """The inverse of `write`, after the id; `nested()` reads one nested record."""
        kinds = [f.type for f in fields(cls)]
        return cls(*(nested() if kind in ("Code", Code) else reader.varint() for kind in kinds))

    def _values(self) -> list[Any]:
        return [getattr(self, name) for name in _names(type(self))]

    def children(self) -> list["Code"]:
        return [value for value in self._values() if isinstance(value, Code)]

    def descendants(self) -> Iterator["Code"]:
        """All nested codes, at any depth."""
        for child in self.children():
            yield child
            yield from child.descendants()

    @abstractmethod
    def check(self, extent: Extent) -> None:
        """Raise FrameError when the parameters make no sense for this extent."""

    @abstractmethod
    def sections(self, extent: Extent) -> list[Section]:
        """The sections, this code's own before those of nested codes."""

    def section_bytes(self, extent: Extent) -> int:
        """The length of all sections."""
        return sum(section.num_bytes for section in self.sections(extent))

    def scratch_bytes(self, extent: Extent) -> int:
        """Most memory that `open` and `add` take, those of nested codes included.

        Without the sections and `out`. It follows from the parameters alone, so that a reader can
        refuse what they multiply out to before it allocates anything.
        """
        return 0

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        """Sections in the form that `add` takes; raise FrameError when their content is bad."""
        return tuple(sections)

    @abstractmethod
    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        """out += weight * values, after `start`; out is flat, contiguous, of type extent.real.

        A wider out is fine for the sparse and raw codes.
        """

    def values(self, opened: Any, extent: Extent, device: torch.device) -> Tensor:
        """All values as a flat tensor of type extent.real, which the caller does not write to."""
        out = torch.empty(extent.numel, dtype=extent.real, device=device)
        self.add(opened, extent, out, 1.0, Start(fresh=True))
        return out

    def held(self, opened: Any, extent: Extent) -> tuple[Tensor, Tensor] | None:
        """Ascending positions and values of the elements that were sent; None if all were."""
        return None
