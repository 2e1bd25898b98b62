"""A compressor in several strengths, light to strong."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, TypeVar

from thinwire.collectives.choose import choose, moved
from thinwire.collectives.memory import weigh
from thinwire.compressors import Cast, Chain, Compressor, JointCompressor, PowerSGD, Quantize
from thinwire.policies.base import Choice, PolicyContext, TensorInfo

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
    return moved(choose([choice], frame, size), frame, size)


@dataclass(frozen=True)
class Rung:
    """One strength for all tensors: a compressor, and a second one for some of them.

    Args:
        compressor: None for uncompressed.
        second: for the tensors in `names`.
    """

    compressor: Choice
    second: Choice = None
    names: frozenset[str] = frozenset()

    def choose(self, tensor: TensorInfo) -> Choice:
        """That of a tensor."""
        return self.second if tensor.name in self.names else self.compressor

    @property
    def joint(self) -> bool:
        """Whether ranks find together what they send."""
        return any(isinstance(each, JointCompressor) for each in (self.compressor, self.second))

    def num_bytes(self, context: PolicyContext) -> float:
        """About how many bytes leave a rank per step."""
        by_choice: dict[Choice, list[TensorInfo]] = {}
        for tensor in context.tensors:
            by_choice.setdefault(self.choose(tensor), []).append(tensor)
        size, feedback = context.size, context.feedback
        return sum(bytes_of(choice, own, size, feedback) for choice, own in by_choice.items())

    def suits(self, context: PolicyContext) -> bool:
        """Whether the collective carries it."""
        choices = {self.choose(tensor) for tensor in context.tensors}
        return all(choice is None or context.options.carries(choice) for choice in choices)

    @property
    def title(self) -> str:
        """In short: without the one for some of the tensors."""
        return str((self.second if self.names else self.compressor) or "uncompressed")

    @property
    def how(self) -> str:
        """The same in a sentence."""
        return self.title if self.compressor is None else f"with {self.title}"

    def __str__(self) -> str:
        other = f" ({self.compressor} where that is smaller)" if self.names else ""
        return self.title + other


# Whatever sends every element in every step suits Adam. Low ranks do so too, but cost accuracy in
# long trainings; few bits are enough for small matrices, of which a low rank would be no smaller.
_BITS = Quantize(4)
_STEADY_KINDS: tuple[Compressor, ...] = (Cast("bf16"), Quantize(8), _BITS)
_RANKS = (16, 8, 4)


def steady_kinds(low_rank: bool) -> tuple[Compressor, ...]:
    """What `steady_ladder` is made of, each in its strongest form."""
    return (*_STEADY_KINDS, PowerSGD(_RANKS[-1])) if low_rank else _STEADY_KINDS


def steady_ladder(context: PolicyContext, low_rank: bool) -> tuple[Rung, ...]:
    """Strengths that send every element in every step, light to strong, always as many."""
    low = [_low_rank(PowerSGD(rank), context) for rank in _RANKS] if low_rank else []
    return (Rung(None), *map(Rung, _STEADY_KINDS), *low)


def _low_rank(low: PowerSGD, context: PolicyContext) -> Rung:
    """A low rank for the tensors of which that sends fewer bytes than few bits do."""
    size, tensors = context.size, context.tensors

    def frame(tensor: TensorInfo) -> float:
        return tensor.numel * weigh(_BITS, tensor.dtype, context.feedback).frame

    collective = choose([_BITS], sum(map(frame, tensors)), size)  # of all of them together
    names = frozenset(
        t.name
        for t in tensors
        if bytes_of(low, [t], size, context.feedback) < moved(collective, frame(t), size)
    )
    return Rung(low) if len(names) == len(tensors) else Rung(_BITS, low, names)
