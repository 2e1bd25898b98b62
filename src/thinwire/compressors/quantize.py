from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Compressor, Encoded, Request
from thinwire.compressors.uniform import encode_uniform, is_tiny, peak_of
from thinwire.frames.codes import Affine
from thinwire.frames.codes.uniform import fit


@dataclass(frozen=True)
class Quantize(Compressor):
    """Evenly spaced levels of 8, 4 or 2 bits.

    Symmetric: scale = max|x| / (2^(bits-1) - 1), level = round(x / scale), value = level * scale.
    Affine: scale = (max - min) / (2^bits - 1), level = round((x - min) / scale), value =
    level * scale + min. The error is at most scale/2 (scale when stochastic, which is unbiased).
    A block whose largest magnitude is under 2^-118 (float64: 2^-800) is sent as zeros.

    Args:
        bits: 8, 4 or 2 an element.
        block: elements that share a scale, a multiple of 8; None for the whole tensor.
        symmetric: around zero; False stores the minimum too and uses every level.
        stochastic: round up or down at random, so that the mean is exact.
        entropy: code levels by their frequency where that is smaller (symmetric only; slower).

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Quantize(8, block=None, symmetric=False)
        >>> c.decode(c.encode(torch.tensor([0.0, 0.4, 255.0])))
        tensor([  0.,   0., 255.])

    Reference: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2015.
    """

    bits: int
    block: int | None = 256
    symmetric: bool = True
    stochastic: bool = False
    entropy: bool = False
    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        check.one_of("Quantize", "bits", self.bits, (8, 4, 2))
        check.block("Quantize", "block", self.block)
        check.flag("Quantize", "symmetric", self.symmetric)
        check.flag("Quantize", "stochastic", self.stochastic)
        check.flag("Quantize", "entropy", self.entropy)
        if self.entropy and not self.symmetric:
            raise ValueError("Quantize: entropy=True needs symmetric=True (levels around zero)")

    @property
    def random(self) -> bool:
        return self.stochastic

    def encode_flat(self, request: Request) -> Encoded | None:
        return self._symmetric(request) if self.symmetric else self._affine(request)

    def _symmetric(self, request: Request) -> Encoded | None:
        limit = (1 << (self.bits - 1)) - 1
        rule, scale = "max", 0.0
        if self.block is None:
            peak = peak_of(request)
            if peak is None:
                return None
            rule, scale = "given", 0.0 if is_tiny(request, peak) else peak / limit
        return encode_uniform(
            request,
            limit=limit,
            width=self.bits,
            block=self.block,
            rule=rule,
            scale=scale,
            key=request.key if self.stochastic else None,
            entropy=self.entropy,
        )

    def _affine(self, request: Request) -> Encoded | None:
        kernel = kernels.on(request.x.device)
        extent = None
        if self.block is None:
            extent = kernel.extent(request.x, request.r)
            if extent is None:
                return None
        sections = kernel.encode_affine(
            request.x,
            request.r,
            width=self.bits,
            block=fit(self.block, request.numel),
            extent=extent,
            key=request.key if self.stochastic else None,
        )
        return None if sections is None else Encoded(Affine(self.bits, self.block or 0), sections)
