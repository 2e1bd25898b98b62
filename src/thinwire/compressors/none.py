from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors.base import Compressor, Encoded, Request, narrow
from thinwire.wire.codes import Raw


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
        if r is None:
            return Encoded(Raw(), (x.clone(),))
        if not kernels.on(x.device).all_finite(x, r):
            return None
        return Encoded(Raw(), (narrow(x + r, request.dtype),))
