"""Another code's sections, each through a lossless byte coder of the libraries that maintain them.

Sections of wider elements are split into byte planes first: the sign and exponent bytes of floats
are alike and compress, the low mantissa bytes do not.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from thinwire.errors import FrameError
from thinwire.frames.code import KEEP, Code, Extent, Reader, Section, Start, as_bytes, varint

MOST_SECTIONS = 16


def _zstd_compress(data: bytes, level: int) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=level).compress(data))


def _zstd_expand(data: bytes, size: int) -> bytes:
    import zstandard

    try:
        if zstandard.frame_content_size(data) != size:
            raise FrameError("a compressed section states another size than the frame")
        expander = zstandard.ZstdDecompressor()
        return bytes(expander.decompress(data, max_output_size=size, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise FrameError(f"a compressed section is damaged: {error}") from None


def _zlib_expand(data: bytes, size: int) -> bytes:
    expander = zlib.decompressobj()
    try:
        out = expander.decompress(data, size + 1)
    except zlib.error as error:
        raise FrameError(f"a compressed section is damaged: {error}") from None
    if not expander.eof or expander.unused_data:
        raise FrameError("a compressed section is damaged: it does not end where it should")
    return out


class Coder(NamedTuple):
    """One coder: its number in frames, and its two directions."""

    id: int
    most: int  # no input expands by more than this factor
    levels: range
    compress: Callable[[bytes, int], bytes]
    expand: Callable[[bytes, int], bytes]


CODERS = {
    "zlib": Coder(1, 1032, range(1, 10), zlib.compress, _zlib_expand),
    # A zstd block of 128 KiB of equal bytes takes 4 bytes.
    "zstd": Coder(2, 1 << 15, range(1, 23), _zstd_compress, _zstd_expand),
}
CODER_BY_ID = {coder.id: coder for coder in CODERS.values()}


def shrink(section: Tensor, coder: Coder, level: int) -> Tensor:
    """A section as compressed byte planes, or its plain bytes where that is no larger."""
    plain = as_bytes(section)
    width = section.dtype.itemsize
    planes = plain.view(-1, width).t() if width > 1 else plain
    data = coder.compress(planes.contiguous().cpu().numpy().tobytes(), level)
    if len(data) >= plain.numel():
        return plain
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(section.device)


def expand(stored: Tensor, section: Section, coder: Coder) -> Tensor:
    """The inverse of `shrink`; FrameError when the bytes are not what a coder wrote."""
    size = section.num_bytes
    if stored.numel() == size:
        return stored.clone().view(section.dtype)
    data = coder.expand(stored.cpu().numpy().tobytes(), size)
    if len(data) != size:
        raise FrameError(f"a compressed section holds {len(data)} bytes, not {size}")
    plain = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else stored.new_empty(0)
    width = section.dtype.itemsize
    planes = plain.view(width, -1).t().contiguous().flatten() if width > 1 else plain
    return planes.to(stored.device).view(section.dtype)


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
        if self.coder not in CODER_BY_ID:
            raise FrameError(f"unknown lossless coder {self.coder}")
        self.inner.check(extent)
        plain = self.inner.sections(extent)
        if len(plain) != len(self.sizes):
            raise FrameError(f"{len(self.sizes)} compressed sections instead of {len(plain)}")
        most = CODER_BY_ID[self.coder].most
        for size, section in zip(self.sizes, plain, strict=True):
            if size > section.num_bytes:
                raise FrameError("a compressed section is larger than its content")
            if section.num_bytes > most * size:
                raise FrameError(f"{size} compressed bytes cannot hold {section.num_bytes}")

    def sections(self, extent: Extent) -> list[Section]:
        return [Section(torch.uint8, size) for size in self.sizes]

    def scratch_bytes(self, extent: Extent) -> int:
        plain = [section.num_bytes for section in self.inner.sections(extent)]
        # While a section is expanded, the coder's bytes and a copy of them are there as well.
        expanded = sum(plain) + 2 * max(plain, default=0)
        return expanded + self.inner.scratch_bytes(extent)

    def open(self, sections: Sequence[Tensor], extent: Extent) -> Any:
        coder = CODER_BY_ID[self.coder]
        plain = self.inner.sections(extent)
        both = zip(sections, plain, strict=True)
        return self.inner.open([expand(stored, section, coder) for stored, section in both], extent)

    def add(
        self, opened: Any, extent: Extent, out: Tensor, weight: float, start: Start = KEEP
    ) -> None:
        self.inner.add(opened, extent, out, weight, start)

    def held(self, opened: Any, extent: Extent) -> tuple[Tensor, Tensor] | None:
        return self.inner.held(opened, extent)
