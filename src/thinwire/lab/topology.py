"""What a lab is made of, as data: rates, distances, links, hosts and racks.

Everything that a user asks for is checked here; `network` builds it, in another process.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_network
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST, FASTEST = 10 * UNITS["kbit"], 10 * UNITS["gbit"]
# What a lab with distance was seen to reach on two busy cores (docs/guides/lab.md); with loss
# packets are carried one by one.
FASTEST_DISTANT, FASTEST_LOSSY = UNITS["gbit"], 200 * UNITS["mbit"]

TIME_UNITS = {"us": 10**6, "ms": 10**3, "s": 1}  # in a second
LONGEST_SECONDS = 5.0

_RATE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+)(?:/s)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+)", re.IGNORECASE)
_LOSS = re.compile(r"(\d+(?:\.\d+)?(?:e-\d+)?) *(%?)", re.IGNORECASE)

MOST_HOSTS = 250  # addresses of the one subnet, with some to spare
INTERFACE = "wire0"  # the name of each host's end of its link
NETWORK = ip_network("10.77.0.0/24")

# Both were measured, see docs/guides/lab.md.
BURST_SECONDS = 0.001
LEAST_BURST_BYTES = 5 * 1514
QUEUE_SECONDS = 0.05
LEAST_QUEUE_BYTES = 2**17


def parse_rate(rate: str) -> int:
    """Bits per second of a rate like "100mbit", "1.5 gbit" or "20mbit/s".

    Units are decimal, as network equipment has them, and always bits: "mbps" is refused because
    half of its readers take it for bytes.

    >>> parse_rate("100mbit")
    100000000
    """
    if not isinstance(rate, str):
        raise TypeError(f"a rate is text with its unit, like '100mbit', got {rate!r}")
    match = _RATE.fullmatch(rate.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"a rate is a number and one of {', '.join(UNITS)}, like '100mbit', got {rate!r}"
        )
    bits = round(float(match[1]) * unit)
    if not SLOWEST <= bits <= FASTEST:
        raise ValueError(f"a rate must be from 10kbit to 10gbit, got {rate!r}")
    return bits


def parse_time(time: str, what: str = "a time") -> float:
    """Seconds of a time like "30ms", "1.5 ms", "200us" or "1s".

    >>> parse_time("30ms")
    0.03
    """
    if not isinstance(time, str):
        raise TypeError(f"{what} is text with its unit, like '30ms', got {time!r}")
    match = _TIME.fullmatch(time.strip())
    unit = TIME_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        units = ", ".join(TIME_UNITS)
        raise ValueError(f"{what} is a number and one of {units}, like '30ms', got {time!r}")
    seconds = float(match[1]) / unit
    if seconds > LONGEST_SECONDS:
        raise ValueError(f"{what} must be from 0 to {LONGEST_SECONDS:g}s, got {time!r}")
    return seconds


def parse_loss(loss: float | str) -> float:
    """The share of packets that are lost, of a number like 0.001 or a text like "0.1%".

    >>> parse_loss("0.1%")
    0.001
    """
    if isinstance(loss, bool) or not isinstance(loss, int | float | str):
        raise TypeError(f"loss is a share of packets, like 0.001 or '0.1%', got {loss!r}")
    if isinstance(loss, str):
        match = _LOSS.fullmatch(loss.strip())
        share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    else:
        share = float(loss)
    if not 0 <= share < 1:
        raise ValueError(f"loss must be a share in [0, 1), like 0.001 or '0.1%', got {loss!r}")
    return share


class LinkText(NamedTuple):
    """What a text like "100mbit delay=15ms jitter=2ms loss=0.1%" says of a link.

    None is what it leaves to the arguments of its lab.
    """

    rate_bits: int
    delay_seconds: float | None
    jitter_seconds: float | None
    loss: float | None


def parse_link(link: str) -> LinkText:
    """A rate, and after it any of delay=, jitter= and loss=, between blanks.

    >>> parse_link("100mbit delay=15ms").delay_seconds
    0.015
    """
    words = link.split() if isinstance(link, str) else []
    settings = [word for word in words if "=" in word]
    if not settings:
        return LinkText(parse_rate(link), None, None, None)
    first = words.index(settings[0])
    found: dict[str, str] = {}
    for word in words[first:]:
        name, _, value = word.partition("=")
        if name not in ("delay", "jitter", "loss") or name in found or not value:
            raise ValueError(
                "a link is its rate and after it delay=, jitter= and loss=, each at most once, "
                f"like '100mbit delay=15ms loss=0.1%', got {word!r} in {link!r}"
            )
        found[name] = value
    return LinkText(
        parse_rate(" ".join(words[:first])),
        parse_time(found["delay"], "delay") if "delay" in found else None,
        parse_time(found["jitter"], "jitter") if "jitter" in found else None,
        parse_loss(found["loss"]) if "loss" in found else None,
    )


def read_links(path: str | os.PathLike[str]) -> list[str]:
    """The links in a text file, one per line for host 0, 1 and so on, see `parse_link`.

    Empty lines do not count, nor does what follows a `#`.
    """
    links = []
    for number, line in enumerate(Path(path).read_text(errors="replace").splitlines(), 1):
        link = line.partition("#")[0].strip()
        if not link:
            continue
        try:
            parse_link(link)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}, line {number}: {error}") from None
        links.append(link)
    if not links:
        raise ValueError(
            f"{os.fspath(path)}: expected one rate per line, like '100mbit', found none"
        )
    return links


@dataclass(frozen=True)
class LinkSettings:
    """A cable with the same rate in both directions, and the distance of what is sent over it.

    Delay, jitter and loss are those of the way out, from the host or the rack to the rest. There
    are none on the way in: that is the way out of somebody else.
    """

    rate_bits: int  # per second, counted as Ethernet frames without preamble, gap and checksum
    burst_bytes: int  # how much may pass at once after a pause
    queue_bytes: int  # how much may wait at either end; what comes on top is dropped
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0  # every packet takes up to so much longer
    loss: float = 0.0  # the share of packets that never arrive

    @property
    def is_distant(self) -> bool:
        """Whether anything but the rate is to be kept."""
        return bool(self.delay_seconds or self.jitter_seconds or self.loss)


@dataclass(frozen=True)
class Station:
    """A host and the link by which it hangs on the switch of its rack."""

    address: str
    link: LinkSettings
    rack: int


@dataclass(frozen=True)
class DistanceSettings:
    """What all links of a lab with distance have in common."""

    seed: int  # of losses and jitter
    by_packet: bool  # packets go one by one, so that they are lost one by one
    window_bytes: int  # that a connection must be able to have under way


@dataclass(frozen=True)
class Topology:
    """Hosts around the switch of their rack, and the link by which each rack hangs on the rest."""

    stations: tuple[Station, ...]
    racks: int
    inter: LinkSettings | None  # None for a single rack

    @property
    def links(self) -> list[LinkSettings]:
        """Of all hosts and, last, between the racks."""
        links = [station.link for station in self.stations]
        return links if self.inter is None else [*links, self.inter]

    @property
    def is_distant(self) -> bool:
        """Whether any link has more to it than its rate."""
        return any(link.is_distant for link in self.links)

    @property
    def is_lossy(self) -> bool:
        """Whether any link loses packets by itself."""
        return any(link.loss for link in self.links)

    @property
    def round_trip_seconds(self) -> float:
        """The longest between two hosts, without the rates."""
        between = 2 * _way_out(self.inter) if self.inter else 0.0
        trips = (
            _way_out(one.link) + _way_out(other.link) + between * (one.rack != other.rack)
            for one, other in combinations(self.stations, 2)
        )
        return max(trips, default=0.0)

    def changed(self, link: LinkSettings, shape: "Shape") -> LinkSettings:
        """A link that one of ours is to become; refused where that asks for another lab."""
        if link.is_distant and not self.is_distant:
            raise ValueError(
                "this lab was made without delay, jitter and loss, and cannot get them: give the "
                "Lab a delay, if only of '1us'"
            )
        if link.loss and not self.is_lossy:
            raise ValueError(
                "this lab was made without loss and cannot get it: give the Lab one, if only of "
                "1e-9"
            )
        _check_limits([*self.links, link])
        return shape.with_room(link, max(self.round_trip_seconds, 2 * _way_out(link)))

    def distance(self, seed: int) -> DistanceSettings | None:
        """None where links have nothing but their rates."""
        if not self.is_distant:
            return None
        fastest = max(link.rate_bits for link in self.links)
        window = round(fastest / 8 * self.round_trip_seconds)
        return DistanceSettings(seed, self.is_lossy, window)


@dataclass(frozen=True)
class Shape:
    """What holds for the links of a lab that do not say otherwise, see `Lab`."""

    burst_bytes: int | None = None
    queue_seconds: float | None = None
    delay: str | None = None
    jitter: str | None = None
    loss: float | str | None = None

    def __post_init__(self) -> None:
        self.link("100mbit")  # says what is wrong with it

    def link(self, text: str) -> LinkSettings:
        """The link of a host."""
        return self._settings(
            parse_link(text),
            parse_time(self.delay, "delay") if self.delay is not None else 0.0,
            parse_time(self.jitter, "jitter") if self.jitter is not None else 0.0,
            parse_loss(self.loss) if self.loss is not None else 0.0,
        )

    def text(self, link: str) -> str:
        """The link of a host with all that holds for it."""
        own, words = parse_link(link), [link]
        if own.delay_seconds is None and self.delay is not None:
            words.append(f"delay={self.delay}")
        if own.jitter_seconds is None and self.jitter is not None:
            words.append(f"jitter={self.jitter}")
        if own.loss is None and self.loss is not None:
            words.append(f"loss={self.loss}")
        return " ".join(words)

    def inter(self, text: str) -> LinkSettings:
        """A link between racks: its distance is what it says itself."""
        return self._settings(parse_link(text), 0.0, 0.0, 0.0)

    def _settings(self, link: LinkText, delay: float, jitter: float, loss: float) -> LinkSettings:
        bits = link.rate_bits
        burst_bytes = self.burst_bytes
        if burst_bytes is None:
            burst_bytes = max(LEAST_BURST_BYTES, round(bits / 8 * BURST_SECONDS))
        if burst_bytes < 2 * 1514:
            raise ValueError(f"burst_bytes must hold two Ethernet frames, 3028, got {burst_bytes}")
        if self.queue_seconds is None:
            queue_bytes = max(LEAST_QUEUE_BYTES, round(bits / 8 * QUEUE_SECONDS))
        elif 0 < self.queue_seconds <= 10:
            queue_bytes = max(burst_bytes, round(bits / 8 * self.queue_seconds))
        else:
            raise ValueError(f"queue_seconds must be in (0, 10], got {self.queue_seconds}")
        return LinkSettings(
            bits,
            burst_bytes,
            queue_bytes,
            delay if link.delay_seconds is None else link.delay_seconds,
            jitter if link.jitter_seconds is None else link.jitter_seconds,
            loss if link.loss is None else link.loss,
        )

    def with_room(self, link: LinkSettings, round_trip_seconds: float) -> LinkSettings:
        """With a queue that holds what a connection has under way at the full rate.

        One that holds less runs empty whenever TCP, after a loss, sends half as fast.
        """
        room = round(link.rate_bits / 8 * round_trip_seconds)
        if self.queue_seconds is not None or room <= link.queue_bytes:
            return link
        return replace(link, queue_bytes=room)


def lay_out(
    hosts: int,
    link: str | Sequence[str],
    racks: int = 1,
    inter: str | None = None,
    shape: Shape | None = None,
) -> Topology:
    """Hosts divided over racks in order and evenly; one link for all of them or one for each."""
    shape = shape or Shape()
    if not _is_number(hosts):
        raise TypeError(f"hosts must be a number of hosts, got {hosts!r}")
    if not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"hosts must be from 1 to {MOST_HOSTS}, got {hosts}")
    if not isinstance(link, str | Sequence):
        raise TypeError(f"link must be a rate, like '100mbit', or a sequence of them, got {link!r}")
    links = [link] * hosts if isinstance(link, str) else list(link)
    if len(links) != hosts:
        raise ValueError(f"link must be one rate or one for each of {hosts} hosts, got {link!r}")
    if not _is_number(racks):
        raise TypeError(f"racks must be a number of racks, got {racks!r}")
    if not 1 <= racks <= hosts:
        raise ValueError(f"racks must be from 1 to {hosts}, the number of hosts, got {racks}")
    if racks > 1 and inter is None:
        raise ValueError(f"{racks} racks need the rate between them, inter, like '20mbit'")
    if racks == 1 and inter is not None:
        raise ValueError(f"inter is the rate between racks, so racks must be 2 or more: {inter!r}")
    topology = Topology(
        tuple(
            Station(str(NETWORK[host + 1]), shape.link(text), host * racks // hosts)
            for host, text in enumerate(links)
        ),
        racks,
        None if inter is None else shape.inter(inter),
    )
    _check_limits(topology.links)
    trip = topology.round_trip_seconds
    return replace(
        topology,
        stations=tuple(
            replace(station, link=shape.with_room(station.link, trip))
            for station in topology.stations
        ),
        inter=topology.inter and shape.with_room(topology.inter, trip),
    )


def _check_limits(links: Sequence[LinkSettings]) -> None:
    """Refuse rates that the process which carries packets over a distance was not seen to reach."""
    if not any(link.is_distant for link in links):
        return
    most = FASTEST_LOSSY if any(link.loss for link in links) else FASTEST_DISTANT
    if (fastest := max(link.rate_bits for link in links)) > most:
        raise ValueError(
            f"with delay, jitter or loss a rate must be at most {FASTEST_DISTANT // 10**6}mbit, "
            f"with loss {FASTEST_LOSSY // 10**6}mbit, got {fastest / 10**6:g}mbit: one process "
            "carries all packets of such a lab (see docs/guides/lab.md)"
        )


def _way_out(link: LinkSettings) -> float:
    return link.delay_seconds + link.jitter_seconds


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
