"""Numbers and tables as text: the one place that says how the package shows them, and reads sizes.

What a person wrote ("512MiB", "25.6M") is read by `read_bytes` and `read_count`; `show_...` is the
other direction. Every `show_...` takes None for what is not known and shows it as `NOTHING`.
`table` makes a table on rich, which is imported only then, and `text_of` turns one into a string.
"""

import io
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOTHING = "-"
WIDTH = 80  # columns of a pipe or a file, unless COLUMNS says otherwise

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


# Reading


def read_bytes(size: int | str) -> int:
    """A number of bytes, as a number or as text with a unit: 500000000, "500 MB", "512MiB".

    >>> read_bytes("512MiB")
    536870912
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", str(size).strip().lower())
    unit = (_DECIMAL | _BINARY).get(found[2]) if found else None
    count = Decimal(found[1]) * unit if found and unit else Decimal("NaN")
    if isinstance(size, bool) or not count.is_finite() or count != int(count):
        raise ValueError(f"a size is a number of bytes such as 500000000 or 512MiB, got {size!r}")
    return int(count)


def read_count(text: str) -> int:
    """How many, as people write it; units are powers of 1000.

    >>> read_count("25.6M")
    25600000
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)", text.strip().lower())
    if not found:
        raise ValueError(f"a size is a number with an optional k, M or G, such as 25.6M: {text!r}")
    count = Decimal(found[1]) * _DECIMAL[found[2]]
    if count != int(count):
        raise ValueError(f"a size is a whole number of elements, got {text!r}")
    return int(count)


# Showing


def show_bytes(num_bytes: float | None) -> str:
    """Three digits and a decimal unit.

    >>> show_bytes(1_234_567)
    '1.23 MB'
    """
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:  # what .3g would show as 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def show_count(count: int | None) -> str:
    """The shortest way to write how many, to four digits; `read_count` reads it.

    >>> show_count(25_600_000)
    '25.6M'
    """
    if count is None:
        return NOTHING
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return str(count)


def show_seconds(seconds: float | None) -> str:
    """Three digits and the unit that suits.

    >>> show_seconds(0.0123), show_seconds(75)
    ('12.3 ms', '75 s')
    """
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if abs(seconds) * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if abs(seconds) < 999.5 else f"{seconds:,.0f} s"


def show_ratio(ratio: float | None) -> str:
    """How many times as much.

    >>> show_ratio(9.32)
    '9.3x'
    """
    return NOTHING if ratio is None or not math.isfinite(ratio) else f"{ratio:.1f}x"


def show_number(value: float | None) -> str:
    """Three digits that matter, and all of those before the point.

    >>> [show_number(value) for value in (0.0123, 0.35, 12.34, 12345)]
    ['0.0123', '0.35', '12.3', '12,345']
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def show_decimals(value: float | None) -> str:
    """Three digits, at most two of them behind the point, never an exponent: for narrow columns.

    >>> [show_decimals(value) for value in (0.0123, 0.35, 12.34, 1234)]
    ['0.01', '0.35', '12.3', '1234']
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def show_rate(bits_per_second: float) -> str:
    """A network's rate.

    >>> show_rate(4.3e8)
    '430 Mbit/s'
    """
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= 0.9995 * factor:
            return f"{bits_per_second / factor:.3g} {unit}"
    return f"{bits_per_second:.3g} bit/s"


def plural(number: int, word: str) -> str:
    """How many of what.

    >>> plural(1, "step"), plural(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def in_words(words: Iterable[str]) -> str:
    """As in a sentence.

    >>> in_words(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def one_line(text: object) -> str:
    """Without line ends, for a message that must be one line."""
    return " ".join(str(text).split())


# Tables


class TableColumn(NamedTuple):
    """One column of a table."""

    title: str
    right: bool = False  # flush right and never broken, as numbers are
    wrap: bool = True  # False: its cells are not broken either
    bold: bool = False


def table(
    columns: Sequence[TableColumn | str], rows: Iterable[Sequence[str]], title: str = ""
) -> "Table":
    """A table of text: a line below the headings and none around it; no markup is read.

    A row may be shorter than the table; an empty one draws a line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    found = Table(
        title=Text(title) if title else None,
        title_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    rows = list(rows)
    for number, column in enumerate(columns):
        if isinstance(column, str):
            column = TableColumn(column)
        heading = column.title
        if column.right:
            # As narrow as its figures: what is left of the width is for words.
            cells = [row[number] for row in rows if number < len(row)]
            narrow = max(map(len, [*cells, *heading.split()]))
            heading = "\n".join(textwrap.wrap(heading, narrow))
        found.add_column(
            Text(heading),
            justify="right" if column.right else "left",
            no_wrap=column.right or not column.wrap,
            overflow="fold",
            style="bold" if column.bold else "",
        )
    for row in rows:
        if row:
            found.add_row(*map(Text, row))
        else:
            found.add_section()
    return found


def break_after_commas(text: str, width: int) -> str:
    """A long spec on several lines: there are no spaces in it at which a table could break it.

    >>> print(break_after_commas("topk:RATIO,sampled=false,scaled=false", 25))
    topk:RATIO,sampled=false,
      scaled=false
    """
    lines = [""]
    for piece in re.findall(r"[^,]+,?", text):
        if lines[-1].strip() and len(lines[-1]) + len(piece) > width:
            lines.append("  ")
        lines[-1] += piece
    return "\n".join(lines)


def text_of(found: "Table", width: int = WIDTH) -> str:
    """A table as plain text, without spaces at the ends of lines."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width).print(found)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def console(file: IO[str] | None = None, width: int = WIDTH) -> "Console":
    """Standard output, or another file, as rich sees it; `width` is that of a pipe or a file."""
    from rich.console import Console

    file = sys.stdout if file is None else file
    known = file.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=file, width=None if known else width, highlight=False)
