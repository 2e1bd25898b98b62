from dataclasses import dataclass, field
from typing import ClassVar

import torch

from thinwire import check, kernels
from thinwire.compressors.base import Encoded, LocalCompressor, Request, not_local
from thinwire.compressors.cast import Cast
from thinwire.compressors.quantizers import Quantize
from thinwire.compressors.sparsifiers import kept
from thinwire.frames.code import Extent
from thinwire.frames.positions import Overlay, Sparse, max_position_bytes, write_positions


@dataclass(frozen=True)
class Tiered(LocalCompressor):
    """The large few at high precision, the rest at few bits.

    The k = max(1, ceil(d * ratio)) largest go through `large`, the tensor without them through
    `small`, whose scales are no longer stretched by the outliers. What is sent is the sum of both.
    With `above` the large ones are those of at least that magnitude, however many.
    Where `small` does not send zero as zero (OneBit, affine), a tensor with values within a factor
    of two of the largest finite number counts as non-finite.

    Args:
        ratio: share of elements that count as large, in (0, 1]; 0 if `above` says that.
        large: compressor of the large ones.
        small: compressor of the rest.
        above: smallest magnitude that counts as large, instead of a share.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Tiered(0.25, small=tw.Quantize(2))
        >>> c.decode(c.encode(torch.tensor([100.0, 1.0, -1.0, 0.0])))
        tensor([100.,   1.,  -1.,   0.])

    Reference: the idea of outlier-aware quantisation, Park et al., Value-aware Quantization for
    Training and Inference of Neural Networks, 2018.
    """

    ratio: float = 0.0
    large: LocalCompressor = field(default=Cast("fp16"))
    small: LocalCompressor = field(default=Quantize(2))
    above: float = 0.0
    name: ClassVar[str] = "tiered"

    def __post_init__(self) -> None:
        if self.above:
            if self.ratio:
                raise ValueError("Tiered: either ratio or above says what is large, got both")
            check.positive("Tiered", "above", self.above)
            object.__setattr__(self, "above", float(self.above))
        else:
            check.fraction("Tiered", "ratio", self.ratio)
        object.__setattr__(self, "ratio", float(self.ratio))
        for name, value in (("large", self.large), ("small", self.small)):
            if not isinstance(value, LocalCompressor):
                raise ValueError(f"Tiered: {name}: {not_local(value)}")
            if any(isinstance(stage, Tiered) for stage in getattr(value, "stages", (value,))):
                raise ValueError(f"Tiered: {name} must be a compressor without Tiered: {value!r}")

    @property
    def random(self) -> bool:
        return self.large.random or self.small.random

    @property
    def common_key(self) -> bool:
        return self.large.common_key or self.small.common_key

    @property
    def leaves_out(self) -> bool:
        return self.small.leaves_out

    def max_section_bytes(self, extent: Extent) -> int:
        count = extent.numel if self.above else kept(extent.numel, self.ratio)
        large = self.large.max_section_bytes(Extent(extent.dtype, count))
        positions = max_position_bytes(count, extent.numel)
        return self.small.max_section_bytes(extent) + positions + large

    def encode_flat(self, request: Request) -> Encoded | None:
        x, r, dtype, key = request
        own = kernels.on(x.device)
        if self.above:
            chosen = own.above(x, r, self.above)
        else:
            chosen = own.top_k(x, r, kept(request.numel, self.ratio))
        if chosen is None:
            return None
        positions, values = chosen
        at = positions.long()
        rest = x.to(request.real, copy=True) if r is None else x + r
        rest[at] = 0
        key = key.substream()
        low = self.small.encode_flat(Request(rest, None, dtype, key))
        if low is None or not positions.numel():
            return low
        # Whatever `small` says of the large ones' places, `large` sends the difference.
        extent = Extent(dtype, request.numel)
        low_known = low.known or low.code.open(low.sections, extent)
        shift = low.code.values(low_known, extent, x.device)[at]
        if shift.any() and values.abs().max() > torch.finfo(values.dtype).max / 2:
            return None
        values = values - shift
        high = self.large.encode_flat(Request(values, None, dtype, key.substream()))
        if high is None:
            return None
        settings, written = write_positions(positions, request.numel)
        few = Extent(dtype, positions.numel())
        high_known = high.known or high.code.open(high.sections, few)
        return Encoded(
            Overlay(low.code, Sparse(positions.numel(), inner=high.code, **settings)),
            (*low.sections, written, *high.sections),
            (low_known, (positions, high_known)),
        )
