import math
from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors.base import Compressor, Encoded, Request
from thinwire.compressors.uniform import TRITS, encode_uniform, is_tiny, peak_of


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Minus one, zero or one times a scale, at random.

    x is clipped at clip * sigma, s = max|x| after that, value = s * sign(x) with probability
    |x| / s, else 0: unbiased after clipping. Five elements go into a byte. sigma is the root mean
    square (gradients have a mean near zero; a constant tensor then still has something to send).

    Args:
        clip: in units of sigma; smaller has less variance and more bias. None for no clipping.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.TernGrad()
        >>> c.decode(c.encode(torch.tensor([2.0, -2.0, 0.0])))
        tensor([ 2., -2.,  0.])

    Reference: Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning, 2017.
    """

    clip: float | None = 2.5
    name: ClassVar[str] = "terngrad"

    def __post_init__(self) -> None:
        if self.clip is None:
            return
        number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
        if not number or not 0 < self.clip < math.inf:
            raise ValueError(f"TernGrad: clip must be positive, or None, got {self.clip!r}")
        object.__setattr__(self, "clip", float(self.clip))

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def random(self) -> bool:
        return True

    def encode_flat(self, request: Request) -> Encoded | None:
        scale = peak_of(request)
        if scale is None:
            return None
        if is_tiny(request, scale):
            scale = 0.0
        elif self.clip is not None:
            x = request.x
            _, mean_square = kernels.on(x.device).moments(x, request.r, 1 / scale)
            scale *= min(1.0, self.clip * math.sqrt(mean_square))
        return encode_uniform(
            request, limit=1, width=TRITS, block=None, rule="given", scale=scale, key=request.key
        )
