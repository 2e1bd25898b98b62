"""What a run found out. Times are in seconds, sizes in bytes; None stands for "not measured"."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.bench.settings import Settings
from thinwire.machine import Machine


class Timing(NamedTuple):
    """The median over rounds, and how far they lay apart."""

    median: float
    lowest: float
    highest: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing | None":
        if not seconds:
            return None
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@dataclass
class Row:
    """One compressor on one tensor.

    Times are of `encode` with a residual and of `decode` from a payload as it arrives: positions
    and coded levels have yet to be decoded. Size and error are of one `encode` without a residual.
    Memory is measured last.
    """

    compressor: str
    family: str
    num_bytes: int
    compression_ratio: float
    bits_per_element: float
    relative_error: float | None
    cosine: float | None
    encode: Timing | None
    decode: Timing | None
    eager_encode: Timing | None
    eager_decode: Timing | None
    extra_memory: float | None = None  # peak over the size of the tensor


@dataclass(frozen=True)
class Group:
    """All compressors on one tensor, timed in the same rounds as `r += g` on it."""

    data: str
    numel: int
    dtype: str
    num_bytes: int
    baseline: Timing | None
    rows: list[Row]


@dataclass
class Report:
    """A whole run, or what was done of it when it was interrupted."""

    settings: Settings
    machine: Machine
    versions: dict[str, str | None]
    threads: int
    date: str
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


def ratio(over: Timing | None, under: Timing | None) -> float | None:
    """How many times `under` goes into `over`, by their medians."""
    return over.median / under.median if over and under else None


def speed(timing: Timing | None, num_bytes: int) -> float | None:
    """Gigabytes of tensor a second."""
    return num_bytes / timing.median / 1e9 if timing else None
