"""What an exchange costs: rounds, bytes on each link, seconds. Pure functions of numbers.

Nothing here measures, talks, or knows a compressor: whoever asks brings its numbers (`Coding`). So
a policy can ask in the middle of a training, `thinwire plan` before it, and a page in a browser,
which has the same functions in JavaScript (report/templates/plan.js, kept equal by a test).

A round costs `start` seconds of software, `peer` seconds for each message of a rank, a round trip
and its bytes at the narrowest place. That it is a round trip and not one way is gloo's doing: a
message leaves when its receiver has said that it is ready, and both sides begin at the same time.
Measured: 1.03 to 1.15 round trips for each (benchmarks/records/wan-2026-11-17.json).

    meeting     a record from each rank straight to each, short messages along with it
    direct      a message from each rank straight to each
    ring        P - 1 hops (all-gather) or 2 (P - 1) hops (all-reduce) between neighbours; gloo
                sends chunks in halves, so that one waits while the other moves

Exchanges of one channel go one after the other, while the next one is prepared (decision 24).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from thinwire.collectives.choose import SMALL, TWICE, moved
from thinwire.collectives.message import ALIGNMENT
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
# Seconds more per round where more ranks than cores wait for each other (the same measurement).
SCHEDULING = 500e-6
# Bytes per second between ranks of one host: gloo's all-reduce of 16 MB between two of them there.
INSIDE = 0.9e9
# Of a link's rate, what connections to several hosts reach that meet others at both of their ends.
# gloo's all-to-all of 16 to 200 kB per pair at 10 and 100 Mbit/s in a lab: 1.0 between 2 hosts,
# 0.65 to 0.90 (median 0.72) among 4 and 8, 0.65 in training; rings 0.92 to 1.0 where bytes count.
CROWDED = 0.65
# The same of the link between racks: quantize:4 by two-shot over two racks of 2 and of 4 hosts
# reached 0.74 and 0.87 of 20 Mbit/s (benchmarks/records/hierarchical-*2026-11-16.json).
CROWDED_UPLINK = 0.80
# Forward takes a third of a step: backward multiplies each matrix twice.
FORWARD = 1 / 3


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
    """

    seconds: float = 0.0
    sent: float = 0.0
    egress: float = 0.0
    work: float = 0.0
    rounds: int = 0

    def then(self, other: "Moved") -> "Moved":
        """Both, one after the other."""
        return Moved(
            self.seconds + other.seconds,
            self.sent + other.sent,
            self.egress + other.egress,
            self.work + other.work,
            self.rounds + other.rounds,
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


def direct(network: Interconnect, message: float, cold: bool = False) -> Moved:
    """A message of so many bytes from each rank straight to each other one."""
    p, h = network.ranks, network.ranks_per_host
    if p == 1:
        return Moved()
    out = h * (p - h) * message  # through a host's link
    in_rack = p // network.racks
    up = in_rack * (p - in_rack) * message  # through a rack's
    rate = network.rate * (CROWDED if network.hosts > 2 else 1.0)
    together = p * (p - 1) * message / network.together
    seconds = max(
        FRAMING * out / rate,
        FRAMING * up / (CROWDED_UPLINK * network.uplink) if network.racks > 1 else 0.0,
        (h - 1) * message / network.inside,
        together,
    )
    software = network.start + (p - 1) * network.peer
    waits = software + network.round_trip
    if cold and network.hosts > 1:
        waits += slow_start(message, network.rate / (h * (p - h)), network.round_trip)
    return Moved(waits + seconds, (p - 1) * message, out / h, software + together, 1)


def ring(network: Interconnect, hops: int, chunk: float, cold: bool = False) -> Moved:
    """So many hops, in each of which every rank sends a chunk to its neighbour.

    Ranks of a host follow each other, so one of them sends over the host's link.
    """
    if network.ranks == 1:
        return Moved()
    together = network.ranks * chunk / network.together
    seconds = max(
        FRAMING * chunk / network.rate if network.hosts > 1 else 0.0,
        FRAMING * chunk / network.uplink if network.racks > 1 else 0.0,
        chunk / network.inside if network.ranks_per_host > 1 else 0.0,
        together,
    )
    software = network.start + network.peer
    # Between two ranks both halves go the same way, and wait for each other.
    half = seconds if network.ranks == 2 else seconds / 2
    waits = hops * (software + max(0.0, network.round_trip + half - seconds))
    if cold and network.hosts > 1:
        waits += slow_start(hops * chunk, network.rate, network.round_trip)
    out = hops * chunk / network.ranks_per_host if network.hosts > 1 else 0.0
    work = hops * (software + together)
    return Moved(waits + hops * seconds, hops * chunk, out, work, hops)


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
    return direct(network, record_bytes(network.ranks) + along, cold)


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
    waits = 2 * levels * (network.start + network.round_trip / 2)
    seconds = waits + FRAMING * sent / slowest
    egress = sent / network.ranks_per_host
    return Moved(seconds, sent, egress, 2 * levels * network.start, 2 * levels)


def summable(network: Interconnect, message: float, cold: bool = False) -> Moved:
    p = network.ranks
    if (p - 1) * message <= MOST_SUMMED:
        return meeting(network, message, cold)
    return meeting(network).then(plain_sum(network, message, cold))


def gather(network: Interconnect, message: float, cold: bool = False) -> Moved:
    if message <= room_of(network.ranks):
        return meeting(network, message, cold)
    hops = network.ranks - 1
    return meeting(network).then(ring(network, hops, aligned_bytes(message), cold))


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


def joint(network: Interconnect, message: float, cold: bool = False, first: float = 0.5) -> Moved:
    """Two sums; `first` is the share of the first of them."""
    left = summable(network, first * message, cold)
    return left.then(summable(network, (1 - first) * message))


def hierarchical(
    network: Interconnect, message: float, inner: float, flat: str, cold: bool = False
) -> Moved:
    """Sums inside of hosts, a flat collective between the owners of each shard, results inside.

    Args:
        message: of the whole tensor between hosts.
        inner: of the whole tensor inside.
        flat: the collective between hosts.
    """
    s = network.ranks_per_host
    own = network._replace(hosts=1, delay=0.0, uplink_delay=0.0, racks=1, together=math.inf)
    inside = direct(own, inner / s) if s > 1 else Moved()
    # The owners on a host share its link, each with a ring of its own.
    share = network._replace(
        ranks_per_host=1, rate=network.rate / s, uplink=network.uplink / s, inside=math.inf
    )
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
    """

    kind: str
    frame: float = 4.0
    call: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    add: float = 0.0
    exchange: float = 0.0
    first: float = 0.5


class ExchangeCost(NamedTuple):
    """One exchange: encoding before it, moving with the codec's work in between, decoding."""

    encode: float
    moving: float
    between: float  # of `moving`: summing and encoding a second time
    decode: float
    sent: float
    egress: float
    work: float  # seconds of a core: codecs and software
    rounds: int


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
        return ExchangeCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    if nodes and s > 1 and network.hosts > 1 and coding.kind not in ("plain", "joint"):
        members, share = network.hosts, 1 / s
        collective = collective_of(coding, coding.frame * numel * share, members)
        found = hierarchical(network, coding.frame * numel, 4 * numel, collective, cold)
        # Each owner adds up its shard of the node, and hands the result round.
        adding = numel / network.inside * 4 * 2 * (s - 1) / s
    else:
        members, share, adding = p, 1.0, 0.0
        collective = collective_of(coding, coding.frame * numel, members)
        found = _flat(collective, coding, network, coding.frame * numel, cold)
    own = numel * share
    encode, between, decode = codec_seconds(coding, collective, own, members)
    return _cost(coding.exchange + encode, found, between + adding, decode)


def _flat(
    collective: str, coding: Coding, network: Interconnect, message: float, cold: bool
) -> Moved:
    if collective == "joint":
        return joint(network, message, cold, coding.first)
    return COLLECTIVES_COSTS[collective](network, message, cold)


def _cost(encode: float, found: Moved, between: float, decode: float) -> ExchangeCost:
    return ExchangeCost(
        encode,
        found.seconds + between,
        between,
        decode,
        found.sent,
        found.egress,
        encode + between + decode + found.work,
        found.rounds,
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


def overlapped_step(
    exchanges: Sequence[Due],
    network: Interconnect,
    compute: float,
    busy: float = 0.0,
    nodes: bool = False,
) -> StepCost:
    """A step whose exchanges begin while backward goes on, one after the other on one channel.

    While one moves its data the next is encoded, no more than one ahead. Plain all-reduces of gloo
    go two at a time: they share the link, but not the waiting for round trips.

    Args:
        compute: seconds of the step without communication.
        busy: of a second of codecs and software, what computing loses: 1 where both want the same
            cores, 0 where exchanges have cores of their own.
    """
    prepared = ended = began = late = work = 0.0
    before = link = last = 0.0  # of plain ones: the last but one has ended, the link is free
    encode = moving = decode = sent = egress = 0.0
    for number, (coding, numel, ready) in enumerate(exchanges):
        cold = number == 0 and compute > IDLE
        cost = exchange_cost(coding, numel, network, nodes, cold)
        arrived = ready * compute + late
        if coding.kind == "plain":
            waits = min(cost.moving, cost.rounds * network.round_trip)
            began, before = max(arrived, before), ended
            link = max(link, began) + cost.moving - waits
            ended = max(link, began + cost.moving)
        else:
            # The preparer is free when the exchange before has begun to move.
            prepared = max(arrived, began) + cost.encode
            began = max(prepared, ended)
            ended = began + cost.moving + cost.decode
        last = max(last, ended)
        late += busy * cost.encode
        work += cost.work
        encode += cost.encode + cost.between
        moving += cost.moving - cost.between
        decode += cost.decode
        sent += cost.sent
        egress += cost.egress
    # Whatever hides behind what: cores have all of this to do.
    seconds = max(compute + busy * work, last)
    talking = encode + moving + decode
    hidden = max(0.0, talking - (seconds - compute))
    return StepCost(compute, encode, moving, decode, hidden, seconds, sent, egress)


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
        encode += cost.encode
        moving += cost.moving
        decode += cost.decode
        sent += cost.sent
        egress += cost.egress
    seconds = compute + encode + moving + decode
    return StepCost(compute, encode, moving, decode, 0.0, seconds, sent, egress)


def gather_rows(network: Interconnect, coding: Coding, numel: float) -> ExchangeCost:
    """An all-gather of a tensor of which each rank has a row; a "plain" one is FSDP's own."""
    p = network.ranks
    row = coding.frame * numel / p
    if coding.kind == "plain":
        found = ring(network, p - 1, row)
        return _cost(0.0, found, 0.0, 0.0)
    found = gather(network, row) if p > 1 else Moved()
    encode = coding.exchange + coding.call + coding.encode * numel / p
    decode = coding.call + coding.decode * numel
    return _cost(encode, found, 0.0, decode)


def scatter_rows(network: Interconnect, coding: Coding, numel: float) -> ExchangeCost:
    """A reduce-scatter: each rank gets the sum of its row. gloo has none, and all-reduces."""
    p = network.ranks
    if coding.kind == "plain":
        found = plain_sum(network, coding.frame * numel)
        return _cost(0.0, found, 0.0, 0.0)
    found = swap(network, coding.frame * numel) if p > 1 else Moved()
    encode = coding.exchange + (coding.call + coding.encode * numel) * (p - 1) / p
    decode = (p - 1) * (coding.call + coding.add * numel / p)
    return _cost(encode, found, 0.0, decode)


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

    Each of `fragments` parts is exchanged once in `every` steps, while `overlap` steps go on.

    Args:
        exchanges: of one fragment.
    """
    encode = moving = decode = sent = egress = 0.0
    for coding, numel, _ in exchanges:
        cost = exchange_cost(coding, numel, network, nodes, compute > IDLE)
        encode += cost.encode + cost.between
        moving += cost.moving - cost.between
        decode += cost.decode
        sent += cost.sent
        egress += cost.egress
    talking = encode + moving + decode
    waiting = max(0.0, talking - overlap * compute)
    share = fragments / every
    return StepCost(
        compute,
        share * encode,
        share * moving,
        share * decode,
        share * (talking - waiting),
        compute + share * waiting,
        share * sent,
        share * egress,
    )
