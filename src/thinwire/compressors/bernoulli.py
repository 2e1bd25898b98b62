from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Request
from thinwire.compressors.drawn import Drawn


@dataclass(frozen=True)
class Bernoulli(Drawn):
    """Each element with probability p.

    Scaled by 1/p it is unbiased with E||C(x) - x||^2 = (1/p - 1) ||x||^2; unscaled
    E||C(x) - x||^2 = (1 - p) ||x||^2, which is what a residual needs.

    Args:
        p: probability of each element, in (0, 1], kept to 2^-32; smaller sends less.
        scaled: multiply by 1/p. None: yes without a residual, no with one.
        shared: all ranks use the same key, so positions need not travel and payloads add up.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Bernoulli(1.0)
        >>> c.decode(c.encode(torch.tensor([1.0, -3.0])))
        tensor([ 1., -3.])

    Reference: Khirirat et al., Distributed Learning with Compressed Gradients, 2018.
    """

    p: float
    scaled: bool | None = None
    shared: bool = False
    name: ClassVar[str] = "bernoulli"

    def __post_init__(self) -> None:
        check.fraction("Bernoulli", "p", self.p)
        if self.p < 2**-32:
            raise ValueError(f"Bernoulli: p must be at least 2^-32, got {self.p!r}")
        self.check_options()
        object.__setattr__(self, "p", float(self.p))

    def draw(self, request: Request) -> tuple[Tensor, int, float]:
        device = request.x.device
        positions = kernels.on(device).bernoulli_positions(
            request.numel, self.p, request.key, device
        )
        return positions, round(self.p * 2**32), 1 / self.p
