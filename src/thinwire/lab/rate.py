"""Rates of links, as people write them."""

import os
import re
from pathlib import Path

UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST, FASTEST = 10 * UNITS["kbit"], 10 * UNITS["gbit"]

_RATE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+)(?:/s)?", re.IGNORECASE)


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
    """The rates in a text file, one a line for host 0, 1 and so on.

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
        raise ValueError(f"{os.fspath(path)}: expected a rate a line, like '100mbit', found none")
    return rates
