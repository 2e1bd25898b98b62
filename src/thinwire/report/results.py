"""The table of results, and what failed."""

import re
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from thinwire.report.words import NOTHING, digits, times

SHOWN = 200  # letters of an error that stand open on the page

Method = dict[str, Any]
Document = dict[str, Any]


class Column(NamedTuple):
    heading: str
    cell: Callable[[Method, Document], str]


def state(method: Method) -> str:
    if method["error"] is not None:
        return "failed"
    return "diverged" if method["diverged"] else "ok"


def result_table(document: Document, badge: str) -> str:
    """All methods, a row each. `badge` is HTML that says how the seconds came about."""
    columns = _columns(document)
    head = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in columns)
    rows = "".join(_row(method, columns, document) for method in document["methods"])
    return f"""<div class="scroll" role="region" aria-label="Results of all methods" tabindex="0">
<table class="results">
<caption>Results of all methods {badge}</caption>
<thead><tr><th scope="col">method</th>{head}<th scope="col">status</th></tr></thead>
<tbody>
{rows}</tbody>
</table>
</div>
"""


def failures(document: Document) -> str:
    """Methods that failed, each with its error; nothing if there are none."""
    failed = [method for method in document["methods"] if method["error"] is not None]
    if not failed:
        return ""
    items = "".join(f"<li>{_failure(method)}</li>\n" for method in failed)
    return f'<h2 id="failed">What failed</h2>\n<ul class="failed">\n{items}</ul>\n'


def _columns(document: Document) -> list[Column]:
    settings = document["settings"]
    metric = []
    if settings["metric"] is not None:
        better = "higher" if settings["higher_is_better"] else "lower"
        metric = [Column(f"final {settings['metric']} ({better} is better)", _metric)]
    else:
        metric = [Column("final training loss", _loss)]
    return [
        *metric,
        Column("ms a step", lambda method, _: digits(_of(method, "step_seconds", 1e3))),
        Column("times faster a step", lambda method, _: times(_of(method, "step_speedup"))),
        Column("seconds to within 2 % of the baseline's final loss", _to_target),
        Column("times sooner", _sooner),
        Column("MB a step", lambda method, _: digits(_of(method, "megabytes_a_step"))),
        Column("times fewer bytes", lambda method, _: times(_of(method, "fewer_bytes"))),
    ]


def _row(method: Method, columns: list[Column], document: Document) -> str:
    # Where a name may be broken on a narrow screen.
    name = re.sub(r"([|,])|(?=\+)", r"\1<wbr>", escape(method["name"]))
    name = f"<code>{name}</code>"
    if method["title"] != method["name"]:
        name += f"<br><small>{escape(method['title'])}</small>"
    if method["name"] == document["baseline"]:
        name += " <small>(baseline)</small>"
    cells = "".join(f"<td>{column.cell(method, document)}</td>" for column in columns)
    mark = state(method)
    return (
        f'<tr class="{mark}"><th scope="row">{name}</th>{cells}'
        f'<td><span class="state {mark}">{mark}</span></td></tr>\n'
    )


def _metric(method: Method, document: Document) -> str:
    return _spread((method["summary"] or {}).get("final_metric"))


def _loss(method: Method, document: Document) -> str:
    return _spread((method["summary"] or {}).get("final_loss"))


def _spread(spread: dict[str, float] | None) -> str:
    if spread is None:
        return NOTHING
    low, high = digits(spread["lowest"]), digits(spread["highest"])
    around = f"<br><small>{low} to {high}</small>" if low != high else ""
    return f"{digits(spread['mean'])}{around}"


def _to_target(method: Method, document: Document) -> str:
    summary = method["summary"]
    if summary is None or document.get("target_loss") is None:
        return NOTHING
    return digits(summary["to_target"]["seconds"]) if summary["to_target"] else "not reached"


def _sooner(method: Method, document: Document) -> str:
    target = (method["summary"] or {}).get("to_target")
    return times(target["speedup"]) if target else NOTHING


def _of(method: Method, name: str, factor: float = 1.0) -> float | None:
    value = (method["summary"] or {}).get(name)
    return None if value is None else float(value) * factor


def _failure(method: Method) -> str:
    text = method["error"].strip()
    line = " ".join(text.split())
    line = line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
    more = ""
    if line != text:
        more = f"<details><summary>Full text</summary><pre>{escape(text)}</pre></details>"
    ended = len(method["runs"])
    after = f" after {ended} of its seeds" if ended else ""
    return (
        f"<code>{escape(method['name'])}</code> failed{after}: "
        f'<span class="error">{escape(line)}</span>{more}'
    )
