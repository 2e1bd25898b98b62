"""The same compression with a residual in plain PyTorch: what `thinwire` is compared with.

Written as a competent user would write it: whole-tensor operations, in place where that is natural,
levels and signs packed into bytes, no checks and no frame. Like the library, each first adds the
tensor to the residual and leaves there what was not sent. Settings without a counterpart here, and
compressors that are more than one algorithm (chains, Tiered, Lossless), have none.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.compressors import (
    QSGD,
    Bernoulli,
    Cast,
    Natural,
    NoCompression,
    OneBit,
    Quantize,
    RandomK,
    ScaledSign,
    TernGrad,
    Threshold,
    TopK,
    TwoBit,
)
from thinwire.compressors.base import Compressor
from thinwire.compressors.sparsifiers import kept

Parts = tuple[Tensor, ...]
TINY = 1e-30
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Eager(NamedTuple):
    """The counterpart of a compressor."""

    encode: Callable[[Tensor, Tensor], Parts]  # (x, residual) -> what is sent; updates the residual
    decode: Callable[[Parts, int], Tensor]  # (what was sent, number of elements) -> tensor


def eager_for(compressor: Compressor, dtype: torch.dtype = torch.float32) -> Eager | None:
    """The counterpart of a compressor, or None; float32 is the only type they are written for."""
    maker = _MAKERS.get(compressor.name)
    return maker(compressor) if maker and dtype == torch.float32 else None


def _generator() -> torch.Generator:
    """Random numbers of our own: a benchmark leaves the global generator alone."""
    return torch.Generator().manual_seed(0)


# No compression, and shorter floating-point types


def none(compressor: NoCompression) -> Eager:
    def encode(x: Tensor, r: Tensor) -> Parts:
        sent = x + r
        r.zero_()
        return (sent,)

    def decode(parts: Parts, n: int) -> Tensor:
        return parts[0].clone()

    return Eager(encode, decode)


def cast(compressor: Cast) -> Eager | None:
    dtype = _TYPES.get(compressor.to)
    if dtype is None:
        return None

    def encode(x: Tensor, r: Tensor) -> Parts:
        r += x
        sent = r.to(dtype)
        r -= sent
        return (sent,)

    def decode(parts: Parts, n: int) -> Tensor:
        return parts[0].float()

    return Eager(encode, decode)


# Some elements with their positions


def top_k(compressor: TopK) -> Eager:
    chunk, ratio = compressor.chunk, compressor.ratio

    def choose(p: Tensor) -> Tensor:
        n = p.numel()
        if chunk is None or chunk >= n:
            return p.abs().topk(kept(n, ratio), sorted=False).indices
        rows = p[: n // chunk * chunk].abs().view(-1, chunk)
        within = rows.topk(kept(chunk, ratio), dim=1, sorted=False).indices
        at = (within + torch.arange(0, rows.numel(), chunk).unsqueeze(1)).view(-1)
        rest = p[rows.numel() :].abs()
        left = rest.topk(kept(rest.numel(), ratio), sorted=False).indices + rows.numel()
        return torch.cat([at, left])

    return _sparse(choose)


def random_k(compressor: RandomK) -> Eager:
    numbers = _generator()

    def choose(p: Tensor) -> Tensor:
        n = p.numel()
        return torch.randperm(n, generator=numbers)[: kept(n, compressor.ratio)]

    return _sparse(choose)


def bernoulli(compressor: Bernoulli) -> Eager:
    numbers = _generator()

    def choose(p: Tensor) -> Tensor:
        chance = torch.rand(p.numel(), generator=numbers)
        return (chance < compressor.p).nonzero().squeeze(1)

    return _sparse(choose)


def threshold(compressor: Threshold) -> Eager:
    return _sparse(lambda p: (p.abs() >= compressor.value).nonzero().squeeze(1))


def _sparse(choose: Callable[[Tensor], Tensor]) -> Eager:
    def encode(x: Tensor, r: Tensor) -> Parts:
        r += x
        at = choose(r)
        values = r[at]
        r[at] = 0
        return at.int(), values

    def decode(parts: Parts, n: int) -> Tensor:
        at, values = parts
        return torch.zeros(n, dtype=values.dtype).index_copy_(0, at.long(), values)

    return Eager(encode, decode)


# A small integer per element


def quantize(compressor: Quantize) -> Eager | None:
    if not compressor.symmetric or compressor.entropy:
        return None
    limit = (1 << (compressor.bits - 1)) - 1

    def scale(rows: Tensor) -> Tensor:
        return rows.abs().amax(1, keepdim=True) / limit

    return _uniform(scale, limit, compressor.bits, compressor.block, compressor.stochastic)


def qsgd(compressor: QSGD) -> Eager | None:
    width = (2 * compressor.levels).bit_length()
    if width not in (2, 4, 8) or compressor.entropy:
        return None

    def scale(rows: Tensor) -> Tensor:
        order = 2 if compressor.norm == "l2" else float("inf")
        norms: Tensor = torch.linalg.vector_norm(rows, order, dim=1, keepdim=True)
        return norms / compressor.levels

    return _uniform(scale, compressor.levels, width, compressor.bucket, stochastic=True)


def terngrad(compressor: TernGrad) -> Eager:
    def scale(rows: Tensor) -> Tensor:
        top = rows.abs().amax()
        if compressor.clip is not None:
            top = top.clamp_max(compressor.clip * rows.square().mean().sqrt())
        return top.view(1, 1)

    return _uniform(scale, 1, 2, None, stochastic=True)


def _uniform(
    scale_of: Callable[[Tensor], Tensor],
    limit: int,
    width: int,
    block: int | None,
    stochastic: bool,
) -> Eager:
    numbers = _generator()

    def encode(x: Tensor, r: Tensor) -> Parts:
        r += x
        rows = rows_of(r, block)
        scales = scale_of(rows).clamp_min_(TINY)
        v = rows / scales
        v = v.add_(torch.rand(v.shape, generator=numbers)).floor_() if stochastic else v.round_()
        v.clamp_(-limit, limit)
        packed = pack((v + limit).to(torch.uint8), width)
        r -= v.mul_(scales).view(-1)[: r.numel()]
        return scales, packed

    def decode(parts: Parts, n: int) -> Tensor:
        scales, packed = parts
        v = unpack(packed, width, n).to(scales.dtype).sub_(limit)
        return rows_of(v, block).mul(scales).view(-1)[:n]

    return Eager(encode, decode)


def natural(compressor: Natural) -> Eager:
    numbers = _generator()

    def encode(x: Tensor, r: Tensor) -> Parts:
        r += x
        fraction, exponent = torch.frexp(r)  # r = fraction * 2^exponent, 0.5 <= |fraction| < 1
        up = torch.rand(r.numel(), generator=numbers) < 2 * fraction.abs() - 1
        exponent = exponent + up - 1
        r -= torch.ldexp(r.sign(), exponent)
        # One byte: the sign above, the exponent in 1..127 below; zero stays zero.
        code = (exponent + 96).clamp_(1, 127).to(torch.uint8)
        return ((code | ((fraction < 0).to(torch.uint8) << 7)) * (fraction != 0),)

    def decode(parts: Parts, n: int) -> Tensor:
        (code,) = parts
        power = (code & 127).int()
        value = torch.ldexp(1.0 - 2.0 * (code >> 7).float(), power - 96)
        return value * (power != 0)

    return Eager(encode, decode)


# One bit per element


def scaled_sign(compressor: ScaledSign) -> Eager:
    def encode(x: Tensor, r: Tensor) -> Parts:
        r += x
        mean = r.abs().mean() if compressor.norm == "l1" else r.square().mean().sqrt()
        upper = r >= 0
        r -= torch.where(upper, mean, -mean)
        return mean, pack(upper.view(torch.uint8), 1)

    def decode(parts: Parts, n: int) -> Tensor:
        mean, packed = parts
        return torch.where(unpack(packed, 1, n).bool(), mean, -mean)

    return Eager(encode, decode)


def one_bit(compressor: OneBit) -> Eager:
    block = compressor.block

    def encode(x: Tensor, r: Tensor) -> Parts:
        r += x
        rows = rows_of(r, block)
        upper = rows >= 0
        above = upper.sum(1, keepdim=True)
        below = rows.shape[1] - above
        above[-1] -= rows.numel() - r.numel()  # the filling
        high = rows.clamp_min(0).sum(1, keepdim=True) / above.clamp_min(1)
        low = rows.clamp_max(0).sum(1, keepdim=True) / below.clamp_min(1)
        r -= torch.where(upper, high, low).view(-1)[: r.numel()]
        return low, high, pack(upper.view(torch.uint8), 1)

    def decode(parts: Parts, n: int) -> Tensor:
        low, high, packed = parts
        upper = rows_of(unpack(packed, 1, n), block).bool()
        return torch.where(upper, high, low).view(-1)[:n]

    return Eager(encode, decode)


def two_bit(compressor: TwoBit) -> Eager:
    block = compressor.block

    def encode(x: Tensor, r: Tensor) -> Parts:
        r += x
        rows = rows_of(r.abs(), block)
        lengths = torch.full((len(rows), 1), rows.shape[1])
        lengths[-1] -= rows.numel() - r.numel()  # the filling
        large = rows > rows.sum(1, keepdim=True) / lengths
        above = large.sum(1, keepdim=True)
        high = rows.masked_fill(~large, 0).sum(1, keepdim=True) / above.clamp_min(1)
        low = rows.masked_fill(large, 0).sum(1, keepdim=True) / (lengths - above).clamp_min(1)
        sizes = torch.where(large, high, low).view(-1)[: r.numel()]
        negative = r < 0
        r -= torch.where(negative, -sizes, sizes)
        kinds = large.view(torch.uint8).view(-1)[: r.numel()] << 1
        return low, high, pack(negative.view(torch.uint8) | kinds, 2)

    def decode(parts: Parts, n: int) -> Tensor:
        low, high, packed = parts
        levels = unpack(packed, 2, n)
        large = rows_of(levels >> 1, block).bool()
        sizes = torch.where(large, high, low).view(-1)[:n]
        return torch.where((levels & 1).bool(), -sizes, sizes)

    return Eager(encode, decode)


# Small numbers in bytes, and tensors in rows


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


_MAKERS: dict[str, Callable[..., Eager | None]] = {
    "none": none,
    "cast": cast,
    "topk": top_k,
    "randomk": random_k,
    "bernoulli": bernoulli,
    "threshold": threshold,
    "quantize": quantize,
    "qsgd": qsgd,
    "terngrad": terngrad,
    "natural": natural,
    "onebit": one_bit,
    "twobit": two_bit,
    "scaledsign": scaled_sign,
}
