"""What an exchange costs: rounds, bytes on each link, seconds. Pure functions of numbers.

Nothing here measures, talks, or knows a compressor: whoever asks brings its numbers (`Coding`). So
a policy can ask in the middle of a training, `thinwire plan` before it, and a page in a browser,
which has the same functions in JavaScript (report/templates/plan.js, kept equal by a test).

A round costs `start` seconds of software, `peer` seconds for each message of a rank, a round trip
and its bytes at the narrowest place. That it is a round trip and not one way is gloo's doing: a
message leaves when its receiver has said that it is ready, and both sides begin at the same time.
Measured: 1.03 to 1.12 round trips for each among two and four hosts, 1.5 among eight on two cores
(benchmarks/records/wan-2026-11-18.json).

    meeting     a record from each rank straight to each, short messages along with it
    direct      a message from each rank straight to each
    ring        P - 1 hops (all-gather) or 2 (P - 1) hops (all-reduce) between neighbours; gloo
                sends chunks in halves, so that one waits while the other moves

Of the exchanges of one channel a few are under way at a time: while one waits for a round trip,
others move their data (decision 24, `ChannelSchedule`). A large tensor goes in slices: while one
moves, the next is compressed and what came of the one before is summed (decision 25).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from thinwire.collectives.choose import SMALL, TWICE, moved
from thinwire.collectives.message import ALIGNMENT
from thinwire.collectives.order import AT_ONCE
from thinwire.collectives.stream import slices_for
from thinwire.collectives.transport import (
    FIELDS,
    HEADER,
    LEAST_ROOM,
    MOST_ROOM,
    MOST_SUMMED,
    ROOM,
)

# Bytes on a link for each byte of payload: Ethernet, IP and TCP headers of packets of 1448 bytes.
FRAMING = 1514 / 1448
# What Linux sends in the first round trip of a connection that was idle: ten packets (RFC 6928).
FIRST_WINDOW = 10 * 1448
# Seconds after which a connection counts as idle: Linux' least retransmission timeout.
IDLE = 0.2
# Seconds of software in a round, and for each message of a rank in it, on a core of one's own:
# gloo's threads are woken. Fitted to 4 kB over loopback among 2, 4 and 8 processes of the machine
# that machines.json was measured on: an all-to-all takes 0.35, 1.34 and 4.15 ms, a hop of a
# ring 0.22, 1.03 and 1.53 ms; n processes on two cores take n / 2 times as long, and `SCHEDULING`.
START, PEER = 150e-6, 110e-6
# Seconds of Python in a meeting, on a core of one's own: records are written and read. What rounds
# of 64 kB tensors took more than the above among 2, 4 and 8 hosts (costs-2026-11-17.json).
MEETING = 0.7e-3
# Seconds more per round where more ranks than cores wait for each other (the same measurement).
SCHEDULING = 500e-6
# Bytes per second between ranks of one host: gloo's all-reduce of 16 MB between two of them there.
INSIDE = 0.9e9
# Messages both ways between ranks hold each other up: gloo sends when the receiver has said that it
# is ready, and that word waits behind what the receiver sends itself, in the connection or in the
# queue of the link. Between two hosts the second message follows the first (half of the link is
# used), of several pairs some move while others wait. Of a long message, only as much is lost as
# lies in the queue. benchmarks/records/costs-2026-11-17.json: 8 to 130 kB took 1.5 to 2.0 times
# their bytes between 2 hosts, 1.3 to 1.6 times among 4 and 8; of 133 to 530 kB, 90 kB more.
CROWDED, PAIR = 0.65, 0.5
HELD = 100e3
# Of a link's rate, what rings reach: 0.94 to 0.98 (the same record).
RINGS = 0.96
# The same of the link between racks: quantize:4 by two-shot over two racks of 2 and of 4 hosts
# reached 0.74 and 0.87 of 20 Mbit/s (benchmarks/records/hierarchical-*2026-11-16.json).
CROWDED_UPLINK = 0.80
# Slices that move at the same time: gloo's groups have two threads each (decision 25).
SLICES_AT_ONCE = 2
# Forward takes a third of a step: backward multiplies each matrix twice.
FORWARD = 1 / 3
# Seconds below which a difference of sums is what rounding left of it.
ROUNDING = 1e-9


class Interconnect(NamedTuple):
    """Where ranks are and what lies between them; bytes and seconds.

    Args:
        hosts: each with a link of its own to a switch that is never the narrowest place.
        rate: bytes per second of a host's link, in each direction.
        ranks_per_host: ranks that share the link of their host.
        delay: between two hosts, one way.
        racks: of equally many hosts; ranks that follow each other share one.
        uplink: bytes per second of the link between a rack and the rest.
        uplink_delay: one way, on top of `delay` between hosts of different racks.
        inside: bytes per second that a rank sends to others on its host.
        start: of software per round.
        peer: of software for each message that a rank sends.
        together: bytes per second that all hosts can send together, where they share a machine.
        trees: the backend sums along pipelined trees of hosts, as NCCL does, not around a ring.
        meeting: of software more in a round that all ranks meet in.
    """

    hosts: int
    rate: float
    ranks_per_host: int = 1
    delay: float = 0.0
    racks: int = 1
    uplink: float = math.inf
    uplink_delay: float = 0.0
    inside: float = INSIDE
    start: float = START
    peer: float = PEER
    together: float = math.inf
    trees: bool = False
    meeting: float = MEETING

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def round_trip(self) -> float:
        return 2 * (self.delay + (self.uplink_delay if self.racks > 1 else 0.0))


class Moved(NamedTuple):
    """What moving data takes.

    Args:
        seconds: from the moment when all ranks have come.
        sent: bytes that a rank sends.
        egress: bytes that leave a host, per rank of it.
        work: of `seconds`, what a core is busy: software of rounds, and bytes where hosts share it.
        rounds: how often a rank waits for others.
        waits: of `seconds`, what passes while nothing moves: software and round trips.
        trips: of `seconds`, what hosts without delay would not take.
    """

    seconds: float = 0.0
    sent: float = 0.0
    egress: float = 0.0
    work: float = 0.0
    rounds: int = 0
    waits: float = 0.0
    trips: float = 0.0

    def then(self, other: "Moved") -> "Moved":
        """Both, one after the other."""
        return Moved(
            self.seconds + other.seconds,
            self.sent + other.sent,
            self.egress + other.egress,
            self.work + other.work,
            self.rounds + other.rounds,
            self.waits + other.waits,
            self.trips + other.trips,
        )

    def in_slices(self, slices: int) -> "Moved":
        """So many of these, one behind the other: while one waits, another moves, or two wait."""
        moving = slices * (self.seconds - self.waits)

        def seconds(waits: float) -> float:
            return waits + max(moving, (slices - 1) * waits / SLICES_AT_ONCE)

        whole = seconds(self.waits)
        return Moved(
            whole,
            slices * self.sent,
            slices * self.egress,
            slices * self.work,
            self.rounds,
            self.waits,
            whole - seconds(self.waits - self.trips),
        )


def aligned_bytes(length: float) -> float:
    """As messages begin at multiples of 64 bytes."""
    return math.ceil(length / ALIGNMENT) * ALIGNMENT


def room_of(ranks: int) -> float:
    """Bytes of the longest message that comes along with a record."""
    return min(MOST_ROOM, max(LEAST_ROOM, aligned_bytes(ROOM // (ranks - 1))))


def record_bytes(ranks: int) -> float:
    """A member's record in a meeting: it has a number for each member."""
    return aligned_bytes(8 * (HEADER + FIELDS + ranks))


def held_up(hosts: int, message: float) -> float:
    """Bytes that a link could have sent besides a message, while its sender waited for word."""
    used = PAIR if hosts == 2 else CROWDED
    return (1 / used - 1) * min(message, HELD)


def direct(network: Interconnect, message: float, cold: bool = False) -> Moved:
    """A message of so many bytes from each rank straight to each other one."""
    p, h = network.ranks, network.ranks_per_host
    if p == 1:
        return Moved()
    out = h * (p - h) * message  # through a host's link
    in_rack = p // network.racks
    up = in_rack * (p - in_rack) * message  # through a rack's
    idle = h * (p - h) * held_up(network.hosts, message)
    together = p * (p - 1) * message / network.together
    seconds = max(
        FRAMING * (out + idle) / network.rate,
        FRAMING * up / (CROWDED_UPLINK * network.uplink) if network.racks > 1 else 0.0,
        (h - 1) * message / network.inside,
        together,
    )
    software = network.start + (p - 1) * network.peer
    trip = network.round_trip
    waits = software + trip
    if cold and network.hosts > 1:
        waits += slow_start(message, network.rate / (h * (p - h)), trip)
    return Moved(waits + seconds, (p - 1) * message, out / h, software + together, 1, waits, trip)


def ring(network: Interconnect, hops: int, chunk: float, cold: bool = False) -> Moved:
    """So many hops, in each of which every rank sends a chunk to its neighbour.

    Ranks of a host follow each other, so one of them sends over the host's link.
    """
    if network.ranks == 1:
        return Moved()
    together = network.ranks * chunk / network.together
    seconds = max(
        FRAMING * chunk / (RINGS * network.rate) if network.hosts > 1 else 0.0,
        FRAMING * chunk / (RINGS * network.uplink) if network.racks > 1 else 0.0,
        chunk / network.inside if network.ranks_per_host > 1 else 0.0,
        together,
    )
    software = network.start + network.peer
    # One half of a chunk is waited for while the other moves; between two ranks both go the same
    # way, and wait for each other.
    half = seconds if network.ranks == 2 else seconds / 2
    waits = hops * max(0.0, software + network.round_trip + half - seconds)
    trips = min(waits, hops * network.round_trip)
    if cold and network.hosts > 1:
        waits += slow_start(hops * chunk, network.rate, network.round_trip)
    out = hops * chunk / network.ranks_per_host if network.hosts > 1 else 0.0
    # Threads of the backend sleep between hops.
    work = hops * together
    return Moved(waits + hops * seconds, hops * chunk, out, work, hops, waits, trips)


def slow_start(num_bytes: float, rate: float, round_trip: float) -> float:
    """Seconds that a connection loses when it starts after a pause.

    Its window doubles in each round trip, from `FIRST_WINDOW` until all is sent or the link is
    full: j round trips in which it sends FIRST_WINDOW (2^j - 1) bytes.
    """
    if not round_trip or num_bytes <= FIRST_WINDOW:
        return 0.0
    all_sent = math.ceil(math.log2(1 + num_bytes / FIRST_WINDOW)) - 1
    link_full = math.ceil(math.log2(max(1.0, rate * round_trip / FIRST_WINDOW)))
    j = min(all_sent, link_full)
    return max(0.0, j * round_trip - FIRST_WINDOW * (2.0**j - 1) / rate)


def meeting(network: Interconnect, along: float = 0.0, cold: bool = False) -> Moved:
    """Records of all ranks, and short messages with them."""
    if network.ranks == 1:
        return Moved()
    software = network._replace(start=network.start + network.meeting)
    return direct(software, record_bytes(network.ranks) + along, cold)


# The collectives, each for a message of so many bytes: what a rank's whole tensor comes to.


def plain_sum(network: Interconnect, message: float, cold: bool = False) -> Moved:
    """The backend's all-reduce alone, as DDP calls it."""
    p = network.ranks
    if network.trees and network.hosts > 1:
        return tree_sum(network, message)
    return ring(network, 2 * (p - 1), message / p, cold)


def tree_sum(network: Interconnect, message: float) -> Moved:
    """Up and down a binary tree of hosts, in pieces that follow each other closely.

    After NCCL's trees: bytes as for a ring of hosts, one delay per level up and down. Not measured
    here, for want of GPUs.
    """
    hosts, levels = network.hosts, math.ceil(math.log2(network.hosts))
    sent = 2 * (hosts - 1) / hosts * message
    slowest = min(network.rate, network.uplink if network.racks > 1 else math.inf)
    trips = levels * network.round_trip
    waits = 2 * levels * network.start + trips
    seconds = waits + FRAMING * sent / slowest
    egress = sent / network.ranks_per_host
    return Moved(seconds, sent, egress, 2 * levels * network.start, 2 * levels, waits, trips)


def summable(network: Interconnect, message: float, cold: bool = False) -> Moved:
    p = network.ranks
    if (p - 1) * message <= MOST_SUMMED:
        return meeting(network, message, cold)
    return meeting(network).then(plain_sum(network, message, cold))


def gather(network: Interconnect, message: float, cold: bool = False) -> Moved:
    if message <= room_of(network.ranks):
        return meeting(network, message, cold)
    return meeting(network).then(all_gather(network, message, cold))


def all_gather(network: Interconnect, message: float, cold: bool = False) -> Moved:
    """A long message from each rank to all: around a ring, between two both ways at once."""
    if network.ranks == 2:
        return direct(network, aligned_bytes(message), cold)
    return ring(network, network.ranks - 1, aligned_bytes(message), cold)


def swap(network: Interconnect, message: float, cold: bool = False) -> Moved:
    """Each rank's shard to its owner: the first half of two-shot, and FSDP's reduce-scatter."""
    shard = message / network.ranks
    if shard <= room_of(network.ranks):
        return meeting(network, shard, cold)
    return meeting(network).then(direct(network, aligned_bytes(shard), cold))


def twoshot(network: Interconnect, message: float, cold: bool = False) -> Moved:
    return swap(network, message, cold).then(gather(network, message / network.ranks))


def sparse(network: Interconnect, message: float, cold: bool = False) -> Moved:
    """As two-shot; regions of one length need no meeting of their own."""
    short = message <= room_of(network.ranks)
    first = Moved() if short else meeting(network)
    return first.then(twoshot(network, message, cold))


def streamed(
    collective: str, network: Interconnect, message: float, slices: int, cold: bool = False
) -> Moved:
    """A gather, two-shot or (swap) its first half in slices: all meet once, letters follow."""
    piece = message / slices
    if collective == "gather":
        one = all_gather(network, piece, cold)
    else:
        shard = piece / network.ranks
        one = direct(network, aligned_bytes(shard), cold)
        if collective == "twoshot":
            one = one.then(all_gather(network, shard))
    return meeting(network).then(one.in_slices(slices))


def joint(network: Interconnect, message: float, cold: bool = False, first: float = 0.5) -> Moved:
    """Two sums; `first` is the share of the first of them."""
    left = summable(network, first * message, cold)
    return left.then(summable(network, (1 - first) * message))


def hierarchical(
    network: Interconnect,
    message: float,
    inner: float,
    flat: str,
    cold: bool = False,
    slices: int = 1,
) -> Moved:
    """Sums inside of hosts, a flat collective between the owners of each shard, results inside.

    Args:
        message: of the whole tensor between hosts.
        inner: of the whole tensor inside.
        flat: the collective between hosts.
        slices: in which that goes.
    """
    s = network.ranks_per_host
    own = network._replace(hosts=1, delay=0.0, uplink_delay=0.0, racks=1, together=math.inf)
    inside = direct(own, inner / s) if s > 1 else Moved()
    # The owners on a host share its link, each with a ring of its own.
    share = network._replace(
        ranks_per_host=1, rate=network.rate / s, uplink=network.uplink / s, inside=math.inf
    )
    if slices > 1:
        between = streamed(flat, share, message / s, slices, cold)
    else:
        between = COLLECTIVES_COSTS[flat](share, message / s, cold)
    meetings = meeting(network).then(meeting(network)).then(meeting(network))
    return meetings.then(inside).then(between).then(inside)


COLLECTIVES_COSTS = {
    "plain": plain_sum,
    "summable": summable,
    "gather": gather,
    "twoshot": twoshot,
    "sparse": sparse,
}

# Codecs


class Coding(NamedTuple):
    """What a method sends of an element, and what that takes.

    Args:
        kind: "plain" (the backend's own all-reduce), "summable", "elements" (single elements, which
            `sparse` can carry), "whole" (other payloads) or "joint".
        frame: bytes of a message per element.
        call: seconds of any encode or decode, however short the tensor.
        encode: seconds per element, the residual brought up to date.
        decode: seconds per element of turning one payload into a tensor.
        add: seconds per element of adding one more payload to it.
        exchange: seconds of software around one exchange: threads, plan, feedback.
        first: of a joint compressor, the share of its first sum in what is sent.
        cut: a tensor can be compressed in slices (`Compressor.grain`).
    """

    kind: str
    frame: float = 4.0
    call: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    add: float = 0.0
    exchange: float = 0.0
    first: float = 0.5
    cut: bool = False


class ExchangeCost(NamedTuple):
    """One exchange: encoding before it, moving with the codec's work in between, decoding.

    Args:
        encode: seconds before anything moves: of a tensor in slices, those of the first.
        moving: from then on until all has come.
        between: of `moving`, what the network does not take: summing, encoding a second time.
        decode: after that.
        sent: bytes that a rank sends.
        egress: bytes that leave a host, per rank of it.
        work: seconds of a core: codecs and software.
        rounds: how often a rank waits for others.
        codec: seconds of all encoding and summing, beside what moves or not.
        trips: of `moving`, the round trips in which the link is free for other exchanges.
    """

    encode: float
    moving: float
    between: float
    decode: float
    sent: float
    egress: float
    work: float
    rounds: int
    codec: float
    trips: float

    @property
    def seconds(self) -> float:
        """Of this exchange by itself."""
        return self.encode + self.moving + self.decode

    @property
    def network(self) -> float:
        """Seconds in which data moves or is waited for."""
        return self.moving - self.between


NO_EXCHANGE = ExchangeCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)


def slices_of(coding: Coding, collective: str, numel: float, ranks: int) -> int:
    """In how many slices a tensor of float32 goes; `thinwire.collectives.stream` has the rule."""
    if not coding.cut or collective not in ("gather", "twoshot", "swap"):
        return 1
    return slices_for(4 * numel, coding.frame * numel, ranks)


def collective_of(coding: Coding, message: float, ranks: int) -> str:
    """What `collective="auto"` takes; `thinwire.collectives.choose` decides by the same rule."""
    if coding.kind in ("plain", "summable", "joint"):
        return coding.kind
    rival = "sparse" if coding.kind == "elements" else "twoshot"
    gathered, other = moved("gather", message, ranks), moved(rival, message, ranks)
    if other > TWICE * gathered or gathered - other < SMALL:
        return "gather"
    return rival


def exchange_cost(
    coding: Coding, numel: float, network: Interconnect, nodes: bool = False, cold: bool = False
) -> ExchangeCost:
    """An all-reduce of so many elements.

    Args:
        nodes: sums inside of hosts first (`nodes=`), uncompressed.
    """
    p, s = network.ranks, network.ranks_per_host
    if p == 1:
        return NO_EXCHANGE
    message = coding.frame * numel
    if nodes and s > 1 and network.hosts > 1 and coding.kind not in ("plain", "joint"):
        members, own = network.hosts, numel / s
        collective = collective_of(coding, message / s, members)
        slices = slices_of(coding, collective, own, members)
        found = hierarchical(network, message, 4 * numel, collective, cold, slices)
        # Each owner adds up its shard of the node, and hands the result round.
        adding = numel / network.inside * 4 * 2 * (s - 1) / s
    else:
        members, own, adding = p, numel, 0.0
        collective = collective_of(coding, message, members)
        slices = slices_of(coding, collective, own, members)
        found = _flat(collective, coding, network, message, cold, slices)
    encode, between, decode = codec_seconds(coding, collective, own, members)
    return _cost(coding.exchange, encode, found, between, decode, slices, adding)


def _flat(
    collective: str, coding: Coding, network: Interconnect, message: float, cold: bool, slices: int
) -> Moved:
    if slices > 1:
        return streamed(collective, network, message, slices, cold)
    if collective == "joint":
        return joint(network, message, cold, coding.first)
    return COLLECTIVES_COSTS[collective](network, message, cold)


def _cost(
    exchange: float,
    encode: float,
    found: Moved,
    between: float,
    decode: float,
    slices: int = 1,
    adding: float = 0.0,
) -> ExchangeCost:
    """Put together what an exchange takes.

    Args:
        exchange: seconds of software around it.
        adding: seconds of sums inside of hosts, which go in one.
    """
    # Of slices the first is encoded before anything moves, and the last summed when all has come;
    # the others beside what moves, if that takes as long.
    first, last = encode / slices, between / slices
    beside = found.waits + (encode - first) + between
    moving = max(found.seconds + last, beside if slices > 1 else 0.0) + adding
    codec = exchange + encode + between + adding
    return ExchangeCost(
        exchange + first,
        moving,
        moving - found.seconds,
        decode,
        found.sent,
        found.egress,
        codec + decode + found.work,
        found.rounds,
        codec,
        found.trips,
    )


def codec_seconds(coding: Coding, collective: str, n: float, p: int) -> tuple[float, float, float]:
    """Seconds of one rank: before data moves, in the middle, after it."""
    if collective == "plain":
        return 0.0, 0.0, 0.0
    encode, decode = coding.call + coding.encode * n, coding.call + coding.decode * n
    if collective in ("summable", "joint"):
        return encode, 0.0, decode
    if collective == "gather":
        return encode, 0.0, decode + (p - 1) * (coding.call + coding.add * n)
    # Of its own shard a rank adds up what the others sent, and encodes the sum.
    shard = n / p
    between = (p - 1) * (coding.call + coding.add * shard) + coding.call + coding.encode * shard
    first = encode if collective == "sparse" else encode * (p - 1) / p
    return first, between, decode


# Steps


class StepCost(NamedTuple):
    """A step of training; seconds and bytes of one rank.

    Args:
        compute: without any communication.
        encode, network, decode: of all exchanges, hidden or not.
        hidden: of these, what goes on while the rank computes.
        seconds: the whole step.
        sent: bytes that a rank sends.
        egress: bytes that leave a host, per rank of it.
    """

    compute: float
    encode: float
    network: float
    decode: float
    hidden: float
    seconds: float
    sent: float
    egress: float

    @property
    def efficiency(self) -> float:
        """The share of a step that computes."""
        return self.compute / self.seconds if self.seconds else 1.0


class Due(NamedTuple):
    """An exchange of a step.

    Args:
        coding: how it is sent.
        numel: elements.
        ready: when its tensors are there, as a share of the step's computing.
    """

    coding: Coding
    numel: float
    ready: float


class ChannelSchedule:
    """Exchanges of one channel, in their order (`thinwire.collectives.order`).

    At most `AT_ONCE` are under way, from encoding to decoding, of which one at a time is encoded.
    One that waits already when another begins is released a round trip later: it moves beside
    those before it. Any other moves when they have moved. All share the link, but not the waiting
    for round trips. They are decoded in their order.

    Args:
        round_trip: after which ranks know what waits on all of them.
    """

    def __init__(self, round_trip: float) -> None:
        self._round_trip = round_trip
        self._prepared = self._moved = 0.0  # the last one, all of them
        self._link = 0.0  # when it is free
        # Of the last few. What was released by one that has ended is released when it is prepared.
        self._began = deque([-math.inf], AT_ONCE)
        self._ended = deque([0.0] * AT_ONCE, AT_ONCE)

    def add(self, arrived: float, cost: ExchangeCost) -> float:
        """When the next one has ended.

        Args:
            arrived: when it is there; not before the last one.
        """
        self._prepared = max(arrived, self._prepared, self._ended[0]) + cost.encode
        released = next((each for each in self._began if arrived <= each), math.inf)
        free = min(released + self._round_trip, self._moved)
        began = max(self._prepared, self._began[-1], free)
        self._link = max(self._link, began) + cost.moving - cost.trips
        moved = max(self._link, began + cost.moving)
        ended = max(moved, self._ended[-1]) + cost.decode
        self._moved = max(self._moved, moved)
        self._began.append(began)
        self._ended.append(ended)
        return ended


def overlapped_step(
    exchanges: Sequence[Due],
    network: Interconnect,
    compute: float,
    busy: float = 0.0,
    nodes: bool = False,
) -> StepCost:
    """A step whose exchanges begin while backward goes on, on one channel (`ChannelSchedule`).

    Plain all-reduces of gloo go two at a time: they share the link, but not the waiting for round
    trips.

    Args:
        compute: seconds of the step without communication.
        busy: of a second of codecs and software, what computing loses: 1 where both want the same
            cores, 0 where exchanges have cores of their own.
    """
    line, late, work = ChannelSchedule(network.round_trip), 0.0, 0.0
    # Of plain ones: the last has ended, the last but one has, the link is free.
    ended = before = link = last = 0.0
    encode = moving = decode = sent = egress = 0.0
    known: dict[tuple[Coding, float, bool], ExchangeCost] = {}  # most buckets are alike
    for number, (coding, numel, ready) in enumerate(exchanges):
        cold = number == 0 and compute > IDLE
        cost = known.get((coding, numel, cold))
        if cost is None:
            cost = exchange_cost(coding, numel, network, nodes, cold)
            known[coding, numel, cold] = cost
        arrived = ready * compute + late
        if coding.kind == "plain":
            began, before = max(arrived, before), ended
            link = max(link, began) + cost.moving - cost.trips
            ended = max(link, began + cost.moving)
            last = max(last, ended)
        else:
            last = max(last, line.add(arrived, cost))
        late += busy * cost.encode
        work += cost.work
        encode += cost.codec
        moving += cost.network
        decode += cost.decode
        sent += cost.sent
        egress += cost.egress
    # Whatever hides behind what: cores have all of this to do.
    seconds = max(compute + busy * work, last)
    hidden = _hidden(encode + moving + decode, seconds - compute)
    return StepCost(compute, encode, moving, decode, hidden, seconds, sent, egress)


def _hidden(talking: float, waiting: float) -> float:
    """Seconds of exchanges that nobody waits for."""
    found = talking - waiting
    return found if found > ROUNDING else 0.0


def waiting_step(
    gathers: Sequence[Due], scatters: Sequence[Due], network: Interconnect, compute: float
) -> StepCost:
    """A step that waits for each of its exchanges: FSDP on gloo.

    Args:
        gathers: parameters that are gathered, before forward and before backward.
        scatters: gradients that are summed, each rank's own row of them.
    """
    encode = moving = decode = sent = egress = 0.0
    found = [gather_rows(network, coding, numel) for coding, numel, _ in gathers]
    found += [scatter_rows(network, coding, numel) for coding, numel, _ in scatters]
    for cost in found:
        encode += cost.codec
        moving += cost.network
        decode += cost.decode
        sent += cost.sent
        egress += cost.egress
    seconds = compute + sum(cost.seconds for cost in found)
    hidden = _hidden(encode + moving + decode, seconds - compute)
    return StepCost(compute, encode, moving, decode, hidden, seconds, sent, egress)


def gather_rows(network: Interconnect, coding: Coding, numel: float) -> ExchangeCost:
    """An all-gather of a tensor of which each rank has a row; a "plain" one is FSDP's own."""
    p = network.ranks
    if p == 1:
        return NO_EXCHANGE
    row = coding.frame * numel / p
    if coding.kind == "plain":
        return _cost(coding.exchange, 0.0, ring(network, p - 1, row), 0.0, 0.0)
    slices = slices_of(coding, "gather", numel / p, p)
    found = _in_one_or_slices("gather", gather, network, row, slices)
    encode = coding.call + coding.encode * numel / p
    decode = coding.call + coding.decode * numel
    return _cost(coding.exchange, encode, found, 0.0, decode, slices)


def _in_one_or_slices(
    name: str,
    whole: Callable[[Interconnect, float], Moved],
    network: Interconnect,
    message: float,
    slices: int,
) -> Moved:
    return streamed(name, network, message, slices) if slices > 1 else whole(network, message)


def scatter_rows(network: Interconnect, coding: Coding, numel: float) -> ExchangeCost:
    """A reduce-scatter: each rank gets the sum of its row. gloo has none, and all-reduces; NCCL's
    goes around a ring."""
    p, message = network.ranks, coding.frame * numel
    if p == 1:
        return NO_EXCHANGE
    if coding.kind == "plain":
        one = ring(network, p - 1, message / p) if network.trees else plain_sum(network, message)
        return _cost(coding.exchange, 0.0, one, 0.0, 0.0)
    slices = slices_of(coding, "swap", numel, p)
    found = _in_one_or_slices("swap", swap, network, message, slices)
    encode = (coding.call + coding.encode * numel) * (p - 1) / p
    decode = (p - 1) * (coding.call + coding.add * numel / p)
    return _cost(coding.exchange, encode, found, 0.0, decode, slices)


def local_step(
    exchanges: Sequence[Due],
    network: Interconnect,
    compute: float,
    every: int,
    fragments: int = 1,
    overlap: int = 0,
    nodes: bool = False,
) -> StepCost:
    """The mean over a round of local steps.

    Each of `fragments` parts is exchanged once in `every` steps, while `overlap` steps go on. All
    exchanges of a fragment are there at once.

    Args:
        exchanges: of one fragment.
    """
    encode = moving = decode = sent = egress = ended = 0.0
    line = ChannelSchedule(network.round_trip)
    for coding, numel, _ in exchanges:
        cost = exchange_cost(coding, numel, network, nodes, compute > IDLE)
        ended = line.add(0.0, cost)
        encode += cost.codec
        moving += cost.network
        decode += cost.decode
        sent += cost.sent
        egress += cost.egress
    waiting = max(0.0, ended - overlap * compute)
    share = fragments / every
    return StepCost(
        compute,
        share * encode,
        share * moving,
        share * decode,
        share * _hidden(encode + moving + decode, waiting),
        compute + share * waiting,
        share * sent,
        share * egress,
    )
