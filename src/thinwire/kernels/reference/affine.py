"""Affine quantisation in plain PyTorch: value = level * scale + low; float64 on halved numbers."""

import torch
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.levels import pack, unpack
from thinwire.kernels.reference.random import random_words
from thinwire.kernels.reference.sum import add, blocks, total
from thinwire.kernels.reference.uniform import TINY


def encode_affine(
    x: Tensor,
    r: Tensor | None,
    *,
    width: int,
    block: int | None,
    extent: tuple[float, float] | None = None,
    key: Key | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(lows, scales, packed levels), or None if not all finite."""
    p = total(x, r)
    if extent is None:
        if not bool(torch.isfinite(p).all()):
            return None
        rows = blocks(p, block or p.numel(), fill=p[-1].item())
        lows, highs = torch.aminmax(rows, dim=1)
    else:
        rows = p.unsqueeze(0)
        lows, highs = (torch.full((1,), v, dtype=p.dtype, device=p.device) for v in extent)
    top = (1 << width) - 1
    scales, inverse = scales_between(lows, highs, top)
    v = (0.5 * rows.double() - 0.5 * lows.double().unsqueeze(1)) * inverse.unsqueeze(1)
    v = v.flatten()[: p.numel()].clamp_(0, top)
    if key is None:
        level = v.round_()
    else:
        down = v.floor()
        u = (random_words(p.numel(), key, p.device) >> 8).double() * 2.0**-24
        level = down + (u < v - down)
    return lows, scales, pack(level.to(torch.uint8), width)


def scales_between(lows: Tensor, highs: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The scales, and what to multiply halved numbers by to get levels (zero for tiny rows)."""
    half = 0.5 * highs.double() - 0.5 * lows.double()
    info = torch.finfo(lows.dtype)
    # low + top * scale stays finite, also when rounding goes up.
    room = (0.5 * info.max - 0.5 * lows.double()) * (1 - 4 * info.eps)
    half = torch.minimum(half, room)
    # By a tensor: on CUDA torch multiplies by the reciprocal of a number.
    scales = 2 * (half / torch.full_like(half, top))
    scales = torch.where(half >= TINY[lows.dtype], scales, 0).to(lows.dtype)
    unit = 0.5 * scales.double()
    return scales, torch.where(unit > 0, 1 / unit, 0)


def add_affine(
    out: Tensor,
    packed: Tensor,
    lows: Tensor,
    scales: Tensor,
    *,
    width: int,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    n = out.numel()
    rows = blocks(unpack(packed, width, n).double(), block or n)
    v = rows * (0.5 * scales.double()).unsqueeze(1) + (0.5 * lows.double()).unsqueeze(1)
    add(out, (2 * v).to(scales.dtype).flatten()[:n], weight, fresh, plus)
