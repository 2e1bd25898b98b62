"""Another code's sections, each through a lossless byte coder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Section, Start
from thinwire.frames.coders import BY_ID, expand
from thinwire.frames.varint import Reader, varint

MOST_SECTIONS = 16


@dataclass(frozen=True)
class Zipped(Code):
    """As many byte sections as the nested code has sections, of the given sizes.

    A section whose stored size equals its plain size is stored plainly.
    """

    coder: int
    sizes: tuple[int, ...]
    inner: Code
    id: ClassVar[int] = 12

    @property
    def verbatim(self) -> bool:
        return self.inner.verbatim

    def write(self) -> bytes:
        head = [self.id, self.coder, len(self.sizes), *self.sizes]
        return b"".join(map(varint, head)) + self.inner.write()

    @classmethod
    def read(cls, reader: Reader, nested: Callable[[], Code]) -> Self:
        coder, count = reader.varint(), reader.varint()
        if count > MOST_SECTIONS:
            raise FrameError(f"{count} compressed sections")
        return cls(coder, tuple(reader.varint() for _ in range(count)), nested())

    def check(self, extent: Extent) -> None:
        if self.coder not in BY_ID:
            raise FrameError(f"unknown lossless coder {self.coder}")
        self.inner.check(extent)
        plain = self.inner.sections(extent)
        if len(plain) != len(self.sizes):
            raise FrameError(f"{len(self.sizes)} compressed sections instead of {len(plain)}")
        if any(size > section.num_bytes for size, section in zip(self.sizes, plain, strict=True)):
            raise FrameError("a compressed section is larger than its content")

    def sections(self, extent: Extent) -> list[Section]:
        return [Section(torch.uint8, size) for size in self.sizes]

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        coder = BY_ID[self.coder]
        plain = self.inner.sections(extent)
        both = zip(sections, plain, strict=True)
        return self.inner.open([expand(stored, section, coder) for stored, section in both], extent)

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        self.inner.add(opened, extent, out, weight, start)
