"""What a collective works on: flat tensors with their residuals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors import Compressor, LocalCompressor
from thinwire.frames import Payload
from thinwire.frames.code import Extent
from thinwire.frames.payload import flat_view
from thinwire.kernels import Key

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

    def draft(self, compressor: Compressor) -> Payload:
        assert isinstance(compressor, LocalCompressor)
        return compressor.draft(self.x, residual=self.r, key=self.key)

    def settle(self, compressor: Compressor, payload: Payload) -> None:
        assert isinstance(compressor, LocalCompressor)
        if self.r is not None:
            compressor.settle(payload, self.x, self.r)


@dataclass
class Work:
    """All that one call of all_reduce is about.

    Args:
        parts: the tensors.
        compressor: for all of them.
        weight: what the sum is multiplied with, 1 / members for an average.
        finish: writes flat copies back where tensors are not contiguous.
        limit: most extra bytes that the call may take.
        recall: what a joint compressor finds again in the next call, for each part.
    """

    parts: list[Part]
    compressor: Compressor
    weight: float
    finish: list[Callable[[], object]]
    limit: int | None = None
    recall: Sequence[dict[str, Tensor]] | None = None

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        compressor: Compressor,
        key: Key,
        weight: float = 1.0,
        *,
        changes: bool = True,
        limit: int | None = None,
        shapes: Sequence[torch.Size] | None = None,
        recall: Sequence[dict[str, Tensor]] | None = None,
    ) -> "Work":
        """Flatten tensors and residuals; what is not contiguous is worked on in a copy.

        Args:
            changes: whether the result goes into the tensors; they are only read otherwise.
            shapes: where the tensors are flattened ones, those of the originals.
        """
        parts, finish = [], []
        for i, (tensor, residual) in enumerate(zip(tensors, residuals, strict=True)):
            x, done = flat_view(tensor)
            if changes:
                finish.append(done)
            r = None
            if residual is not None:
                r, done = flat_view(residual)
                finish.append(done)
            shape = tensor.shape if shapes is None else shapes[i]
            parts.append(Part(x, r, key if i == 0 else key.derive(i), shape))
        return cls(parts, compressor, weight, finish, limit, recall)

    def recalled(self) -> list[tuple[Part, dict[str, Tensor]]]:
        """Each part with what is to be found again; nothing if nobody keeps it."""
        kept = [{} for _ in self.parts] if self.recall is None else self.recall
        return list(zip(self.parts, kept, strict=True))

    def done(self) -> None:
        """Write back what was worked on in copies."""
        for each in self.finish:
            each()


def share(numel: int, index: int, count: int) -> tuple[int, int]:
    """The index-th of `count` stretches of nearly equal length."""
    return numel * index // count, numel * (index + 1) // count
