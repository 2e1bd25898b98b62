import math
from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Compressor, Encoded, Request
from thinwire.compressors.uniform import encode_uniform, is_tiny, peak_of


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic levels of the norm.

    In each bucket of n elements, with s levels: l = floor(s|v|/norm), one more with the probability
    of the fraction; value = norm * sign(v) * l / s. Unbiased, and with the L2 norm
    E||Q(v) - v||^2 <= min(n/s^2, sqrt(n)/s) ||v||^2.

    Args:
        levels: s, from 1 to 127; fewer send less. Packed into ceil(log2(2s + 1)) bits.
        bucket: elements that share a norm, a multiple of 8; None for the whole tensor.
        norm: "l2" as in the paper, or "max", which has a smaller error at the same bits.
        entropy: Elias-code the levels, as the paper does, where that is smaller (slower).

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.QSGD(4, norm="max")
        >>> c.decode(c.encode(torch.tensor([4.0, -2.0, 0.0]), key=tw.Key(1)))
        tensor([ 4., -2.,  0.])

    Reference: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding, 2017.
    """

    levels: int
    bucket: int | None = 512
    norm: str = "l2"
    entropy: bool = False
    name: ClassVar[str] = "qsgd"

    def __post_init__(self) -> None:
        whole = isinstance(self.levels, int) and not isinstance(self.levels, bool)
        if not whole or not 1 <= self.levels <= 127:
            raise ValueError(f"QSGD: levels must be an integer in [1, 127], got {self.levels!r}")
        check.block("QSGD", "bucket", self.bucket)
        check.one_of("QSGD", "norm", self.norm, ("l2", "max"))
        check.flag("QSGD", "entropy", self.entropy)

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def random(self) -> bool:
        return True

    def encode_flat(self, request: Request) -> Encoded | None:
        rule, scale = self.norm, 0.0
        if self.bucket is None:
            norm = self._whole_norm(request)
            if norm is None:
                return None
            rule, scale = "given", norm / self.levels
        return encode_uniform(
            request,
            limit=self.levels,
            width=(2 * self.levels).bit_length(),
            block=self.bucket,
            rule=rule,
            scale=scale,
            key=request.key,
            entropy=self.entropy,
        )

    def _whole_norm(self, request: Request) -> float | None:
        peak = peak_of(request)
        if peak is None or is_tiny(request, peak):
            return None if peak is None else 0.0
        if self.norm == "max":
            return peak
        x = request.x
        _, mean_square = kernels.on(x.device).moments(x, request.r, 1 / peak)
        # Any bound of all magnitudes is a valid norm, so one that overflows is cut.
        top = 3.4e38 if x.dtype.itemsize == 4 else 1.7e308
        return min(peak * math.sqrt(mean_square * request.numel), top)
