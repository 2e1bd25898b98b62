"""A report as one self-contained page: pictures drawn inline, the table below them.

Light or dark as the reader's system is, one panel above the other where the screen is narrow, and
nothing is loaded from anywhere.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from thinwire.bench.columns import COLUMNS, LEGEND, machine_line, parts, title_of
from thinwire.bench.plot import WIDTH, draw_speed, draw_trade, height_of
from thinwire.bench.result import Group, Report
from thinwire.report.figure import Finish, new_figure, settle, share_glyphs, svg
from thinwire.report.template import environment


def write_page(report: Report, path: Path) -> None:
    """Write the page."""
    title = "thinwire bench"
    state = " Interrupted: this is what was done until then." if report.interrupted else ""
    notes = "".join(f"<p>Note: {escape(note)}.</p>\n" for note in report.notes)
    legend = "".join(f"<dt>{escape(n)}</dt><dd>{escape(m)}</dd>\n" for n, m in LEGEND)
    body = f"""<h1>{title}</h1>
<p>{escape(machine_line(report))}</p>
<p>{escape(report.date)}.{state}</p>
{notes}{"".join(map(_section, report.groups))}<h2>What the columns mean</h2>
<dl>
{legend}</dl>
"""
    whole = '{% extends "page.html.j2" %}{% block body %}{{ body }}{% endblock %}'
    html = environment().from_string(whole).render(title=title, body=Markup(body))
    path.write_text(share_glyphs(html), encoding="utf-8")


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
    figure = new_figure(WIDTH, height_of(group))
    finish = draw(figure.subplots(), group)
    settle(figure, [finish] if finish else [])
    return svg(figure, what, salt=f"{what}{group}")


def _table(group: Group) -> str:
    def row(tag: str, cells: list[str]) -> str:
        marks = [' class="new"' if part else "" for part in parts(COLUMNS)]
        inner = (f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>\n"

    both = zip(parts(COLUMNS), COLUMNS, strict=True)
    head = row("th", [f"{escape(part)}<br>{escape(c.heading)}" for part, c in both])
    body = [row("td", [escape(c.cell(r, group)) for c in COLUMNS]) for r in group.rows]
    return f"<table>\n<thead>{head}</thead>\n<tbody>\n{''.join(body)}</tbody>\n</table>\n"
