"""The report as one self-contained page."""

from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from thinwire.report.bars import final_metric, step_share, step_split
from thinwire.report.curves import loss_megabytes, loss_seconds, metric_seconds
from thinwire.report.figure import share_glyphs
from thinwire.report.layers import layers_error, layers_ratio
from thinwire.report.links import links, where_it_pays
from thinwire.report.picture import Picture
from thinwire.report.results import failures, result_table
from thinwire.report.style import page
from thinwire.report.words import count, day, digits, link, listing

Document = dict[str, Any]
Maker = Callable[[Document], Picture | str]

SECTIONS: dict[str, tuple[Maker, ...]] = {
    "Training loss": (loss_seconds, loss_megabytes),
    "Metric": (metric_seconds, final_metric),
    "Time of a step": (step_split, step_share),
    "Layers": (layers_ratio, layers_error),
    "Links": (links,),
}
_STYLE = """
:root { --accent: #0072B2; --bad: #b3261e; --warn: #8a5a00; --tint: #f3f6f9; }
@media (prefers-color-scheme: dark) {
  :root { --accent: #56B4E9; --bad: #ff8a80; --warn: #e6b450; --tint: #20242a; }
}
body { padding: 1.5rem 1rem 4rem; box-sizing: border-box; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0 0 .4rem; }
.verdict { color: var(--ink); font-size: 1.2rem; line-height: 1.45; margin: 1.2rem 0;
  padding: .8rem 1rem; background: var(--tint); border-left: 4px solid var(--accent); }
.badge { display: inline-block; font-size: .75rem; font-weight: 600; line-height: 1.4;
  padding: 0 .5em; border: 1px solid var(--warn); border-radius: 1em; color: var(--warn);
  vertical-align: .1em; white-space: nowrap; }
.panels { gap: 2rem; align-items: start; }
figure { margin: 0; min-width: 0; max-width: 40rem; }
figcaption, .pays { color: var(--soft); font-size: .85rem; }
.pays { overflow-wrap: anywhere; } ul.pays { padding-left: 1.2rem; } .pays li { margin: .4rem 0; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
caption > span { position: sticky; left: 0; }
.results { width: 100%; } .results small { color: var(--soft); }
.results thead th { white-space: normal; min-width: 4.5rem; font-weight: 600; }
.results tbody th { font-weight: 400; white-space: normal; overflow-wrap: anywhere;
  min-width: 14rem; }
.results td { vertical-align: top; } .results tbody th { vertical-align: top; }
.state.failed { color: var(--bad); } .state.diverged { color: var(--warn); }
.state:not(.ok) { font-weight: 600; }
code, pre { font: .9em/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; background: var(--tint); padding: .6rem .8rem; margin: .4rem 0; }
.failed { padding-left: 1.2rem; } .failed li { margin: .5rem 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--accent); }
a { color: var(--accent); }
dl { grid-template-columns: minmax(6rem, max-content) minmax(0, 1fr); }
dd { overflow-wrap: anywhere; }
.files { columns: 14rem; padding-left: 1.2rem; font-size: .9rem; }
@media (max-width: 40rem) {
  .results tbody th { max-width: 9rem; min-width: 7rem; } .verdict { font-size: 1.05rem; }
}
"""


class Drawn(NamedTuple):
    html: str
    pictures: dict[str, bytes]  # PNGs by the names of their files, in the order of the page


def mark_of(document: Document) -> str:
    """What all that holds seconds is marked with: "projected", or nothing."""
    return "projected" if document["settings"]["network"] == "projected" else ""


def draw(document: Document) -> Drawn:
    """The page, and what is on it."""
    mark = mark_of(document)
    badge = f'<span class="badge">{mark}</span>' if mark else ""
    sections: list[str] = []
    pictures: dict[str, bytes] = {}
    for heading, makers in SECTIONS.items():
        made = [maker(document) for maker in makers]
        figures = []
        for picture in (one for one in made if isinstance(one, Picture)):
            inline, pictures[f"{picture.name}.png"] = picture.render(mark)
            figures.append(_figure(picture, inline, badge))
        missing = [one for one in made if isinstance(one, str)]
        if heading == "Links" and figures:
            figures.append(_pays(document, badge))
        sections.append(_section(heading, figures, missing))
    title = f"thinwire compare: {_where(document)}"
    body = f"""<header>
<h1>{escape(title)}</h1>
<p>{escape(_scope(document))}</p>
</header>
<main>
<p class="verdict">{escape(document["verdict"])}</p>
<p>{badge} {escape(_network(document))}</p>
<h2 id="results">Results</h2>
{result_table(document, badge)}{failures(document)}{"".join(sections)}</main>
<footer>
{_about(document, list(pictures))}</footer>
"""
    return Drawn(share_glyphs(page(escape(title), body, _STYLE)), pictures)


def _section(heading: str, figures: list[str], missing: list[str]) -> str:
    panels = f'<div class="panels">\n{"".join(figures)}</div>\n' if figures else ""
    words = "".join(f"<p>{escape(sentence)}</p>\n" for sentence in dict.fromkeys(missing))
    return f'<h2 id="{heading.lower().replace(" ", "-")}">{heading}</h2>\n{panels}{words}'


def _figure(picture: Picture, inline: str, badge: str) -> str:
    return (
        f'<figure id="figure-{picture.name}">\n<h3>{escape(picture.title)} {badge}</h3>\n'
        f"{inline}<figcaption>{escape(picture.text)}</figcaption>\n</figure>\n"
    )


def _pays(document: Document, badge: str) -> str:
    """Beside the picture of step times, what can be read from it."""
    found = where_it_pays(document)
    if not found:
        return ""
    items = "".join(
        f"<li><code>{escape(name)}</code> {escape(text)}</li>\n" for name, text in found
    )
    return (
        f'<div>\n<h3>Where it pays {badge}</h3>\n<p class="pays">Against the step of '
        f"<code>{escape(document['baseline'])}</code> at the same rate.</p>\n"
        f'<ul class="pays">\n{items}</ul>\n</div>\n'
    )


def _where(document: Document) -> str:
    settings = document["settings"]
    over = f" with {_links(settings)}" if settings["links"] else ""
    workload = settings["workload"].rsplit("/", 1)[-1]
    return f"{workload} on {count(settings['hosts'], 'host')}{over}"


def _links(settings: dict[str, Any]) -> str:
    inter = settings.get("inter")
    links = f"links of {listing(dict.fromkeys(map(link, settings['links'])))}"
    return f"{links} and {link(inter)} between racks" if inter else links


def _scope(document: Document) -> str:
    settings = document["settings"]
    size = settings.get("parameters")
    parts = [f"{size:,} parameters"] if size else []
    if settings.get("steps") is not None:
        parts.append(count(settings["steps"], "step"))
    if settings.get("seconds") is not None:
        parts.append(f"{digits(settings['seconds'])} seconds a run")
    parts += [count(len(settings["seeds"]), "seed"), day(document["date"])]
    return ", ".join(parts) + "."


def _network(document: Document) -> str:
    settings = document["settings"]
    links = _links(settings) if settings["links"] else "the links asked for"
    if mark_of(document):
        return (
            "All hosts ran on this machine and spoke over its loopback. Seconds are not measured: "
            f"they are computed for {links} from the bytes and the compute that were measured, "
            "assuming that nothing overlaps. Losses, metrics and bytes are measured."
        )
    return (
        f"Measured in a lab on this machine: hosts are network namespaces, joined by {links}. "
        "They share its cores."
    )


def _about(document: Document, names: list[str]) -> str:
    settings = {key: value for key, value in document["settings"].items() if key != "command"}
    files = "".join(f'<li><a href="{name}">{name}</a></li>\n' for name in names)
    notes = "".join(f"<li>{escape(note)}</li>\n" for note in document["notes"])
    return f"""<div class="panels">
<section><h2 id="settings">Settings</h2>
<pre><code>{escape(document["settings"]["command"])}</code></pre>
{_list(settings)}</section>
<section><h2 id="machine">Machine and versions</h2>
{_list({**document["machine"], **document["versions"]})}</section>
</div>
<h2 id="notes">Notes</h2>
{f"<ul>{notes}</ul>" if notes else "<p>None.</p>"}
<h2 id="files">Files</h2>
<p>All numbers: <a href="data.json">data.json</a>. The pictures, beside this page:</p>
<ul class="files">
{files}</ul>
"""


def _list(values: dict[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(key.removesuffix('_bytes').replace('_', ' '))}</dt>"
        f"<dd>{escape(_show(key, value))}</dd>\n"
        for key, value in values.items()
    )
    return f"<dl>\n{rows}</dl>\n"


def _show(key: str, value: Any) -> str:
    if value is None:
        return "not set" if key in ("steps", "seconds", "target", "inter") else "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key == "memory_bytes":
        return f"{value / 1e9:.1f} GB"
    return f"{value:,}" if isinstance(value, int) else str(value)
