import math
from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Compressor, Encoded, Request, cut
from thinwire.frames.codes import Pairs

SMALLEST = 1e-300  # means below it have no reciprocal worth using


@dataclass(frozen=True)
class ScaledSign(Compressor):
    """The sign of every element, and one magnitude for all.

    C(x) = s sign(x), with sign(0) = +1. With norm "l1", s = ||x||_1 / d, the mean magnitude: of all
    scales the one with the least error, exactly
    ||C(x) - x||^2 = (1 - ||x||_1^2 / (d ||x||_2^2)) ||x||_2^2. With norm "l2",
    s = ||x||_2 / sqrt(d), so that C(x) is as long as x, as in 1-bit Adam: the error is
    2 (1 - ||x||_1 / (sqrt(d) ||x||_2)) ||x||_2^2, which exceeds ||x||^2 where few elements carry
    most of it. Use either with a residual, always.

    Args:
        norm: "l1" or "l2".

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.ScaledSign()
        >>> c.decode(c.encode(torch.tensor([1.0, 3.0, -5.0])))
        tensor([ 3.,  3., -3.])

    Reference: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes, 2019; Tang et al., 1-bit Adam, 2021.
    """

    norm: str = "l1"
    name: ClassVar[str] = "scaledsign"

    def __post_init__(self) -> None:
        check.one_of("ScaledSign", "norm", self.norm, ("l1", "l2"))

    def encode_flat(self, request: Request) -> Encoded | None:
        x, r = request.x, request.r
        kernel = kernels.on(x.device)
        found = kernel.encode_pairs(x, r, block=None, scaled=True)
        if found is None:
            return None
        pairs, bits = found
        mean = float(pairs[0, 1])
        if self.norm == "l2" and mean > SMALLEST:
            _, mean_square = kernel.moments(x, r, 1 / mean)
            # 1 / mean and the square root are rounded: equal magnitudes must come out as they are.
            pairs.mul_(max(1.0, math.sqrt(mean_square)))
        cut(pairs)
        return Encoded(Pairs(0), (pairs.view(-1), bits))
