"""Compression as strong as the network needs: `Bandwidth`, and `Auto` for the fastest step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from thinwire import check
from thinwire.collectives.probe import ProbeSize
from thinwire.compressors import Compressor, Quantize, TopK
from thinwire.formatting import show_rate
from thinwire.machine import starts_slowly_after_pauses
from thinwire.policies.base import (
    LISTENS_EVERY,
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
from thinwire.policies.forecast import FIRST, NOTICEABLE, SELDOM, Conditions, Forecast
from thinwire.policies.ladder import Rung, ladder_of, steady_kinds, steady_ladder
from thinwire.policies.schedule import WarmingUp

TRIAL = 4  # steps with one strength before it is judged
UNSEEN = 1  # of these are not looked at: buffers are made
# The same of uncompressed steps: ranks meet in two of them before they add up directly. After
# compressed ones it is one more, which sends what waits in residuals.
UNSEEN_PLAIN = 2
LONGEST_TRY = 4 * TRIAL  # steps, where the link seems to have changed and ranks look at that first
KEPT = 5  # steps of which the median counts
ENOUGH = 2  # steps that must have been looked at
PATIENCE = 3  # reports in a row that must want the same
# Steps that uncompressed ones are given to settle where forecasts see nothing faster: the first of
# a process take up to twice as long as later ones, and what is tried against those seems to pay.
CALM = 16
LOOK = 32  # steps until the best that is known may be left, and what others took is doubted
RARELY = 512  # the same, where the best is not clear
# What is believed of a strength that was not used, as a share below its forecast; of one that was
# measured long ago, and once; and of uncompressed steps on a changed link. Where another compressed
# one has been measured and was as forecast, a try must promise more than the noise instead.
# Where none of its kind has been (joint compressors are one, all others another), what was measured
# of the other kind says little: text at 100 Mbit/s on a busy machine took 1.5 times its forecast in
# 4 bits, and 0.9 times with powersgd:4.
DOUBT, NOISE, STRANGE = 0.1, 0.05, 0.3
TRUSTED = 1.25  # times more or less than forecast: further off, and others are worth a try too
STAY = 0.03  # what another strength must be better by
# Times what the first choice takes: from there on uncompressed steps are too slow to look again.
# They were measured in the first steps of a process, which are slower than later ones.
CLOSE = 1.5
LOST = 0.01  # of the time since the last change, what a try may take longer than no try
CLEAR = 1.25  # times as long as another strength takes: reason enough to leave at once
DEAR = 1.5  # times as long as before: a try that need not go on
REPORTS = 0.004  # of the time that passes, what reports may take, as long as a meeting is
LISTENING = 0.003  # the same, what listening to the others' doubts may take
SURPRISE = 2.0  # times more or less on the network than before, twice: the link has changed
MISJUDGED = 1.2  # times as long as was expected: perhaps the link is not what it was
NEARLY = 1.2  # times the least that is as good when nothing fits: the lightest of them
FAR = 0.005  # seconds of a meeting, from which on what TCP forgets in a pause costs several of them
SMALLER = 1.2  # times fewer bytes than the rung before: otherwise a rung is no use
STRONGEST = TopK(0.01) | Quantize(4)  # of Auto, where the optimizer is not like Adam
_FIELDS = len(Measured._fields) + 1  # numbers of a rank: the last one says how fast its codecs are


class _Rule(ABC):
    """Which strength is wanted."""

    @abstractmethod
    def pick(self, steps: Sequence[float], usable: Sequence[int], compute: float) -> int:
        """
        Args:
            steps: seconds of a step with each strength, light to strong.
            usable: those to choose from.
            compute: seconds of a step that did not communicate.
        """


@dataclass(frozen=True)
class _Hidden(_Rule):
    """The lightest with which a step is at most `target` longer than its computing."""

    target: float

    def pick(self, steps: Sequence[float], usable: Sequence[int], compute: float) -> int:
        fitting = [i for i in usable if steps[i] <= (1 + self.target) * compute]
        least = min(steps[i] for i in usable)
        return fitting[0] if fitting else next(i for i in usable if steps[i] <= NEARLY * least)


@dataclass(frozen=True)
class _Fastest(_Rule):
    """The fastest; of those that are at most `gain` slower, the lightest."""

    gain: float

    def pick(self, steps: Sequence[float], usable: Sequence[int], compute: float) -> int:
        least = min(steps[i] for i in usable)
        return next(i for i in usable if steps[i] <= (1 + self.gain) * least)


@dataclass(frozen=True)
class Bandwidth(Policy):
    """As strong as needed for communication to hide behind the computation.

    The ranks time the link, and compare how long their steps take. From a table of codecs and these
    numbers follows what a step would take with each strength of the compressor; the lightest one is
    used that would make it at most `target` longer than its computing. On a fast link that is none
    at all. What is measured then replaces what was forecast, and corrects the forecasts of the
    others.

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
        rule = _Hidden(self.target)
        return _Following(rule, _rungs_of(self.then), context, Conditions(context))


def _rungs_of(strongest: Compressor) -> tuple[Rung, ...]:
    return tuple(map(Rung, ladder_of(strongest)))


class _Kept(NamedTuple):
    """What was known before the link seemed to change; see `_Following`."""

    times: list[float]
    known: list[int]
    looks: list[int]
    wait: int
    anew: bool
    network: float
    tried_from: int


class _Following(Chooser):
    """Goes up and down a ladder, by forecast and by what was measured.

    A step with each strength is forecast. What was measured of a strength takes the place of its
    forecast, and by how much the two differ corrects the forecasts of the strengths next to it.
    The rule picks from these; what it wants without knowing it is tried for some steps. When the
    link has changed, what was measured is forgotten.

    Args:
        rule: which strength is wanted.
        rungs: light to strong, the first of them uncompressed.
        conditions: what is known of link and machine, perhaps also by others.
        thinned: leave out those that the collective does not carry, or that are no smaller than the
            one before. They keep their place, so that a state fits any number of ranks.
    """

    num_reports = _FIELDS

    def __init__(
        self,
        rule: _Rule,
        rungs: Sequence[Rung],
        context: PolicyContext,
        conditions: Conditions,
        thinned: bool = False,
    ) -> None:
        self._rule, self._rungs, self._conditions = rule, rungs, conditions
        self._journal = context.journal
        self._usable = list(range(len(rungs)))
        if thinned:
            self._usable = [0]
            num_bytes = [rung.num_bytes(context) for rung in rungs]
            for i in range(1, len(rungs)):
                smaller = SMALLER * num_bytes[i] < num_bytes[self._usable[-1]]
                if smaller and rungs[i].suits(context):
                    self._usable.append(i)
        self._forecast = Forecast(rungs, context)
        self._held = False
        self._rung, self._since = 0, 1
        self._from = -1  # the rung to go back to, while another one is tried
        self._wanted = 0  # reports in a row that wanted another one
        self._wait = LOOK
        self._odd = (0.0, 0.0)  # network and step of the report before, if it was a surprise
        self._forgotten = False  # what was measured before the link changed, when that was noticed
        self._kept: _Kept | None = None  # that, until it is known whether the link has changed
        self._asked = 0  # the last step after which a rank wanted to hear the others
        self._slow = False  # the last step, on this rank alone
        self._checked = False  # the link, since a try seems to say that it has changed
        self._network = 0.0  # seconds on it with this rung
        self._recent = [0.0] * KEPT  # seconds of the last steps with this rung, 0 for none
        self._times = [0.0] * len(rungs)  # of a step with each rung, 0 where nothing is known
        self._known = [0] * len(rungs)  # the step of the last look
        self._looks = [1, *[0] * (len(rungs) - 1)]  # how often it came to be used
        self._before = 0.0  # seconds of a step with this rung, when it was used before
        self._promised = 0.0  # the same, as it was expected
        self._anew = True  # nothing is settled: strengths may be tried one after the other
        self._version, self._link_version = -1, 0  # of the conditions of what was forecast
        self._forecasts: list[float] = []

    @property
    def rung(self) -> Rung:
        """In use."""
        return self._rungs[self._rung]

    @property
    def _unseen(self) -> int:
        """Steps with this rung that are not looked at."""
        return UNSEEN if self._rung else UNSEEN_PLAIN + (self._since > 1)

    def settled(self, step: int) -> bool:
        """Whether steps with this rung are by now as they will be."""
        return step >= self._since + self._unseen

    @property
    def ladder(self) -> list[Rung]:
        """All that may be used, light to strong."""
        return [self._rungs[i] for i in self._usable]

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self.rung.choose(tensor)

    def due(self, step: int) -> bool:
        new = self._anew or not self._times[self._rung]
        judging = new and step - self._since <= TRIAL + self._unseen
        judging = judging or self._from >= 0 or any(self._odd) or step == self._asked
        judging = judging or (step >= self._since + CALM and self._is_calm(step - 1))
        return judging or self._conditions.due(step, self._every) or self.probes(step) is not None

    @property
    def _every(self) -> int:
        """Steps from report to report. Of uncompressed ones, in which ranks ask if they need one,
        those with a report are not DDP's own."""
        return self._conditions.every(REPORTS) if self._rung else SELDOM

    def probes(self, step: int) -> ProbeSize | None:
        return self._conditions.probes(step, self._every)

    @property
    def listens_every(self) -> int:
        return min(LISTENS_EVERY, self._conditions.every(LISTENING))

    def idle(self, step: int) -> bool:
        return self._rung == 0 and not self.due(step)

    def doubts(self, measured: Measured) -> bool:
        known, before = self._times[self._rung], self._slow
        self._slow = 0 < SURPRISE * known < measured.step
        # One step that takes longer is often chance on a busy machine, unless it takes much longer.
        return self._slow and (before or measured.step > SURPRISE**2 * known)

    def ask(self, step: int) -> None:
        self._asked = step

    def report(self, measured: Measured) -> list[float]:
        return [*measured, self._forecast.speed]

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        self.learn_conditions(step, rows)
        self.follow(step, [Measured(*row[:-1]) for row in rows])

    def learn_conditions(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        """What the ranks say of link and machine, this rung being in use."""
        told = [Measured(*row[:-1]) for row in rows]
        conditions = self._conditions
        conditions.learn_speed(max(row[-1] for row in rows))
        uncompressed = self.rung.compressor is None
        looks = conditions.ready and not uncompressed and step > self._since
        expected = self._forecast.codec_seconds(self._rung, conditions) if looks else 0.0
        if self.probes(step) is not None:
            conditions.note_probe(step)
        conditions.learn(told, uncompressed, expected)

    def follow(self, step: int, told: Sequence[Measured]) -> None:
        """What the ranks say of a step with this rung."""
        if self._conditions.seen <= FIRST or not self.settled(step):
            return
        # Who arrives last in an exchange waits least: that is what the network itself takes.
        network = min(one.network for one in told)
        if not network:
            return  # a group of one
        took = median(one.step for one in told)
        self._remember(network, took)
        if self._surprised(step, network, took):
            return
        if self._conditions.ready:
            self._forecast_anew()
        self._note(step, took)
        if self._conditions.ready and not self._held:
            self._decide(step)

    def hold(self, held: bool) -> None:
        self._held = held

    def _surprised(self, step: int, network: float, took: float) -> bool:
        """Whether this step is to be left out: the link has perhaps changed."""
        before, first = self._network, self._odd
        # What it took when it was used before counts too: the link may change right after a try.
        known = self._times[self._rung] if any(self._recent) or self._before else 0.0
        odd = bool(before) and _differ(network, before, NOTICEABLE * took)
        odd = odd or 0 < SURPRISE * known < took
        self._odd = (network, took) if odd else (0.0, 0.0)
        if not odd:
            self._network = 0.5 * (before + network) if before else network
            return False
        pairs = zip(self._odd, first, strict=True)
        once = any(_differ(a, b, NOTICEABLE * took) for a, b in pairs)
        if once and step != self._asked:
            return True  # that is chance, and so are two that differ; who asked has seen one before
        kept = _Kept(
            self._times, self._known, self._looks, self._wait, self._anew, before, self._from
        )
        self._forget()  # what others took says nothing of this link
        self._kept = kept
        self._odd, self._network = (0.0, 0.0), network
        self._conditions.doubt(network / before if before else took / known)
        self._forgotten = True
        self._wait, self._wanted = 0, PATIENCE  # what is known to be better need not wait
        return False

    def _remember(self, network: float, took: float) -> None:
        """What was forgotten, if a step is again what it was: it was chance."""
        kept, conditions = self._kept, self._conditions
        if kept is None:
            return
        before, here = kept.times[self._rung], kept.network
        same = before / SURPRISE < took < before * SURPRISE
        same = same and not (here and _differ(network, here, NOTICEABLE * took))
        if not conditions.doubted or same:
            self._kept = None  # the link was looked at, or need not be
        if not same or self._link_version != conditions.link_version:
            return
        self._times, self._known, self._looks = kept.times, kept.known, kept.looks
        self._before, self._recent = before, [0.0] * KEPT
        self._wait, self._anew = kept.wait, kept.anew
        self._network, self._odd, self._from = here, (0.0, 0.0), kept.tried_from
        self._wanted, self._forgotten = 0, False

    def _note(self, step: int, took: float) -> None:
        """What was measured of the strength in use."""
        self._recent = [*self._recent[1:], took]
        seen = [each for each in self._recent if each]
        now = median(seen)
        if self._before and len(seen) < KEPT:
            now = 0.5 * (self._before + now)
        self._times[self._rung], self._known[self._rung] = now, step

    def _forecast_anew(self) -> None:
        """If something has changed; when the link has, what was measured is no more."""
        conditions = self._conditions
        if self._version == conditions.version:
            return
        self._version = conditions.version
        self._forecasts = self._all_forecasts()
        if self._link_version != conditions.link_version:
            self._link_version = conditions.link_version
            if not self._forgotten:
                self._forget()
            self._forgotten, self._anew = False, True

    def _forget(self) -> None:
        n = len(self._rungs)
        self._times, self._known, self._looks = [0.0] * n, [0] * n, [0] * n
        self._recent, self._before, self._network = [0.0] * KEPT, 0.0, 0.0
        self._kept = None
        self._looks[self._rung], self._wait, self._from, self._anew = 1, LOOK, -1, True

    def _all_forecasts(self) -> list[float]:
        indices = range(len(self._rungs))
        return [self._forecast.step(i, self._conditions).seconds for i in indices]

    def _expected(self) -> list[float]:
        """Seconds of a step with each rung: measured, or forecast as the nearest measured one says.

        Of compressed ones that is a compressed one, if there is any.
        """
        times, forecasts = self._times, self._forecasts
        known = [i for i in self._usable if times[i]]
        found = []
        for i, forecast in enumerate(forecasts):
            near = [j for j in known if (j > 0) == (i > 0)] or known
            if not times[i] and near:
                j = min(near, key=lambda j: abs(j - i))
                forecast *= times[j] / forecasts[j]
            found.append(times[i] or forecast)
        return found

    def _believed(self, step: int, tries: bool) -> list[float]:
        """The same, with the benefit of the doubt for what is worth a try; infinity if nothing is,
        for what was never measured."""
        found = self._expected()
        compressed = [i for i in self._usable if i and self._times[i]]
        kinds = {self._rungs[i].joint for i in compressed}
        wrong = any(
            not 1 / TRUSTED <= self._times[i] / self._forecasts[i] <= TRUSTED for i in compressed
        )
        for i in range(len(found)):
            if not self._times[i]:
                doubt = DOUBT if wrong or not i or not compressed else -NOISE
                if i and kinds and self._rungs[i].joint not in kinds and self._rung:
                    doubt = STRANGE
                found[i] = found[i] * (1 - doubt) if tries else math.inf
            elif tries and self._is_old(i, step) and self._looks[i] == 1:
                found[i] *= 1 - DOUBT
            elif i != self._rung:
                found[i] *= 1 + STAY
        return found

    def _is_old(self, rung: int, step: int) -> bool:
        after = min(RARELY, LOOK << max(0, self._looks[rung] - 1))
        return rung != self._rung and step - self._known[rung] > after

    def _is_calm(self, step: int) -> bool:
        """Whether to look at some more uncompressed steps, as forecasts see nothing faster."""
        if self._rung or not self._anew or step >= self._since + CALM + KEPT - 1:
            return False
        others = [self._forecasts[i] for i in self._usable[1:]] if self._forecasts else []
        return bool(others) and self._forecasts[0] <= (1 + STAY) * min(others)

    def _decide(self, step: int) -> None:
        if self._is_calm(step):
            return
        now, back = self._rung, self._from
        dear = back >= 0 and self._times[now] > DEAR * self._times[back]
        stay = step - self._since + 1
        looked_at = sum(1 for each in self._recent if each)
        if (stay < TRIAL + self._unseen - UNSEEN or looked_at < ENOUGH) and not dear:
            return
        if back >= 0 and stay <= LONGEST_TRY and self._link_is_doubtful(now, back):
            return
        self._from = -1
        if back >= 0 and self._times[now] > MISJUDGED * self._promised:
            self._conditions.asked = True
        expected = self._expected()
        tries = self._anew or back < 0
        wanted = self._rule.pick(
            self._believed(step, tries), self._usable, self._conditions.compute
        )
        close = 0 < self._times[0] < CLOSE * self._times[now]
        if wanted == now and now and close and self._looks[0] == 1:
            self._move(step, 0, expected, again=True)
        elif wanted == now:
            self._wanted, self._anew, self._wait = 0, False, self._wait or LOOK
        elif back >= 0 or self._anew:
            self._move(step, wanted, expected, back=wanted == back)
        else:
            self._wanted += 1
            risk = TRIAL * max(0.0, expected[wanted] - expected[now])
            affordable = risk <= LOST * stay * expected[now]
            rested = stay >= self._wait or expected[now] > CLEAR * expected[wanted]
            if self._wanted >= PATIENCE and rested and affordable:
                self._move(step, wanted, expected)

    def _link_is_doubtful(self, now: int, back: int) -> bool:
        """Whether a try took much longer than all that is known: perhaps the link has changed while
        it went on. One look at it tells, before anything else is tried."""
        usual = max(self._promised, self._times[back])
        if not self._checked and self._times[now] > SURPRISE * usual:
            self._checked = True
            self._conditions.doubt(self._times[now] / usual)
        return self._checked and self._conditions.doubted

    def _at_most(self, rung: int) -> int:
        """This rung, or the strongest usable one that is lighter."""
        return max(i for i in self._usable if i <= rung)

    def _move(
        self,
        step: int,
        rung: int,
        expected: list[float],
        again: bool = False,
        back: bool = False,
    ) -> None:
        """
        Args:
            again: what was measured before does not count.
            back: from a try.
        """
        before, measured = self._rung, bool(self._times[rung])
        known = measured and not self._is_old(rung, step) and not again
        now = f"steps take {1e3 * expected[before]:.0f} ms {self._rungs[before].how}"
        there = f"{1e3 * expected[rung]:.0f} ms {self._rungs[rung].how}"
        if again:
            why = f"measured again: the first steps of a process are slow ({there}); {now}"
        elif back or known:
            why = f"{'no faster: ' if back else ''}{now}, and {there}"
        elif measured:
            why = f"trying it again: {now}, and took {there} long ago"
        else:
            why = f"trying it: {now}, and {there} are forecast"
            slower = expected[rung] > expected[before]
            why += "; forecasts can be too long" if slower else ""
        if known:  # the first choice is over, and where the best is not clear moves get rare
            self._anew = False
            self._wait = min(2 * max(self._wait, LOOK // 2), RARELY)
        self._rung, self._promised = rung, expected[rung]
        self.begin_at(step + 1, why)
        self._from = -1 if known else before
        self._before = 0.0 if again else self._before

    def begin_at(self, step: int, why: str) -> None:
        """Tensors are sent with this rung from a step on."""
        self._since, self._from, self._wanted, self._odd = step, -1, 0, (0.0, 0.0)
        self._checked, self._kept = False, None
        self._network, self._recent = 0.0, [0.0] * KEPT
        self._before = self._times[self._rung]
        self._looks[self._rung] += 1
        self._journal.note(step, "all", str(self.rung), why)

    def explain(self) -> list[str]:
        here = self._conditions
        words = f"with {self.rung}" if self._rung else f"{self.rung}"
        lines = [f"Since step {self._since} tensors are sent {words}."]
        if not here.ready:
            return lines
        lines += [
            f"Ranks hear from each other in {1e3 * here.report:.3g} ms, and the link of each "
            f"moves {show_rate(8 * here.rate)}. A step computes for {1e3 * here.compute:.0f} "
            f"ms, of which {1e3 * here.window:.0f} ms can hide communication, and waits "
            f"{1e3 * here.waiting:.0f} ms for it.",
        ]
        if here.report > FAR and starts_slowly_after_pauses():
            lines.append(
                "The ranks are far apart, and this machine's TCP starts slowly after each pause: "
                "set net.ipv4.tcp_slow_start_after_idle to 0 on all machines "
                "(docs/guides/internet.md)."
            )
        lines.append("A step, forecast from that and measured:")
        names = [str(rung) for rung in self._rungs]
        width = max(len(names[i]) for i in self._usable)
        forecasts = self._all_forecasts()
        for i in self._usable:
            took = f"{1e3 * self._times[i]:7.0f} ms" if self._times[i] else "         -"
            mark = "  <- in use" if i == self._rung else ""
            line = f"  {names[i]:{width}} {1e3 * forecasts[i]:7.0f} ms {took}{mark}"
            lines.append(line)
        return lines

    def state(self) -> list[float]:
        counts = [self._rung, self._since, self._from, self._wanted, self._wait, self._anew]
        seconds = [self._network, self._before, self._promised, *self._odd]
        seconds += [*self._recent, *self._times]
        numbers = [*counts, *self._known, *self._looks, *seconds]
        return [*map(float, numbers), *self._conditions.state()]

    def load(self, state: Sequence[float]) -> None:
        n = len(self._rungs)
        counts = [int(number) for number in state[: 6 + 2 * n]]
        rung, self._since, back, self._wanted, self._wait = counts[:5]
        self._anew = bool(counts[5])
        self._known, self._looks = counts[6 : 6 + n], counts[6 + n :]
        self._rung, self._from = self._at_most(rung), self._at_most(back) if back >= 0 else -1
        rest = list(state[6 + 2 * n :])
        self._network, self._before, self._promised, *odd = rest[:5]
        self._odd = (odd[0], odd[1])
        self._recent, self._times = rest[5 : 5 + KEPT], rest[5 + KEPT : 5 + KEPT + n]
        self._version, self._link_version = -1, self._conditions.link_version
        self._asked, self._kept = 0, None
        self._slow = self._checked = self._forgotten = False
        same = (rung, back) == (self._rung, self._from)  # and not another collective
        if not self._conditions.load(rest[5 + KEPT + n :]) or not same:
            self._forget()  # what was measured there says nothing here


def _differ(a: float, b: float, least: float) -> bool:
    """Whether one of two times is much longer, by more than the least that counts."""
    return abs(a - b) > least and not b / SURPRISE <= a <= b * SURPRISE


@dataclass(frozen=True)
class Auto(Policy):
    """The fastest step on this network: uncompressed where it is fast, as much as pays where not.

    Small tensors are always uncompressed. So is everything in a short warm-up, in which the ranks
    time the link and their steps. From that and a table of codecs a step is forecast with each
    strength, and the fastest one is used, with what is left out remembered; of those that are about
    as fast, the lightest. What is measured corrects the forecasts. How far it goes depends on the
    optimizer:

    - like Adam, or unknown: 16 bits, 8, 4. All of these send every element in every step. What
      arrives in bursts would inflate the second moment that Adam divides by.
    - any other (SGD, Lion, Muon): up to the largest one in a hundred in four bits.

    Args:
        warmup: steps before the first compression.
        gain: how much shorter a stronger compression must make a step to be used, as a share of it.
        low_rank: under Adam go further than 4 bits, to a low rank (PowerSGD) of the matrices for
            which that is smaller. That is faster where links are slow, and costs accuracy in long
            trainings (docs/guides/policies.md has figures).

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Auto(warmup=100))
        'auto:100'
    """

    warmup: int = 5
    gain: float = 0.03
    low_rank: bool = False
    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        check.steps("Auto", "warmup", self.warmup)
        check.positive("Auto", "gain", self.gain)
        check.flag("Auto", "low_rank", self.low_rank)

    @property
    def main(self) -> Compressor:
        return STRONGEST

    @property
    def under_adam(self) -> tuple[Compressor, ...]:
        return steady_kinds(self.low_rank)

    def begin(self, context: PolicyContext) -> Chooser:
        ladders = _Ladders(_Fastest(self.gain), context, self.low_rank)
        warming_up = WarmingUp(ladders, self.warmup, context.journal)
        return _Explained(warming_up, ladders, context.size)


class _Ladders(Chooser):
    """Two ladders, of which the optimizer decides.

    Each rank reports what it knows of the optimizer; the largest kind counts. Until one is known
    the ladder is that for Adam, which is safe under all of them.
    """

    num_reports = 1 + _FIELDS

    def __init__(self, rule: _Rule, context: PolicyContext, low_rank: bool) -> None:
        conditions = Conditions(context)
        self._sparse = _Following(rule, _rungs_of(STRONGEST), context, conditions)
        steady = steady_ladder(context, low_rank)
        self._steady = _Following(rule, steady, context, conditions, thinned=True)
        self._own = OptimizerKind.UNKNOWN  # as far as this rank knows
        self.kind = OptimizerKind.UNKNOWN  # as far as all ranks have heard
        self._held = False

    @property
    def used(self) -> _Following:
        """The ladder in use."""
        return self._sparse if self.kind == OptimizerKind.OTHER else self._steady

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        return self.used.choose(tensor, step)

    def due(self, step: int) -> bool:
        return self.used.due(step)

    def probes(self, step: int) -> ProbeSize | None:
        return self.used.probes(step)

    @property
    def listens_every(self) -> int:
        return self.used.listens_every

    def idle(self, step: int) -> bool:
        return self.used.idle(step)

    def doubts(self, measured: Measured) -> bool:
        return self._own > self.kind or self.used.doubts(measured)

    def ask(self, step: int) -> None:
        self.used.ask(step)

    def note_optimizer(self, kind: OptimizerKind) -> None:
        self._own = kind

    def report(self, measured: Measured) -> list[float]:
        return [float(self._own), *self.used.report(measured)]

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        before, settled = self.used, self.used.settled(step)
        compressed = before.rung.compressor is not None
        before.learn_conditions(step, [row[1:] for row in rows])
        told = [Measured(*row[1:-1]) for row in rows]
        self.kind = OptimizerKind(int(max(row[0] for row in rows))) or self.kind
        for ladder in (self._sparse, self._steady):
            ladder.hold(self._held or ladder is not self.used)
            # What was sent uncompressed says as much about the link to the other ladder.
            alike = settled and not (compressed or ladder.rung.compressor is not None)
            if ladder is before or alike:
                ladder.follow(step, told)
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
    def __init__(self, inner: Chooser, ladders: _Ladders, size: int) -> None:
        super().__init__(inner)
        self._ladders, self._size = ladders, size

    def explain(self) -> list[str]:
        if self._size == 1:
            return ["Automatic: there is one rank, so nothing is exchanged.", *super().explain()]
        ladder = self._ladders.used.ladder
        rungs = ", ".join(rung.title for rung in ladder)
        second = {str(rung.compressor) for rung in ladder if rung.names}
        rungs += f" (low ranks with {second.pop()} where that is smaller)" if second else ""
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
            "Automatic: the fastest step counts. Compression is switched on where it pays, "
            f"up to {ladder[-1]}, and off where it does not.",
            f"Its strengths are {rungs}: {why}.",
            *super().explain(),
        ]
