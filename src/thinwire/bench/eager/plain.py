"""No compression, and shorter floating-point types."""

import torch
from torch import Tensor

from thinwire.bench.eager.contract import Eager, Parts
from thinwire.compressors import Cast, NoCompression

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


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
