"""Checks of what policies are made with."""

import math
from typing import Any

from thinwire.compressors import Compressor
from thinwire.policies.base import Policy
from thinwire.policies.fixed import Fixed


def child(owner: str, given: Any) -> Policy:
    """A policy inside another: one, or a compressor, or the spec of either."""
    if isinstance(given, Policy):
        return given
    from thinwire.policies.registry import policy_of

    try:
        return policy_of(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: {error}") from None


def compressor(owner: str, given: Any, field: str = "then") -> Compressor:
    """A compressor, or the spec of one."""
    policy = child(owner, given)
    if not isinstance(policy, Fixed):
        raise ValueError(f"{owner}: {field} must be a compressor, got {policy}")
    return policy.compressor


def steps(owner: str, field: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}: {field} must be a number of steps from {least}, got {value!r}")


def positive(owner: str, field: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{owner}: {field} must be positive, got {value!r}")
