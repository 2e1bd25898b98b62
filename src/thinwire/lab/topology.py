"""What a lab is made of, as data: rates, links, hosts and racks.

Everything that a user asks for is checked here; `network` builds it, in another process.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST, FASTEST = 10 * UNITS["kbit"], 10 * UNITS["gbit"]

_RATE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+)(?:/s)?", re.IGNORECASE)

MOST_HOSTS = 250  # addresses of the one subnet, with some to spare
INTERFACE = "wire0"  # the name of each host's end of its link
NETWORK = ip_network("10.77.0.0/24")

# Both were measured, see docs/lab.md.
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


def read_links(path: str | os.PathLike[str]) -> list[str]:
    """The rates in a text file, one per line for host 0, 1 and so on.

    Empty lines do not count, nor does what follows a `#`.
    """
    rates = []
    for number, line in enumerate(Path(path).read_text(errors="replace").splitlines(), 1):
        rate = line.partition("#")[0].strip()
        if not rate:
            continue
        try:
            parse_rate(rate)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}, line {number}: {error}") from None
        rates.append(rate)
    if not rates:
        raise ValueError(
            f"{os.fspath(path)}: expected one rate per line, like '100mbit', found none"
        )
    return rates


@dataclass(frozen=True)
class LinkSettings:
    """A cable with the same rate in both directions."""

    rate_bits: int  # per second, counted as Ethernet frames without preamble, gap and checksum
    burst_bytes: int  # how much may pass at once after a pause
    queue_bytes: int  # how much may wait at either end; what comes on top is dropped


@dataclass(frozen=True)
class Station:
    """A host and the link by which it hangs on the switch of its rack."""

    address: str
    link: LinkSettings
    rack: int


@dataclass(frozen=True)
class Topology:
    """Hosts around the switch of their rack, and the link by which each rack hangs on the rest."""

    stations: tuple[Station, ...]
    racks: int
    inter: LinkSettings | None  # None for a single rack


def link_of(
    rate: str, burst_bytes: int | None = None, queue_seconds: float | None = None
) -> LinkSettings:
    bits = parse_rate(rate)
    if burst_bytes is None:
        burst_bytes = max(LEAST_BURST_BYTES, round(bits / 8 * BURST_SECONDS))
    if burst_bytes < 2 * 1514:
        raise ValueError(f"burst_bytes must hold two Ethernet frames, 3028, got {burst_bytes}")
    if queue_seconds is None:
        queue_bytes = max(LEAST_QUEUE_BYTES, round(bits / 8 * QUEUE_SECONDS))
    elif 0 < queue_seconds <= 10:
        queue_bytes = max(burst_bytes, round(bits / 8 * queue_seconds))
    else:
        raise ValueError(f"queue_seconds must be in (0, 10], got {queue_seconds}")
    return LinkSettings(bits, burst_bytes, queue_bytes)


def lay_out(
    hosts: int,
    link: str | Sequence[str],
    racks: int = 1,
    inter: str | None = None,
    burst_bytes: int | None = None,
    queue_seconds: float | None = None,
) -> Topology:
    """Hosts divided over racks in order and evenly; one rate for all links or one for each."""
    if not _is_number(hosts):
        raise TypeError(f"hosts must be a number of hosts, got {hosts!r}")
    if not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"hosts must be from 1 to {MOST_HOSTS}, got {hosts}")
    if not isinstance(link, str | Sequence):
        raise TypeError(f"link must be a rate, like '100mbit', or a sequence of them, got {link!r}")
    rates = [link] * hosts if isinstance(link, str) else list(link)
    if len(rates) != hosts:
        raise ValueError(f"link must be one rate or one for each of {hosts} hosts, got {link!r}")
    if not _is_number(racks):
        raise TypeError(f"racks must be a number of racks, got {racks!r}")
    if not 1 <= racks <= hosts:
        raise ValueError(f"racks must be from 1 to {hosts}, the number of hosts, got {racks}")
    if racks > 1 and inter is None:
        raise ValueError(f"{racks} racks need the rate between them, inter, like '20mbit'")
    if racks == 1 and inter is not None:
        raise ValueError(f"inter is the rate between racks, so racks must be 2 or more: {inter!r}")
    shape = (burst_bytes, queue_seconds)
    return Topology(
        tuple(
            Station(str(NETWORK[host + 1]), link_of(rate, *shape), host * racks // hosts)
            for host, rate in enumerate(rates)
        ),
        racks,
        None if inter is None else link_of(inter, *shape),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
