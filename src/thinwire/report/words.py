"""Numbers and names as people read them."""

import math
from collections.abc import Iterable
from datetime import datetime

from thinwire.lab import parse_rate

NOTHING = "–"  # noqa: RUF001  (an en dash, as in tables of print)


def digits(value: float | None) -> str:
    """Three digits that matter: 0.0123, 0.350, 1.23, 12.3, 1,234."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def times(value: float | None) -> str:
    """A factor: 9.30×."""
    return NOTHING if value is None else f"{digits(value)}×"  # noqa: RUF001


def rate(bits: float) -> str:
    """Bits a second with the unit that suits: 430 Mbit/s."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= 0.9995 * factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def link(text: str) -> str:
    """A link as given, with the usual unit where it is a rate: 100mbit is 100 Mbit/s."""
    try:
        return rate(parse_rate(text))
    except ValueError:
        return text


def day(date: str) -> str:
    """A date of ISO 8601 to the minute; anything else as it is."""
    try:
        moment = datetime.fromisoformat(date)
    except ValueError:
        return date
    zone = f" {name}" if (name := moment.tzname()) else ""
    return f"{moment:%Y-%m-%d %H:%M}{zone}"


def count(number: int, word: str) -> str:
    """How many, and of what: 1 step, 3 steps."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def listing(words: Iterable[str]) -> str:
    """As in a sentence: a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def shorten(text: str, length: int) -> str:
    """On one line, without its middle where it is too long: both ends tell names apart."""
    text = " ".join(text.split())
    if len(text) <= length:
        return text
    tail = (length - 1) * 2 // 5  # the beginning says more
    return f"{text[: length - 1 - tail]}…{text[-tail:]}"


def labels(names: list[str], length: int) -> dict[str, str]:
    """Short forms of names for matplotlib; those that come out alike get a number."""
    result: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        short = shorten(name, length)
        number = 1
        while short in taken:
            number += 1
            short = f"{shorten(name, length - 3)} {number}"
        taken.add(short)
        # matplotlib takes what stands between dollars for formulas, and hides what begins with _.
        result[name] = (" " if short.startswith("_") else "") + short.replace("$", r"\$")
    return result
