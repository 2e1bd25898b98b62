"""thinwire: communication compression for distributed training.

import torch, thinwire as tw

compressor = tw.TopK(0.01) | tw.Quantize(4)
residual = torch.zeros_like(gradient)
payload = compressor.encode(gradient, residual=residual)
frame = tw.pack(payload)  # bytes to send
restored = tw.decode(frame)  # on the other side, with nothing else
"""

from thinwire.compressors import (
    QSGD,
    Bernoulli,
    Cast,
    Chain,
    Compressor,
    Lossless,
    Natural,
    NoCompression,
    OneBit,
    Quantize,
    RandomK,
    ScaledSign,
    TernGrad,
    Threshold,
    Tiered,
    TopK,
    compressors,
    parse,
)
from thinwire.errors import FrameError, MissingExtraError, ThinwireError, ThinwireWarning
from thinwire.kernels import Key
from thinwire.wire import Payload, decode, pack, unpack

__version__ = "0.1.0"

__all__ = [
    "QSGD",
    "Bernoulli",
    "Cast",
    "Chain",
    "Compressor",
    "FrameError",
    "Key",
    "Lossless",
    "MissingExtraError",
    "Natural",
    "NoCompression",
    "OneBit",
    "Payload",
    "Quantize",
    "RandomK",
    "ScaledSign",
    "TernGrad",
    "ThinwireError",
    "ThinwireWarning",
    "Threshold",
    "Tiered",
    "TopK",
    "__version__",
    "compressors",
    "decode",
    "pack",
    "parse",
    "unpack",
]
