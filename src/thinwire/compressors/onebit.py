from dataclasses import dataclass
from typing import ClassVar

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Compressor, Encoded, Request, cut
from thinwire.frames.codes import Pairs
from thinwire.frames.codes.uniform import fit


@dataclass(frozen=True)
class OneBit(Compressor):
    """One bit an element and the means of both halves.

    In each block, elements >= 0 are sent as the mean of all those, the others as the mean of the
    others. Of all ways to send one bit with threshold 0 this has the least squared error. Use it
    with a residual, always.

    Args:
        block: elements that share their two means, a multiple of 8; None for the whole tensor.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.OneBit()
        >>> c.decode(c.encode(torch.tensor([1.0, 3.0, -5.0])))
        tensor([ 2.,  2., -5.])

    Reference: Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs, 2014.
    """

    block: int | None = 1024
    name: ClassVar[str] = "onebit"

    def __post_init__(self) -> None:
        check.block("OneBit", "block", self.block)

    def encode_flat(self, request: Request) -> Encoded | None:
        found = kernels.on(request.x.device).encode_pairs(
            request.x, request.r, block=fit(self.block, request.numel), scaled=False
        )
        if found is None:
            return None
        pairs, bits = found
        cut(pairs)
        return Encoded(Pairs(self.block or 0), (pairs.view(-1), bits))
