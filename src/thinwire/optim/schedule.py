"""When 0/1 Adam updates its variance, and when ranks meet: functions of the number of the step."""

from typing import NamedTuple

LONGEST = 62  # doublings, far beyond any run


class Variance(NamedTuple):
    """The variance at a step.

    Args:
        due: whether it is updated.
        updates: how many there have been, this one included.
    """

    due: bool
    updates: int


def variance_at(step: int, scaler: int) -> Variance:
    """The first `scaler` updates come one step apart, the next two, then four and so on."""
    begin, interval, before = 0, 1, 0
    while True:
        end = (begin // interval + scaler) * interval
        if step <= end:
            updates = before + step // interval - begin // interval
            return Variance(step % interval == 0, updates)
        begin, interval, before = end, 2 * interval, before + scaler


def interval_at(step: int, begin: int, scaler: int, longest: int) -> int:
    """Steps between two meetings: doubled every `scaler` steps after `begin`, up to `longest`."""
    doublings = min((step - begin - 1) // scaler, LONGEST)
    return min(longest, 1 << doublings)
