"""Compression as strong as the network needs, and no stronger."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from thinwire.compressors import Compressor
from thinwire.policies.base import Choice, Chooser, Measured, Policy, Setting, Target
from thinwire.policies.check import child, positive
from thinwire.policies.ladder import bytes_of, ladder_of

FIRST = 2  # steps that are not looked at: connections and kernels are made in them
SETTLED = 2  # steps with one choice before the next one is made
PATIENCE = 3  # steps for which a lighter choice must look good
LONGEST = 48  # the same, after lighter choices that were not
MARGIN = 0.8  # share of the time allowed that a lighter choice may take
SURPRISE = 2.5  # times more or less than expected: the link has changed
MEMORY = 6  # steps that a link is judged by
_FIELDS = 6  # numbers of a rank


@dataclass(frozen=True)
class Bandwidth(Policy):
    """As strong as needed for communication to hide behind the computation.

    Every step the ranks compare what they measured: seconds and bytes of the real exchanges, and
    how long computing took. From these follows what each strength of the compressor would take; the
    lightest one is used that would add at most `target` of the computing time. On a fast link that
    is none at all. It gets stronger at once, and lighter only when that has looked good for a
    while, longer each time it was not.

    Args:
        then: the strongest compressor allowed; lighter versions of it come before it.
        target: how much longer than its computation a step may be, as a share of it.

    Example:
        >>> import thinwire as tw
        >>> str(tw.Bandwidth("topk:0.001|quantize:4"))
        'bandwidth:(topk:0.001|quantize:4)'
    """

    then: Compressor
    target: float = 0.1
    name: ClassVar[str] = "bandwidth"

    def __post_init__(self) -> None:
        policy = child("Bandwidth", self.then)
        if str(policy) != str(policy.main):
            raise ValueError(f"Bandwidth: then must be a compressor, got {policy}")
        object.__setattr__(self, "then", policy.main)
        positive("Bandwidth", "target", self.target)

    @property
    def main(self) -> Compressor:
        return self.then

    def begin(self, setting: Setting) -> Chooser:
        return _Following(self, setting)


class _Following(Chooser):
    num_reports = _FIELDS

    def __init__(self, policy: Bandwidth, setting: Setting) -> None:
        self._target = policy.target
        self._journal = setting.journal
        self._rungs = ladder_of(policy.then)
        self._bytes = [
            bytes_of(rung, setting.tensors, setting.size, setting.feedback) for rung in self._rungs
        ]
        self._held = False
        self._rung = 0
        self._seen = 0  # steps
        self._settled = 0  # steps with this rung
        self._patience = PATIENCE
        self._lighter = 0  # steps in which a lighter rung looked good
        self._since = 1
        self._tried = -LONGEST  # the step of the last move to a lighter rung
        self._link: list[tuple[float, float]] = []  # bytes and seconds of the last steps
        self._codec = [0.0] * len(self._rungs)  # seconds, the least of the last ones
        self._last = (0.0, 0.0, 0.0)  # of a step: computing, window, waiting

    def choose(self, tensor: Target, step: int) -> Choice:
        return self._rungs[self._rung]

    def report(self, measured: Measured) -> list[float]:
        return list(measured)

    def learn(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        self._seen += 1
        self._settled += 1
        told = [Measured(*row) for row in rows]
        if self._seen <= FIRST or self._settled == 1:
            return  # kernels are compiled, buffers made
        # Who arrives last in an exchange waits least: that is what the network itself takes.
        network = min(one.network for one in told)
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
        self._learn_link(num_bytes, network)
        if not self._held:
            self._decide(step, num_bytes)

    def hold(self, held: bool) -> None:
        self._held = held

    def _learn_link(self, num_bytes: float, seconds: float) -> None:
        if self._link:
            expected = self._seconds(num_bytes)
            if not expected / SURPRISE <= seconds <= expected * SURPRISE:
                self._link.clear()
        self._link = [*self._link, (num_bytes, seconds)][-MEMORY:]

    def _seconds(self, num_bytes: float) -> float:
        """What the network is expected to take for so many bytes: a start, and a rate.

        With messages of one size all seconds are put down to the rate: what is larger then seems
        slower than it is, and is reached in several moves.
        """
        sizes = [size for size, _ in self._link]
        times = [time for _, time in self._link]
        size, time = sum(sizes) / len(sizes), sum(times) / len(times)
        spread = sum((each - size) ** 2 for each in sizes)
        if max(sizes) < 1.5 * min(sizes):
            return time * num_bytes / max(size, 1.0)
        slope = sum((s - size) * (t - time) for s, t in self._link) / spread
        slope = min(max(slope, 0.0), time / max(size, 1.0))
        return max(0.0, time - slope * size) + slope * num_bytes

    def _costs(self, num_bytes: float) -> list[float]:
        """Seconds of communication for each rung."""
        rest = max(0.0, num_bytes - self._bytes[self._rung])  # what travels as it is anyway
        known = [seconds for seconds in self._codec[1:] if seconds]
        usual = max(known, default=0.0)
        return [
            self._seconds(size + rest) + (self._codec[i] or (usual if i else 0.0))
            for i, size in enumerate(self._bytes)
        ]

    def _decide(self, step: int, num_bytes: float) -> None:
        costs = self._costs(num_bytes)
        computing, window, _ = self._last
        allowed = window + self._target * computing
        fitting = [i for i, cost in enumerate(costs) if cost <= allowed]
        wanted = fitting[0] if fitting else costs.index(min(costs))
        if self._settled < SETTLED:
            return
        if wanted > self._rung or (wanted < self._rung and not fitting):
            if wanted > self._rung and step - self._tried < 2 * PATIENCE:
                self._patience = min(LONGEST, 2 * self._patience)  # that was too light
            self._move(step, wanted, costs, allowed)
            return
        good = [i for i in fitting if i < self._rung and costs[i] <= MARGIN * allowed]
        self._lighter = self._lighter + 1 if good else 0
        if self._lighter >= self._patience:
            self._tried = step
            self._move(step, good[0], costs, allowed)
        elif step - self._tried == LONGEST:
            self._patience = PATIENCE  # the lighter choice has proved itself

    def _move(self, step: int, rung: int, costs: list[float], allowed: float) -> None:
        why = (
            f"communication would take {1e3 * costs[self._rung]:.0f} ms, now "
            f"{1e3 * costs[rung]:.0f} ms; {1e3 * allowed:.0f} ms are hidden or allowed"
        )
        self._rung, self._settled, self._lighter, self._since = rung, 0, 0, step + 1
        self._journal.note(step + 1, "all", self._rungs[rung], why)

    def explain(self) -> list[str]:
        computing, window, waiting = self._last
        now = self._rungs[self._rung]
        words = "tensors travel as they are" if now is None else f"tensors travel with {now}"
        lines = [f"Since step {self._since} {words}, as the network asks for it."]
        if self._link:
            size, seconds = self._link[-1]
            rate = 8e-6 * size / max(seconds, 1e-9)
            lines.append(
                f"A step computes for {1e3 * computing:.0f} ms, of which {1e3 * window:.0f} ms can "
                f"hide communication, and waits {1e3 * waiting:.0f} ms for it; the last exchanges "
                f"moved {size / 1e6:.3g} MB in {1e3 * seconds:.0f} ms ({rate:.3g} Mbit/s)."
            )
            costs = self._costs(size)
            dense = "as they are" if self._rung else "now"
            lines.append(
                f"Communication would take about {1e3 * costs[0]:.0f} ms {dense}, "
                f"{1e3 * costs[-1]:.0f} ms with {self._rungs[-1]}."
            )
        return lines

    def state(self) -> list[float]:
        link = [number for pair in self._link for number in pair]
        link += [-1.0] * (2 * MEMORY - len(link))
        counts = (self._rung, self._seen, self._settled, self._patience, self._lighter)
        return [*counts, self._since, self._tried, *self._last, *self._codec, *link]

    def load(self, state: Sequence[float]) -> None:
        counts = [int(number) for number in state[:7]]
        self._rung, self._seen, self._settled, self._patience, self._lighter = counts[:5]
        self._since, self._tried = counts[5:]
        self._seen = 0  # a new process makes its connections and kernels anew
        self._last = (state[7], state[8], state[9])
        end = 10 + len(self._rungs)
        self._codec = list(state[10:end])
        pairs = list(zip(state[end::2], state[end + 1 :: 2], strict=True))
        self._link = [pair for pair in pairs if pair[0] >= 0]
