"""One bit an element."""

import torch
from torch import Tensor

from thinwire.bench.eager.bits import pack, rows_of, unpack
from thinwire.bench.eager.contract import Eager, Parts
from thinwire.compressors import OneBit, ScaledSign


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
