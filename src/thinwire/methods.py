"""Methods as their papers name them: compressor, feedback and collective in a word.

    dgc:0.001          Top-K with momentum correction and factor masking
    signsgd, signum    the majority of the ranks' signs
    ef-signsgd         signs scaled by the mean magnitude, with error feedback
    1bit-sgd           one bit and the means of both halves, with error feedback
    qsgd:4bit          stochastic levels of the norm, as many as fit 4 bits, unbiased
    powersgd, arc, terngrad, natural, onebit, topk, ...
                       compressors, with the feedback that belongs to them

A method is an immutable description with a spec; `recipe` says what it consists of, which is all
that `attach` needs to know.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from thinwire import check
from thinwire.compressors import (
    QSGD,
    ARCTopK,
    Compressor,
    Natural,
    OneBit,
    PowerSGD,
    ScaledSign,
    TernGrad,
    TopK,
)
from thinwire.compressors.quantizers import levels_of
from thinwire.compressors.registry import COMPRESSORS
from thinwire.feedback import DGC, EF14, Feedback, NoFeedback, Vote, feedback_for
from thinwire.policies import Fixed, Policy, Ramp
from thinwire.policies.schedule import DGC_DENSITIES
from thinwire.spec import Bits, Kind, first_line, read_stage, read_value, spec_of, usage

__all__ = [
    "BitQSGD",
    "DeepGradientCompression",
    "EFSignSGD",
    "MethodLine",
    "NamedMethod",
    "OneBitSGD",
    "Recipe",
    "SignSGD",
    "Signum",
    "list_methods",
    "method_of",
    "parse",
]


@dataclass(frozen=True)
class Recipe:
    """What a method consists of.

    Args:
        name: its spec.
        policy: what is chosen: a compressor, or one that comes after a warm-up.
        feedback: what is remembered.
        collective: that the paper uses, or "auto".
        momentum: whether it takes the place of the optimizer's momentum.
        clips: whether it looks at the size of gradients.
    """

    name: str
    policy: Policy
    feedback: Feedback
    collective: str = "auto"
    momentum: bool = False
    clips: bool = False

    @property
    def compressor(self) -> Compressor:
        """In the end."""
        return self.policy.main


@dataclass(frozen=True)
class NamedMethod(ABC):
    """Base of the methods that are more than a compressor: frozen dataclasses with a `name`."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        self.recipe()  # refuses what cannot be made

    @abstractmethod
    def recipe(self) -> Recipe:
        """What it consists of."""

    def __str__(self) -> str:
        return spec_of(self)


@dataclass(frozen=True)
class DeepGradientCompression(NamedMethod):
    """Deep Gradient Compression: the largest 0.1 % of gradients that gather momentum as they wait.

    Args:
        ratio: share of elements sent in the end.
        warmup: steps (of an epoch, in the paper) at each of 25, 6.25, 1.5625 and 0.4 %, as far as
            that is more than `ratio`; 0 begins with `ratio`.
        clip: norm that the gradient of a unit is scaled down to before all, times sqrt(ranks).
        momentum, nesterov: as those of SGD; taken from the optimizer by `attach`.
    """

    ratio: float = 0.001
    warmup: int = 0
    clip: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    name: ClassVar[str] = "dgc"

    def recipe(self) -> Recipe:
        check.fraction("dgc", "ratio", self.ratio)
        check.steps("dgc", "warmup", self.warmup, 0)
        final = TopK(self.ratio)
        steps = len(DGC_DENSITIES) * self.warmup
        return Recipe(
            name=str(self),
            policy=Ramp(steps, final, shape="dgc") if steps else Fixed(final),
            feedback=DGC(momentum=self.momentum, nesterov=self.nesterov, clip=self.clip),
            collective="gather",
            momentum=True,
            clips=self.clip > 0,
        )


@dataclass(frozen=True)
class SignSGD(NamedMethod):
    """signSGD: the sign of each gradient, decided by the majority of ranks."""

    name: ClassVar[str] = "signsgd"

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(ScaledSign()), Vote(), "twoshot")


@dataclass(frozen=True)
class Signum(NamedMethod):
    """signSGD of a moving average of the gradient, decided by the majority of ranks.

    Args:
        momentum: of the moving average.
    """

    momentum: float = 0.9
    name: ClassVar[str] = "signum"

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(ScaledSign()), Vote(momentum=self.momentum), "twoshot")


@dataclass(frozen=True)
class EFSignSGD(NamedMethod):
    """EF-signSGD: signs times the mean magnitude, what is left out remembered."""

    name: ClassVar[str] = "ef-signsgd"

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(ScaledSign()), EF14(), "gather")


@dataclass(frozen=True)
class OneBitSGD(NamedMethod):
    """1-bit SGD: one bit per element, the means of both halves, what is left out remembered."""

    name: ClassVar[str] = "1bit-sgd"

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(OneBit()), EF14(), "twoshot")


@dataclass(frozen=True)
class BitQSGD(NamedMethod):
    """QSGD with as many levels as fit so many bits; "qsgd:7" is the compressor with 7 levels.

    Args:
        bits: per element, from 2 to 8; written ``qsgd:4bit``.
    """

    bits: int
    name: ClassVar[str] = "qsgd"

    def __post_init__(self) -> None:
        if isinstance(self.bits, Bits):
            object.__setattr__(self, "bits", self.bits.count)
        super().__post_init__()

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(QSGD(levels_of(self.bits))), NoFeedback(), "gather")

    def __str__(self) -> str:
        return f"{self.name}:{self.bits}bit"


class _Methods(Kind[NamedMethod]):
    def knows(self, spec: str) -> bool:
        if not super().knows(spec):
            return False
        stage = read_stage(spec)
        if stage.name != BitQSGD.name:
            return True
        given = [*stage.positional, *stage.named.values()]
        return len(given) == 1 and isinstance(read_value(given[0], int), Bits)

    def read(self, text: str) -> NamedMethod:
        if super().knows(text) and not self.knows(text):
            raise ValueError(f"{text!r}: the method is written with bits, as in 'qsgd:4bit'")
        return super().read(text)


METHODS = _Methods("method", "methods", NamedMethod, "dgc:0.001", beside=COMPRESSORS)
METHODS.add(DeepGradientCompression, SignSGD, Signum, EFSignSGD, OneBitSGD, BitQSGD)
# Compressors that are methods by themselves.
_PLAIN = (PowerSGD(2), ARCTopK(0.2), TopK(0.01), OneBit(), TernGrad(), Natural())


def parse(spec: str) -> NamedMethod:
    """The method that a spec string names, such as ``dgc:0.001`` or ``qsgd:4bit``.

    ``str(method)`` is the inverse. Raises ValueError that says what is wrong and what is known.

    >>> parse("qsgd:4bit").recipe().compressor
    QSGD(levels=7, bucket=512, norm='l2', entropy=False)
    """
    return METHODS.parse(spec)


def method_of(given: object) -> NamedMethod | None:
    """A method, from itself or its spec; None for whatever is no method of its own.

    >>> print(method_of("signum:0.5"), method_of("topk:0.01"), method_of("qsgd:7"))
    signum:0.5 None None
    """
    if isinstance(given, NamedMethod):
        return given
    return parse(given) if isinstance(given, str) and METHODS.knows(given) else None


class MethodLine(NamedTuple):
    """A method in a list.

    Args:
        usage: its spec with all arguments and their defaults.
        parts: compressor, feedback and collective.
        line: what it does.
    """

    usage: str
    parts: str
    line: str


def list_methods() -> dict[str, str]:
    """Every method's name in spec strings, with one line on what it does."""
    return {name: line.line for name, line in usages().items()}


def usages() -> dict[str, MethodLine]:
    """Every method by its name: how it is written, made of what, doing what."""
    named = (DeepGradientCompression(), SignSGD(), Signum(), EFSignSGD(), OneBitSGD(), BitQSGD(4))
    found = {}
    for method in named:
        recipe = method.recipe()
        parts = f"{recipe.compressor} + {recipe.feedback}, {recipe.collective}"
        written = "qsgd:BITSbit" if isinstance(method, BitQSGD) else usage(type(method))
        found[method.name] = MethodLine(written, parts, first_line(method))
    for compressor in _PLAIN:
        parts = f"{compressor} + {feedback_for(compressor, 'auto')}, auto"
        line = MethodLine(usage(type(compressor)), parts, first_line(compressor))
        found[compressor.name] = line
    return found
