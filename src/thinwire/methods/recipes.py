"""Methods as their papers name them: compressor, feedback and collective in a word.

    dgc:0.001          Top-K with momentum correction and factor masking
    signsgd, signum    the majority of the ranks' signs
    ef-signsgd         signs scaled by the mean magnitude, with error feedback
    1bit-sgd           one bit and the means of both halves, with error feedback
    qsgd:4bit          stochastic levels of the norm, unbiased
    powersgd, arc, terngrad, natural, onebit, topk, ...
                       compressors, with the feedback that belongs to them

`recipe_of` gives the recipe of those that are more than a compressor; it is all that `attach` needs
to know.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

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
    check,
)
from thinwire.feedback import DGC, EF14, EF21M, Feedback, NoFeedback, Vote
from thinwire.policies.base import Policy
from thinwire.policies.fixed import Fixed
from thinwire.policies.schedule import DGC as STAGES
from thinwire.policies.schedule import Ramp
from thinwire.spec import build, spec_of, usage


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
class Dgc:
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

    def __post_init__(self) -> None:
        check.fraction("dgc", "ratio", self.ratio)
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"dgc: warmup must be a number of steps, got {self.warmup!r}")

    def recipe(self) -> Recipe:
        final = TopK(self.ratio)
        stages = len(STAGES) * self.warmup
        policy = Ramp(stages, final, shape="dgc") if self.warmup else Fixed(final)
        feedback = DGC(momentum=self.momentum, nesterov=self.nesterov, clip=self.clip)
        return Recipe(spec_of(self), policy, feedback, "gather", momentum=True, clips=self.clip > 0)


@dataclass(frozen=True)
class SignSgd:
    """signSGD: the sign of each gradient, decided by the majority of ranks."""

    name: ClassVar[str] = "signsgd"

    def recipe(self) -> Recipe:
        return Recipe(spec_of(self), Fixed(ScaledSign()), Vote(), "twoshot")


@dataclass(frozen=True)
class Signum:
    """signSGD of a moving average of the gradient, decided by the majority of ranks.

    Args:
        momentum: of the moving average.
    """

    momentum: float = 0.9
    name: ClassVar[str] = "signum"

    def recipe(self) -> Recipe:
        return Recipe(spec_of(self), Fixed(ScaledSign()), Vote(momentum=self.momentum), "twoshot")


@dataclass(frozen=True)
class EfSignSgd:
    """EF-signSGD: signs times the mean magnitude, what is left out remembered."""

    name: ClassVar[str] = "ef-signsgd"

    def recipe(self) -> Recipe:
        return Recipe(spec_of(self), Fixed(ScaledSign()), EF14(), "gather")


@dataclass(frozen=True)
class OneBitSgd:
    """1-bit SGD: one bit an element, the means of both halves, what is left out remembered."""

    name: ClassVar[str] = "1bit-sgd"

    def recipe(self) -> Recipe:
        return Recipe(spec_of(self), Fixed(OneBit()), EF14(), "twoshot")


Named = Dgc | SignSgd | Signum | EfSignSgd | OneBitSgd
_ALL: tuple[type[Named], ...] = (Dgc, SignSgd, Signum, EfSignSgd, OneBitSgd)
NAMED: dict[str, type[Named]] = {kind.name: kind for kind in _ALL}
_QSGD = re.compile(r"qsgd:\s*([2-8])\s*bit", re.IGNORECASE)
# Compressors that are methods by themselves, with the feedback that "auto" gives them.
_PLAIN: tuple[tuple[Compressor, Feedback], ...] = (
    (PowerSGD(2), EF14()),
    (ARCTopK(0.2), EF21M()),
    (TopK(0.01), EF14()),
    (OneBit(), EF14()),
    (QSGD(7), NoFeedback()),
    (TernGrad(), NoFeedback()),
    (Natural(), NoFeedback()),
)


def recipe_of(spec: str) -> Recipe | None:
    """The recipe of a method with a name of its own; None for everything else.

    >>> recipe_of("qsgd:4bit").compressor
    QSGD(levels=7, bucket=512, norm='l2', entropy=False)
    >>> recipe_of("topk:0.01") is None
    True
    """
    found = _QSGD.fullmatch(spec.strip())
    if found:
        policy = Fixed(QSGD(2 ** (int(found[1]) - 1) - 1))
        return Recipe(f"qsgd:{found[1]}bit", policy, NoFeedback(), "gather")
    if spec.partition(":")[0].strip().lower() not in NAMED:
        return None
    return build(spec, "method", NAMED).recipe()


def methods() -> list[tuple[str, str, str]]:
    """Every method's usage, what it is made of, and a line on it; for `thinwire methods`."""
    rows = []
    for kind in _ALL:
        recipe = kind().recipe()
        made = f"{recipe.compressor} + {recipe.feedback}, {recipe.collective}"
        rows.append((usage(kind), made, (kind.__doc__ or "").partition("\n")[0]))
    for compressor, feedback in _PLAIN:
        line = (type(compressor).__doc__ or "").partition("\n")[0]
        rows.append((usage(type(compressor)), f"{compressor} + {feedback}, auto", line))
    return rows


def list_methods() -> dict[str, str]:
    """Every method's name in spec strings, with one line on what it does."""
    lines = {kind.name: (kind.__doc__ or "").partition("\n")[0] for kind in _ALL}
    plain = {type(c).name: (type(c).__doc__ or "").partition("\n")[0] for c, _ in _PLAIN}
    return {**lines, **plain}
