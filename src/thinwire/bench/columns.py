"""The columns of the result, the same in the terminal and on the page."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from thinwire.bench.result import Group, Report, Row, Timing, ratio, speed
from thinwire.bench.sizes import show_size

NOTHING = "-"


class Column(NamedTuple):
    part: str  # written above the first column of those that share it
    heading: str
    cell: Callable[[Row, Group], str]
    vital: int = 1  # 0: the first to go where the terminal is narrow; 9: never

    @property
    def full_name(self) -> str:
        return f"{self.part} {self.heading}".strip()


def short(value: float | None) -> str:
    """Three digits that matter, and never an exponent: 0.35, 1.23, 12.3, 1234."""
    if value is None:
        return NOTHING
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


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


def _ms(timing: Timing | None) -> str:
    return short(timing and timing.median * 1e3)


COLUMNS = (
    Column("", "compressor", lambda row, group: row.compressor, vital=9),
    Column("", "ratio", lambda row, group: short(row.compression_ratio), vital=9),
    Column("", "bits", lambda row, group: short(row.bits_per_element)),
    Column("", "error", lambda row, group: _error(row.relative_error), vital=9),
    Column("", "cosine", lambda row, group: _cosine(row.cosine), vital=0),
    Column("encode", "ms", lambda row, group: _ms(row.encode), vital=2),
    Column("encode", "GB/s", lambda row, group: short(speed(row.encode, group.num_bytes)), vital=9),
    Column("encode", "r+=g", lambda row, group: short(ratio(row.encode, group.baseline)), vital=3),
    Column(
        "encode", "eager", lambda row, group: short(ratio(row.eager_encode, row.encode)), vital=3
    ),
    Column("decode", "ms", lambda row, group: _ms(row.decode), vital=2),
    Column("decode", "GB/s", lambda row, group: short(speed(row.decode, group.num_bytes)), vital=9),
    Column("decode", "r+=g", lambda row, group: short(ratio(row.decode, group.baseline))),
    Column("decode", "eager", lambda row, group: short(ratio(row.eager_decode, row.decode))),
    Column("extra", "mem", lambda row, group: short(row.extra_memory), vital=4),
)

LEGEND = (
    ("ratio, bits", "bytes of the tensor / bytes of the frame; bits of frame an element"),
    ("error, cosine", "||x - y|| / ||x|| and <x, y> / (||x|| ||y||) for y = decode(encode(x))"),
    ("ms, GB/s", "median of encode with residual and of decode; bytes of tensor a second"),
    ("r+=g", "that time in passes of r += g over the tensor, timed in the same rounds"),
    ("eager", "times faster than plain PyTorch doing the same"),
    ("extra mem", "peak memory that encode adds, payload included / bytes of the tensor"),
)


def parts(columns: Sequence[Column]) -> list[str]:
    """What stands above the heading of each column."""
    before = ["", *(column.part for column in columns)]
    return [
        "" if column.part == left else column.part
        for column, left in zip(columns, before, strict=False)
    ]


def machine_line(report: Report) -> str:
    """Where the run took place, in one line."""
    machine, versions = report.machine, report.versions
    size = f", {machine.memory_bytes / 1e9:.0f} GB" if machine.memory_bytes else ""
    names = ", ".join(f"{name} {versions[name]}" for name in ("thinwire", "torch", "numba"))
    return f"{names} on {machine.cpu}, {machine.cores} cores{size}, {report.threads} threads"


def title_of(group: Group) -> str:
    """Which tensor, and how long a pass over it took."""
    title = f"{group.data}, {show_size(group.numel)} {group.dtype}"
    if group.baseline:
        t = group.baseline
        low, mid, high = (f"{1e3 * s:.3g}" for s in (t.lowest, t.median, t.highest))
        title += f"; one r += g: {mid} ms"
        title += f" ({low} to {high} in {t.rounds} rounds)" if t.rounds > 1 else ""
    return title
