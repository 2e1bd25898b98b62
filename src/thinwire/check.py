"""Checks of settings; each raises ValueError with what was expected and what came."""

import sys
from typing import Any

LARGEST = sys.float_info.max


def is_number(value: Any) -> bool:
    """An int or float; neither a bool nor NaN, infinity or an int that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -LARGEST <= value <= LARGEST


def is_whole(value: Any) -> bool:
    """An int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive(who: str, field: str, value: Any) -> None:
    """A finite number above zero."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"{who}: {field} must be positive and finite, got {value!r}")


def at_least(who: str, field: str, value: Any, least: float) -> None:
    """A finite number that is not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{who}: {field} must be a number, got {value!r}")
    if not is_number(value) or not value >= least:
        raise ValueError(f"{who}: {field} must be at least {least:g} and finite, got {value!r}")


def below(who: str, field: str, value: Any, top: float) -> None:
    """A number in [0, top)."""
    if not is_number(value) or not 0 <= value < top:
        raise ValueError(f"{who}: {field} must be in [0, {top:g}), got {value!r}")


def fraction(who: str, field: str, value: Any) -> None:
    """A number in (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{who}: {field} must be in (0, 1], got {value!r}")


def whole(who: str, field: str, value: Any, least: int) -> None:
    """A whole number that is not below `least`."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{who}: {field} must be a whole number from {least}, got {value!r}")


def steps(who: str, field: str, value: Any, least: int = 1) -> None:
    """A number of steps."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{who}: {field} must be a number of steps from {least}, got {value!r}")


def one_of(who: str, field: str, value: Any, known: tuple[Any, ...]) -> None:
    """A member of a short list."""
    if not any(type(value) is type(k) and value == k for k in known):
        names = ", ".join(map(repr, known))
        raise ValueError(f"{who}: {field} must be one of {names}, got {value!r}")


def flag(who: str, field: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{who}: {field} must be True or False, got {value!r}")


def block(who: str, field: str, value: Any) -> None:
    """A positive multiple of 8 elements, or None for the whole tensor."""
    if value is None:
        return
    if not is_whole(value) or value < 8 or value % 8:
        raise ValueError(
            f"{who}: {field} must be a positive multiple of 8, or None for the whole tensor, "
            f"got {value!r}"
        )
