"""Compression as strong as the network needs, and no stronger: `Bandwidth`, and `Auto` with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from thinwire import check
from thinwire.compressors import Compressor, Quantize, TopK
from thinwire.policies.base import (
    Around,
    Choice,
    Chooser,
    Measured,
    OptimizerKind,
    Policy,
    PolicyContext,
    TensorInfo,
    inner_compressor,
)
from thinwire.policies.ladder import STEADY_KINDS, Rung, ladder_of, steady_ladder
from thinwire.policies.schedule import WarmingUp

FIRST = 2  # steps that are not looked at: connections and kernels are made in them
STEADY = 2  # steps with one choice before the next one is made
PATIENCE = 3  # steps for which a lighter choice must seem to fit
LOOK = 8  # steps after which the next lighter choice is tried
RARELY = 64  # the same, after tries that were expensive
SURPRISE = 2.0  # times more or less than before, twice: the link has changed
NEARLY = 1.2  # times the least that is as good when nothing fits: the lightest of them
OLD = 100  # steps after which what another choice took is forgotten
SMALLER = 1.2  # times fewer bytes than the rung before: otherwise a rung is no use
_FIELDS = 6  # numbers of a rank
STRONGEST = TopK(0.01) | Quantize(4)  # of Auto, where the optimizer is not like Adam


@dataclass(frozen=True)
class Bandwidth(Policy):
    """As strong as needed for communication to hide behind the computation.

    Every step the ranks compare what they measured: seconds and bytes of the real exchanges, and
    how long computing took. From these follows what each strength of the compressor would take; the
    lightest one is used that would add at most `target` of the computing time. On a fast link that
    is none at all. It gets stronger at once, and lighter when that has seemed to fit for three
    steps. Small messages say little about a link, so every eight steps it tries the next lighter
    strength for two, less often where that was expensive.

    Args:
        then: the strongest compressor allowed; lighter versions of it come before it.
        target: how much longer than its computation a step may be, as a share of it.

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Bandwidth("topk:0.001|quantize:4"))
        'bandwidth:(topk:0.001|quantize:4)'
    """

    then: Compressor
    target: float = 0.1
    name: ClassVar[str] = "bandwidth"

    if TYPE_CHECKING:

        def __init__(self, then: Compressor | str, target: float = 0.1) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", inner_compressor("Bandwidth", self.then))
        check.positive("Bandwidth", "target", self.target)

    @property
    def main(self) -> Compressor:
        return self.then

    def begin(self, context: PolicyContext) -> Chooser:
        return _Following(self.target, _rungs_of(self.then), context)


def _rungs_of(strongest: Compressor) -> tuple[Rung, ...]:
    return tuple(map(Rung, ladder_of(strongest)))


class _Following(Chooser):
    """Goes up and down a ladder, as the network asks for it.

    Args:
        rungs: light to strong, the first of them uncompressed.
        thinned: leave out those that the collective does not carry, or that are no smaller than the
            one before. They keep their place, so that a state fits any number of ranks.
    """

    num_reports = _FIELDS

    def __init__(
        self, target: float, rungs: Sequence[Rung], context: PolicyContext, thinned: bool = False
    ) -> None:
        self._target = target
        self._journal = context.journal
        self._rungs = rungs
        self._bytes = [rung.num_bytes(context) for rung in rungs]
        self._usable = list(range(len(rungs)))
        if thinned:
            self._usable = [0]
            for i in range(1, len(rungs)):
                smaller = SMALLER * self._bytes[i] <= self._bytes[self._usable[-1]]
                if smaller and rungs[i].suits(context):
                    self._usable.append(i)
        self._held = False
        self._rung = 0
        self._seen = 0  # steps
        self._steady = 0  # steps with this rung
        self._lighter = 0  # steps in a row in which a lighter rung seemed to fit
        self._since = 1
        self._wait = LOOK
        self._from = -1  # the rung to go back to, while a lighter one is tried
        count = len(self._rungs)
        self._sizes = [0.0] * count  # bytes per step with each rung, 0 where nothing is known
        self._times = [0.0] * count  # its seconds on the network
        self._known = [0] * count  # the step of the last look
        self._shortest = 0.0  # seconds on the network, of all steps
        self._odd = 0  # steps in a row that were a surprise
        self._codec = [0.0] * count  # seconds, the least of the last ones
        self._last = (0.0, 0.0, 0.0)  # of a step: computing, window, waiting

    @property
    def rung(self) -> Rung:
        """In use."""
        return self._rungs[self._rung]

    @property
    def ladder(self) -> list[Rung]:
        """All that may be used, light to strong."""
        return [self._rungs[i] for i in self._usable]

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self.rung.choose(tensor)

    def report(self, measured: Measured) -> list[float]:
        return list(measured)

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        self._seen += 1
        self._steady += 1
        told = [Measured(*row) for row in rows]
        if self._seen <= FIRST or self._steady == 1:
            return  # kernels are compiled, buffers made
        # Who arrives last in an exchange waits least: that is what the network itself takes.
        network = min(one.network for one in told)
        if not network:
            return  # a group of one
        num_bytes = sum(one.num_bytes for one in told) / len(told)
        computing = median(max(0.0, one.step - one.waiting) for one in told)
        window = min(one.window for one in told)
        waiting = median(one.waiting for one in told)
        if self._last[0]:
            computing = 0.5 * (computing + self._last[0])
            window = 0.5 * (window + self._last[1])
        self._last = (computing, window, waiting)
        codec = max(one.codec for one in told)
        known = self._codec[self._rung]
        self._codec[self._rung] = codec if not known else min(codec, 1.2 * known)
        self._learn_link(step, num_bytes, network)
        if not self._held:
            self._decide(step, num_bytes)

    def hold(self, held: bool) -> None:
        self._held = held

    def _learn_link(self, step: int, num_bytes: float, seconds: float) -> None:
        """Note what this rung takes; what others took counts as long as the link is the same."""
        self._shortest = min(self._shortest or seconds, seconds)
        now, before = self._rung, self._times[self._rung]
        odd = before and not before / SURPRISE <= seconds <= before * SURPRISE
        self._odd = self._odd + 1 if odd else 0
        if odd and self._odd < 2:
            return  # once is chance
        self._wait = LOOK if odd else self._wait
        for i, known in enumerate(self._known):
            if i == now or odd or step - known > OLD:
                self._sizes[i] = self._times[i] = 0.0
        smooth = 0.0 if odd or not before else 0.5
        self._sizes[now] = num_bytes
        self._times[now] = smooth * before + (1 - smooth) * seconds
        self._known[now] = step

    def _seconds(self, num_bytes: float) -> float:
        """What the network is expected to take for so many bytes: a start, and a rate.

        As long as messages of one size are known, half of the shortest time ever seen counts as the
        start: a guess that moves will correct.
        """
        link = [(s, t) for s, t in zip(self._sizes, self._times, strict=True) if t]
        size = sum(s for s, _ in link) / len(link)
        time = sum(t for _, t in link) / len(link)
        if len(link) == 1:
            start = min(0.5 * self._shortest, time)
            return start + (time - start) * num_bytes / max(size, 1.0)
        spread = sum((s - size) ** 2 for s, _ in link)
        slope = sum((s - size) * (t - time) for s, t in link) / max(spread, 1.0)
        slope = min(max(slope, 0.0), time / max(size, 1.0))
        return max(0.0, time - slope * size) + slope * num_bytes

    def _costs(self, num_bytes: float) -> list[float]:
        """Seconds of communication for each rung."""
        rest = max(0.0, num_bytes - self._bytes[self._rung])  # what is uncompressed anyway
        usual = max((seconds for seconds in self._codec[1:] if seconds), default=0.0)
        return [
            (self._times[i] or self._seconds(size + rest))
            + (self._codec[i] or (usual if i else 0.0))
            if i in self._usable
            else math.inf
            for i, size in enumerate(self._bytes)
        ]

    def _decide(self, step: int, num_bytes: float) -> None:
        if self._steady < STEADY:
            return
        costs, now = self._costs(num_bytes), self._rung
        computing, window, _ = self._last
        allowed = window + self._target * computing
        fitting = [i for i, cost in enumerate(costs) if cost <= allowed]
        fitting = fitting or [i for i, cost in enumerate(costs) if cost <= NEARLY * min(costs)]
        back, self._from = self._from, -1
        self._lighter = self._lighter + 1 if fitting[0] < now else 0
        if back >= 0 and costs[now] > max(allowed, NEARLY * costs[back]):
            dear = costs[now] > 2 * costs[back]
            self._wait = min(2 * self._wait, RARELY) if dear else LOOK
            self._move(step, back, costs, allowed, "not yet")
        elif now not in fitting or self._lighter >= PATIENCE:
            self._move(step, fitting[0], costs, allowed)
        elif now and (back >= 0 or step - self._since >= self._wait):
            self._move(step, self._at_most(now - 1), costs, allowed, "a try")
            self._from = now

    def _at_most(self, rung: int) -> int:
        """This rung, or the strongest usable one that is lighter."""
        return max(i for i in self._usable if i <= rung)

    def _move(
        self, step: int, rung: int, costs: list[float], allowed: float, word: str = ""
    ) -> None:
        why = f"{word}: " if word else ""
        why += (
            f"communication would take {1e3 * costs[self._rung]:.0f} ms, now "
            f"{1e3 * costs[rung]:.0f} ms; {1e3 * allowed:.0f} ms are hidden or allowed"
        )
        self._rung = rung
        self.begin_at(step + 1, why)

    def begin_at(self, step: int, why: str) -> None:
        """Tensors are sent with this rung from a step on."""
        self._steady, self._lighter, self._since, self._from = 0, 0, step, -1
        self._journal.note(step, "all", str(self.rung), why)

    def explain(self) -> list[str]:
        computing, window, waiting = self._last
        words = f"with {self.rung}" if self._rung else f"{self.rung}"
        lines = [f"Since step {self._since} tensors are sent {words}, as the network asks for it."]
        size, seconds = self._sizes[self._rung], self._times[self._rung]
        if seconds:
            rate = 8e-6 * size / seconds
            lines.append(
                f"A step computes for {1e3 * computing:.0f} ms, of which {1e3 * window:.0f} ms can "
                f"hide communication, and waits {1e3 * waiting:.0f} ms for it; its exchanges move "
                f"{size / 1e6:.3g} MB in {1e3 * seconds:.0f} ms ({rate:.3g} Mbit/s)."
            )
            costs = self._costs(size)
            last = self._usable[-1]
            lines.append(
                f"Communication is thought to take {1e3 * costs[0]:.0f} ms uncompressed, "
                f"{1e3 * costs[last]:.0f} ms with {self._rungs[last]}."
            )
        return lines

    def state(self) -> list[float]:
        counts = [self._rung, self._steady, self._lighter, self._odd, self._since]
        counts += [self._from, self._wait]
        link = (*self._sizes, *self._times, *self._known, *self._codec)
        return [*map(float, counts), *self._last, self._shortest, *link]

    def load(self, state: Sequence[float]) -> None:
        counts = [int(number) for number in state[:7]]
        self._rung, self._steady, self._lighter, self._odd, self._since = counts[:5]
        self._from, self._wait = counts[5:]
        self._rung = self._at_most(self._rung)
        self._from = self._at_most(self._from) if self._from >= 0 else -1
        self._seen = 0  # a new process makes its connections and kernels anew
        self._last, self._shortest = (state[7], state[8], state[9]), state[10]
        n = len(self._rungs)
        parts = [list(state[11 + i * n : 11 + (i + 1) * n]) for i in range(4)]
        self._sizes, self._times, self._codec = parts[0], parts[1], parts[3]
        self._known = [int(step) for step in parts[2]]


@dataclass(frozen=True)
class Auto(Policy):
    """No compression where the network is fast; as much as it needs where it is not.

    Small tensors are always uncompressed. So is everything in a short warm-up. Then `Bandwidth`
    chooses, with what is left out remembered. How far it goes depends on the optimizer:

    - like Adam, or unknown: 16 bits, 8, 4, then a low rank (PowerSGD) of the matrices for which
      that is smaller. All of these send every element in every step. What arrives in bursts would
      inflate the second moment that Adam divides by.
    - any other (SGD, Lion, Muon): up to the largest one in a hundred in four bits.

    Args:
        warmup: steps before the first compression.
        target: how much longer than its computation a step may be, as a share of it.

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Auto(warmup=100))
        'auto:100'
    """

    warmup: int = 5
    target: float = 0.1
    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        check.steps("Auto", "warmup", self.warmup)
        check.positive("Auto", "target", self.target)

    @property
    def main(self) -> Compressor:
        return STRONGEST

    @property
    def under_adam(self) -> tuple[Compressor, ...]:
        return STEADY_KINDS

    def begin(self, context: PolicyContext) -> Chooser:
        ladders = _Ladders(self.target, context)
        return _Explained(WarmingUp(ladders, self.warmup, context.journal), ladders)


class _Ladders(Chooser):
    """Two ladders, of which the optimizer decides.

    Each rank reports what it knows of the optimizer; the largest kind counts. Until one is known
    the ladder is that for Adam, which is safe under all of them.
    """

    num_reports = 1 + _FIELDS

    def __init__(self, target: float, context: PolicyContext) -> None:
        self._journal = context.journal
        self._sparse = _Following(target, _rungs_of(STRONGEST), context)
        self._steady = _Following(target, steady_ladder(context), context, thinned=True)
        self._own = OptimizerKind.UNKNOWN  # as far as this rank knows
        self.kind = OptimizerKind.UNKNOWN  # as far as all ranks have heard
        self._held = False

    @property
    def used(self) -> _Following:
        """The ladder in use."""
        return self._sparse if self.kind == OptimizerKind.OTHER else self._steady

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self.used.choose(tensor, step)

    def note_optimizer(self, kind: OptimizerKind) -> None:
        self._own = kind

    def report(self, measured: Measured) -> list[float]:
        return [float(self._own), *self.used.report(measured)]

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        before = self.used
        compressed = before.rung.compressor is not None
        self.kind = OptimizerKind(int(max(row[0] for row in rows))) or self.kind
        for ladder in (self._sparse, self._steady):
            ladder.hold(self._held or ladder is not self.used)
            # What was sent uncompressed says as much about the link to the other ladder.
            if ladder is before or not (compressed or ladder.rung.compressor is not None):
                ladder.learn(step, [row[1:] for row in rows])
        if self.used is not before and compressed:
            self.used.begin_at(step + 1, "the optimizer became known")

    def hold(self, held: bool) -> None:
        self._held = held

    def explain(self) -> list[str]:
        return self.used.explain()

    def state(self) -> list[float]:
        return [float(self.kind), *self._sparse.state(), *self._steady.state()]

    def load(self, state: Sequence[float]) -> None:
        middle = 1 + len(self._sparse.state())
        self.kind = OptimizerKind(int(state[0]))
        self._sparse.load(state[1:middle])
        self._steady.load(state[middle:])


class _Explained(Around):
    def __init__(self, inner: Chooser, ladders: _Ladders) -> None:
        super().__init__(inner)
        self._ladders = ladders

    def explain(self) -> list[str]:
        ladder = self._ladders.used.ladder
        rungs = ", ".join(str(rung) for rung in ladder)
        why = {
            OptimizerKind.UNKNOWN: "what takes the averages is not known, and may divide by a "
            "second moment as Adam does (optimizer= tells): only what sends every element in every "
            "step is used",
            OptimizerKind.ADAM_LIKE: "the optimizer divides by a second moment, which bursts would "
            "inflate: only what sends every element in every step is used",
            OptimizerKind.OTHER: "the optimizer does not divide by a second moment: sparse "
            "gradients are used",
        }[self._ladders.kind]
        return [
            "Automatic: compression is switched on where the network is what a step waits for, "
            f"up to {ladder[-1]}, and off where it is not.",
            f"Its strengths are {rungs}: {why}.",
            *super().explain(),
        ]
