"""Checks of settings that several compressors share; each raises ValueError with the fix."""

import math
from typing import Any


def threshold(who: str, field: str, value: Any) -> None:
    """A positive magnitude."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{who}: {field} must be positive and finite, got {value!r}")


def fraction(who: str, field: str, value: Any) -> None:
    """A number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{who}: {field} must be in (0, 1], got {value!r}")


def one_of(who: str, field: str, value: Any, known: tuple[Any, ...]) -> None:
    """A member of a short list."""
    if not any(type(value) is type(k) and value == k for k in known):
        names = ", ".join(map(repr, known))
        raise ValueError(f"{who}: {field} must be one of {names}, got {value!r}")


def block(who: str, field: str, value: Any) -> None:
    """A positive multiple of 8, or None for the whole tensor."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 8 or value % 8:
        raise ValueError(
            f"{who}: {field} must be a positive multiple of 8, or None for the whole tensor, "
            f"got {value!r}"
        )


def flag(who: str, field: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{who}: {field} must be True or False, got {value!r}")
