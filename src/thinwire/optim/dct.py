"""The discrete cosine transform of a tensor, block by block."""

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

ROUNDINGS = 16  # that an element may come to, of the largest coefficient of its block


@functools.cache
def basis(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The matrix of the orthonormal DCT-II of n numbers: row k has the k-th frequency.

    >>> matrix = basis(4, torch.float64, torch.device("cpu"))
    >>> bool(torch.allclose(matrix @ matrix.T, torch.eye(4, dtype=torch.float64)))
    True
    """
    at = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / n * (at + 0.5) * at.unsqueeze(1)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(dtype=dtype, device=device)


class BlockDCT:
    """The orthonormal two-dimensional DCT-II of each block of a tensor.

    A matrix whose dimensions are multiples of `side` is divided into squares of that side. Of every
    other tensor each `side * side` elements in a row are taken as a square; what is left over at
    the end is a shorter rectangle, its last row filled up with zeros. So the coefficients are at
    most `side - 1` more than the elements, and those of a block lie together.

    Args:
        shape: of the tensors.
        side: of the squares.
    """

    def __init__(self, shape: torch.Size, side: int) -> None:
        self._shape, self._side = shape, side
        count = shape.numel()
        self._tiled = len(shape) == 2 and count > 0 and not any(n % side for n in shape)
        self._whole = count if self._tiled else count - count % (side * side)
        self._rest = count - self._whole
        self._width = min(side, self._rest)  # of the rectangle at the end
        self._rows = -(-self._rest // max(1, self._width))

    @property
    def num_coefficients(self) -> int:
        return self._whole + self._rows * self._width

    def forward(self, tensor: Tensor) -> Tensor:
        """The coefficients, flat."""
        side = self._side
        if self._tiled:
            rows, columns = (n // side for n in self._shape)
            squares = tensor.reshape(rows, side, columns, side).transpose(1, 2)
            return _transformed(squares).reshape(-1)
        flat = tensor.reshape(-1)
        pieces = [_transformed(flat[: self._whole].view(-1, side, side)).reshape(-1)]
        if self._rest:
            size = self._rows * self._width
            rectangle = pad(flat[self._whole :], (0, size - self._rest)).view(-1, self._width)
            pieces.append(_transformed(rectangle).reshape(-1))
        return torch.cat(pieces)

    def inverse(self, coefficients: Tensor, *, clear: bool = False) -> Tensor:
        """The tensor that has these coefficients.

        Args:
            clear: make zero of what is no more than rounding. Coefficients of equal magnitude
                cancel at some elements, whose signs would be those of errors.
        """
        side = self._side
        squares = _restored(coefficients[: self._whole].view(-1, side, side), clear)
        if self._tiled:
            rows, columns = (n // side for n in self._shape)
            return squares.view(rows, columns, side, side).transpose(1, 2).reshape(self._shape)
        pieces = [squares.reshape(-1)]
        if self._rest:
            rectangle = coefficients[self._whole :].view(self._width, self._rows)
            pieces.append(_restored(rectangle, clear).reshape(-1)[: self._rest])
        return torch.cat(pieces).view(self._shape)


def _transformed(blocks: Tensor) -> Tensor:
    """The coefficients of each block, transposed, which saves going back and forth."""
    rows, columns = (basis(n, blocks.dtype, blocks.device) for n in blocks.shape[-2:])
    return (blocks @ columns.T).transpose(-1, -2) @ rows.T


def _restored(coefficients: Tensor, clear: bool) -> Tensor:
    """The inverse of `_transformed`."""
    columns, rows = (
        basis(n, coefficients.dtype, coefficients.device) for n in coefficients.shape[-2:]
    )
    blocks = (coefficients @ rows).transpose(-1, -2) @ columns
    if clear and blocks.numel():
        largest = coefficients.abs().amax((-2, -1), keepdim=True)
        noise = ROUNDINGS * torch.finfo(blocks.dtype).eps * largest
        blocks.masked_fill_(blocks.abs() <= noise, 0)
    return blocks
