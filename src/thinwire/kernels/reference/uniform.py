"""Uniform quantisation around zero, in plain PyTorch: value = (level - limit) * scale."""

import math

import torch
from torch import Tensor

from thinwire.kernels.key import Key
from thinwire.kernels.reference.levels import pack, unpack
from thinwire.kernels.reference.random import random_words
from thinwire.kernels.reference.sum import add, blocks, total

TINY = {torch.float32: 2.0**-118, torch.float64: 2.0**-800}


def highest_scale(dtype: torch.dtype, limit: int) -> float:
    """The largest scale whose product with `limit` is finite, also when rounding goes up."""
    info = torch.finfo(dtype)
    return info.max / limit * (1 - 4 * info.eps)


def power_above(p: Tensor) -> Tensor:
    """The least power of two that is at least p; see the CPU kernel."""
    bits, mantissa = (torch.int32, 23) if p.dtype == torch.float32 else (torch.int64, 52)
    mask = (1 << mantissa) - 1
    return ((p.view(bits) + mask) & ~mask).view(p.dtype)


def _quotient(number: float, divisors: Tensor) -> Tensor:
    """With one rounding: torch multiplies a number by the reciprocals, which is two."""
    return torch.full_like(divisors, number) / divisors


def _scales(rows: Tensor, limit: int, rule: str) -> tuple[Tensor, Tensor]:
    """The scale of each row and what to multiply by to get levels (zero for tiny rows)."""
    peak = rows.abs().amax(1)
    if rule == "l2":
        wide = peak.double()
        norm = wide * (rows.double() / wide.clamp_min(1e-300).unsqueeze(1)).square().sum(1).sqrt()
        norm = norm.clamp_max(torch.finfo(rows.dtype).max)
        scale, inverse = (norm / limit).to(rows.dtype), _quotient(limit, norm).to(rows.dtype)
    elif rule == "power":
        scale = power_above(peak / limit)
        scale = scale.clamp_max(2.0 ** (math.frexp(highest_scale(rows.dtype, limit))[1] - 1))
        inverse = 1 / scale
    else:
        scale, inverse = peak / limit, _quotient(limit, peak)
    tiny = peak < TINY[rows.dtype]
    scale = scale.clamp_max(highest_scale(rows.dtype, limit))
    return scale.masked_fill(tiny, 0), inverse.masked_fill(tiny, 0)


def encode_uniform(
    x: Tensor,
    r: Tensor | None,
    *,
    limit: int,
    width: int,
    block: int | None,
    rule: str,
    scale: float = 0.0,
    key: Key | None = None,
) -> tuple[Tensor, Tensor] | None:
    """(scales, packed levels), or None if not all finite."""
    p = total(x, r)
    if rule == "given":
        scale = min(scale, highest_scale(p.dtype, limit))
        scales = torch.full((1,), scale, dtype=p.dtype, device=p.device)
        rows = p.unsqueeze(0)
        inverse = torch.where(scales > 0, 1 / scales, 0)
    else:
        if not bool(torch.isfinite(p).all()):
            return None
        rows = blocks(p, block or p.numel())
        scales, inverse = _scales(rows, limit, rule)
    v = (rows * inverse.unsqueeze(1)).flatten()[: p.numel()].clamp_(-limit, limit)
    if key is None:
        level = v.round_()
    else:
        down = v.floor()
        u = (random_words(p.numel(), key, p.device) >> 8).to(p.dtype) * 2.0**-24
        level = down + (u < v - down)
    return scales, pack((level + limit).to(torch.uint8), width)


def add_uniform(
    out: Tensor,
    packed: Tensor,
    scales: Tensor,
    *,
    limit: int,
    width: int,
    block: int | None,
    weight: float,
    fresh: bool = False,
    plus: Tensor | None = None,
) -> None:
    """out += weight * value, after zeroing out (`fresh`) or adding another tensor (`plus`)."""
    n = out.numel()
    levels = unpack(packed, width, n).to(scales.dtype) - limit
    rows = blocks(levels, block or n)
    add(out, (rows * scales.unsqueeze(1)).flatten()[:n], weight, fresh, plus)
