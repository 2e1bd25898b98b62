"""All compressors by name. A new one is one more name in `COMPRESSORS.add`."""

import functools

from thinwire.compressors.arctopk import ARCTopK
from thinwire.compressors.base import Compressor, LocalCompressor, not_local
from thinwire.compressors.cast import Cast
from thinwire.compressors.chain import Chain
from thinwire.compressors.lossless import Lossless, NoCompression
from thinwire.compressors.powersgd import PowerSGD
from thinwire.compressors.quantizers import QSGD, Natural, Quantize, TernGrad
from thinwire.compressors.signs import OneBit, ScaledSign, TwoBit
from thinwire.compressors.sparsifiers import Bernoulli, RandomK, Threshold, TopK
from thinwire.compressors.tiered import Tiered
from thinwire.spec import Kind, split


class _Compressors(Kind[Compressor]):
    def read(self, text: str) -> Compressor:
        first, *others = [super(_Compressors, self).read(stage) for stage in split(text, "|")]
        try:
            return Chain.of(first, *others) if others else first
        except TypeError as error:
            raise ValueError(f"{text!r}: {error}") from None


COMPRESSORS = _Compressors("compressor", "compressors", Compressor, "topk:0.01")
COMPRESSORS.add(NoCompression, Cast, TopK, RandomK, Bernoulli, Threshold)
COMPRESSORS.add(Quantize, QSGD, OneBit, TwoBit, ScaledSign, TernGrad, Natural, Tiered, Lossless)
COMPRESSORS.add(PowerSGD, ARCTopK)
COMPRESSORS.unnamed[Chain.name] = Chain


def list_compressors() -> dict[str, str]:
    """Every compressor's name in spec strings, with one line on what it sends."""
    return COMPRESSORS.lines()


def parse(spec: str) -> Compressor:
    """The compressor that a spec string names, such as ``topk:0.01|quantize:4``.

    ``str(compressor)`` is the inverse. Raises ValueError that says what is wrong and what is known.
    """
    return COMPRESSORS.parse(spec)


def compressor_of(given: Compressor | str) -> Compressor:
    """A compressor, or what a spec string describes."""
    if isinstance(given, Compressor):
        return given
    if isinstance(given, str):
        return _parsed(given)
    what = f": {not_local(given)}" if isinstance(given, type) else f", got {type(given).__name__}"
    raise TypeError(f"expected a compressor or a spec such as 'topk:0.01'{what}")


@functools.lru_cache(maxsize=128)
def _parsed(spec: str) -> Compressor:
    """Kept, as calls name the same few again and again: compressors are immutable."""
    return parse(spec)


def local_of(given: Compressor | str) -> LocalCompressor:
    """A compressor that has a payload, or what a spec string describes."""
    compressor = compressor_of(given)
    if not isinstance(compressor, LocalCompressor):
        raise TypeError(
            f"{not_local(compressor)}, so it has no payload: use tw.all_reduce, tw.Reducer or "
            "tw.attach"
        )
    return compressor
