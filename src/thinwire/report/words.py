"""Numbers in columns, dates, links and names as people read them."""

from datetime import datetime

from thinwire.formatting import show_decimals, show_number, show_rate
from thinwire.lab import parse_rate


def digits(value: float | None) -> str:
    """As `show_number`, but always three digits from 1 on, so that numbers in a column compare.

    >>> [digits(value) for value in (0.05, 9, 87.04, 1458)]
    ['0.05', '9.00', '87.0', '1,458']
    """
    if value is not None and 1 <= abs(value) < 99.95:
        return show_decimals(value)
    return show_number(value)


def link(text: str) -> str:
    """A link as given, with the usual unit where it is a rate: 100mbit is 100 Mbit/s."""
    try:
        return show_rate(parse_rate(text))
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
