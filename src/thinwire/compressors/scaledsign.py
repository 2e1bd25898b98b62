from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors.base import Compressor, Encoded, Request, cut
from thinwire.wire.codes import Pairs


@dataclass(frozen=True)
class ScaledSign(Compressor):
    """The sign of every element, and the mean magnitude.

    C(x) = (||x||_1 / d) sign(x), with sign(0) = +1. Exactly
    ||C(x) - x||^2 = (1 - ||x||_1^2 / (d ||x||_2^2)) ||x||_2^2. Use it with a residual, always.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.ScaledSign()
        >>> c.decode(c.encode(torch.tensor([1.0, 3.0, -5.0])))
        tensor([ 3.,  3., -3.])

    Reference: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes, 2019.
    """

    name: ClassVar[str] = "scaledsign"

    def encode_flat(self, request: Request) -> Encoded | None:
        found = kernels.on(request.x.device).encode_pairs(
            request.x, request.r, block=None, scaled=True
        )
        if found is None:
            return None
        pairs, bits = found
        cut(pairs)
        return Encoded(Pairs(0), (pairs.view(-1), bits))
