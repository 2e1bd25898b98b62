"""One or two bits per element: signs, and the magnitudes that belong to them."""

import math
from dataclasses import dataclass
from typing import ClassVar

from thinwire import check, kernels
from thinwire.compressors.base import Encoded, LocalCompressor, Request, cut
from thinwire.frames.code import Extent
from thinwire.frames.levels import Pairs, SignedPairs, fit

SMALLEST = 1e-300  # means below it have no reciprocal worth using


@dataclass(frozen=True)
class OneBit(LocalCompressor):
    """One bit per element and the means of both halves.

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

    @property
    def grain(self) -> int | None:
        return self.block

    def max_section_bytes(self, extent: Extent) -> int:
        return Pairs(self.block or 0).section_bytes(extent)

    def encode_flat(self, request: Request) -> Encoded | None:
        found = kernels.on(request.x.device).encode_pairs(
            request.x, request.r, block=fit(self.block, request.numel), scaled=False
        )
        if found is None:
            return None
        pairs, bits = found
        cut(pairs)
        return Encoded(Pairs(self.block or 0), (pairs.view(-1), bits))


@dataclass(frozen=True)
class ScaledSign(LocalCompressor):
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

    def max_section_bytes(self, extent: Extent) -> int:
        return Pairs(0).section_bytes(extent)

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


@dataclass(frozen=True)
class TwoBit(LocalCompressor):
    """Two bits per element: its sign and whether it is large, and the means of both kinds.

    In each block an element is large if |x| exceeds the mean of all |x|. What is sent is its sign
    times the mean magnitude of its kind, with sign(0) = +1. It never turns a sign, C(-x) = -C(x)
    where no element is zero, and the mean magnitude of each block stays as it is. Contractive:
    ||C(x) - x||^2 = ||x||^2 - ||C(x)||^2. Made for the values of a sparsifier, as in
    ``topk:0.03125,chunk=4096|twobit``; use it with a residual, always.

    Args:
        block: elements that share their two means, a multiple of 8; None for the whole tensor.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.TwoBit()
        >>> c.decode(c.encode(torch.tensor([1.0, -2.0, 5.0, -6.0])))
        tensor([ 1.5000, -1.5000,  5.5000, -5.5000])

    Reference: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025, which
    takes four bins of a lookup table, one of them around zero.
    """

    block: int | None = 4096
    name: ClassVar[str] = "twobit"

    def __post_init__(self) -> None:
        check.block("TwoBit", "block", self.block)

    @property
    def grain(self) -> int | None:
        return self.block

    def max_section_bytes(self, extent: Extent) -> int:
        return SignedPairs(self.block or 0).section_bytes(extent)

    def encode_flat(self, request: Request) -> Encoded | None:
        found = kernels.on(request.x.device).encode_signed_pairs(
            request.x, request.r, block=fit(self.block, request.numel)
        )
        if found is None:
            return None
        pairs, levels = found
        cut(pairs)
        return Encoded(SignedPairs(self.block or 0), (pairs.view(-1), levels))
