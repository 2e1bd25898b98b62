"""What keeps every bit of every element type."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import check, kernels
from thinwire.compressors.base import Encoded, LocalCompressor, Request, cut
from thinwire.frames.code import Extent
from thinwire.frames.values import PIECE, Raw
from thinwire.frames.zipped import CODERS, Zipped, shrink
from thinwire.kernels import Key


@dataclass(frozen=True)
class BitExact(LocalCompressor):
    """Base of the two below: without a residual any bits of any type are encoded."""

    @property
    def lossless(self) -> bool:
        return True

    @property
    def grain(self) -> int | None:
        return 1

    @abstractmethod
    def encode_bits(self, flat: Tensor) -> Encoded:
        """Encode any bits of any type."""

    def max_section_bytes(self, extent: Extent) -> int:
        return Raw().section_bytes(extent)

    def _encoded(self, flat: Tensor, r: Tensor | None, key: Key) -> tuple[Encoded | None, bool]:
        if r is not None:
            return super()._encoded(flat, r, key)
        finite = not flat.is_floating_point() or bool(torch.isfinite(flat).all())
        return self.encode_bits(flat), finite


@dataclass(frozen=True)
class NoCompression(BitExact):
    """The tensor, uncompressed.

    Every type, every bit, no indices. With a residual, x + r is sent in x's type and the residual
    keeps the rounding error (zero for float32 and float64).

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.NoCompression()
        >>> c.decode(c.encode(torch.tensor([1, 2, 3])))
        tensor([1, 2, 3])
    """

    name: ClassVar[str] = "none"

    @property
    def summable(self) -> bool:
        return True

    def encode_flat(self, request: Request) -> Encoded | None:
        x, r = request.x, request.r
        if not kernels.on(x.device).all_finite(x, r):
            return None
        if request.dtype == request.real:
            return Encoded(Raw(), (x.clone() if r is None else x + r,))
        out = torch.empty_like(x, dtype=request.dtype)
        for lo in range(0, request.numel, PIECE):
            out[lo : lo + PIECE] = request.total(lo, lo + PIECE)
        cut(out)
        return Encoded(Raw(), (out,))

    def encode_bits(self, flat: Tensor) -> Encoded:
        return Encoded(Raw(), (flat.clone(),))


@dataclass(frozen=True)
class Lossless(BitExact):
    """Byte planes through a general-purpose coder.

    Every type, every bit. Alone it shrinks normally distributed float32 by 15 %; at the end of a
    chain (`Quantize(4) | Lossless()`) it squeezes what the stages before it send.

    Args:
        coder: "zstd" or "zlib".
        level: the coder's effort; higher is smaller and slower.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Lossless()
        >>> c.encode(torch.zeros(100_000)).num_bytes < 200
        True

    Reference: zstandard (RFC 8878), zlib (RFC 1950).
    """

    coder: str = "zstd"
    level: int = 3
    name: ClassVar[str] = "lossless"

    def __post_init__(self) -> None:
        check.one_of("Lossless", "coder", self.coder, tuple(CODERS))
        levels = CODERS[self.coder].levels
        if not check.is_whole(self.level) or self.level not in levels:
            raise ValueError(
                f"Lossless: level of {self.coder} must be an integer in [{levels[0]}, "
                f"{levels[-1]}], got {self.level!r}"
            )

    def encode_flat(self, request: Request) -> Encoded | None:
        plain = NoCompression().encode_flat(request)
        return None if plain is None else self.zip(plain, Extent(request.dtype, request.numel))

    def encode_bits(self, flat: Tensor) -> Encoded:
        return self.zip(NoCompression().encode_bits(flat), Extent(flat.dtype, flat.numel()))

    def zip(self, encoded: Encoded, extent: Extent) -> Encoded:
        """What another compressor made, smaller."""
        code, sections, known = encoded
        coder = CODERS[self.coder]
        stored = tuple(shrink(section, coder, self.level) for section in sections)
        sizes = tuple(data.numel() for data in stored)
        if known is None:
            known = code.open(sections, extent)
        return Encoded(Zipped(coder.id, sizes, code), stored, known)
