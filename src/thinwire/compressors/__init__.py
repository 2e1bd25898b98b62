"""Compressors: how a tensor becomes smaller, as immutable descriptions with one contract."""

from thinwire.compressors.arctopk import ARCTopK
from thinwire.compressors.base import Compressor, LocalCompressor
from thinwire.compressors.cast import Cast
from thinwire.compressors.chain import Chain
from thinwire.compressors.joint import JointCompressor
from thinwire.compressors.lossless import Lossless, NoCompression
from thinwire.compressors.powersgd import PowerSGD
from thinwire.compressors.quantizers import QSGD, Natural, Quantize, TernGrad
from thinwire.compressors.registry import compressor_of, list_compressors, local_of, parse
from thinwire.compressors.signs import OneBit, ScaledSign, TwoBit
from thinwire.compressors.sparsifiers import (
    Bernoulli,
    RandomK,
    SparseCompressor,
    Threshold,
    TopK,
)
from thinwire.compressors.tiered import Tiered

__all__ = [
    "QSGD",
    "ARCTopK",
    "Bernoulli",
    "Cast",
    "Chain",
    "Compressor",
    "JointCompressor",
    "LocalCompressor",
    "Lossless",
    "Natural",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "ScaledSign",
    "SparseCompressor",
    "TernGrad",
    "Threshold",
    "Tiered",
    "TopK",
    "TwoBit",
    "compressor_of",
    "list_compressors",
    "local_of",
    "parse",
]
