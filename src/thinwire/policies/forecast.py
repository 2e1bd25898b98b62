"""What a step would take with each strength: the formulas of plans, with what ranks measured.

`Conditions` is what all ranks have heard of link and machine, `Forecast` what follows from it.
"""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from thinwire.collectives.costs import (
    PEER,
    START,
    Coding,
    Due,
    Interconnect,
    StepCost,
    overlapped_step,
    plain_sum,
)
from thinwire.collectives.memory import weigh
from thinwire.collectives.probe import SHORTER, ProbeSize
from thinwire.compressors import Compressor, JointCompressor, PowerSGD, Quantize
from thinwire.policies.base import Choice, Measured, PolicyContext, TensorInfo
from thinwire.policies.codecs import CodecTable, kind_of, measured_file, read_table, shipped
from thinwire.policies.ladder import Rung

log = logging.getLogger("thinwire")
FIRST = 2  # steps that are not looked at: connections and kernels are made in them
SHARE = 0.004  # of the time that passes, what probes may take
# Codecs run on the cores that train; what that costs is measured as soon as one is used.
BUSY = 1.0
FIRST_PROBE, LEAST_PROBE, MOST_PROBE = 1 << 18, 1 << 16, 1 << 22  # bytes
LONG_ENOUGH = 0.06  # seconds of a probe's sum: bursts and waiting for cores hardly show in it
TRIES = 3
PROBES = 2  # before anything is decided: the second one is as long as the first one says
# Times more bytes that a probe should have had: the link became so fast that this one says little.
TOO_SHORT = 2.0
# From then on a glance now and then: one try of a sum so much shorter, which only tells whether a
# thorough probe is worth its time.
GLANCE, LEAST_GLANCE = 3, 1 << 14
UNCERTAIN = 0.2  # of the longer sum of a glance: a difference of less is noise
LEAST_TIMES = 0.01  # of what a sum should take: noise can make it look like nothing
BETWEEN = 50  # steps from probe to probe, at least
SELDOM = 32  # steps from report to report, at most
CHANGED = 2.0  # times more or less: a link that has changed, or chance
NOTICEABLE = 0.1  # of a step: less than that is no change
SMOOTH = 0.5  # of what was known before
HALVINGS = 12  # of the intervals in which a rate and the seconds of a meeting are looked for
MOST_WAITS = 0.97  # of a sum's seconds, what may be other than its bytes
# Times as long as in the table, at most. Threads that wait for a core show in the seconds of any
# codec: what is beyond this is taken to be the same for all of them, not in proportion.
MOST_SLOWER = 2.0
FORGOTTEN = 1.1  # times more or less, from which on forecasts are made anew


def network_of(size: int, meeting: float, rate: float) -> Interconnect:
    """Ranks of which each has a link of its own, with meetings that take so long."""
    software = START + (size - 1) * PEER
    less = min(1.0, meeting / software)
    return Interconnect(
        size,
        rate,
        delay=max(0.0, meeting - software) / 2,
        start=less * START,
        peer=less * PEER,
    )


def link_of(
    size: int, meeting: float, num_bytes: float, seconds: float, part_seconds: float
) -> tuple[float, float]:
    """Seconds of a meeting, and bytes per second, with which a sum of so many bytes and one of a
    part of them take so long.

    Ranks that share cores wait for these in a meeting, which then takes longer than a hop of a sum:
    so the short sum says what waiting takes, if that is less, and the long one the rate.
    """
    part_seconds = min(part_seconds, seconds)

    def waiting(rate: float) -> float:
        """Seconds of a meeting with which the short sum takes as long as it did."""
        longest = plain_sum(network_of(size, meeting, rate), num_bytes / SHORTER).seconds
        if longest <= part_seconds:
            return meeting
        low, high = 0.0, meeting
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            took = plain_sum(network_of(size, middle, rate), num_bytes / SHORTER).seconds
            low, high = (low, middle) if took > part_seconds else (middle, high)
        return low

    # All of the seconds are for bytes, or few of them.
    slowest = plain_sum(network_of(size, 0.0, 1.0), num_bytes).seconds / seconds
    low, high = math.log2(slowest), math.log2(slowest / (1 - MOST_WAITS))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        rate = 2.0**middle
        longer = plain_sum(network_of(size, waiting(rate), rate), num_bytes).seconds > seconds
        low, high = (middle, high) if longer else (low, middle)
    rate = 2.0**high
    return waiting(rate), rate


class SentPart(NamedTuple):
    """Tensors that are sent in one way.

    Args:
        at_end: in one exchange when all of them are there, not bucket by bucket.
    """

    coding: Coding
    numel: int
    at_end: bool


class Forecast:
    """Steps with each strength of a ladder.

    Ranks may have measured their codecs, or have other machines. So all of them forecast from one
    table, and each tells the others how long codecs take on it, compared with that: `speed`.
    """

    def __init__(self, rungs: Sequence[Rung], context: PolicyContext) -> None:
        known = shipped()
        self._parts = [_parts(rung, context, known["cores-2"]) for rung in rungs]

        def seconds(table: CodecTable) -> float:
            return sum(_seconds(part) for rung in rungs for part in _parts(rung, context, table))

        here, there = seconds(_like_this_machine(known)), seconds(known["cores-2"])
        file = measured_file()
        if file.is_file():
            try:
                here = seconds(read_table(file))
            except (TypeError, ValueError) as error:  # no reason not to train
                log.warning("the measured table of codecs is not used: %s", error)
        self.speed = here / there if there else 1.0

    def step(self, rung: int, conditions: "Conditions") -> StepCost:
        """A step with a strength."""
        times, n = conditions.codec, max(1, round(conditions.exchanges))
        early = min(1.0, conditions.window / conditions.compute) if conditions.compute else 0.0
        due = []
        for coding, numel, at_end in self._parts[rung]:
            scaled = coding._replace(
                call=times * coding.call,
                encode=times * coding.encode,
                decode=times * coding.decode,
                add=times * coding.add,
            )
            if at_end:
                due.append(Due(scaled, numel, 1.0))
            else:
                due += [Due(scaled, numel / n, _ready(early, i, n)) for i in range(n)]
        due.sort(key=lambda each: each.ready)
        cost = overlapped_step(due, conditions.network, conditions.compute, BUSY)
        compressed = any(part.coding.kind != "plain" for part in self._parts[rung])
        return cost._replace(seconds=cost.seconds + (conditions.extra if compressed else 0.0))

    def codec_seconds(self, rung: int, conditions: "Conditions") -> float:
        """Of encoding and decoding alone, as the table has it."""
        plain = conditions.with_codec(1.0)
        cost, n = self.step(rung, plain), max(1, round(conditions.exchanges))
        calls = sum(coding.exchange * (1 if end else n) for coding, _, end in self._parts[rung])
        return cost.encode + cost.decode - calls


def _ready(early: float, i: int, n: int) -> float:
    """When the i-th of n exchanges can begin, as a share of computing: the first one `early`."""
    return 1.0 - early * (1.0 - (i / (n - 1) if n > 1 else 0.0))


def _like_this_machine(known: Mapping[str, CodecTable]) -> CodecTable:
    """That of a machine with about as many cores."""
    threads = torch.get_num_threads()
    return known["cores-1" if threads == 1 else "cores-2" if threads < 8 else "cores-16"]


def _parts(rung: Rung, context: PolicyContext, table: CodecTable) -> list[SentPart]:
    by_choice: dict[Choice, list[TensorInfo]] = {}
    for tensor in context.tensors:
        by_choice.setdefault(rung.choose(tensor), []).append(tensor)
    return [_part(choice, own, context, table) for choice, own in by_choice.items()]


def _part(
    choice: Choice, own: Sequence[TensorInfo], context: PolicyContext, table: CodecTable
) -> SentPart:
    numel = sum(tensor.numel for tensor in own)
    if choice is None:
        num_bytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in own)
        # As DDP's hook sends what is uncompressed; others meet before, which is measured.
        return SentPart(Coding("plain", num_bytes / numel), numel, False)
    known = _in_table(choice, table)
    if isinstance(choice, JointCompressor):
        coding = table.joint_coding(choice if known else PowerSGD(4), [t.shape for t in own])
        return SentPart(coding, numel, True)
    frame = sum(t.numel * weigh(choice, t.dtype, context.feedback).frame for t in own)
    coding = table.coding(choice if known else Quantize(4), frame / numel)
    return SentPart(coding._replace(kind=kind_of(choice)), numel, False)


def _in_table(compressor: Compressor, table: CodecTable) -> bool:
    """Whether a table has something like it; if not, figures of a common one do until measured."""
    try:
        table.row_of(compressor)
    except ValueError:
        return False
    return True


def _seconds(part: SentPart) -> float:
    return part.coding.call + (part.coding.encode + part.coding.decode) * part.numel


def _alike(a: float, b: float) -> bool:
    """Whether two times are about the same, for a link."""
    return b / CHANGED <= a <= b * CHANGED


class Conditions:
    """What all ranks have heard of the link and of computing; the same numbers on all of them.

    Attributes:
        meeting: seconds for ranks to hear from each other, as forecasts have it.
        report: seconds of one, as measured.
        rate: bytes per second of a rank's link; 0 if not known.
        compute: seconds of a step without communication.
        window: of these, what comes after the first exchange has begun.
        exchanges: of an uncompressed step.
        codec: times as long as the table has it.
        extra: seconds of codecs in a step beyond that, whatever the codec.
        link_version: counts up when the link has changed.
        version: counts up when anything has, so that forecasts are made anew.
    """

    def __init__(self, context: PolicyContext) -> None:
        self.size = context.size
        dense = sum(tensor.numel * tensor.dtype.itemsize for tensor in context.tensors)
        self._dense = float(dense)
        self._most = max(LEAST_PROBE, min(MOST_PROBE, dense))
        self.seen = 0  # reports in this process
        self.asked = False  # for a probe
        self.doubted = False  # others tell of a change: one probe that does too is enough
        self._second_glance = False  # the last one was odd
        self.link_version = self.version = 0
        self.meeting = self.rate = self.compute = self.window = self.waiting = 0.0
        self.report = 0.0
        self.exchanges = self.codec = 1.0
        self.extra = 0.0
        self.took = 0.0  # a step, the last that was reported
        self._codec_known = False
        self._probes = 0
        self._suspect = 0.0  # seconds of an uncompressed sum on a link that has perhaps changed
        self._size = min(FIRST_PROBE, self._most)
        self._probed = 0  # the last step with a probe
        self._used = (0.0, 1.0, 0.0)  # compute, codec, and compute + extra of the last forecasts

    @property
    def ready(self) -> bool:
        """Whether enough is known to forecast."""
        return self._probes >= PROBES and self.compute > 0

    @property
    def network(self) -> Interconnect:
        return network_of(self.size, self.meeting, self.rate)

    def with_codec(self, codec: float) -> "Conditions":
        """The same with codecs that take so many times as long as in the table."""
        other = copy.copy(self)
        other.codec = codec
        return other

    # When to ask.

    def due(self, step: int, every: int) -> bool:
        """Whether a report is worth its price now, where they come after so many steps."""
        first = self.seen <= 2 * FIRST + PROBES or not self.ready
        return first or step == self._probed + 1 or step % every == 0

    def every(self, share: float) -> int:
        """Steps from report to report: each is a meeting, and they may take a share of the time."""
        if not self.took:
            return 1
        return min(SELDOM, max(1, math.ceil(self.report / (share * self.took))))

    def probes(self, step: int, every: int) -> ProbeSize | None:
        """How to time the link now, where reports come after so many steps."""
        since = step - self._probed
        if self.size == 1 or not self.seen or since < 2:
            return None
        if self.asked or self._probes < PROBES:
            return ProbeSize(self._size, TRIES)
        glance = ProbeSize(max(LEAST_GLANCE, self._size // GLANCE), 1)
        if self._second_glance:
            return glance
        if since >= BETWEEN and step % every == 0:
            return glance if self._seconds_of(glance) <= SHARE * since * self.took else None
        return None

    def _seconds_of(self, size: ProbeSize) -> float:
        lengths = (size.num_bytes, size.num_bytes / SHORTER)
        long, short = (plain_sum(self.network, length).seconds for length in lengths)
        # One meeting and one short sum are not timed, and the exchange itself meets.
        return (size.meetings + 2) * self.report + size.tries * (long + short) + short

    def note_probe(self, step: int) -> None:
        """One goes out after this step."""
        self._probed, self.asked = step, False

    def doubt(self, slower: float = 1.0) -> None:
        """Steps, or two glances, say that the link is not what it was.

        Args:
            slower: times that exchanges take longer than before: a probe of the old length would.
        """
        if self.doubted:
            return  # told by somebody else
        self.asked = self.doubted = True
        self._size = max(LEAST_PROBE, int(self._size / max(1.0, slower)) // 4096 * 4096)

    # What came.

    def learn(self, told: Sequence[Measured], uncompressed: bool, codec_seconds: float) -> None:
        """What all ranks reported of a step.

        Args:
            codec_seconds: as they should be by the table, of the strength in use.
        """
        self.seen += 1
        if all(one.probed for one in told):
            self._learn_link(
                told[0].probed,
                median(one.meeting for one in told),
                median(one.moving for one in told),
                median(one.moving_part for one in told),
                told[0].tries < TRIES,
            )
        if self.seen <= FIRST:
            return
        self.took = median(one.step for one in told)
        self.waiting = median(one.waiting for one in told)
        work = 0.0 if uncompressed else median(one.codec for one in told)
        computing = median(one.step - one.waiting for one in told) - work
        computing = max(computing, 0.1 * self.took)
        window = min(one.window for one in told)
        if self.compute:
            computing = SMOOTH * self.compute + (1 - SMOOTH) * computing
            window = SMOOTH * self.window + (1 - SMOOTH) * window
        self.compute, self.window = computing, min(window, computing)
        if uncompressed:
            self.exchanges = max(one.exchanges for one in told)
        elif codec_seconds:
            seconds = median(one.codec for one in told)
            codec = min(MOST_SLOWER, seconds / codec_seconds)
            extra = seconds - codec * codec_seconds
            smooth = SMOOTH if self._codec_known else 0.0
            self.codec = smooth * self.codec + (1 - smooth) * codec
            self.extra = smooth * self.extra + (1 - smooth) * extra
            self._codec_known = True
        if self._codec_known or uncompressed:
            self._notice((self.compute, self.codec, self.compute + self.extra))

    def learn_speed(self, speed: float) -> None:
        """Until codecs were measured: how long they take on the slowest rank."""
        if not self._codec_known:
            self.codec = speed

    def _notice(self, now: tuple[float, float, float]) -> None:
        pairs = zip(now, self._used, strict=True)
        if any(not b / FORGOTTEN <= a <= b * FORGOTTEN for a, b in pairs):
            self._used = now
            self.version += 1

    def _learn_link(
        self, num_bytes: float, meeting: float, moving: float, part: float, glance: bool
    ) -> None:
        """
        Args:
            num_bytes, meeting, moving, part: of a probe, and its seconds.
            glance: it was not thorough.
        """
        if not moving or not meeting or not part:
            return
        if glance:
            self._learn_glance(num_bytes, moving - part)
            return
        report = meeting
        self.report = min(report, self.report or report)
        meeting, rate = link_of(self.size, meeting, num_bytes, moving, part)
        found = network_of(self.size, meeting, rate)
        took = plain_sum(found, num_bytes)
        wanted = num_bytes * LONG_ENOUGH / (took.seconds - took.waits)
        self._size = int(max(LEAST_PROBE, min(self._most, wanted))) // 4096 * 4096
        self._probes += 1
        before = plain_sum(self.network, self._dense).seconds if self.rate else 0.0
        now = plain_sum(found, self._dense).seconds
        confirmed, self.doubted = self.doubted or _alike(now, self._suspect), False
        if self._probes <= PROBES:
            self.meeting, self.rate = meeting, rate
            self.version += 1
        elif not self._is_much(now, before):
            self.rate = self.rate**SMOOTH * rate ** (1 - SMOOTH)
            self.meeting = SMOOTH * self.meeting + (1 - SMOOTH) * meeting
            self._suspect = 0.0
        elif not confirmed:
            self._suspect, self.asked = now, True  # once is chance
        else:
            self.meeting, self.rate, self._suspect = meeting, rate, 0.0
            self.report = report
            self.link_version += 1
            self.version += 1
            if self._size > TOO_SHORT * num_bytes:
                self._probes = PROBES - 1  # as at first: nothing is decided before a longer one

    def _learn_glance(self, num_bytes: float, longer: float) -> None:
        """A sum took so many seconds more than one of a part: decides what to look at next.

        That is the rate alone. What ranks wait shows in exchanges, however short.
        """
        if not self.rate:
            return  # somebody else's
        lengths = (num_bytes, num_bytes / SHORTER)
        whole, part = (plain_sum(self.network, length).seconds for length in lengths)
        times = max(longer / (whole - part), LEAST_TIMES)
        before = plain_sum(self.network, self._dense).seconds
        odd = abs(longer - (whole - part)) > UNCERTAIN * whole
        odd = odd and self._is_much(times * before, before)
        if odd and self._second_glance:
            self.doubt()
        self._second_glance = odd and not self._second_glance

    def _is_much(self, now: float, before: float) -> bool:
        """Whether an uncompressed sum of all takes much more or less than before."""
        return not _alike(now, before) and abs(now - before) > NOTICEABLE * self.took

    def state(self) -> list[float]:
        numbers: list[float] = [self.size, self.meeting, self.rate, self.compute, self.window]
        numbers += [self.waiting]
        numbers += [self.exchanges, self.codec, self._codec_known, self.took]
        numbers += [self._probes, self._size, self._probed, self.report, self.extra]
        return [float(number) for number in numbers]

    def load(self, state: Sequence[float]) -> bool:
        """Go on from a state; False if it is that of another number of ranks, of which only the
        codecs count."""
        self.codec, self._codec_known, self.extra = state[7], bool(state[8]), state[14]
        self.seen = 0  # a new process makes its connections and kernels anew
        self.asked = self.doubted = self._second_glance = False
        self._suspect = 0.0
        self.version += 1
        if state[0] != self.size:
            return False
        _, self.meeting, self.rate, self.compute, self.window, self.waiting = state[:6]
        self.exchanges, self.took = state[6], state[9]
        self._probes, self._size, self._probed = int(state[10]), int(state[11]), int(state[12])
        self.report = state[13]
        return True
