"""The process that carries the packets of a lab with distance: `... lab.forwarder <parent>`.

Where links have delay, jitter or loss, a host's end of its link is a TAP device (`distance`), and
this process is the rest of the link, the switches and the uplinks: it reads what hosts send, keeps
each packet for as long as its way takes, and writes it to the device of its receiver. It holds no
namespace and knows no kernel interface but files, a clock and `select`.

A packet's way is a list of hops, one direction of a link each: out of the sender (its rate is kept
by a token bucket of the kernel before we see the packet), out of the sender's rack and into the
receiver's where these differ, into the receiver. Each hop says when the packet is through. Nothing
is ever early: a packet goes on when the clock has reached that time, and from then on hops reckon
with the time at which it was due, so that being late does not add up.

The kernel hands over what TCP writes in one piece of up to a millisecond's worth, with the note of
how to cut it, and takes it in the same form at the other end: that is what makes Python fast enough
(docs/decisions/0022-distance.md).

The first line on standard input is the plan, the following are requests; an answer, one line, goes
to standard output for each. When the input ends or the process <parent> does, this one ends.
"""

import contextlib
import gc
import heapq
import json
import math
import os
import random
import select
import sys
import time
from collections.abc import Iterable
from typing import Any

from thinwire.lab.enter import die_with
from thinwire.lab.topology import NETWORK, LinkSettings

NOTE_BYTES = 10  # struct virtio_net_hdr: how to cut the packet and where its checksum goes
_LONGEST = NOTE_BYTES + 14 + 2**16
_IPV4 = NOTE_BYTES + 14  # where its header begins
_TO = slice(_IPV4 + 16, _IPV4 + 20)  # the address of the receiver
LATE_SECONDS = 0.005  # from here on, `Lateness` counts a packet as late
_MULTICAST = bytes([224])  # addresses from here on are of many or of all
_AT_ONCE = 32  # packets read from one host before others have their turn


def losses_of(seed: int, link: str) -> random.Random:
    """What decides which packets a link loses: the n-th if the n-th `random()` is below its loss.

    Links are "host 0" and so on, and "rack 0" and so on.
    """
    return random.Random(f"{seed} {link} loss")


def jitters_of(seed: int, link: str) -> random.Random:
    """What decides how long packets take: of the n-th that is not lost, the n-th `random()`.

    So much of the jitter is added to the delay.
    """
    return random.Random(f"{seed} {link} jitter")


class Hop:
    """One direction of a link: a rate with its queue, then the distance.

    Args:
        link: the settings of the link.
        shaped: whether the rate is to be kept here.
        distant: whether the delay, jitter and loss of the link are in this direction.
        seed, name: of the draws.
    """

    def __init__(
        self, link: LinkSettings, *, shaped: bool, distant: bool, seed: int = 0, name: str = ""
    ) -> None:
        self._shaped, self._distant = shaped, distant
        self._losses, self._jitters = losses_of(seed, name), jitters_of(seed, name)
        self._free = self._arrival = 0.0
        self.sent_bytes = self.sent_packets = 0
        self.arrived_bytes = self.arrived_packets = self.dropped_packets = 0
        self.set(link)

    def set(self, link: LinkSettings) -> None:
        """From now on, be a part of such a link."""
        self._byte_seconds = 8 / link.rate_bits if self._shaped else 0.0
        self._burst_seconds = link.burst_bytes * self._byte_seconds
        self._queue_seconds = link.queue_bytes * self._byte_seconds if self._shaped else math.inf
        self._delay = link.delay_seconds if self._distant else 0.0
        self._jitter = link.jitter_seconds if self._distant else 0.0
        self._loss = link.loss if self._distant else 0.0

    def take(self, now: float, num_bytes: int, packets: int) -> float | None:
        """When what comes now is through; None if it is dropped. Nothing overtakes another."""
        # A token bucket by its time of emptiness: tokens of a pause are kept up to the burst.
        free = max(self._free, now - self._burst_seconds)
        if free - now > self._queue_seconds:
            self.dropped_packets += packets
            return None
        self._free = free = free + num_bytes * self._byte_seconds
        self.sent_bytes += num_bytes
        self.sent_packets += packets
        if self._loss and self._losses.random() < self._loss:
            self.dropped_packets += packets
            return None
        self.arrived_bytes += num_bytes
        self.arrived_packets += packets
        through = max(free, now) + self._delay
        if self._jitter:
            through += self._jitter * self._jitters.random()
        self._arrival = max(through, self._arrival)
        return self._arrival


Way = tuple[Hop, ...]


class Fabric:
    """All hops of a lab, and which of them lie between two hosts."""

    def __init__(
        self,
        links: list[LinkSettings],
        racks: list[int],
        inter: LinkSettings | None,
        seed: int,
    ) -> None:
        self._racks = racks
        self.outs = [
            Hop(link, shaped=False, distant=True, seed=seed, name=f"host {host}")
            for host, link in enumerate(links)
        ]
        self.ins = [Hop(link, shaped=True, distant=False) for link in links]
        number = max(racks) + 1
        self.rack_outs: list[Hop] = []
        self.rack_ins: list[Hop] = []
        if inter is not None:
            self.rack_outs = [
                Hop(inter, shaped=True, distant=True, seed=seed, name=f"rack {rack}")
                for rack in range(number)
            ]
            # Two racks share one link: what is the way out of one is the way into the other.
            self.rack_ins = (
                self.rack_outs[::-1]
                if number == 2
                else [Hop(inter, shaped=True, distant=False) for _ in range(number)]
            )

    def way(self, source: int, target: int) -> Way:
        """What lies between the sender's own link and the receiver, the latter's link included."""
        here, there = self._racks[source], self._racks[target]
        if here == there:
            return (self.ins[target],)
        between = dict.fromkeys((self.rack_outs[here], self.rack_ins[there]))
        return (*between, self.ins[target])

    def set_link(self, host: int, link: LinkSettings) -> None:
        self.outs[host].set(link)
        self.ins[host].set(link)

    def set_inter(self, link: LinkSettings) -> None:
        for hop in (*self.rack_outs, *self.rack_ins):
            hop.set(link)

    def counters(self) -> list[dict[str, int]]:
        return [_counters(out, into) for out, into in zip(self.outs, self.ins, strict=True)]

    def inter_counters(self) -> list[dict[str, int]]:
        return [
            _counters(out, into) for out, into in zip(self.rack_outs, self.rack_ins, strict=True)
        ]


def _counters(out: Hop, into: Hop) -> dict[str, int]:
    return {
        "sent_bytes": out.sent_bytes,
        "sent_packets": out.sent_packets,
        "received_bytes": into.arrived_bytes,
        "received_packets": into.arrived_packets,
        "dropped_packets": out.dropped_packets + into.dropped_packets,
    }


class PacketBatch:
    """What was read at once, a packet or what the kernel will cut into several, on its way."""

    __slots__ = ("data", "num_bytes", "packets", "passed", "target", "way")

    def __init__(self, data: bytes, size: tuple[int, int], target: int, way: Way) -> None:
        self.data, self.target, self.way = data, target, way
        self.num_bytes, self.packets = size
        self.passed = 0  # hops of the way


class Forwarder:
    """Moves packets between the devices of hosts.

    Args:
        files: of the devices, in the order of the hosts.
        fabric: what lies between them.
    """

    def __init__(self, files: list[int], fabric: Fabric) -> None:
        self._files, self.fabric = files, fabric
        self._host_of = {file: host for host, file in enumerate(files)}
        self._number_of = {NETWORK[host + 1].packed: host for host in range(len(files))}
        self._ways: dict[tuple[int, int], Way] = {}
        # When each is due; the number keeps those of one time in order.
        self._under_way: list[tuple[float, int, PacketBatch]] = []
        self._added = 0
        self._delivered, self._late, self._late_seconds = 0, 0, 0.0

    def lateness(self) -> dict[str, float]:
        """How much later than due batches were delivered."""
        number = max(1, self._delivered)
        return {"mean_seconds": self._late_seconds / number, "late_share": self._late / number}

    def deliver(self, now: float) -> float | None:
        """Move on all that is due; seconds until something is again, None if nothing is there."""
        while self._under_way:
            due, _, batch = self._under_way[0]
            if due > now:
                return due - now
            heapq.heappop(self._under_way)
            if batch.passed < len(batch.way):
                through = batch.way[batch.passed].take(due, batch.num_bytes, batch.packets)
                batch.passed += 1
                if through is not None:
                    self._add(through, batch)
                continue
            late = time.monotonic() - due
            self._delivered += 1
            self._late_seconds += late
            self._late += late > LATE_SECONDS
            try:
                os.write(self._files[batch.target], batch.data)
            except OSError:  # the host has turned its interface off: an unplugged cable
                self.fabric.ins[batch.target].dropped_packets += batch.packets
        return None

    def receive(self, file: int) -> None:
        """Take what a host has sent."""
        source = self._host_of[file]
        for _ in range(_AT_ONCE):
            try:
                data = os.read(file, _LONGEST)
            except BlockingIOError:
                return
            size = on_the_wire(data)
            due = self.fabric.outs[source].take(time.monotonic(), *size)
            if due is not None:
                for target in self._targets(source, data):
                    self._add(due, PacketBatch(data, size, target, self._way(source, target)))

    def _targets(self, source: int, data: bytes) -> Iterable[int]:
        address = data[_TO]
        target = self._number_of.get(address)
        if target is not None:
            return (target,)
        if address[:1] >= _MULTICAST or address == NETWORK.broadcast_address.packed:
            return [host for host in range(len(self._files)) if host != source]
        return ()

    def _way(self, source: int, target: int) -> Way:
        way = self._ways.get((source, target))
        if way is None:
            way = self._ways[source, target] = self.fabric.way(source, target)
        return way

    def _add(self, due: float, batch: PacketBatch) -> None:
        self._added += 1
        heapq.heappush(self._under_way, (due, self._added, batch))


def on_the_wire(packet: bytes) -> tuple[int, int]:
    """Bytes and packets that the kernel's piece would be on a cable, each with its headers."""
    num_bytes = len(packet) - NOTE_BYTES
    if not packet[1] & 0x7F:  # the note asks for no cuts
        return num_bytes, 1
    size = int.from_bytes(packet[4:6], sys.byteorder)
    ip = 4 * (packet[_IPV4] & 15)
    headers = 14 + ip + 4 * (packet[_IPV4 + ip + 12] >> 4)
    packets = max(1, math.ceil((num_bytes - headers) / size))
    return num_bytes + (packets - 1) * headers, packets


def main(parent: int) -> None:
    die_with(parent)
    # Before all that computes: with both of two cores busy elsewhere, packets were 0.2 ms late so,
    # 1 ms as a process of niceness -10. Not permitted to an ordinary user.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()  # nothing here refers to itself in a circle
    received = b""
    while b"\n" not in received:
        chunk = os.read(0, 2**16)
        if not chunk:
            return
        received += chunk
    line, _, received = received.partition(b"\n")
    plan = json.loads(line)
    fabric = Fabric(
        [LinkSettings(**link) for link in plan["links"]],
        plan["racks"],
        plan["inter"] and LinkSettings(**plan["inter"]),
        plan["seed"],
    )
    forwarder = Forwarder(plan["files"], fabric)
    _answer(None)
    files = [0, *plan["files"]]
    while True:
        wait = forwarder.deliver(time.monotonic())
        ready, _, _ = select.select(files, [], [], wait)
        for file in ready:
            if file:
                forwarder.receive(file)
                continue
            chunk = os.read(0, 2**16)
            if not chunk:
                return
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                _answer(_do(forwarder, json.loads(line)))


def _do(forwarder: Forwarder, request: dict[str, Any]) -> object:
    fabric = forwarder.fabric
    match request:
        case {"do": "set_link", "host": host, "link": link}:
            fabric.set_link(host, LinkSettings(**link))
            return None
        case {"do": "set_inter", "link": link}:
            fabric.set_inter(LinkSettings(**link))
            return None
        case {"do": "counters"}:
            return fabric.counters()
        case {"do": "inter_counters"}:
            return fabric.inter_counters()
        case {"do": "lateness"}:
            return forwarder.lateness()
    raise AssertionError(f"unknown request {request}")


def _answer(value: object) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
