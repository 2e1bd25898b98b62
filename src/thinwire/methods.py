"""Methods as their papers name them: compressor, feedback and collective in a word.

    dgc:0.001          Top-K with momentum correction and factor masking
    signsgd, signum    the majority of the ranks' signs
    ef-signsgd         signs scaled by the mean magnitude, with error feedback
    1bit-sgd           one bit and the means of both halves, with error feedback
    qsgd:4bit          stochastic levels of the norm, as many as fit 4 bits, unbiased
    powersgd, arc, terngrad, natural, onebit, topk, ...
                       compressors, with the feedback that belongs to them

and those that exchange what optimizers have done to the parameters, for `LocalSteps`:

    adam-update:0.01   the update of each step, 1 % of it in 4 bits
    local-sgd, post-local-sgd
                       averages of the parameters every so many steps
    diloco, streaming-diloco
                       an outer optimizer with momentum, all at once or fragment by fragment
    sparseloco         2-bit values of the largest few of each chunk

A method is an immutable description with a spec; `recipe` says what it consists of, which is all
that `attach` needs to know.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from thinwire import check
from thinwire.compressors import (
    QSGD,
    ARCTopK,
    Compressor,
    Natural,
    NoCompression,
    OneBit,
    PowerSGD,
    Quantize,
    ScaledSign,
    TernGrad,
    TopK,
    TwoBit,
)
from thinwire.compressors.quantizers import levels_of
from thinwire.compressors.registry import COMPRESSORS
from thinwire.feedback import DGC, EF14, Feedback, NoFeedback, Vote, feedback_for
from thinwire.formatting import plural
from thinwire.policies import Fixed, Policy, Ramp
from thinwire.policies.schedule import DGC_DENSITIES
from thinwire.spec import Bits, Kind, first_line, read_stage, read_value, spec_of, usage

__all__ = [
    "AdamUpdate",
    "BitQSGD",
    "DeepGradientCompression",
    "DiLoCo",
    "EFSignSGD",
    "LocalRecipe",
    "LocalSGD",
    "MethodLine",
    "NamedMethod",
    "OneBitSGD",
    "OuterSGD",
    "PostLocalSGD",
    "Recipe",
    "SignSGD",
    "Signum",
    "SparseLoCo",
    "StreamingDiLoCo",
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
class OuterSGD:
    """How `LocalSteps` moves the common parameters: v = momentum * v + D, then by lr * v, or with
    `nesterov` by lr * (D + momentum * v); D is the mean of what ranks have moved theirs by.

    Args:
        lr: learning rate; 1 without momentum is the average of the ranks' parameters.
        momentum: of the outer steps.
        nesterov: look ahead.

    Reference: Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with Slow
    Momentum, 2019, with momentum and without `nesterov`; Douillard et al., DiLoCo: Distributed
    Low-Communication Training of Language Models, 2023, with both.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check.positive("OuterSGD", "lr", self.lr)
        check.below("OuterSGD", "momentum", self.momentum, 1)
        if self.nesterov and not self.momentum:
            raise ValueError("OuterSGD: nesterov needs a momentum")

    @property
    def averages(self) -> bool:
        """Whether this is no more than the average."""
        return self.lr == 1 and not self.momentum


AVERAGE = OuterSGD()


@dataclass(frozen=True)
class LocalRecipe(Recipe):
    """What a method for `LocalSteps` consists of; see there.

    Args:
        every: optimizer steps in a round.
        outer: how the common parameters are moved.
        warmup: steps at the beginning after each of which all is averaged, uncompressed.
        fragments: parts of the model that are exchanged one after the other.
        overlap: steps that go on while an exchange is under way.
        mixing: share of the local parameters that stays when the common ones arrive.
        keep: share of what a rank has not sent yet that its own parameters have already.
        gain: lengthen common steps by as much as the mean gradient has less noise than each rank's.
        average: "world" or "senders".
        min_numel: tensors with fewer elements, or fewer than two dimensions, are sent uncompressed;
            0 for none.
    """

    every: int = 1
    outer: OuterSGD = AVERAGE
    warmup: int = 0
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0
    keep: float = 0.0
    gain: bool = False
    average: str = "world"
    min_numel: int = 1024

    def __post_init__(self) -> None:
        check_rounds(self.name, self.every, self.fragments, self.overlap)
        check.steps(self.name, "warmup", self.warmup, 0)
        if not check.is_number(self.mixing) or not 0 <= self.mixing < 1:
            raise ValueError(f"{self.name}: mixing must be in [0, 1), got {self.mixing!r}")
        if not check.is_whole(self.min_numel) or self.min_numel < 0:
            raise ValueError(f"min_numel must be a number of elements, got {self.min_numel!r}")
        check.flag(self.name, "gain", self.gain)
        if not check.is_number(self.keep) or not 0 <= self.keep <= 1:
            raise ValueError(f"{self.name}: keep must be in [0, 1], got {self.keep!r}")
        if self.keep and self.overlap:
            raise ValueError(
                f"{self.name}: keep={self.keep:g} takes what was not sent from an exchange that "
                "has ended: leave out overlap"
            )


def check_rounds(who: str, every: int, fragments: int, overlap: int) -> None:
    """Refuse rounds that cannot be."""
    check.steps(who, "every", every)
    check.steps(who, "fragments", fragments)
    check.steps(who, "overlap", overlap, 0)
    if every % fragments:
        raise ValueError(
            f"{who}: each fragment is exchanged once every {every} steps, which must be a multiple "
            f"of the {fragments} fragments"
        )
    if overlap >= every // fragments:
        raise ValueError(
            f"{who}: overlap={overlap}, but the next exchange begins {every // fragments} steps "
            "after the last: overlap must be less than that"
        )


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

    u = m u + g; v = v + u; the largest of v are sent, and u and v start from zero there. See
    `thinwire.feedback.DGC`.

    Args:
        ratio: share of elements sent in the end.
        warmup: steps (of an epoch, in the paper) at each of 25, 6.25, 1.5625 and 0.4 %, as far as
            that is more than `ratio`; 0 begins with `ratio`.
        clip: norm that the gradient of a unit is scaled down to before all, times sqrt(ranks).
        momentum, nesterov: as those of SGD; taken from the optimizer by `attach`.

    Reference: Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for
    Distributed Training, 2018.
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
    """signSGD: the sign of each gradient, decided by the majority of ranks.

    The step is sign(sum over ranks of sign(g)), ties counting as +1.

    Reference: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018;
    Bernstein et al., signSGD with Majority Vote is Communication Efficient And Fault Tolerant,
    2019.
    """

    name: ClassVar[str] = "signsgd"

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(ScaledSign()), Vote(), "twoshot")


@dataclass(frozen=True)
class Signum(NamedMethod):
    """signSGD of a moving average of the gradient, decided by the majority of ranks.

    v = m v + (1 - m) g; the step is sign(sum over ranks of sign(v)), ties counting as +1.

    Args:
        momentum: m, of the moving average.

    Reference: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018;
    Bernstein et al., signSGD with Majority Vote is Communication Efficient And Fault Tolerant,
    2019.
    """

    momentum: float = 0.9
    name: ClassVar[str] = "signum"

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(ScaledSign()), Vote(momentum=self.momentum), "twoshot")


@dataclass(frozen=True)
class EFSignSGD(NamedMethod):
    """EF-signSGD: signs times the mean magnitude, what is left out remembered.

    p = g + e; c = (||p||_1 / d) sign(p), for d elements; e = p - c; the step is the mean of c.

    Reference: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes, 2019.
    """

    name: ClassVar[str] = "ef-signsgd"

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(ScaledSign()), EF14(), "gather")


@dataclass(frozen=True)
class OneBitSGD(NamedMethod):
    """1-bit SGD: one bit per element, the means of both halves, what is left out remembered.

    p = g + e; in c, the elements of a block that are >= 0 become their mean, and the others theirs;
    e = p - c. Ranks sum shards, and what they send back of the sums is compressed so too.

    Reference: Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs, 2014.
    """

    name: ClassVar[str] = "1bit-sgd"

    def recipe(self) -> Recipe:
        return Recipe(str(self), Fixed(OneBit()), EF14(), "twoshot")


@dataclass(frozen=True)
class BitQSGD(NamedMethod):
    """QSGD with as many levels as fit so many bits; "qsgd:7" is the compressor with 7 levels.

    |v| / norm is rounded to one of s = 2^(bits - 1) - 1 levels, up or down at random, so that the
    mean is right. See `thinwire.QSGD`.

    Args:
        bits: per element, from 2 to 8; written ``qsgd:4bit``.

    Reference: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding, 2017.
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


@dataclass(frozen=True)
class AdamUpdate(NamedMethod):
    """The update of each step, with each rank's own moments: sparse compression that Adam bears.

    What Adam divides by its second moment is this rank's own gradient, not one that arrives in
    bursts; what is compressed and remembered is the step that Adam wants to take. With the common
    parameters Theta and this rank's theta:

        u = Theta - theta;   c = C(u + e);   e = u + e - c
        Theta = Theta - mean(c);   theta = Theta - keep * e

    Args:
        ratio: share of elements sent.
        bits: of each of their values; 0 for all of them.
        ramp: exchanges over which `ratio` falls from a half; 0 for none.
        keep: share of what a rank has not sent yet that its own parameters have already, so that
            its gradients are less stale.
        gain: make up for Adam's shorter steps: each rank's gradients are noisier than their mean.

    Reference: Chen et al., Efficient-Adam: Communication-Efficient Distributed Adam, 2022, which
    compresses both ways through a server; Wang et al., CocktailSGD: Fine-tuning Foundation Models
    over 500Mbps Networks, 2023, whose local parameters minus the shared ones are the residual.
    """

    ratio: float = 0.01
    bits: int = 4
    ramp: int = 0
    keep: float = 0.5
    gain: bool = False
    name: ClassVar[str] = "adam-update"

    def recipe(self) -> LocalRecipe:
        check.fraction(self.name, "ratio", self.ratio)
        check.steps(self.name, "ramp", self.ramp, 0)
        compressor: Compressor = TopK(self.ratio)
        if self.bits:
            compressor = compressor | Quantize(self.bits)
        policy = Ramp(self.ramp, compressor, start=0.5) if self.ramp else Fixed(compressor)
        return LocalRecipe(str(self), policy, EF14(), keep=self.keep, gain=self.gain, min_numel=0)


def _differences(
    method: NamedMethod, every: int, compressor: Compressor, **settings: Any
) -> LocalRecipe:
    """Differences to the last common parameters, with the feedback that suits their compressor."""
    feedback = feedback_for(compressor, "auto")
    return LocalRecipe(str(method), Fixed(compressor), feedback, every=every, **settings)


@dataclass(frozen=True)
class LocalSGD(NamedMethod):
    """The average of the ranks' parameters every so many steps.

    Theta = Theta - mean(C(Theta - theta)), of the last average Theta and each rank's own theta.

    Args:
        every: steps between two averages.
        compressor: of the differences to the last average.

    Reference: Stich, Local SGD Converges Fast and Communicates Little, 2018.
    """

    every: int = 10
    compressor: Compressor = field(default=NoCompression(), kw_only=True)
    name: ClassVar[str] = "local-sgd"

    def recipe(self) -> LocalRecipe:
        return _differences(self, self.every, self.compressor)


@dataclass(frozen=True)
class PostLocalSGD(NamedMethod):
    """Local SGD after some steps in which ranks average after each step, uncompressed.

    Args:
        every: steps between two averages.
        warmup: steps before that.
        compressor: of the differences to the last average.

    Reference: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018.
    """

    every: int = 10
    warmup: int = 100
    compressor: Compressor = field(default=NoCompression(), kw_only=True)
    name: ClassVar[str] = "post-local-sgd"

    def recipe(self) -> LocalRecipe:
        return _differences(self, self.every, self.compressor, warmup=self.warmup)


@dataclass(frozen=True)
class DiLoCo(NamedMethod):
    """DiLoCo: many local steps, then one of an outer optimizer with Nesterov momentum.

    D = mean(C(Theta - theta)); v = m v + D; Theta = Theta - lr (D + m v).

    Args:
        every: local steps in a round; 500 in the paper, fewer for small models.
        lr, momentum: of the outer optimizer; momentum is m.
        compressor: of the differences.

    Reference: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
    2023.
    """

    every: int = 500
    lr: float = 0.7
    momentum: float = 0.9
    compressor: Compressor = field(default=NoCompression(), kw_only=True)
    name: ClassVar[str] = "diloco"

    def recipe(self) -> LocalRecipe:
        outer = OuterSGD(self.lr, self.momentum, nesterov=self.momentum > 0)
        return _differences(self, self.every, self.compressor, outer=outer)


@dataclass(frozen=True)
class SparseLoCo(NamedMethod):
    """SparseLoCo: the largest few differences of each chunk, in 2 bits, and a residual that fades.

    e = decay e + (Theta - theta); c = C(e); e = e - c; Theta = Theta - lr mean(c).

    Args:
        every: local steps in a round.
        ratio: share of elements sent, of each chunk.
        decay: what is left of the residual from round to round.
        lr: of the outer steps, which have no momentum.
        average: over all ranks ("world"), or over those that sent an element ("senders"), as in the
            paper: then an element that one rank sends moves as far as one that all send.
        chunk: elements in a chunk.

    Reference: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025.
    """

    every: int = 15
    ratio: float = 0.03125
    decay: float = 0.95
    lr: float = 1.0
    average: str = "world"
    chunk: int = 4096
    name: ClassVar[str] = "sparseloco"

    def recipe(self) -> LocalRecipe:
        return LocalRecipe(
            str(self),
            Fixed(TopK(self.ratio, chunk=self.chunk) | TwoBit()),
            EF14(self.decay),
            "gather",
            every=self.every,
            outer=OuterSGD(self.lr),
            average=self.average,
        )


@dataclass(frozen=True)
class StreamingDiLoCo(NamedMethod):
    """Streaming DiLoCo: one fragment of the model after the other, while training goes on.

    Theta is moved as in `DiLoCo`; then theta = mixing theta + (1 - mixing) Theta.

    Args:
        every: local steps between two exchanges of a fragment.
        fragments: the layers are dealt out to.
        overlap: steps that go on while a fragment is under way.
        mixing: share of the local parameters that stays when the common ones arrive.
        lr, momentum: of the outer optimizer.
        compressor: of the differences, of which nothing is remembered.

    Reference: Douillard et al., Streaming DiLoCo with overlapping communication, 2025.
    """

    every: int = 100
    fragments: int = 4
    overlap: int = 1
    mixing: float = 0.5
    lr: float = 0.4
    momentum: float = 0.9
    compressor: Compressor = field(default=Quantize(4), kw_only=True)
    name: ClassVar[str] = "streaming-diloco"

    def recipe(self) -> LocalRecipe:
        return LocalRecipe(
            str(self),
            Fixed(self.compressor),
            NoFeedback(),
            every=self.every,
            outer=OuterSGD(self.lr, self.momentum, nesterov=self.momentum > 0),
            fragments=self.fragments,
            overlap=self.overlap,
            mixing=self.mixing,
        )


LOCAL = (AdamUpdate, LocalSGD, PostLocalSGD, DiLoCo, SparseLoCo, StreamingDiLoCo)


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
METHODS.add(DeepGradientCompression, SignSGD, Signum, EFSignSGD, OneBitSGD, BitQSGD, *LOCAL)
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
    gradients = (DeepGradientCompression(), SignSGD(), Signum(), EFSignSGD(), OneBitSGD())
    named: tuple[NamedMethod, ...] = (*gradients, BitQSGD(4), *(each() for each in LOCAL))
    found = {}
    for method in named:
        recipe = method.recipe()
        parts = f"{recipe.compressor} + {recipe.feedback}, {recipe.collective}"
        if isinstance(recipe, LocalRecipe):
            parts += f", every {plural(recipe.every, 'step')}"
        written = "qsgd:BITSbit" if isinstance(method, BitQSGD) else usage(type(method))
        found[method.name] = MethodLine(written, parts, first_line(method))
    for compressor in _PLAIN:
        parts = f"{compressor} + {feedback_for(compressor, 'auto')}, auto"
        line = MethodLine(usage(type(compressor)), parts, first_line(compressor))
        found[compressor.name] = line
    return found
