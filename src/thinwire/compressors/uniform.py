"""The way from a quantiser's settings to the uniform code, packed or entropy-coded."""

from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Encoded, Request
from thinwire.frames.codes import Elias, Uniform
from thinwire.frames.codes.uniform import fit
from thinwire.kernels import Key

TRITS = 0
TINY = {4: 2.0**-118, 8: 2.0**-800}  # by the bytes of an element: below it, levels are all zero


def peak_of(request: Request) -> float | None:
    """max |x + r|; None if not finite throughout."""
    extent = kernels.on(request.x.device).extent(request.x, request.r)
    return None if extent is None else max(-extent[0], extent[1])


def is_tiny(request: Request, peak: float) -> bool:
    """Whether a scale for such a peak would leave the range of normal numbers."""
    return peak < TINY[request.x.dtype.itemsize]


def encode_uniform(
    request: Request,
    *,
    limit: int,
    width: int,
    block: int | None,
    rule: str,
    scale: float = 0.0,
    key: Key | None = None,
    entropy: bool = False,
) -> Encoded | None:
    """Levels -limit..limit; see the kernel for the rest. Entropy-coded where that is smaller."""
    kernel = kernels.on(request.x.device)

    def levels(bits: int) -> tuple[Tensor, ...] | None:
        found: tuple[Tensor, ...] | None = kernel.encode_uniform(
            request.x,
            request.r,
            limit=limit,
            width=bits,
            block=fit(block, request.numel),
            rule=rule,
            scale=scale,
            key=key,
        )
        return found

    if entropy:
        loose = levels(8)
        if loose is None:
            return None
        scales, data = loose
        unary, words = kernel.elias_encode(data, limit)
        if words.numel() * 8 < request.numel * width // 8:
            code = Elias(limit, block or 0, unary, words.numel() - unary)
            return Encoded(code, (scales, words), (scales, data))
    packed = levels(width)
    return None if packed is None else Encoded(Uniform(width, limit, block or 0), packed)
