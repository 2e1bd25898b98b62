"""Rates and times as people write them, over a wider range than a lab can have."""

import re

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([a-z]+)(?:/s)?", re.IGNORECASE)


def read_rate(text: str) -> float:
    """Bits per second of "100mbit" or "1.5 gbit".

    >>> read_rate("100mbit")
    100000000.0
    """
    found = _read(text, _RATES)
    if not found:
        raise ValueError(
            f"a rate is a positive number and one of {', '.join(_RATES)}, like '100mbit', got "
            f"{text!r}"
        )
    return found


def read_seconds(text: str) -> float:
    """Seconds of "0.8s" or "15ms".

    >>> read_seconds("250ms")
    0.25
    """
    found = _read(text, _TIMES)
    if found is None:
        raise ValueError(
            f"a time is a number and one of {', '.join(_TIMES)}, like '250ms', got {text!r}"
        )
    return found


def _read(text: str, units: dict[str, float]) -> float | None:
    match = _NUMBER.fullmatch(text.strip())
    unit = units.get(match[2].lower()) if match else None
    return None if match is None or unit is None else float(match[1]) * unit
