import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.compressors.base import Compressor, Encoded, Request
from thinwire.compressors.uniform import is_tiny, peak_of
from thinwire.frames.codes import Powers
from thinwire.frames.codes.powers import BIAS


@dataclass(frozen=True)
class Natural(Compressor):
    """The nearest powers of two, at random.

    |x| between 2^e and 2^(e+1) becomes the upper one with probability |x|/2^e - 1: unbiased, and
    E||C(x)||^2 <= 9/8 ||x||^2. A byte an element: the sign and the exponent in a window of 127
    below the tensor's largest; what is smaller becomes the window's lowest power or zero, unbiased
    too.

    Example:
        >>> import torch, thinwire as tw
        >>> c = tw.Natural()
        >>> c.decode(c.encode(torch.tensor([0.5, -4.0, 0.0])))
        tensor([ 0.5000, -4.0000,  0.0000])

    Reference: Horvath et al., Natural Compression for Distributed Deep Learning, 2019.
    """

    name: ClassVar[str] = "natural"

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def random(self) -> bool:
        return True

    def encode_flat(self, request: Request) -> Encoded | None:
        peak = peak_of(request)
        if peak is None:
            return None
        x = request.x
        if is_tiny(request, peak):
            return Encoded(Powers(BIAS), (torch.zeros_like(x, dtype=torch.uint8),))
        top = math.frexp(peak)[1]
        codes = kernels.on(x.device).encode_powers(x, request.r, top=top, key=request.key)
        return Encoded(Powers(top + BIAS), (codes,))
