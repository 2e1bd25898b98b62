"""Small integers as bits, in plain PyTorch; the layout is that of the wire format."""

import torch
from torch import Tensor

from thinwire.kernels.reference.sum import blocks

TRITS = 0


def bits_to_bytes(bits: Tensor) -> Tensor:
    """A tensor of 0 and 1 as bytes, first bit lowest."""
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (blocks(bits.to(torch.uint8), 8) * places).sum(1, dtype=torch.uint8)


def bytes_to_bits(data: Tensor) -> Tensor:
    """The inverse of `bits_to_bytes`: eight bits for every byte, as uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(1) >> shifts) & 1).flatten()


def _digits(device: torch.device) -> Tensor:
    return torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32, device=device)


def pack(levels: Tensor, width: int) -> Tensor:
    """uint8 levels below 2^width as a bit stream; five to a byte for width TRITS."""
    if width == TRITS:
        return (blocks(levels.int(), 5) * _digits(levels.device)).sum(1).to(torch.uint8)
    if width == 8:
        return levels
    if 8 % width == 0:
        rows = blocks(levels, 8 // width)
        out = rows[:, 0].clone()
        for i in range(1, 8 // width):
            out |= rows[:, i] << (i * width)
        return out
    shifts = torch.arange(width, dtype=torch.uint8, device=levels.device)
    bits = ((levels.unsqueeze(1) >> shifts) & 1).flatten()
    return bits_to_bytes(bits)[: -(-levels.numel() * width // 8)]


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack`."""
    if width == TRITS:
        digits = packed.int().unsqueeze(1) // _digits(packed.device) % 3
        return digits.to(torch.uint8).flatten()[:count]
    if width == 8:
        return packed[:count]
    if 8 % width == 0:
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
        return ((packed.unsqueeze(1) >> shifts) & ((1 << width) - 1)).flatten()[:count]
    bits = bytes_to_bits(packed)[: count * width].view(count, width)
    shifts = torch.arange(width, dtype=torch.uint8, device=packed.device)
    return (bits << shifts).sum(1, dtype=torch.uint8)
