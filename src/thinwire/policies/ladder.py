"""A compressor in several strengths, light to strong."""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any, TypeVar

from thinwire.collectives.choose import choose, moved
from thinwire.collectives.memory import weigh
from thinwire.compressors import Chain, Compressor, JointCompressor
from thinwire.policies.base import Choice, TensorInfo

C = TypeVar("C", bound=Compressor)

# What makes a compressor lighter, and the values that a ladder takes of it.
_RUNGS: dict[str, Sequence[float]] = {
    "ratio": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001),
    "bits": (8, 4, 2),
    "levels": (127, 31, 7, 3, 1),
    "rank": (64, 32, 16, 8, 4, 2, 1),
}


def knob(compressor: Compressor) -> tuple[str, float] | None:
    """The field that sets how strong a compressor is, and its value; of a chain, the first's."""
    first: Any = compressor.stages[0] if isinstance(compressor, Chain) else compressor
    for field in fields(first):
        if field.name in _RUNGS and getattr(first, field.name):
            return field.name, getattr(first, field.name)
    return None


def turned(compressor: C, value: float) -> C:
    """The compressor with its knob at another value."""
    if isinstance(compressor, Chain):
        first, *rest = compressor.stages
        return replace(compressor, stages=(turned(first, value), *rest))
    found = knob(compressor)
    assert found is not None
    changes: dict[str, Any] = {found[0]: value}
    return replace(compressor, **changes)


def near(compressor: C, value: float) -> C:
    """The compressor with its knob at a value, or at what is possible nearest to it."""
    found = knob(compressor)
    assert found is not None
    if found[0] == "ratio":
        return turned(compressor, float(f"{value:.3g}"))
    rungs = [int(rung) for rung in _RUNGS[found[0]]]
    return turned(compressor, min(rungs, key=lambda rung: abs(rung - value)))


def ladder_of(compressor: Compressor, beyond: bool = False) -> tuple[Choice, ...]:
    """Uncompressed, then lighter versions of a compressor, then itself, then up to ten times
    stronger ones on request.

    >>> from thinwire.compressors import parse
    >>> [str(rung) for rung in ladder_of(parse("topk:0.02|quantize:4"))]
    ['None', 'topk:0.3|quantize:4', 'topk:0.1|quantize:4', 'topk:0.03|quantize:4', \
'topk:0.02|quantize:4']
    """
    found = knob(compressor)
    if found is None:
        return (None, compressor)
    name, value = found
    lighter = [rung for rung in _RUNGS[name] if rung > 1.2 * value]
    stronger = [rung for rung in _RUNGS[name] if value / 11 < rung < value / 1.2] if beyond else []
    return (
        None,
        *(turned(compressor, rung) for rung in lighter),
        compressor,
        *(turned(compressor, rung) for rung in stronger),
    )


def bytes_of(choice: Choice, tensors: Sequence[TensorInfo], size: int, feedback: bool) -> float:
    """About how many bytes leave a rank per step when these tensors are sent in this way."""
    dense = sum(tensor.numel * tensor.dtype.itemsize for tensor in tensors)
    if choice is None:
        return moved("summable", dense, size)
    if isinstance(choice, JointCompressor):
        sent = sum(choice.sent(t.shape) * max(4, t.dtype.itemsize) for t in tensors)
        return moved("joint", sent, size)
    frame = sum(prod(t.shape) * weigh(choice, t.dtype, feedback).frame + 64 for t in tensors)
    return moved(choose(choice, frame, size), frame, size)
