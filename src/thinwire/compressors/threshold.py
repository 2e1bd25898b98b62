from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Request
from thinwire.compressors.sparsifier import Selection, Sparsifier


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """All elements of at least a given magnitude.

    Sends x_i where |x_i| >= value. How many that are depends on the tensor. What is left out is
    below the threshold: max |C(x) - x| < value.

    Args:
        value: the smallest magnitude sent, positive; larger sends less.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Threshold(1.0)
        >>> c.decode(c.encode(torch.tensor([1.0, -3.0, 0.5])))
        tensor([ 1., -3.,  0.])

    Reference: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015.
    """

    value: float
    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        check.threshold("Threshold", "value", self.value)
        object.__setattr__(self, "value", float(self.value))

    def select(self, request: Request) -> Selection | None:
        chosen = kernels.on(request.x.device).above(request.x, request.r, self.value)
        return None if chosen is None else Selection(*chosen)
