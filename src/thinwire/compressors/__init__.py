"""Compressors: one algorithm a file, all with the same contract (`base`)."""

from thinwire.compressors.arctopk import ARCTopK
from thinwire.compressors.base import Compressor
from thinwire.compressors.bernoulli import Bernoulli
from thinwire.compressors.cast import Cast
from thinwire.compressors.chain import Chain
from thinwire.compressors.joint import Joint
from thinwire.compressors.lossless import Lossless
from thinwire.compressors.natural import Natural
from thinwire.compressors.none import NoCompression
from thinwire.compressors.onebit import OneBit
from thinwire.compressors.powersgd import PowerSGD
from thinwire.compressors.qsgd import QSGD
from thinwire.compressors.quantize import Quantize
from thinwire.compressors.randomk import RandomK
from thinwire.compressors.registry import compressor_of, list_compressors, parse
from thinwire.compressors.scaledsign import ScaledSign
from thinwire.compressors.terngrad import TernGrad
from thinwire.compressors.threshold import Threshold
from thinwire.compressors.tiered import Tiered
from thinwire.compressors.topk import TopK

__all__ = [
    "QSGD",
    "ARCTopK",
    "Bernoulli",
    "Cast",
    "Chain",
    "Compressor",
    "Joint",
    "Lossless",
    "Natural",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "ScaledSign",
    "TernGrad",
    "Threshold",
    "Tiered",
    "TopK",
    "compressor_of",
    "list_compressors",
    "parse",
]
