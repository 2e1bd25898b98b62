from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import check, kernels
from thinwire.compressors.base import Encoded, LocalCompressor, Request
from thinwire.frames.code import Extent
from thinwire.frames.levels import fit
from thinwire.frames.values import PIECE, Narrow, Scaled8, scale_blocks

_KINDS = {"fp16": (1, torch.float16), "bf16": (2, torch.bfloat16)}
_FP8_TOP = 448.0
_TINY = {torch.float32: 2.0**-118, torch.float64: 2.0**-800}
# Elements from which on torch may use its threads: 25.6 M take 33 ms so, 60 to 110 in pieces.
LARGE = 1 << 20


@dataclass(frozen=True)
class Cast(LocalCompressor):
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

    @property
    def grain(self) -> int | None:
        return self.block if self.to == "fp8" else 1

    @property
    def _code(self) -> Narrow | Scaled8:
        return Scaled8(self.block) if self.to == "fp8" else Narrow(_KINDS[self.to][0])

    def max_section_bytes(self, extent: Extent) -> int:
        return self._code.section_bytes(extent)

    def encode_flat(self, request: Request) -> Encoded | None:
        """Piece by piece: a temporary of the whole tensor would cost more than the cast. Large ones
        that need none at once, as pieces of those take twice as long."""
        device = request.x.device
        code = self._code
        layout = code.sections(Extent(request.dtype, request.numel))
        sections = tuple(torch.empty(s.numel, dtype=s.dtype, device=device) for s in layout)
        plain = self.to != "fp8" and request.r is None and request.x.dtype == request.real
        whole = plain and request.numel >= LARGE
        step = request.numel if whole else self.block * max(1, PIECE // self.block)
        for lo in range(0, request.numel, step):
            p = request.total(lo, lo + step)
            extent = kernels.on(device).extent(p, None)
            if extent is None:
                return None
            if self.to == "fp8":
                self._fp8(p, sections[0], sections[1], lo)
            else:
                _narrow(p, max(-extent[0], extent[1]), sections[0][lo : lo + step])
        return Encoded(code, sections)

    def _fp8(self, p: Tensor, scales: Tensor, data: Tensor, lo: int) -> None:
        block = fit(self.block, p.numel()) or self.block
        padded = torch.nn.functional.pad(p.abs(), (0, -p.numel() % block))
        peak = padded.view(-1, block).amax(1)
        tiny = peak < _TINY[p.dtype]
        # Scales that were rounded up must not make an infinity of the largest numbers.
        ceiling = torch.finfo(p.dtype).max / _FP8_TOP * (1 - 4 * torch.finfo(p.dtype).eps)
        own = (peak / _FP8_TOP).clamp_max(ceiling).masked_fill(tiny, 0)
        inverse = (_FP8_TOP / peak).masked_fill(tiny, 0)
        scaled = scale_blocks(p.clone(), inverse, block).clamp_(-_FP8_TOP, _FP8_TOP)
        scales[lo // self.block :][: own.numel()] = own
        data[lo : lo + p.numel()] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def _narrow(p: Tensor, peak: float, out: Tensor) -> None:
    """out = p in its own type; what is too large becomes the largest finite number."""
    out.copy_(p)
    top = torch.finfo(out.dtype).max
    if peak > top:
        out.clamp_(-top, top)
