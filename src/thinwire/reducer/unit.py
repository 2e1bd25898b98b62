"""Units: tensors that are compressed as one flat tensor."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire.compressors import Compressor
from thinwire.feedback.state import ScratchBuffers


class Unit:
    """Some tensors as one.

    Where the tensors lie one behind the other in memory, the flat tensor is a view of them;
    otherwise it is a copy in a scratch buffer that is filled before an exchange and given back
    after it.

    Args:
        names: of the tensors.
        pieces: the tensors, of one type and device.
        compressor: that they are sent with.
    """

    def __init__(
        self, names: Sequence[str], pieces: Sequence[Tensor], compressor: Compressor
    ) -> None:
        self.names = tuple(names)
        self.compressor = compressor
        self.pieces = [piece.detach() for piece in pieces]
        for name, piece in zip(names, self.pieces, strict=True):
            if not piece.is_contiguous() and any(
                n > 1 and step == 0 for n, step in zip(piece.shape, piece.stride(), strict=True)
            ):
                raise ValueError(f"{name}: several elements share one place in memory")
        self._joined = joined(self.pieces)

    @property
    def sizes(self) -> list[int]:
        return [piece.numel() for piece in self.pieces]

    def spans(self) -> list[tuple[str, tuple[int, int]]]:
        """Where each tensor lies in the flat one."""
        ends = list(accumulate(self.sizes))
        return list(zip(self.names, pairwise([0, *ends]), strict=True))

    @property
    def shape(self) -> torch.Size:
        """Of the one tensor, or that of all together, flat."""
        return self.pieces[0].shape if len(self.pieces) == 1 else torch.Size([sum(self.sizes)])

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def flat(self, buffers: ScratchBuffers, name: str) -> Tensor:
        """The flat tensor that the exchange works on."""
        if self._joined is not None:
            return self._joined
        first = self.pieces[0]
        return buffers.take(f"{name} flat", sum(self.sizes), first.dtype, first.device)

    def fill(self, flat: Tensor) -> None:
        """Copy the tensors to the flat one, if that is a copy."""
        if self._joined is None:
            for part, piece in zip(torch.split(flat, self.sizes), self.pieces, strict=True):
                part.view(piece.shape).copy_(piece)

    def give_back(self, flat: Tensor) -> None:
        """Copy the result to the tensors."""
        if self._joined is None:
            for part, piece in zip(torch.split(flat, self.sizes), self.pieces, strict=True):
                piece.copy_(part.view(piece.shape))


def joined(pieces: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors that lie one behind the other in memory, if they do."""
    first = pieces[0]
    total = sum(piece.numel() for piece in pieces)
    end = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for piece in pieces:
        if not piece.is_contiguous() or piece.untyped_storage().data_ptr() != storage:
            return None
        if piece.numel() and piece.data_ptr() != end:
            return None
        end += piece.nbytes
    return first.as_strided((total,), (1,), first.storage_offset())
