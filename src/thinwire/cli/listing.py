"""What the commands that list something share."""

import json
import re
from collections.abc import Sequence

Rows = Sequence[tuple[str, ...]]


def show(rows: Rows, keys: Sequence[str], titles: Sequence[str], as_json: bool) -> int:
    """Print rows as a table, or as a JSON list of objects with these keys.

    The column of usages is broken after commas, the first one is bold.
    """
    if as_json:
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
        return 0

    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from thinwire.cli.screen import console

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for key, title in zip(keys, titles, strict=True):
        table.add_column(title, no_wrap=key in ("name", "usage"))
    width = 44 if keys[0] == "name" else 30
    for row in rows:
        cells = [
            in_lines(cell, width) if key == "usage" else cell
            for key, cell in zip(keys, row, strict=True)
        ]
        table.add_row(Text(cells[0], "bold"), *map(Text, cells[1:]))
    console().print(table)
    return 0


def in_lines(spec: str, width: int) -> str:
    """The spec broken after commas."""
    lines = [""]
    for piece in re.findall(r"[^,]+,?", spec):
        if len(lines[-1]) + len(piece) > width:
            lines.append("  ")
        lines[-1] += piece
    return "\n".join(lines)
