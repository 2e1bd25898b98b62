"""Small numbers in bytes, and tensors in rows."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def rows_of(p: Tensor, length: int | None) -> Tensor:
    """A flat tensor as rows of `length`, filled up with zeros; one row for None."""
    if length is None:
        return p.view(1, -1)
    return pad(p, (0, -p.numel() % length)).view(-1, length)


def pack(values: Tensor, width: int) -> Tensor:
    """uint8 numbers of 1, 2, 4 or 8 bits into bytes: neighbours are joined until they fill one."""
    values = pad(values.view(-1), (0, -values.numel() % (8 // width)))
    while width < 8:
        pairs = values.view(-1, 2)
        values = pairs[:, 0] | (pairs[:, 1] << width)
        width *= 2
    return values


def unpack(data: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack`."""
    parts = [(data >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)]
    return torch.stack(parts, 1).view(-1)[:count]
