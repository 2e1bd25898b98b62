"""A report as a JSON document.

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

A timing is {median_seconds, lowest_seconds, highest_seconds, rounds}. null: not measured.
"""

from typing import Any

from thinwire.bench.result import Group, Report, Row, Timing, ratio, speed

SCHEMA = "thinwire.bench/1"


def document(report: Report) -> dict[str, Any]:
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


def _group(group: Group) -> dict[str, Any]:
    return {
        "data": group.data,
        "numel": group.numel,
        "dtype": group.dtype,
        "num_bytes": group.num_bytes,
        "baseline": _timing(group.baseline),
        "rows": [_row(row, group) for row in group.rows],
    }


def _row(row: Row, group: Group) -> dict[str, Any]:
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


def _speed(timing: Timing | None, eager: Timing | None, group: Group) -> dict[str, Any] | None:
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
