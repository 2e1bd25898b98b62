"""What an all-reduce works on: flat tensors with their residuals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.message import Expected, bundle
from thinwire.compressors import Compressor, LocalCompressor
from thinwire.frames import Payload, pack
from thinwire.frames.code import Extent
from thinwire.frames.payload import flat_view
from thinwire.kernels import Key

SLICED = 1  # tells the keys of slices from those of other pieces of a tensor
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Part(NamedTuple):
    """A tensor, or a stretch of one: flat, contiguous, with the residual of the same elements and
    the compressor that it is sent with."""

    x: Tensor
    r: Tensor | None
    key: Key
    compressor: Compressor
    shape: torch.Size = torch.Size()  # that it has for its owner
    place: int = 0  # among the tensors of the reduction that it is a stretch of

    def cut(self, lo: int, hi: int, key: Key) -> "Part":
        """Some elements, as a part of its own that shares the memory."""
        r = None if self.r is None else self.r[lo:hi]
        return Part(self.x[lo:hi], r, key, self.compressor, place=self.place)

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
        return bool(kernels.on(self.x.device).all_finite(self.x, self.r))

    @property
    def uncompressed(self) -> bool:
        """Whether the tensor itself is what is sent."""
        return self.compressor.lossless and self.r is None

    @property
    def local(self) -> LocalCompressor:
        """The compressor, where there are payloads."""
        assert isinstance(self.compressor, LocalCompressor)
        return self.compressor

    @property
    def expected(self) -> Expected:
        """What another rank's frame of the same elements must be."""
        return Expected(self.extent, self.local)

    def using(self, compressor: Compressor) -> "Part":
        """The same, sent with another compressor."""
        return self._replace(compressor=compressor)

    def draft(self) -> Payload:
        return self.local.draft(self.x, residual=self.r, key=self.key)

    def settle(self, payload: Payload) -> None:
        if self.r is not None:
            self.local.settle(payload, self.x, self.r)


@dataclass
class Reduction:
    """A weighted sum over ranks that is to be formed, in place.

    Args:
        parts: the tensors.
        weight: what the sum is multiplied with, 1 / members for an average.
        max_bytes: most extra memory that it may take.
        recalled: what a joint compressor finds again in the next call, for each part.
        op: SUM, unless the backend itself reduces uncompressed tensors in another way.
        senders: in place of a weighted sum, the mean of each element over the ranks that sent it,
            where compressors leave out some.

    Attributes:
        sent: bytes that this rank has sent of each tensor, in frames or as values to be summed.
    """

    parts: list[Part]
    weight: float
    max_bytes: int | None = None
    recalled: Sequence[dict[str, Tensor]] | None = None
    op: str = "SUM"
    senders: bool = False
    sent: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sent = [0] * (1 + max(part.place for part in self.parts))

    @property
    def uncompressed(self) -> bool:
        """Whether the tensors themselves are what is sent."""
        return all(part.uncompressed for part in self.parts)

    @property
    def has_residual(self) -> bool:
        return any(part.r is not None for part in self.parts)

    def sliced(self, count: int) -> "list[Reduction]":
        """The same for each of so many slices of the tensors, or for fewer."""
        return [replace(self, parts=parts) for parts in cut(self.parts, count) if parts]

    def bundle(self, parts: Sequence[Part], payloads: Sequence[Payload]) -> Tensor:
        """A message with a frame of each of these parts, or stretches; counted as sent."""
        frames = [pack(payload) for payload in payloads]
        self.count(parts, [frame.numel() for frame in frames])
        return bundle(frames)

    def count(self, parts: Sequence[Part], num_bytes: Sequence[int]) -> None:
        """So much was sent of each of these parts."""
        for part, each in zip(parts, num_bytes, strict=True):
            self.sent[part.place] += each

    def count_all(self, other: "Reduction") -> None:
        """All that was sent in another reduction of the same tensors, or of some of them."""
        for place, each in enumerate(other.sent):
            self.sent[place] += each


def cut(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """About equally long slices of tensors, as they lie behind each other; some may be empty.

    A tensor is cut where its compressor sees no difference; one that is looked at as a whole is
    part of the slice in which it begins.
    """
    ends = list(accumulate(part.x.numel() for part in parts))
    total = ends[-1]
    edges = [total * k // count for k in range(count)] + [total + 1]
    slices: list[list[Part]] = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        pieces: list[Part] = []
        for part, last in zip(parts, ends, strict=True):
            n = part.x.numel()
            lo, hi = (_rounded(edge - (last - n), part) for edge in (begin, end))
            if begin <= last - n < end and hi == n:
                pieces.append(part)
            elif lo < hi:
                pieces.append(part.cut(lo, hi, part.key.derive(SLICED, number)))
        slices.append(pieces)
    return slices


def _rounded(edge: int, part: Part) -> int:
    """An edge of a slice in a tensor, where that may be cut."""
    n = part.x.numel()
    grain = part.compressor.grain or n or 1
    return n if edge >= n or (edge > 0 and grain >= n) else max(0, edge) // grain * grain


class FlatTensors:
    """Tensors and residuals as parts; what is not contiguous is worked on in a copy.

    Args:
        compressors, keys: of each tensor; equal keys are told apart by the tensors' places.
        shapes: where the tensors are flattened ones, those of the originals.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        compressors: Sequence[Compressor],
        keys: Sequence[Key],
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
            key = keys[i] if i == 0 else keys[i].derive(i)
            self.parts.append(Part(x, r, key, compressors[i], shape, i))

    def write_back(self, *, tensors: bool = True) -> None:
        """Write copies back to residuals, and to tensors unless these are only read."""
        for write in [*(self._writes if tensors else ()), *self._residual_writes]:
            write()
