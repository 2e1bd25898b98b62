"""All compressors by name. A new one is one line in `_ALL`."""

from typing import Any

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
from thinwire.compressors.scaledsign import ScaledSign
from thinwire.compressors.terngrad import TernGrad
from thinwire.compressors.threshold import Threshold
from thinwire.compressors.tiered import Tiered
from thinwire.compressors.topk import TopK
from thinwire.spec import build, read_value, split

_ALL: tuple[type[Compressor], ...] = (
    NoCompression,
    Cast,
    TopK,
    RandomK,
    Bernoulli,
    Threshold,
    Quantize,
    QSGD,
    OneBit,
    ScaledSign,
    TernGrad,
    Natural,
    Tiered,
    Lossless,
)
_JOINT: tuple[type[Joint], ...] = (PowerSGD, ARCTopK)
BY_NAME: dict[str, type[Compressor]] = {kind.name: kind for kind in _ALL}
JOINT: dict[str, type[Joint]] = {kind.name: kind for kind in _JOINT}


def list_compressors() -> dict[str, str]:
    """Every compressor's name in spec strings, with one line on what it sends."""
    kinds = {**BY_NAME, **JOINT}
    return {name: (kind.__doc__ or "").partition("\n")[0] for name, kind in kinds.items()}


def parse(spec: str) -> Compressor:
    """The compressor that a spec string names, such as ``topk:0.01|quantize:4``.

    ``str(compressor)`` is the inverse. Raises ValueError that says what is wrong and what is known.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a spec is a string such as 'topk:0.01', got {spec!r}")
    kinds: dict[str, type[Compressor]] = {**BY_NAME, **JOINT}
    stages = [build(text, "compressor", kinds, _value) for text in split(spec, "|")]
    for stage in stages if len(stages) > 1 else ():
        if isinstance(stage, Joint):
            raise ValueError(f"{spec!r}: {stage} is found by all ranks together: it has no chains")
    return stages[0] if len(stages) == 1 else Chain.of(*stages)


def _value(text: str) -> Any:
    return parse(text[1:-1]) if text.startswith("(") and text.endswith(")") else read_value(text)


def compressor_of(compressor: Compressor | str) -> Compressor:
    """A compressor, or what a spec string describes."""
    if isinstance(compressor, Compressor):
        return compressor
    if isinstance(compressor, str):
        return parse(compressor)
    raise TypeError(
        f"expected a compressor or a spec such as 'topk:0.01', got {type(compressor).__name__}"
    )
