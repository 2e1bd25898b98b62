from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Compressor, Encoded, Request, narrow
from thinwire.wire.codes import Narrow, Scaled8
from thinwire.wire.codes.scaled8 import scale_blocks
from thinwire.wire.codes.uniform import fit

_KINDS = {"fp16": (1, torch.float16), "bf16": (2, torch.bfloat16)}
_FP8_TOP = 448.0
_TINY = {torch.float32: 2.0**-118, torch.float64: 2.0**-800}


@dataclass(frozen=True)
class Cast(Compressor):
    """A shorter floating-point type.

    fp16 and bf16: rounded to nearest; what is too large becomes the largest finite number, and a
    residual keeps the rest. fp8: e4m3 with a scale of max|x| / 448 for each block, relative error
    at most 2^-4 for all but the smallest of a block.

    Args:
        to: "fp16", "bf16" or "fp8".
        block: elements that share a scale, for fp8 only.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Cast("fp16")
        >>> c.decode(c.encode(torch.tensor([1.0, 1e6])))
        tensor([1.0000e+00, 6.5504e+04])

    Reference: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """

    to: str
    block: int = 256
    name: ClassVar[str] = "cast"

    def __post_init__(self) -> None:
        check.one_of("Cast", "to", self.to, ("fp16", "bf16", "fp8"))
        check.block("Cast", "block", self.block)
        if self.block is None or (self.to != "fp8" and self.block != 256):
            raise ValueError(f"Cast: block is for fp8 and must be a number, got {self.block!r}")

    @property
    def summable(self) -> bool:
        return self.to != "fp8"

    def encode_flat(self, request: Request) -> Encoded | None:
        x, r = request.x, request.r
        p = x if r is None else x + r
        if not kernels.on(p.device).all_finite(p, None):
            return None
        if self.to == "fp8":
            return Encoded(Scaled8(self.block), self._fp8(p))
        kind, dtype = _KINDS[self.to]
        # A tensor of the same type already is not shared with the payload, but copied.
        return Encoded(Narrow(kind), (narrow(p, dtype),))

    def _fp8(self, p: Tensor) -> tuple[Tensor, Tensor]:
        block = fit(self.block, p.numel()) or self.block
        padded = torch.nn.functional.pad(p.abs(), (0, -p.numel() % block))
        peak = padded.view(-1, block).amax(1)
        tiny = peak < _TINY[p.dtype]
        # Scales that were rounded up must not make an infinity of the largest numbers.
        ceiling = torch.finfo(p.dtype).max / _FP8_TOP * (1 - 4 * torch.finfo(p.dtype).eps)
        scales = (peak / _FP8_TOP).clamp_max(ceiling).masked_fill(tiny, 0)
        inverse = (_FP8_TOP / peak).masked_fill(tiny, 0)
        scaled = scale_blocks(p.clone(), inverse, block).clamp_(-_FP8_TOP, _FP8_TOP)
        return scales, scaled.to(torch.float8_e4m3fn).view(torch.uint8)
