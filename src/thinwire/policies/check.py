"""Checks of what policies are made with."""

import math
from typing import Any

from thinwire.policies.base import Policy


def child(owner: str, given: Any) -> Policy:
    """A policy inside another: one, or a compressor, or the spec of either."""
    if isinstance(given, Policy):
        return given
    from thinwire.policies.registry import policy_of

    try:
        return policy_of(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: {error}") from None


def steps(owner: str, field: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}: {field} must be a number of steps from {least}, got {value!r}")


def positive(owner: str, field: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{owner}: {field} must be positive, got {value!r}")
