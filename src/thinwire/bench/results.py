"""What a run found out, and the JSON document of it.

Times are in seconds, sizes in bytes; None, null in the document, stands for "not measured".
The document:

    schema        "thinwire.bench/1"
    date          ISO 8601, UTC
    interrupted   true if Ctrl-C ended the run early
    machine       cpu, cores, memory_bytes, system
    versions      thinwire, torch, numba, numpy, python, commit (null outside a checkout)
    settings      compressors, sizes, data, input, rounds, eager, threads
    notes         sentences on what could not be measured
    groups        one for each tensor:
      data        "normal", "heavy" or the name of the file
      numel, dtype, num_bytes
      baseline    timing of `r += g` over the tensor
      rows        one for each compressor:
        compressor, family
        num_bytes, compression_ratio, bits_per_element
        relative_error, cosine        of decode(encode(x)), no residual
        extra_memory                  peak of encode with residual / bytes of the tensor
        encode, decode                timing and, beside it,
          gigabytes_per_second        of tensor
          passes                      median / median of the baseline
          eager                       timing of plain PyTorch, or null
          speedup                     median of eager / median

A timing is {median_seconds, lowest_seconds, highest_seconds, rounds}.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from thinwire.bench.settings import BenchSettings
from thinwire.machine import Machine

SCHEMA = "thinwire.bench/1"


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
class CompressorResult:
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
class TensorResults:
    """All compressors on one tensor, timed in the same rounds as `r += g` on it."""

    data: str
    numel: int
    dtype: str
    num_bytes: int
    baseline: Timing | None
    rows: list[CompressorResult]


@dataclass
class BenchReport:
    """A whole run, or what was done of it when it was interrupted."""

    settings: BenchSettings
    machine: Machine
    versions: dict[str, str | None]
    threads: int
    date: str
    groups: list[TensorResults] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


def ratio(over: Timing | None, under: Timing | None) -> float | None:
    """How many times `under` goes into `over`, by their medians."""
    return over.median / under.median if over and under else None


def speed(timing: Timing | None, num_bytes: int) -> float | None:
    """Gigabytes of tensor per second."""
    return num_bytes / timing.median / 1e9 if timing else None


def document(report: BenchReport) -> dict[str, Any]:
    """The report in plain types, ready for `json.dumps`."""
    settings = report.settings
    return {
        "schema": SCHEMA,
        "date": report.date,
        "interrupted": report.interrupted,
        "machine": report.machine._asdict(),
        "versions": report.versions,
        "settings": {
            "compressors": list(settings.compressors),
            "sizes": None if settings.input else list(settings.sizes),
            "data": None if settings.input else list(settings.data),
            "input": str(settings.input) if settings.input else None,
            "rounds": settings.rounds,
            "eager": settings.eager,
            "threads": report.threads,
        },
        "notes": report.notes,
        "groups": [_group(group) for group in report.groups],
    }


def _group(group: TensorResults) -> dict[str, Any]:
    return {
        "data": group.data,
        "numel": group.numel,
        "dtype": group.dtype,
        "num_bytes": group.num_bytes,
        "baseline": _timing(group.baseline),
        "rows": [_row(row, group) for row in group.rows],
    }


def _row(row: CompressorResult, group: TensorResults) -> dict[str, Any]:
    return {
        "compressor": row.compressor,
        "family": row.family,
        "num_bytes": row.num_bytes,
        "compression_ratio": row.compression_ratio,
        "bits_per_element": row.bits_per_element,
        "relative_error": row.relative_error,
        "cosine": row.cosine,
        "extra_memory": row.extra_memory,
        "encode": _speed(row.encode, row.eager_encode, group),
        "decode": _speed(row.decode, row.eager_decode, group),
    }


def _speed(
    timing: Timing | None, eager: Timing | None, group: TensorResults
) -> dict[str, Any] | None:
    if timing is None:
        return None
    return {
        **(_timing(timing) or {}),
        "gigabytes_per_second": speed(timing, group.num_bytes),
        "passes": ratio(timing, group.baseline),
        "eager": _timing(eager),
        "speedup": ratio(eager, timing),
    }


def _timing(timing: Timing | None) -> dict[str, Any] | None:
    if timing is None:
        return None
    return {
        "median_seconds": timing.median,
        "lowest_seconds": timing.lowest,
        "highest_seconds": timing.highest,
        "rounds": timing.rounds,
    }
