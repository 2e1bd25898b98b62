"""A report as tables for the terminal: all of it at 100 columns, less where there are fewer."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.bench.columns import COLUMNS, LEGEND, NOTHING, Column, machine_line, parts, title_of
from thinwire.bench.result import Group, Report

LONGEST_NAME = 24  # before it is broken


def print_report(report: Report, console: Console) -> None:
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


def _print_group(group: Group, console: Console) -> None:
    columns = list(COLUMNS)
    least = min(columns, key=lambda column: column.vital)
    while sum(_widths(columns, group)) + len(columns) - 1 > console.width and least.vital < 9:
        columns.remove(least)
        least = min(columns, key=lambda column: column.vital)
    console.print(Text(title_of(group), "bold"), soft_wrap=True)
    console.print(_table(group, columns))
    if left_out := [column.full_name for column in COLUMNS if column not in columns]:
        console.print(f"Left out for want of room: {', '.join(left_out)}.")


def _table(group: Group, columns: list[Column]) -> Table:
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


def _widths(columns: list[Column], group: Group) -> list[int]:
    widths = []
    for part, column in zip(parts(columns), columns, strict=True):
        cells = [column.cell(row, group) for row in group.rows]
        longest = max(map(len, [column.heading, *cells]))
        if column is COLUMNS[0]:
            longest = min(longest, LONGEST_NAME)
        gap = part in ("encode", "decode")  # sets them apart
        widths.append(max(longest, len(part) + gap))
    return widths
