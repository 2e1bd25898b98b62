from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Request
from thinwire.compressors.sparsifier import Selection, Sparsifier, kept


@dataclass(frozen=True)
class TopK(Sparsifier):
    """The k elements of largest magnitude.

    k = max(1, ceil(d * ratio)); exact, ties go to the lower index. Contractive:
    ||C(x) - x||^2 <= (1 - k/d) ||x||^2. Biased, so use it with a residual.

    Args:
        ratio: share of elements sent, in (0, 1]; smaller sends less.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.TopK(0.5)
        >>> c.decode(c.encode(torch.tensor([1.0, -3.0, 2.0, 0.5])))
        tensor([ 0., -3.,  2.,  0.])

    Reference: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017;
    Stich et al., Sparsified SGD with Memory, 2018.
    """

    ratio: float
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        check.fraction("TopK", "ratio", self.ratio)
        object.__setattr__(self, "ratio", float(self.ratio))

    def select(self, request: Request) -> Selection | None:
        k = kept(request.numel, self.ratio)
        chosen = kernels.on(request.x.device).top_k(request.x, request.r, k)
        return None if chosen is None else Selection(*chosen)
