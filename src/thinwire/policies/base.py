"""What a policy is: it chooses a compressor for a named tensor at a step, the same on every rank.

A policy is an immutable description; a chooser is one at work. A chooser decides from the step,
from its settings, and from numbers of all ranks, which reach it in the same order everywhere:
nothing else can differ between ranks, so its choices cannot.

    choose(tensor, step)       before a step, for each tensor
    watch(tensor, step, x, r)  in steps that it wants to see, what a tensor is about to send
    report(measured)           after a step that is due: numbers of this rank, always as many
    learn(step, rows)          before the next step: those of all ranks
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.collectives.options import Options
from thinwire.collectives.probe import ProbeSize
from thinwire.compressors import Compressor, NoCompression, compressor_of
from thinwire.compressors.registry import COMPRESSORS
from thinwire.spec import Kind, name_of, spec_of

log = logging.getLogger("thinwire")
Choice = Compressor | None  # None: uncompressed
KEPT = 1000  # decisions
LISTENS_EVERY = 8  # passes: a comparison costs a step of 50 ms a hundredth


class TensorInfo(NamedTuple):
    """A tensor that a policy chooses for.

    Args:
        kind: of the module it belongs to: "embedding", "linear", "conv", "norm" or "other".
        last: whether it belongs to the last layer.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype = torch.float32
    kind: str = "other"
    last: bool = False

    @property
    def numel(self) -> int:
        return self.shape.numel()


class Measured(NamedTuple):
    """What a step came to on this rank, in seconds and bytes."""

    step: float  # from the end of the backward pass before to the end of this one
    window: float  # from the first bucket of gradients to the end of backward
    waiting: float  # for exchanges, when backward had ended
    network: float  # of the thread that exchanges, waiting for other ranks included
    codec: float  # encoding and decoding
    num_bytes: float  # sent
    exchanges: float = 1.0  # how many
    probed: float = 0.0  # bytes of the last probe of the link, if one has ended since; see `probes`
    meeting: float = 0.0  # its seconds for ranks to hear from each other
    moving: float = 0.0  # its seconds to sum those bytes
    moving_part: float = 0.0  # and a part of them: 1 / SHORTER of thinwire.collectives.probe
    tries: float = 0.0  # its sums of each length


class OptimizerKind(IntEnum):
    """What takes the averages; where ranks or optimizers differ, the largest counts."""

    UNKNOWN = 0
    OTHER = 1
    ADAM_LIKE = 2  # divides by a running second moment of the gradient


class Decision(NamedTuple):
    """What changed, and why."""

    step: int
    tensors: str
    compressor: str
    why: str


def how(choice: Choice) -> str:
    """How a tensor is sent, in words."""
    return "uncompressed" if choice is None else f"with {choice}"


class Journal:
    """The decisions of a policy, the last thousand of them."""

    def __init__(self) -> None:
        self.decisions: deque[Decision] = deque(maxlen=KEPT)

    def note(self, step: int, tensors: str, choice: Choice | str, why: str) -> None:
        chosen = "uncompressed" if choice is None else str(choice)
        decision = Decision(step, tensors, chosen, why)
        self.decisions.append(decision)
        log.info("step %d: %s: %s (%s)", *decision)


class PolicyContext(NamedTuple):
    """Where a policy works.

    Args:
        tensors: that it chooses for.
        size: ranks of the group.
        feedback: whether what is left out is remembered.
        journal: for its decisions.
        options: of the exchanges: not every compressor suits every collective.
    """

    tensors: Sequence[TensorInfo]
    size: int
    feedback: bool
    journal: Journal
    options: Options = Options()


@dataclass(frozen=True)
class Policy(ABC):
    """Base of the policies: frozen dataclasses with a `name`, written as a spec by `str`.

    A policy of your own implements `begin`, which makes a `Chooser`, and `main`.

    Where a field holds a compressor or a policy, its spec is taken too and read when the object is
    made. The field's annotation is what it holds then, from which specs are read; what may be given
    stands in an `__init__` that only type checkers see, next to the one that dataclass makes.
    """

    name: ClassVar[str]

    @abstractmethod
    def begin(self, context: PolicyContext) -> "Chooser":
        """Start choosing."""

    @property
    @abstractmethod
    def main(self) -> Compressor:
        """What it comes to in the end, or at its strongest: that decides the feedback."""

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """Kinds that it may choose from: they must suit the collective."""
        return (self.main,)

    @property
    def under_adam(self) -> tuple[Compressor, ...]:
        """Kinds that it may choose from under an optimizer like Adam: the same, unless it goes by
        the optimizer; then those that do not suit the collective are left out."""
        return self.compressors

    def __str__(self) -> str:
        return spec_of(self)


class Chooser(ABC):
    """A policy at work. Only `choose` must be there; the rest is for those that learn.

    Attributes:
        fixed: choices never change, so that they are asked for once.
        num_reports: how many numbers `report` gives.
    """

    fixed = False
    num_reports = 0

    @abstractmethod
    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        """The compressor of a tensor at a step, counted from 1."""

    def due(self, step: int) -> bool:
        """Whether ranks tell each other their numbers after this step."""
        return self.num_reports > 0

    def probes(self, step: int) -> ProbeSize | None:
        """How to time the link after this step, which must be due; None for not at all. What comes
        of it is measured with the next step."""
        return None

    @property
    def listens_every(self) -> int:
        """After so many uncompressed passes of DDP ranks tell each other of doubts, and compare
        their steps."""
        return LISTENS_EVERY

    def idle(self, step: int) -> bool:
        """Whether nothing is compressed in this step, and nothing of it has to be known: it may be
        left to DDP itself. The same on all ranks."""
        return False

    def doubts(self, measured: Measured) -> bool:
        """Whether this rank would rather hear from the others soon, after a step like this. They
        may, or may not, be asked."""
        return False

    def ask(self, step: int) -> None:
        """Some rank doubts: this step is due."""

    def watches(self, step: int) -> bool:
        """Whether it wants to see tensors in this step."""
        return False

    def watch(self, tensor: TensorInfo, step: int, x: Tensor, residual: Tensor | None) -> None:
        """What a tensor is about to send in a step that it `watches`: the gradient, and what was
        left out before, both flat. Called by the thread that exchanges."""

    def report(self, measured: Measured) -> list[float]:
        """What this rank has to say after a step."""
        return []

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        """What all ranks said after this step."""

    def hold(self, held: bool) -> None:
        """Whether somebody else chooses: it may learn then, but has nothing to decide."""

    def scale(self, factor: float) -> None:
        """The loss, and with it all gradients, is from now on so many times as large."""

    def observe(self, value: float) -> None:
        """A validation came to this."""

    def note_optimizer(self, kind: OptimizerKind) -> None:
        """What takes the averages, as far as this rank knows."""

    def explain(self) -> list[str]:
        """Sentences on what it does now, and why."""
        return []

    def state(self) -> list[float]:
        """All that it knows, always as many numbers."""
        return []

    def load(self, state: Sequence[float]) -> None:
        """Go on from a state."""


class Around(Chooser):
    """A chooser that leaves all but some choices to another."""

    def __init__(self, inner: Chooser) -> None:
        self.inner = inner
        self.num_reports = inner.num_reports

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self.inner.choose(tensor, step)

    def due(self, step: int) -> bool:
        return self.inner.due(step)

    def probes(self, step: int) -> ProbeSize | None:
        return self.inner.probes(step)

    @property
    def listens_every(self) -> int:
        return self.inner.listens_every

    def idle(self, step: int) -> bool:
        return self.inner.idle(step)

    def doubts(self, measured: Measured) -> bool:
        return self.inner.doubts(measured)

    def ask(self, step: int) -> None:
        self.inner.ask(step)

    def watches(self, step: int) -> bool:
        return self.inner.watches(step)

    def watch(self, tensor: TensorInfo, step: int, x: Tensor, residual: Tensor | None) -> None:
        self.inner.watch(tensor, step, x, residual)

    def report(self, measured: Measured) -> list[float]:
        return self.inner.report(measured)

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        self.inner.learn(step, rows)

    def hold(self, held: bool) -> None:
        self.inner.hold(held)

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)

    def observe(self, value: float) -> None:
        self.inner.observe(value)

    def note_optimizer(self, kind: OptimizerKind) -> None:
        self.inner.note_optimizer(kind)

    def explain(self) -> list[str]:
        return self.inner.explain()

    def state(self) -> list[float]:
        return self.inner.state()

    def load(self, state: Sequence[float]) -> None:
        self.inner.load(state)


class Shared(Chooser):
    """Several choosers, each for its own tensors.

    Args:
        of: the chooser of each tensor, by name.
    """

    def __init__(self, of: Mapping[str, Chooser]) -> None:
        self._of = of
        self._all = list({id(chooser): chooser for chooser in of.values()}.values())
        self.fixed = all(chooser.fixed for chooser in self._all)
        self.num_reports = sum(chooser.num_reports for chooser in self._all)

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self._of[tensor.name].choose(tensor, step)

    def due(self, step: int) -> bool:
        return any(chooser.due(step) for chooser in self._all)

    def probes(self, step: int) -> ProbeSize | None:
        found = [size for each in self._all if (size := each.probes(step)) is not None]
        return ProbeSize(*map(max, *found)) if len(found) > 1 else next(iter(found), None)

    @property
    def listens_every(self) -> int:
        return min(chooser.listens_every for chooser in self._all)

    def idle(self, step: int) -> bool:
        return all(chooser.idle(step) for chooser in self._all)

    def doubts(self, measured: Measured) -> bool:
        return any(chooser.doubts(measured) for chooser in self._all)

    def ask(self, step: int) -> None:
        for chooser in self._all:
            chooser.ask(step)

    def watches(self, step: int) -> bool:
        return any(chooser.watches(step) for chooser in self._all)

    def watch(self, tensor: TensorInfo, step: int, x: Tensor, residual: Tensor | None) -> None:
        chooser = self._of[tensor.name]
        if chooser.watches(step):  # and not only one of the others
            chooser.watch(tensor, step, x, residual)

    def report(self, measured: Measured) -> list[float]:
        return [number for chooser in self._all for number in chooser.report(measured)]

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        begin = 0
        for chooser in self._all:
            end = begin + chooser.num_reports
            if chooser.due(step):
                chooser.learn(step, [row[begin:end] for row in rows])
            begin = end

    def hold(self, held: bool) -> None:
        for chooser in self._all:
            chooser.hold(held)

    def scale(self, factor: float) -> None:
        for chooser in self._all:
            chooser.scale(factor)

    def observe(self, value: float) -> None:
        for chooser in self._all:
            chooser.observe(value)

    def note_optimizer(self, kind: OptimizerKind) -> None:
        for chooser in self._all:
            chooser.note_optimizer(kind)

    def explain(self) -> list[str]:
        return [line for chooser in self._all for line in chooser.explain()]

    def state(self) -> list[float]:
        return [number for chooser in self._all for number in chooser.state()]

    def load(self, state: Sequence[float]) -> None:
        begin = 0
        for chooser in self._all:
            end = begin + len(chooser.state())
            chooser.load(state[begin:end])
            begin = end


@dataclass(frozen=True)
class Fixed(Policy):
    """The same compressor for all tensors at all steps; its spec is that of the compressor."""

    compressor: Compressor
    name: ClassVar[str] = "fixed"

    if TYPE_CHECKING:

        def __init__(self, compressor: Compressor | str) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", compressor_of(self.compressor))

    @property
    def main(self) -> Compressor:
        return self.compressor

    def begin(self, context: PolicyContext) -> Chooser:
        return _Same(lambda _: self.compressor)

    def __str__(self) -> str:
        return str(self.compressor)


@dataclass(frozen=True)
class ByName(Policy):
    """What a function says of a tensor's name.

    A function has no spec: ``wire.settings()`` gives a `Layerwise` with the same choices, which
    has one.

    Args:
        choices: what it said.
    """

    choices: tuple[tuple[str, Choice], ...]
    name: ClassVar[str] = "by-name"

    @classmethod
    def of(cls, function: Callable[[str], Compressor | str | None], names: list[str]) -> "ByName":
        """
        Args:
            function: from a name to a compressor or its spec, or to None for uncompressed.
            names: of all tensors.
        """
        found = []
        for name in names:
            choice = function(name)
            try:
                found.append((name, None if choice is None else compressor_of(choice)))
            except (TypeError, ValueError) as error:
                error.add_note(f"for parameter {name}")
                raise
        return cls(tuple(found))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        used = {choice for _, choice in self.choices if choice is not None}
        return tuple(sorted(used, key=str)) or (NoCompression(),)

    @property
    def main(self) -> Compressor:
        return self.compressors[0]

    def begin(self, context: PolicyContext) -> Chooser:
        return _Same(dict(self.choices).__getitem__)

    def __str__(self) -> str:
        return "<function of names, no spec>"


class _Same(Chooser):
    fixed = True

    def __init__(self, of: Callable[[str], Choice]) -> None:
        self._of = of

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self._of(tensor.name)


class _Policies(Kind[Policy]):
    def read(self, text: str) -> Policy:
        """A policy, or a compressor for all tensors."""
        if self.knows(text):
            return super().read(text)
        if not COMPRESSORS.knows(text):
            raise self.unknown(name_of(text), "compressor or policy")
        return Fixed(COMPRESSORS.read(text))


POLICIES = _Policies("policy", "policies", Policy, "auto", beside=COMPRESSORS)
POLICIES.unnamed[Fixed.name] = Fixed


def policy_of(given: Policy | Compressor | str) -> Policy:
    """A policy, from itself, a compressor, or the spec of either."""
    if isinstance(given, Policy):
        return given
    if isinstance(given, Compressor):
        return Fixed(given)
    if isinstance(given, str):
        return POLICIES.read(given)
    what: Any = f"got {type(given).__name__}"
    if isinstance(given, type):
        what = f"{given.__name__} is a class, give an object such as {given.__name__}(...)"
    raise TypeError(f"expected a policy, a compressor or a spec such as 'topk:0.01': {what}")


def inner_policy(owner: str, given: Any) -> Policy:
    """A policy inside another: one, or a compressor, or the spec of either."""
    try:
        return policy_of(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{owner}: {error}") from None


def inner_compressor(owner: str, given: Any, field: str = "then") -> Compressor:
    """A compressor, or the spec of one."""
    policy = inner_policy(owner, given)
    if not isinstance(policy, Fixed):
        raise ValueError(f"{owner}: {field} must be a compressor, got {policy}")
    return policy.compressor
