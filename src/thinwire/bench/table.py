"""A report as tables for the terminal; its columns are those of the page, too.

All of them fit into 100 columns; a narrower terminal gets fewer.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.bench.results import (
    BenchReport,
    CompressorResult,
    TensorResults,
    Timing,
    ratio,
    speed,
)
from thinwire.formatting import NOTHING, show_bytes, show_count, show_decimals, show_seconds

WIDTH = 100  # of all columns
LONGEST_NAME = 24  # before it is broken


class FigureColumn(NamedTuple):
    """One figure of each compressor."""

    part: str  # written above the first column of those that share it
    heading: str
    value: Callable[[CompressorResult, TensorResults], Any]
    show: Callable[[Any], str] = show_decimals
    vital: int = 1  # 0: the first to go where the terminal is narrow; 9: never

    @property
    def full_name(self) -> str:
        return f"{self.part} {self.heading}".strip()

    def cell(self, row: CompressorResult, group: TensorResults) -> str:
        return self.show(self.value(row, group))


def _error(value: float | None) -> str:
    if value is None or value == 0:
        return NOTHING if value is None else "0"
    if value >= 0.01:
        return f"{value:.3f}" if value < 99.95 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _cosine(value: float | None) -> str:
    if value is None or value == 1:
        return NOTHING if value is None else "1"
    # Cut, not rounded: 0.99999 is not 1.
    return f"{math.trunc(value * 1e4) / 1e4:.4f}"


def _ms(timing: Timing | None) -> float | None:
    return timing and timing.median * 1e3


COLUMNS = (
    FigureColumn("", "compressor", lambda row, group: row.compressor, str, vital=9),
    FigureColumn("", "ratio", lambda row, group: row.compression_ratio, vital=9),
    FigureColumn("", "bits", lambda row, group: row.bits_per_element),
    FigureColumn("", "error", lambda row, group: row.relative_error, _error, vital=9),
    FigureColumn("", "cosine", lambda row, group: row.cosine, _cosine, vital=0),
    FigureColumn("encode", "ms", lambda row, group: _ms(row.encode), vital=2),
    FigureColumn("encode", "GB/s", lambda row, group: speed(row.encode, group.num_bytes), vital=9),
    FigureColumn("encode", "r+=g", lambda row, group: ratio(row.encode, group.baseline), vital=3),
    FigureColumn(
        "encode", "eager", lambda row, group: ratio(row.eager_encode, row.encode), vital=3
    ),
    FigureColumn("decode", "ms", lambda row, group: _ms(row.decode), vital=2),
    FigureColumn("decode", "GB/s", lambda row, group: speed(row.decode, group.num_bytes), vital=9),
    FigureColumn("decode", "r+=g", lambda row, group: ratio(row.decode, group.baseline)),
    FigureColumn("decode", "eager", lambda row, group: ratio(row.eager_decode, row.decode)),
    FigureColumn("extra", "mem", lambda row, group: row.extra_memory, vital=4),
)

LEGEND = (
    ("ratio, bits", "bytes of the tensor / bytes of the frame; bits of frame per element"),
    ("error, cosine", "||x - y|| / ||x|| and <x, y> / (||x|| ||y||) for y = decode(encode(x))"),
    ("ms, GB/s", "median of encode with residual and of decode; bytes of tensor per second"),
    ("r+=g", "that time in passes of r += g over the tensor, timed in the same rounds"),
    ("eager", "times faster than plain PyTorch doing the same"),
    ("extra mem", "peak memory that encode adds, payload included / bytes of the tensor"),
)


def parts(columns: Sequence[FigureColumn]) -> list[str]:
    """What stands above the heading of each column."""
    before = ["", *(column.part for column in columns)]
    return [
        "" if column.part == left else column.part
        for column, left in zip(columns, before, strict=False)
    ]


def machine_line(report: BenchReport) -> str:
    """Where the run took place, in one line."""
    machine, versions = report.machine, report.versions
    size = f", {show_bytes(machine.memory_bytes)}" if machine.memory_bytes else ""
    names = ", ".join(f"{name} {versions[name]}" for name in ("thinwire", "torch", "numba"))
    return f"{names} on {machine.cpu}, {machine.cores} cores{size}, {report.threads} threads"


def title_of(group: TensorResults) -> str:
    """Which tensor, and how long a pass over it took."""
    title = f"{group.data}, {show_count(group.numel)} {group.dtype}"
    if group.baseline:
        t = group.baseline
        low, mid, high = map(show_seconds, (t.lowest, t.median, t.highest))
        title += f"; one r += g: {mid}"
        title += f" ({low} to {high} in {t.rounds} rounds)" if t.rounds > 1 else ""
    return title


def print_report(report: BenchReport, console: Console) -> None:
    """Machine, meaning of the columns, then a table for each tensor."""
    console.print(Text(machine_line(report), "bold"), soft_wrap=True)
    legend = Table.grid(padding=(0, 2, 0, 0))
    for name, meaning in LEGEND:
        legend.add_row(Text(name), Text(meaning))
    console.print(legend)
    for group in report.groups:
        console.print()
        _print_group(group, console)
    for note in report.notes:
        console.print(Text(f"\nNote: {note}."))
    if report.interrupted:
        console.print("\n[bold]Interrupted:[/bold] this is what was done until then.")


def _print_group(group: TensorResults, console: Console) -> None:
    columns = list(COLUMNS)
    least = min(columns, key=lambda column: column.vital)
    while sum(_widths(columns, group)) + len(columns) - 1 > console.width and least.vital < 9:
        columns.remove(least)
        least = min(columns, key=lambda column: column.vital)
    console.print(Text(title_of(group), "bold"), soft_wrap=True)
    console.print(_table(group, columns))
    if left_out := [column.full_name for column in COLUMNS if column not in columns]:
        console.print(f"Left out for want of space: {', '.join(left_out)}.")


def _table(group: TensorResults, columns: list[FigureColumn]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    settings = zip(parts(columns), columns, _widths(columns, group), strict=True)
    for part, column, width in settings:
        name = column is COLUMNS[0]
        table.add_column(
            f"{part}\n{column.heading}",
            justify="left" if name else "right",
            no_wrap=not name,
            overflow="fold",
            width=width,
        )
    for row in group.rows:
        cells = [column.cell(row, group) for column in columns]
        table.add_row(*(Text(cell, "dim" if cell == NOTHING else "") for cell in cells))
    return table


def _widths(columns: list[FigureColumn], group: TensorResults) -> list[int]:
    widths = []
    for part, column in zip(parts(columns), columns, strict=True):
        cells = [column.cell(row, group) for row in group.rows]
        longest = max(map(len, [column.heading, *cells]))
        if column is COLUMNS[0]:
            longest = min(longest, LONGEST_NAME)
        gap = part in ("encode", "decode")  # sets them apart
        widths.append(max(longest, len(part) + gap))
    return widths
