"""What an all-reduce works on: flat tensors with their residuals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors import Compressor, LocalCompressor
from thinwire.frames import Payload
from thinwire.frames.code import Extent
from thinwire.frames.payload import flat_view
from thinwire.kernels import Key

SLICED = 1  # tells the keys of slices from those of other pieces of a tensor
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Part(NamedTuple):
    """A tensor, or a stretch of one: flat, contiguous, with the residual of the same elements."""

    x: Tensor
    r: Tensor | None
    key: Key
    shape: torch.Size = torch.Size()  # that it has for its owner

    def cut(self, lo: int, hi: int, key: Key) -> "Part":
        """Some elements, as a part of its own that shares the memory."""
        return Part(self.x[lo:hi], None if self.r is None else self.r[lo:hi], key)

    def shard(self, index: int, count: int) -> "Part":
        """The index-th of `count` stretches of nearly equal length, with a key of its own."""
        n = self.x.numel()
        return self.cut(n * index // count, n * (index + 1) // count, self.key.derive(index))

    @property
    def extent(self) -> Extent:
        return Extent(self.x.dtype, self.x.numel())

    @property
    def real(self) -> torch.dtype:
        """The type that sums are formed in."""
        return WIDE.get(self.x.dtype, self.x.dtype)

    @property
    def finite(self) -> bool:
        """Whether x + r is, throughout."""
        if not self.x.numel() or not self.x.is_floating_point():
            return True
        return bool(kernels.on(self.x.device).all_finite(self.x.to(self.real), self.r))

    def draft(self, compressor: LocalCompressor) -> Payload:
        assert isinstance(compressor, LocalCompressor)
        return compressor.draft(self.x, residual=self.r, key=self.key)

    def settle(self, compressor: LocalCompressor, payload: Payload) -> None:
        assert isinstance(compressor, LocalCompressor)
        if self.r is not None:
            compressor.settle(payload, self.x, self.r)


@dataclass
class Reduction:
    """A weighted sum over ranks that is to be formed, in place.

    Args:
        parts: the tensors.
        compressor: for all of them.
        weight: what the sum is multiplied with, 1 / members for an average.
        max_bytes: most extra memory that it may take.
        recalled: what a joint compressor finds again in the next call, for each part.
        op: SUM, unless the backend itself reduces uncompressed tensors in another way.
        senders: in place of a weighted sum, the mean of each element over the ranks that sent it.
    """

    parts: list[Part]
    compressor: Compressor
    weight: float
    max_bytes: int | None = None
    recalled: Sequence[dict[str, Tensor]] | None = None
    op: str = "SUM"
    senders: bool = False

    @property
    def uncompressed(self) -> bool:
        """Whether the tensors themselves are what is sent."""
        return self.compressor.lossless and all(part.r is None for part in self.parts)

    @property
    def has_residual(self) -> bool:
        return any(part.r is not None for part in self.parts)

    def sliced(self, count: int) -> "list[Reduction]":
        """The same for each of so many slices of the tensors, or for fewer."""
        slices = cut(self.parts, self.compressor.grain or 1, count)
        return [replace(self, parts=parts) for parts in slices if parts]


def cut(parts: Sequence[Part], grain: int, count: int) -> list[list[Part]]:
    """About equally long slices of tensors, as they lie behind each other; some may be empty.

    Args:
        grain: tensors are cut at multiples of so many elements.
    """
    ends = list(accumulate(part.x.numel() for part in parts))
    edges = [ends[-1] * k // count for k in range(count + 1)]
    slices: list[list[Part]] = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        pieces: list[Part] = []
        for part, last in zip(parts, ends, strict=True):
            n = part.x.numel()
            lo, hi = (_rounded(edge - (last - n), n, grain) for edge in (begin, end))
            if (lo, hi) == (0, n):
                pieces.append(part)
            elif lo < hi:
                pieces.append(part.cut(lo, hi, part.key.derive(SLICED, number)))
        slices.append(pieces)
    return slices


def _rounded(edge: int, numel: int, grain: int) -> int:
    """An edge of a slice in a tensor, where that may be cut."""
    return numel if edge >= numel else max(0, edge) // grain * grain


class FlatTensors:
    """Tensors and residuals as parts; what is not contiguous is worked on in a copy.

    Args:
        shapes: where the tensors are flattened ones, those of the originals.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        key: Key,
        shapes: Sequence[torch.Size] | None = None,
    ) -> None:
        self.parts: list[Part] = []
        self._writes: list[Callable[[], object]] = []
        self._residual_writes: list[Callable[[], object]] = []
        for i, (tensor, residual) in enumerate(zip(tensors, residuals, strict=True)):
            x, write = flat_view(tensor)
            self._writes.append(write)
            r = None
            if residual is not None:
                r, write = flat_view(residual)
                self._residual_writes.append(write)
            shape = tensor.shape if shapes is None else shapes[i]
            self.parts.append(Part(x, r, key if i == 0 else key.derive(i), shape))

    def write_back(self, *, tensors: bool = True) -> None:
        """Write copies back to residuals, and to tensors unless these are only read."""
        for write in [*(self._writes if tensors else ()), *self._residual_writes]:
            write()
