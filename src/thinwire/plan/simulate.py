"""Steps of up to 10,000 ranks, event by event: stragglers, uneven links, racks, regions.

The formulas of `thinwire.collectives.costs` take all ranks for equal. Here each has its own links,
its own speed and its own place. A link serves messages one after the other, in the order in which
they come; a message goes on to its next link as soon as it begins to leave the last (cut-through),
and has arrived when its end has passed all of them. `events.py` does that.

    ring        t[j] <- max(t[j - 1], t[j]) + what the hop from j - 1 to j takes
    direct      a message from each rank to each, through its link, its rack's and its region's; of
                more than `EXACT` ranks what goes the same way goes as one
    tree        up to the root and down again, `FANOUT` children each
    grouped     to the first rank of each rack, a ring among these, and back
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.collectives.costs import (
    FRAMING,
    MEETING,
    PEER,
    RINGS,
    SLICES_AT_ONCE,
    START,
    Coding,
    Due,
    aligned_bytes,
    codec_seconds,
    collective_of,
    held_up,
    record_bytes,
    room_of,
    slices_of,
)
from thinwire.collectives.order import AT_ONCE
from thinwire.plan.events import pass_links, turn_ring

Times = NDArray[np.float64]
EXACT = 64  # ranks up to which each message of `direct` is simulated by itself
FANOUT = 4  # children of a rank in a tree
COLLECTIVES = ("plain", "auto", "gather", "twoshot", "tree", "grouped")
WITHOUT_MEETING = ("plain", "tree", "grouped")


@dataclass(frozen=True)
class World:
    """Ranks, their links and where they are; bytes per second and seconds.

    Args:
        up, down: of each rank's link.
        speed: seconds that each rank needs for a second of computing: 1, more for stragglers.
        rack: of each rank; ranks of a rack follow each other.
        rack_rate: of each rack's link to the others, in each direction.
        region: of each rack; racks of a region follow each other.
        region_rate: of each region's link to the others.
        delay: one way between ranks of a rack.
        rack_delay: one way on top between racks.
        region_delay: one way on top between regions, of each.
    """

    up: Times
    down: Times
    speed: Times
    rack: NDArray[np.int64]
    rack_rate: Times
    region: NDArray[np.int64]
    region_rate: Times
    delay: float = 0.0
    rack_delay: float = 0.0
    region_delay: Times = field(default_factory=lambda: np.zeros(1))
    start: float = START
    peer: float = PEER
    meeting: float = MEETING

    @property
    def ranks(self) -> int:
        return len(self.up)

    @property
    def racks(self) -> int:
        return len(self.rack_rate)

    @property
    def regions(self) -> int:
        return len(self.region_rate)

    @property
    def round_trip(self) -> float:
        """Between the ranks that are furthest from each other."""
        far = np.sort(self.region_delay)[-2:].sum() if self.regions > 1 else 0.0
        return float(2 * (self.delay + (self.rack_delay if self.racks > 1 else 0.0) + far))

    def one_way(self, sender: Any, receiver: Any) -> Times:
        """Delay from ranks to ranks."""
        a, b = self.rack[sender], self.rack[receiver]
        p, q = self.region[a], self.region[b]
        far = self.region_delay[p] + self.region_delay[q]
        found: Times = self.delay + np.where(a != b, self.rack_delay, 0.0)
        return found + np.where(p != q, far, 0.0)


def make_world(
    ranks: int,
    rate: float,
    *,
    delay: float = 0.0,
    ranks_per_rack: int | None = None,
    oversubscribed: float = 1.0,
    rack_delay: float = 0.0,
    regions: int = 1,
    region_rate: float = math.inf,
    region_delay: float = 0.0,
    uneven: float = 0.0,
    stragglers: float = 0.0,
    slowness: float = 2.0,
    download: float = 1.0,
    start: float = START,
    peer: float = PEER,
    seed: int = 0,
) -> World:
    """A world of equal parts, made uneven by chance.

    Args:
        rate: bytes per second of each rank.
        ranks_per_rack: all in one rack if None.
        oversubscribed: how many times the ranks of a rack could fill its link.
        region_delay: one way between two regions; each has its own share of it, from a half to
            three halves of the mean.
        uneven: standard deviation of the logarithm of rates.
        stragglers: share of ranks that compute `slowness` times as long.
        download: times the rate of uploads.
    """
    if ranks < 1 or regions < 1:
        raise ValueError(f"ranks and regions must be at least 1, got {ranks} and {regions}")
    per_rack = ranks if ranks_per_rack is None else ranks_per_rack
    random = np.random.default_rng(seed)
    racks = max(regions, math.ceil(ranks / per_rack))
    rack = np.arange(ranks) * racks // ranks
    region = np.arange(racks) * regions // racks
    up = rate * np.exp(uneven * random.standard_normal(ranks))
    slow = random.permutation(ranks) < round(stragglers * ranks)
    members = np.bincount(rack, minlength=racks)
    rack_rate = np.full(racks, math.inf)
    if racks > 1:
        rack_rate = members * rate / oversubscribed
    share = 0.5 * region_delay * random.uniform(0.5, 1.5, regions)
    return World(
        up=up,
        down=download * up,
        speed=np.where(slow, slowness, 1.0),
        rack=rack,
        rack_rate=rack_rate,
        region=region,
        region_rate=np.full(regions, region_rate),
        delay=delay,
        rack_delay=rack_delay,
        region_delay=share,
        start=start,
        peer=peer,
    )


class SimulatedRound(NamedTuple):
    """When each rank has gone through a part of an exchange, and what that took."""

    ended: Times
    sent: float  # bytes that a rank sends, at most
    events: int


# Parts


def ring_round(
    world: World, begin: Times, hops: int, chunk: float, slices: int = 1
) -> SimulatedRound:
    """Hops around a ring of all ranks, a round trip each, as gloo has it.

    Args:
        slices: that go around one behind the other: while one waits, another moves.
    """
    p = world.ranks
    if p == 1 or not hops:
        return SimulatedRound(begin, 0.0, 0)
    sender, receiver = np.arange(-1, p - 1) % p, np.arange(p)
    edge = np.minimum(world.up[sender], world.down[receiver])
    a, b = world.rack[sender], world.rack[receiver]
    edge = np.where(a != b, np.minimum(edge, np.minimum(world.rack_rate[a], world.rack_rate[b])),
                    edge)  # fmt: skip
    r, s = world.region[a], world.region[b]
    far = np.minimum(world.region_rate[r], world.region_rate[s])
    edge = np.where(r != s, np.minimum(edge, far), edge)
    bytes_seconds = FRAMING * chunk / (RINGS * edge)
    # A chunk goes in halves: one waits for its round trip while the other moves.
    half = bytes_seconds if p == 2 else bytes_seconds / 2
    trip, software = 2 * world.one_way(sender, receiver), world.start + world.peer
    one = software + trip + half / slices
    two = (slices - 1) * (software + trip) / SLICES_AT_ONCE
    hop = np.maximum(np.maximum(bytes_seconds, two), one)
    return SimulatedRound(turn_ring(begin, hop, hops), hops * chunk, hops * p)


def direct_round(world: World, begin: Times, message: float) -> SimulatedRound:
    """A message from each rank straight to each other one."""
    p = world.ranks
    if p == 1:
        return SimulatedRound(begin, 0.0, 0)
    # Everybody says that it is ready, and begins when the others have.
    ready = begin + world.start + (p - 1) * world.peer
    ended, events = (_each_message if p <= EXACT else _aggregated)(world, ready, message)
    return SimulatedRound(ended, (p - 1) * message, events)


def _links(world: World) -> tuple[Times, int, int, int]:
    """Rates of all links (up, down, racks up, racks down, regions up, regions down)."""
    p, racks, regions = world.ranks, world.racks, world.regions
    both = [world.up, world.down, world.rack_rate, world.rack_rate]
    rates = np.concatenate([*both, world.region_rate, world.region_rate]) / FRAMING
    return rates, p, racks, regions


def _each_message(world: World, ready: Times, message: float) -> tuple[Times, int]:
    rates, p, racks, regions = _links(world)
    sender, receiver = (each.ravel() for each in np.meshgrid(np.arange(p), np.arange(p)))
    # Each begins with the neighbour that follows it, as gloo does.
    order = np.argsort((receiver - sender) % p, kind="stable")
    sender, receiver = sender[order][p:], receiver[order][p:]
    a, b = world.rack[sender], world.rack[receiver]
    r, s = world.region[a], world.region[b]
    none = np.full(len(sender), -1)
    path = np.stack(
        [
            sender,
            np.where(a != b, 2 * p + a, none),
            np.where(r != s, 2 * p + 2 * racks + r, none),
            np.where(r != s, 2 * p + 2 * racks + regions + s, none),
            np.where(a != b, 2 * p + racks + b, none),
            p + receiver,
        ],
        axis=1,
    )
    sizes = np.full(path.shape, message)
    way = world.one_way(sender, receiver)
    # A message leaves when its receiver is known to be ready.
    release = np.maximum(ready[sender], ready[receiver] + way)
    _, tail = pass_links(release, np.zeros(len(sender)), path, sizes, rates)
    ended = ready.copy()
    np.maximum.at(ended, receiver, tail + way)
    return ended, path.size


def _aggregated(world: World, ready: Times, message: float) -> tuple[Times, int]:
    """What leaves a rank goes as one, what goes between racks or regions as one for each."""
    rates, p, racks, regions = _links(world)
    members = np.bincount(world.rack, minlength=racks)
    in_region = np.bincount(world.region[world.rack], minlength=regions)
    near = members[world.rack]
    # Messages that do not come in step hold each other up: each by itself shows it, as one they
    # would not.
    rates *= message / (message + held_up(p, message)) if message else 1.0
    # The last to be ready is waited for by all; how long its word takes differs.
    slowest = int(np.argmax(ready))
    waits = np.maximum(ready, ready[slowest] + world.one_way(slowest, np.arange(p)))
    leaves: Times = (p - near) * np.float64(message)
    path = np.stack([np.arange(p), np.where(leaves > 0, 2 * p + world.rack, -1)], axis=1)
    sizes = np.stack([np.full(p, (p - 1) * message), leaves], axis=1)
    head, tail = pass_links(waits, np.zeros(p), path, sizes, rates)
    events = path.size
    rack_head, rack_tail = _first_and_last(head, tail, world.rack, racks)
    # Out of regions, then into them.
    arrive_head, arrive_tail = rack_head, rack_tail
    outside: Times = (p - in_region) * in_region * np.float64(message)
    if regions > 1:
        region_head, region_tail = _first_and_last(rack_head, rack_tail, world.region, regions)
        out = 2 * p + 2 * racks + np.arange(regions)
        path, sizes = out[:, None], outside[:, None]
        gone_head, gone_tail = pass_links(region_head, region_tail, path, sizes, rates)
        delay = world.region_delay
        first, last = (gone_head + delay).min(), (gone_tail + delay).max()
        came = np.full(regions, first) + delay
        here_head, here_tail = pass_links(
            came, np.full(regions, last) + delay, path + regions, sizes, rates
        )
        events += 2 * regions
        arrive_head = np.minimum(rack_head, here_head[world.region])
        arrive_tail = np.maximum(rack_tail, here_tail[world.region])
    if racks > 1:
        into: Times = (p - members) * members * np.float64(message)
        path = (2 * p + racks + np.arange(racks))[:, None]
        first, last = arrive_head.min(), rack_tail.max()
        begin = np.full(racks, first) + world.rack_delay
        end = np.maximum(arrive_tail, last) + world.rack_delay
        arrive_head, arrive_tail = pass_links(begin, end, path, into[:, None], rates)
        events += racks
    path, sizes = (p + np.arange(p))[:, None], np.full((p, 1), (p - 1) * message)
    _, done = pass_links(
        arrive_head[world.rack] + world.delay,
        arrive_tail[world.rack] + world.delay,
        path,
        sizes,
        rates,
    )
    return np.maximum(done, ready), events + p


def _first_and_last(
    head: Times, tail: Times, group: NDArray[np.int64], count: int
) -> tuple[Times, Times]:
    first, last = np.full(count, math.inf), np.zeros(count)
    np.minimum.at(first, group, head)
    np.maximum.at(last, group, tail)
    return first, last


def meeting_round(world: World, begin: Times, along: float = 0.0) -> SimulatedRound:
    """Records of all ranks, straight from each to each."""
    if world.ranks == 1:
        return SimulatedRound(begin, 0.0, 0)
    return direct_round(world, begin + world.meeting, record_bytes(world.ranks) + along)


def tree_round(world: World, begin: Times, message: float, fanout: int = FANOUT) -> SimulatedRound:
    """Sums up a tree, the result down again; a parent's link serves one child after the other."""
    p = world.ranks
    ended, down = begin.copy(), begin.copy()
    levels = [np.arange(1)]
    while levels[-1][-1] < p - 1:
        low = levels[-1][-1] + 1
        levels.append(np.arange(low, min(p, fanout * levels[-1][-1] + fanout + 1)))
    for level in reversed(levels[1:]):
        parent = (level - 1) // fanout
        came = ended[level] + FRAMING * message / world.up[level] + _trip(world, level, parent)
        for child in range(fanout):  # each parent's children in their order
            mine = (level - 1) % fanout == child
            who, arrival = parent[mine], came[mine]
            service = FRAMING * message / world.down[who]
            ended[who] = np.maximum(np.maximum(ended[who] + service, arrival), ended[who])
    down[0] = ended[0]
    for level in levels[1:]:
        parent, turn = (level - 1) // fanout, (level - 1) % fanout
        sending = (turn + 1) * FRAMING * message / world.up[parent]
        down[level] = down[parent] + sending + _trip(world, parent, level)
    return SimulatedRound(np.maximum(down, begin), (fanout + 1) * message, 2 * p)


def _trip(world: World, sender: Any, receiver: Any) -> Times:
    return world.start + world.peer + 2 * world.one_way(sender, receiver)


def grouped_round(world: World, begin: Times, inner: float, outer: float) -> SimulatedRound:
    """Racks send to their first rank, these form a ring, and hand the result back.

    Args:
        inner: bytes of a message inside of a rack.
        outer: of the whole message between racks.
    """
    p, racks = world.ranks, world.racks
    leader = np.searchsorted(world.rack, np.arange(racks))
    own = leader[world.rack]
    members = np.bincount(world.rack, minlength=racks)
    way = world.start + world.peer + 2 * world.delay
    came = begin + FRAMING * inner / world.up + way
    ready = np.zeros(racks)
    np.maximum.at(ready, world.rack, came)
    # A leader's link takes one member after the other.
    first = np.full(racks, math.inf)
    np.minimum.at(first, world.rack, begin)
    ready = np.maximum(ready, first + (members - 1) * FRAMING * inner / world.down[leader] + way)
    sub = World(
        up=world.up[leader],
        down=world.down[leader],
        speed=world.speed[leader],
        rack=np.arange(racks),
        rack_rate=world.rack_rate,
        region=world.region,
        region_rate=world.region_rate,
        delay=world.delay,
        rack_delay=world.rack_delay,
        region_delay=world.region_delay,
        start=world.start,
        peer=world.peer,
    )
    between = ring_round(sub, ready, 2 * (racks - 1), outer / racks)
    back = (members[world.rack] - 1) * FRAMING * inner / world.up[own] + way
    ended = np.where(np.arange(p) == own, between.ended[world.rack], 0.0)
    ended = np.maximum(ended, between.ended[world.rack] + back)
    return SimulatedRound(ended, inner + between.sent, 2 * p + between.events)


# Exchanges


def exchange_round(
    world: World, begin: Times, coding: Coding, numel: float, collective: str
) -> SimulatedRound:
    """All that moves in an all-reduce of so many elements, from the moment each rank comes."""
    p, message = world.ranks, coding.frame * numel
    if p == 1:
        return SimulatedRound(begin, 0.0, 0)
    if collective == "auto":
        collective = collective_of(coding, message, p)
    if collective in ("plain", "summable"):
        meets = [] if collective == "plain" else [lambda t: meeting_round(world, t)]
        return _one_after_the_other(
            begin, [*meets, lambda t: ring_round(world, t, 2 * (p - 1), message / p)]
        )
    if collective == "tree":
        return tree_round(world, begin, message)
    if collective == "grouped":
        return grouped_round(world, begin, message, message)
    if collective == "joint":
        sums = [lambda t: ring_round(world, t, 2 * (p - 1), message / 2 / p)]
        return _one_after_the_other(begin, [lambda t: meeting_round(world, t), *sums] * 2)
    room, codec = room_of(p), codec_seconds(coding, collective, numel, p)[1]
    slices = slices_of(coding, collective, numel, p)
    if slices > 1:
        return _one_after_the_other(begin, _streamed(world, collective, message, slices, codec))
    if collective == "gather":
        return _one_after_the_other(begin, _gathering(world, message, room))
    shard = message / p
    swaps: list[Callable[[Times], SimulatedRound]]
    if shard <= room:
        swaps = [lambda t: meeting_round(world, t, shard)]
    else:
        swaps = [
            lambda t: meeting_round(world, t),
            lambda t: direct_round(world, t, aligned_bytes(shard)),
        ]
    if collective == "sparse" and message > room:
        swaps.insert(0, lambda t: meeting_round(world, t))

    def adding(t: Times) -> SimulatedRound:
        return SimulatedRound(t + codec * world.speed, 0.0, p)

    return _one_after_the_other(begin, [*swaps, adding, *_gathering(world, shard, room)])


def _gathering(
    world: World, message: float, room: float
) -> list[Callable[[Times], SimulatedRound]]:
    if message <= room:
        return [lambda t: meeting_round(world, t, message)]
    hops = world.ranks - 1
    return [
        lambda t: meeting_round(world, t),
        lambda t: ring_round(world, t, hops, aligned_bytes(message)),
    ]


def _streamed(
    world: World, collective: str, message: float, slices: int, codec: float
) -> list[Callable[[Times], SimulatedRound]]:
    """All meet once, then slices follow each other; the last one is summed when all has come.

    Args:
        codec: seconds of sums in the middle, of all slices.
    """
    p = world.ranks
    share = message if collective == "gather" else message / p
    if p == 2:
        gathers = [lambda t: direct_round(world, t, aligned_bytes(share))]
    else:
        gathers = [lambda t: ring_round(world, t, p - 1, aligned_bytes(share), slices)]
    if collective == "gather":
        return [lambda t: meeting_round(world, t), *gathers]

    def adding(t: Times) -> SimulatedRound:
        return SimulatedRound(t + codec / slices * world.speed, 0.0, p)

    return [
        lambda t: meeting_round(world, t),
        lambda t: direct_round(world, t, aligned_bytes(share)),
        adding,
        *gathers,
    ]


def _one_after_the_other(
    begin: Times, parts: Sequence[Callable[[Times], SimulatedRound]]
) -> SimulatedRound:
    sent, events = 0.0, 0
    for part in parts:
        begin, more, count = part(begin)
        sent, events = sent + more, events + count
    return SimulatedRound(begin, sent, events)


class SimulatedStep(NamedTuple):
    """A step of all ranks.

    Args:
        seconds: until the last rank has ended it.
        compute: that a rank computes, mean.
        waiting: share of the step that a rank does not compute, mean.
        sent: bytes of a rank.
        events: messages at links that this stands for.
    """

    seconds: float
    compute: float
    waiting: float
    sent: float
    events: int

    @property
    def efficiency(self) -> float:
        return self.compute / self.seconds


class _RankSchedule:
    """`thinwire.collectives.costs.ChannelSchedule` for ranks that differ.

    What waits on all ranks when another exchange begins is released a round trip after the last of
    them has begun that.
    """

    def __init__(self, world: World) -> None:
        zero = np.zeros(world.ranks)
        self._world = world
        self._prepared = self._began = self._moved = self._link = zero
        self._met: deque[Times] = deque(maxlen=AT_ONCE)  # when the last few with a meeting began
        self._ended = deque([zero] * AT_ONCE, AT_ONCE)

    def begin(self, arrived: Times, encode: float, meets: bool) -> Times:
        """When each rank begins to meet the others, or to move data."""
        waiting = np.maximum(arrived, np.maximum(self._prepared, self._ended[0]))
        self._prepared = waiting + encode * self._world.speed
        free = self._moved
        met = next((each for each in self._met if (arrived <= each).all()), None)
        if meets and met is not None:
            free = np.minimum(free, met.max() + self._world.round_trip)
        self._began = np.maximum(np.maximum(self._prepared, self._began), free)
        if meets:
            self._met.append(self._began)
        return self._began

    def end(self, moved: Times, data: Times | float, decode: float) -> Times:
        """When each rank has decoded what began last.

        Args:
            moved: when all would have come, with the links to itself.
            data: seconds that each rank's links are taken, without waiting for round trips.
        """
        together = self._began.max()
        self._link = np.maximum(self._link, together) + np.minimum(data, moved - together)
        own = np.maximum(self._link, moved)
        ended = np.maximum(own, self._ended[-1]) + decode * self._world.speed
        self._moved = np.maximum(self._moved, own)
        self._ended.append(ended)
        return ended


def simulate_step(
    world: World, exchanges: Sequence[Due], compute: float, collective: str = "auto"
) -> SimulatedStep:
    """A step of DDP on every rank: buckets as they get ready, a few exchanges under way at a time.

    Without meetings ranks do not know what waits on all of them: then exchanges move one after the
    other.

    Args:
        collective: one of `COLLECTIVES`; "plain" does without codecs and meetings.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {collective!r}")
    own = compute * world.speed
    zero = ended = np.zeros(world.ranks)
    near = replace(world, delay=0.0, rack_delay=0.0, region_delay=0 * world.region_delay)
    line, known = _RankSchedule(world), dict[tuple[Coding, float], Times]()
    sent, events = 0.0, 0
    for coding, numel, ready in exchanges:
        used = collective
        if coding.kind == "summable" and collective in ("gather", "twoshot"):
            used = "summable"
        algorithm = collective_of(coding, coding.frame * numel, world.ranks)
        if used in ("gather", "twoshot"):
            algorithm = used
        encode, _, decode = codec_seconds(coding, algorithm, numel, world.ranks)
        if used not in WITHOUT_MEETING:
            encode /= slices_of(coding, algorithm, numel, world.ranks)
        if used != "plain":
            encode += coding.exchange
        meets = used not in WITHOUT_MEETING and coding.kind != "plain"
        if meets and (coding, numel) not in known:  # most buckets are alike
            known[coding, numel] = exchange_round(near, zero, coding, numel, used).ended
        began = line.begin(ready * own, encode, meets)
        moved = exchange_round(world, began, coding, numel, used)
        ended = line.end(moved.ended, known.get((coding, numel), math.inf), decode)
        sent, events = sent + moved.sent, events + moved.events
    seconds = float(max(ended.max(), own.max()))
    mean = float(own.mean())
    return SimulatedStep(seconds, mean, 1 - mean / seconds, sent, events)
