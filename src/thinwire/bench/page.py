"""A report as one self-contained page: pictures drawn inline, the table below them.

Light or dark as the reader's system is, one panel above the other where the screen is narrow, and
nothing is loaded from anywhere.
"""

import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from thinwire.bench.columns import COLUMNS, LEGEND, machine_line, parts, title_of
from thinwire.bench.plot import (
    INK,
    PAPER,
    WIDTH,
    Finish,
    draw_speed,
    draw_trade,
    height_of,
    new_figure,
    settle,
)
from thinwire.bench.result import Group, Report

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ddd; --soft: #666; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #16181c; --line: #3a3d42; --soft: #a0a0a0; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 80rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { color: var(--soft); margin: .25rem 0; overflow-wrap: anywhere; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr));
  gap: 1rem; }
svg { width: 100%; height: auto; color: var(--ink); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper); }
th { vertical-align: bottom; } th.new, td.new { padding-left: 1.4rem; }
dl { font-size: .85rem; display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); }
"""


def write_page(report: Report, path: Path) -> None:
    """Write the page."""
    title = "thinwire bench"
    state = " Interrupted: this is what was done until then." if report.interrupted else ""
    notes = "".join(f"<p>Note: {escape(note)}.</p>\n" for note in report.notes)
    legend = "".join(f"<dt>{escape(n)}</dt><dd>{escape(m)}</dd>\n" for n, m in LEGEND)
    path.write_text(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{escape(machine_line(report))}</p>
<p>{escape(report.date)}.{state}</p>
{notes}{"".join(map(_section, report.groups))}<h2>What the columns mean</h2>
<dl>
{legend}</dl>
</body>
</html>
""",
        encoding="utf-8",
    )


def _section(group: Group) -> str:
    pictures = [
        _svg(draw_trade, group, "Compression ratio against relative error"),
        _svg(draw_speed, group, "Throughput of encode and decode"),
    ]
    return (
        f'<h2>{escape(title_of(group))}</h2>\n<div class="panels">\n{"".join(pictures)}</div>\n'
        f'<div class="scroll">\n{_table(group)}</div>\n'
    )


def _svg(draw: Callable[[Any, Group], Finish | None], group: Group, what: str) -> str:
    """A panel as an <svg> element whose ink is the colour of the text around it."""
    import matplotlib

    figure = new_figure(WIDTH, height_of(group))
    finish = draw(figure.subplots(), group)
    settle(figure, [finish] if finish else [])
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Letters as outlines: labels keep the width that they were placed for. The salt makes the names
    # of clip paths the same in every run, and different between panels.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": f"{what}{group}"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # named after figure and axes: not unique here
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = text.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(what)}"', 1)


def _table(group: Group) -> str:
    def row(tag: str, cells: list[str]) -> str:
        marks = [' class="new"' if part else "" for part in parts(COLUMNS)]
        inner = (f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>\n"

    both = zip(parts(COLUMNS), COLUMNS, strict=True)
    head = row("th", [f"{escape(part)}<br>{escape(c.heading)}" for part, c in both])
    body = [row("td", [escape(c.cell(r, group)) for c in COLUMNS]) for r in group.rows]
    return f"<table>\n<thead>{head}</thead>\n<tbody>\n{''.join(body)}</tbody>\n</table>\n"
