"""The same compression with a residual in plain PyTorch: what `thinwire` is compared with.

Written as a competent user would write it: whole-tensor operations, in place where that is natural,
levels and signs packed into bytes, no checks and no frame. Like the library, each first adds the
tensor to the residual and leaves there what was not sent. Settings without a counterpart here, and
compressors that are more than one algorithm (chains, Tiered, Lossless), have none.
"""

from collections.abc import Callable

import torch

from thinwire.bench.eager import levels, plain, signs, sparse
from thinwire.bench.eager.contract import Eager
from thinwire.compressors.base import Compressor

__all__ = ["Eager", "eager_for"]

_MAKERS: dict[str, Callable[..., Eager | None]] = {
    "none": plain.none,
    "cast": plain.cast,
    "topk": sparse.top_k,
    "randomk": sparse.random_k,
    "bernoulli": sparse.bernoulli,
    "threshold": sparse.threshold,
    "quantize": levels.quantize,
    "qsgd": levels.qsgd,
    "terngrad": levels.terngrad,
    "natural": levels.natural,
    "onebit": signs.one_bit,
    "scaledsign": signs.scaled_sign,
}


def eager_for(compressor: Compressor, dtype: torch.dtype = torch.float32) -> Eager | None:
    """The counterpart of a compressor, or None; float32 is the only type they are written for."""
    maker = _MAKERS.get(compressor.name)
    return maker(compressor) if maker and dtype == torch.float32 else None
