from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire import kernels
from thinwire.compressors.base import Compressor, Encoded, Request, narrow
from thinwire.frames.codes import Raw


@dataclass(frozen=True)
class NoCompression(Compressor):
    """The tensor as it is.

    Every type, every bit, no indices. With a residual, x + r is sent in x's type and the residual
    keeps the rounding error (zero for float32 and float64).

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.NoCompression()
        >>> c.decode(c.encode(torch.tensor([1, 2, 3])))
        tensor([1, 2, 3])
    """

    name: ClassVar[str] = "none"
    lossless: ClassVar[bool] = True

    @property
    def summable(self) -> bool:
        return True

    def encode_flat(self, request: Request) -> Encoded | None:
        x, r = request.x, request.r
        p = x.clone() if r is None else x + r
        if not kernels.on(p.device).all_finite(p, None):
            return None
        return Encoded(Raw(), (narrow(p, request.dtype),))

    def encode_bits(self, flat: Tensor) -> Encoded:
        return Encoded(Raw(), (flat.clone(),))
