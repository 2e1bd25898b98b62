from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Request
from thinwire.compressors.drawn import Drawn
from thinwire.compressors.sparsifier import kept


@dataclass(frozen=True)
class RandomK(Drawn):
    """k elements at random positions.

    k = max(1, ceil(d * ratio)) distinct positions, drawn from the key alone. Scaled by d/k it is
    unbiased with E||C(x) - x||^2 = (d/k - 1) ||x||^2; unscaled it is contractive with
    E||C(x) - x||^2 = (1 - k/d) ||x||^2, which is what a residual needs.

    Args:
        ratio: share of elements sent, in (0, 1]; smaller sends less.
        scaled: multiply by d/k. None: yes without a residual, no with one.
        shared: all ranks use the same key, so positions need not travel and payloads add up.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.RandomK(0.25)
        >>> int((c.decode(c.encode(torch.ones(100), key=tw.Key(1))) == 4).sum())
        25

    Reference: Stich et al., Sparsified SGD with Memory, 2018; Wangni et al., Gradient
    Sparsification for Communication-Efficient Distributed Optimization, 2018.
    """

    ratio: float
    scaled: bool | None = None
    shared: bool = False
    name: ClassVar[str] = "randomk"

    def __post_init__(self) -> None:
        check.fraction("RandomK", "ratio", self.ratio)
        self.check_options()
        object.__setattr__(self, "ratio", float(self.ratio))

    def draw(self, request: Request) -> tuple[Tensor, int, float]:
        n = request.numel
        k = kept(n, self.ratio)
        device = request.x.device
        positions = kernels.on(device).random_positions(n, k, request.key, device)
        return positions, 0, n / k
