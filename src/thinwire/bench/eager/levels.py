"""A small integer an element: quantisers."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.bench.eager.bits import pack, rows_of, unpack
from thinwire.bench.eager.contract import Eager, Parts, generator
from thinwire.compressors import QSGD, Natural, Quantize, TernGrad

TINY = 1e-30


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
    numbers = generator()

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
    numbers = generator()

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
