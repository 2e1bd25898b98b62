"""What a report shows: all of its document, escaped and marked, in a page that stands alone."""

import html
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import comparisons
import jinja2
import numpy as np
import pytest
from browser import CHROMIUM, measure, printed

from thinwire import report
from thinwire.compare.document import Document, StepSplit, SweepEntry
from thinwire.errors import MissingExtraError
from thinwire.report.charts import _prefix, where_it_pays
from thinwire.report.curves import POINTS, Curve, thin, trailing_mean
from thinwire.report.demo_page import DemoPart, write_demo
from thinwire.report.figure import new_figure
from thinwire.report.page import SECTIONS, draw
from thinwire.report.picture import WIDTH, Picture, looks
from thinwire.report.template import environment
from thinwire.report.words import day, digits, labels, link, shorten

RECORDS = Path(__file__).resolve().parents[1] / "benchmarks" / "records"
PICTURES = [
    *("loss-seconds", "loss-megabytes", "metric-seconds", "final-metric", "step-split"),
    *("step-share", "layers-ratio", "layers-error", "links"),
]
CHARTS = {"loss-seconds", "loss-megabytes", "metric-seconds", "links"}  # that can be asked
DEMO = ("images", "text")  # folders of the reports that the demo's page is about


def small(**settings: Any) -> Document:
    """Two methods, one seed, few steps: quick to draw."""
    few: dict[str, Any] = {"seeds": 1, "steps": 6, "tensors": 2}
    methods = [comparisons.method("ddp", **few), comparisons.method("topk:0.01", **few)]
    return comparisons.document(methods, **settings)


@pytest.fixture(scope="module")
def large() -> Document:
    """As large as they come: thousands of steps, hundreds of tensors."""
    return comparisons.rich(steps=2000, tensors=200, network="projected")


@pytest.fixture(scope="module")
def written(large: Document, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return report.write(large, tmp_path_factory.mktemp("report") / "deep" / "er")


@pytest.fixture(scope="module")
def page(written: list[Path]) -> str:
    return written[0].read_text(encoding="utf-8")


def test_all_files_are_written(large: Document, written: list[Path]) -> None:
    names = ["report.html", "data.json", *(f"{name}.png" for name in PICTURES)]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(names)
    assert report.read_document(written[1]) == large
    assert written[1].read_text(encoding="utf-8").startswith('{\n "schema": "thinwire.compare/1"')
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in written[2:])


def test_the_page_is_small_and_alone(page: str) -> None:
    assert len(page.encode()) < 1_000_000
    assert not re.search(r"https?:", page)
    for outside in ("src=", "@import", "url(http", "<link", "xmlns", "fetch(", "import("):
        assert outside not in page, f"the page loads something by {outside}"
    hrefs = set(re.findall(r'(?<!:)href="([^"]*)"', page))
    assert hrefs == {"data.json", *(f"{name}.png" for name in PICTURES)}
    # Letters, clip paths, sections: what is named is named once.
    names = re.findall(r' id="([^"]*)"', page)
    assert len(names) == len(set(names))
    assert set(re.findall(r'xlink:href="#([^"]*)"', page)) <= set(names)


def test_the_page_says_it_all(large: Document, page: str) -> None:
    text = re.sub(r"<svg.*?</svg>|<wbr>", "", page, flags=re.DOTALL)
    headings = re.findall(r"<h2[^>]*>([^<]*)<", text)
    assert headings == [
        *("Results", "What failed", *SECTIONS, "Settings", "Machine and versions", "Notes"),
        "Files",
    ]
    assert text.index("reached plain DDP&#39;s final loss") < text.index("<table")
    for method in large.methods:
        assert f"<code>{method.name}</code>" in text
    row = text[text.index("<code>topk:0.01+ef14</code>") :].split("</tr>")[0]
    for cell in ("86.0", "9.4x", "50.0x", "50 kB", "ok"):
        assert f">{cell}<" in row, f"{cell} is not in {row}"
    assert "not reached" in text
    assert '<span class="state diverged">' in text
    assert '<span class="state failed">' in text
    assert "trailing mean of 200 steps" in text  # a tenth, as results are taken
    assert "20 largest of 200 tensors" in text
    for words in ("thinwire compare --link 100mbit", "AMD EPYC", "half of a core", "2.9.1"):
        assert words in text, f"{words} is not on the page"
    assert len(re.findall(r'<svg role="img" aria-label="[^"]+', page)) == len(PICTURES)
    error = "&lt;frozen&gt;/hooks_29.py"
    assert "<frozen>" not in page
    assert error in text.split("<details>")[1].split("</details>")[0]
    assert error not in text.split("<details>")[0]


def test_all_is_marked_as_projected(written: list[Path], page: str) -> None:
    assert "over its loopback interface" in page
    figures = re.findall(r"<figure.*?</figure>", page, flags=re.DOTALL)
    captions = re.findall(r"<caption>.*?</caption>", page)
    assert len(figures) == len(PICTURES)
    assert len(captions) == page.count("<table") == 1
    for each in captions + re.findall(r"<h3>.*?</h3>", "".join(figures)):
        assert '<span class="badge">projected</span>' in each
    for figure in figures:
        assert re.search(r'aria-label="[^".]*\(projected\)', figure)
    for path in written[2:]:
        assert b"(projected)" in path.read_bytes().split(b"IDAT")[0], f"{path.name} is not marked"


def test_a_png_shows_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []

    def remember(width: float, height: float) -> Any:
        figures.append(new_figure(width, height))
        return figures[-1]

    monkeypatch.setattr("thinwire.report.picture.new_figure", remember)
    picture = Picture("a", "Title", "text", 2.0, lambda figure: figure.subplots())
    inline, png = picture.render("projected")
    assert inline.startswith('<svg role="img" aria-label="Title (projected). text"')
    assert [text.get_text() for text in figures[0].texts] == ["Title (projected)"]
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert width == pytest.approx(150 * WIDTH, abs=2)
    assert height == pytest.approx(150 * 2.3, abs=2)


def test_a_lab_is_not_projected_and_bytes_repeat(tmp_path: Path) -> None:
    document = small(metric=None)
    document.sweep = []
    first, again = (report.write(document, tmp_path / name) for name in ("a", "b"))
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), f"{one.name} differs"
    text = first[0].read_text(encoding="utf-8")
    assert "projected" not in text
    assert "Measured in a lab" in text
    assert "What failed" not in text


@pytest.fixture
def page_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn for the page, not for files besides."""
    monkeypatch.setattr("thinwire.report.picture.png", lambda *_: b"")


@pytest.mark.usefixtures("page_only")
def test_names_are_escaped() -> None:
    names = ["<b>&\"'", "_$x^2$", "a" * 300, "a" * 299 + "b", "two\nlines"]
    few: dict[str, Any] = {"seeds": 1, "steps": 2, "tensors": 1}
    document = comparisons.document(
        [comparisons.method(name, title="<script>alert(1)</script>", **few) for name in names],
        workload="<i>.py",
        metric="$\\frac <u>",
        command="compare '<script>'",
    )
    document.baseline, document.verdict = names[0], "<em>"
    document.notes, document.sweep = ["<img src=x>"], []
    document.methods.append(comparisons.failed("</pre>", "</details><script>"))
    document.methods[0].runs[0].tensors[0].name = "<s>$$"
    drawn = draw(document).html
    assert drawn.count("<script") == drawn.count("</script") == 2  # the charts, and their data
    drawn = re.sub(r"<script.*?</script>", "", drawn, flags=re.DOTALL)
    tags = set(re.findall(r"<(\w+)", drawn))
    assert not tags & {"script", "img", "b", "i", "em", "u", "s"}
    assert drawn.count("</pre>") == drawn.count("<pre>")
    assert "&lt;script&gt;alert(1)" in drawn
    shown = [look.label for look in looks(document).values()]
    assert len(set(shown)) == len(names)
    assert max(map(len, shown)) < 30


def without_seconds(document: Document) -> Document:
    for method in document.methods:
        for run in method.runs:
            run.megabytes = [0.0] * len(run.megabytes)
            run.evaluations = []
            run.split = StepSplit(compute=0.0, encode=0.0, network=0.0, decode=0.0)
    return document


def odd_documents() -> dict[str, tuple[Document, list[str]]]:
    """By name: the document, and the pictures that can be drawn from it."""
    lost = comparisons.document([comparisons.failed("ddp", "E: no")], metric=None)
    lost.sweep, lost.target_loss = [], None
    none = lost.model_copy(update={"methods": [], "baseline": None, "notes": []})
    step = comparisons.method("none", seeds=1, steps=1, tensors=0, megabytes=0.0)
    step.summary.final_metric = step.summary.to_target = step.summary.step_speedup = None
    step.runs[0].final_metric = None
    alone = without_seconds(comparisons.document([step], hosts=1, links=[], metric=None))
    alone.sweep = alone.sweep[:1]
    blind = comparisons.diverged("ddp", seeds=2, steps=9, tensors=1)
    blind.runs[0].losses = [None] * 9
    blind.runs.append(comparisons.method("x", steps=2).runs[0])  # cut off
    blind.error, blind.summary = "stopped", None
    for tensor in (tensor for run in blind.runs for tensor in run.tensors):
        tensor.relative_error = None
    wild = comparisons.document([blind], seconds=30.0, steps=None, higher_is_better=False)
    wild.sweep.append(SweepEntry(link="a mixture", step_seconds={"ddp": 1.0, "gone": None}))
    gaps = [name for name in PICTURES if name != "layers-error"]
    hollow = small()
    hollow.methods[0].runs = []
    return {
        "all failed": (lost, []),
        "nothing at all": (none, []),
        "one step, one host": (alone, ["loss-seconds", "step-split", "step-share"]),
        "diverged, cut off": (wild, gaps),
        "a sweep of what has no runs": (hollow, PICTURES),
    }


@pytest.mark.parametrize("name", odd_documents())
def test_odd_documents_are_drawn(name: str) -> None:
    document, expected = odd_documents()[name]
    drawn = draw(document)
    assert list(drawn.pictures) == [f"{name}.png" for name in expected]
    # A section without pictures says why.
    assert not re.search(r"</h2>\s*(<h2|</main)", drawn.html)
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", drawn.html, flags=re.DOTALL)


def test_a_failure_half_way_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("old", encoding="utf-8")
    document = small()

    def fail(*_: object) -> None:
        raise RuntimeError("no paper")

    monkeypatch.setattr(Picture, "render", fail)
    with pytest.raises(RuntimeError, match="no paper"):
        report.write(document, tmp_path)
    # What was measured is safe, and nothing is half done.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json", "report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == "old"
    assert report.read_document(tmp_path / "data.json") == document


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"thinwire\[plot\]"):
        report.write(small(), tmp_path)
    with pytest.raises(MissingExtraError, match="thinwire report"):
        report.require_matplotlib("thinwire report")


def broken(path: str, value: Any) -> str:
    """A document with one thing changed, as JSON."""
    document: Any = json.loads(small().to_json())
    place = document
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    if value is KeyError:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return json.dumps(document)


WRONG = {
    "no JSON": ("{", "not JSON"),
    "a picture": ("\x89PNG", "not JSON"),
    "a list": ("[]", "no schema"),
    "another document": ('{"schema": "thinwire.bench/1"}', "thinwire.bench/1"),
    "a later version": (broken("schema", "thinwire.compare/2"), "another version of thinwire"),
    "no hosts": (broken("settings.hosts", KeyError), "settings: expected a field 'hosts'"),
    "no methods": (broken("methods", KeyError), "the document: expected a field 'methods'"),
    "methods of text": (broken("methods", "ddp"), "methods: expected a list, got 'ddp'"),
    "a loss of text": (broken("methods.1.runs.0.losses.3", "x"), r"methods\[1\].*losses\[3\]"),
    "NaN": (broken("methods.1.runs.0.losses.3", math.nan), "a finite number, got nan"),
    "a second missing": (broken("methods.0.runs.0.seconds", [1.0]), "6 losses, 1 seconds"),
    "a flag": (broken("methods.0.diverged", 1), r"methods\[0\].diverged: expected a boolean"),
    "a name twice": (broken("methods.1.name", "ddp"), "names that differ"),
    "sweep of text": (
        broken("sweep.0.step_seconds", {"ddp": "1"}),
        r"sweep\[0\].step_seconds.ddp: expected a number",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_report_is_refused(name: str, tmp_path: Path) -> None:
    text, reason = WRONG[name]
    path = tmp_path / "data.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"(?s)data.json: .*{reason}"):
        report.read_document(path)


def test_a_wrong_document_is_not_written(tmp_path: Path) -> None:
    document = small()
    document.methods[1].runs[0].losses[3] = math.inf
    with pytest.raises(ValueError, match=r"methods\[1\].*losses\[3\]: expected a finite number"):
        report.write(document, tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(RECORDS.glob("compare-*.json")), ids=lambda path: path.stem)
def test_records_of_earlier_comparisons_are_read_and_kept(path: Path) -> None:
    document = report.read_document(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(document.to_json()) == found
    # A benchmark's own field, which `thinwire compare` by itself does not write.
    assert hasattr(document, "targets") == ("targets" in found)


def test_templates_escape_and_know_their_names() -> None:
    page = environment().from_string(
        '{% extends "page.html.j2" %}{% block body %}{{ x }} {{ 1234567 | bytes }}{% endblock %}'
    )
    assert "&lt;b&gt; 1.23 MB" in page.render(title="t", x="<b>")
    with pytest.raises(jinja2.UndefinedError, match="'x' is undefined"):
        page.render(title="t")


@pytest.mark.usefixtures("page_only")
def test_a_dollar_begins_no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(
        "thinwire.report.picture.new_figure",
        lambda *size: figures.append(new_figure(*size)) or figures[-1],
    )
    name = r"loss $x^$ \frac"  # as a formula it would be wrong
    document = small(metric=name)
    assert f"final {name} (higher is better)" in draw(document).html
    axes = [one for figure in figures for one in figure.axes]
    shown = [text for one in axes for text in (one.get_xlabel(), one.get_ylabel())]
    assert shown.count(name) == 2  # over time, and at the end


def test_trailing_mean() -> None:
    values = np.array([4.0, 2.0, np.nan, 6.0, 1.0])
    expected = [4.0, 3.0, np.nan, 4.0, 3.5]  # the third is left out of the means after it
    np.testing.assert_allclose(trailing_mean(values, 3), expected)
    np.testing.assert_array_equal(trailing_mean(values, 1), values)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("steps", [1, POINTS, 5000])
def test_thinning_keeps_both_ends(log: bool, steps: int) -> None:
    x = np.arange(1.0, steps + 1)
    curve = thin(Curve(x, x, x - 1, x + 1), log)
    assert curve.x[0] == 1
    assert curve.x[-1] == steps
    assert len(curve.x) <= POINTS + 1
    assert np.all(np.diff(curve.x) > 0)
    np.testing.assert_array_equal(curve.high, curve.x + 1)


def test_where_it_pays() -> None:
    document = small()
    names = ["ddp", "always", "never", "slow links", "fast links"]
    document.methods = [document.methods[0].model_copy(update={"name": name}) for name in names]
    times = {"1gbit": (1, 0.5, 2, 2, 0.5), "10mbit": (1, 0.5, 2, 0.5, 2)}
    document.sweep = [
        SweepEntry(link=link, step_seconds=dict(zip(names, seconds, strict=True)))
        for link, seconds in times.items()
    ]
    found = dict(where_it_pays(document))
    assert found["always"].startswith("pays at all rates tried")
    assert found["never"].startswith("pays at none of the rates tried")
    # Twice as fast at 10 Mbit/s, half as fast at 1 Gbit/s: even at the geometric mean.
    assert found["slow links"].startswith("stops paying at about 100 Mbit/s: 2x at 10")
    assert found["fast links"].startswith("pays at 1 Gbit/s and not at the other")
    document.baseline = None
    assert where_it_pays(document) == []


def test_layers_are_told_apart() -> None:
    names = [f"module.transformer.layers.{i}.attention.weight" for i in range(12)]
    assert _prefix(names) == "module.transformer.layers."
    assert _prefix(names[:1]) == _prefix(["1.weight", "1.bias"]) == ""
    assert _prefix([*names, "head"]) == ""


def test_words() -> None:
    numbers = (None, math.inf, 0, 0.01234, 0.35, 1.234, 99.96, 1234.5, -2.5)
    shown = ["-", "-", "0", "0.0123", "0.35", "1.23", "100", "1,234", "-2.50"]
    assert [digits(number) for number in numbers] == shown
    assert [link(text) for text in ("100mbit", "1.5gbit", "wifi")] == [
        *("100 Mbit/s", "1.5 Gbit/s", "wifi")
    ]
    assert day("2026-11-16T07:00:59+00:00") == "2026-11-16 07:00 UTC"
    assert day("today") == "today"
    assert shorten("0123456789", 7) == "0123…89"
    assert labels(["_a", "$"], 9) == {"_a": " _a", "$": r"\$"}


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")
@pytest.mark.parametrize(
    ("scheme", "paper", "ink"),
    [
        ("1", "rgb(255, 255, 255)", "rgb(34, 34, 34)"),
        ("0", "rgb(22, 24, 28)", "rgb(228, 228, 228)"),
    ],
    ids=["light", "dark"],
)
def test_a_browser_shows_it(
    scheme: str, paper: str, ink: str, written: list[Path], tmp_path: Path
) -> None:
    frames, said = measure(written[0], tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    assert "CONSOLE" not in said, said
    assert [frame["width"] for frame in frames] == [1280, 390]
    for frame in frames:
        assert frame["needs"] <= frame["width"], "the page scrolls sideways"
        assert {"Results", "What failed", *SECTIONS, "Files"} <= set(frame["headings"])
        assert len(frame["pictures"]) == len(PICTURES)
        for left, right, height in frame["pictures"]:
            assert left >= 0
            assert right <= frame["width"]
            assert right - left > 300
            assert height > 100
        assert frame["letters"] > 1000, "letters are not drawn"
        assert (frame["paper"], frame["ink"]) == (paper, ink)
        assert frame["loaded"] == []
        played = frame["played"]
        assert played["charts"] == len(CHARTS)
        assert re.search(r": [\d.]+ .*at [\d.e+]+ \(seconds of training\)", played["said"])
        # A method is hidden in all charts that have it, and comes back.
        assert played["off"] == "false"
        assert 0 < played["before"] - played["without"] <= len(CHARTS)
        assert played["after"] == played["before"]
        assert played["scales"] == [True, True]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")
def test_without_javascript_and_on_paper_there_are_the_pictures(
    written: list[Path], tmp_path: Path
) -> None:
    page = written[0].read_text(encoding="utf-8")
    still = tmp_path / "still.html"  # as a browser has it that runs no script of the page
    still.write_text(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL), encoding="utf-8")
    frames, _ = measure(still, tmp_path)
    for frame in frames:
        assert frame["played"] is None
        assert len(frame["pictures"]) == len(PICTURES)
        assert frame["needs"] <= frame["width"]
    paper = printed(written[0], tmp_path)
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", paper)) >= 2


def test_charts_hold_what_the_pictures_show(large: Document, page: str) -> None:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page)
    assert found is not None
    charts = json.loads(found[1])
    assert set(charts) == CHARTS
    names = {method.name for method in large.methods if method.runs}
    for chart in charts.values():
        assert {series["name"] for series in chart["series"]} <= names
        for series in chart["series"]:
            x = [point[0] for point in series["points"]]
            assert x == sorted(x)


def test_a_failure_is_shown_with_its_traceback() -> None:
    method = comparisons.failed("topk:0.01", "ValueError: <no>")
    method.output = "host 0 failed with exit code 1\n-- stderr:\nTraceback <most recent>"
    made = draw(comparisons.document([comparisons.method("ddp", seeds=1, steps=6), method])).html
    assert "Traceback &lt;most recent&gt;" in made
    assert "<most recent>" not in made


@pytest.fixture(scope="module")
def demo(large: Document, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's page about two models, each with methods of the same names."""
    failing = large.model_copy(update={"verdict": "<won>"})
    failing.methods = [method.model_copy() for method in large.methods]
    lost = next(method for method in failing.methods if method.error is not None)
    lost.output = "host 0 failed with exit code 1\n-- stderr:\nTraceback <most recent>"
    parts = [DemoPart(f"Model {name}", name, failing) for name in DEMO]
    return write_demo(parts, tmp_path_factory.mktemp("demo"))


def test_the_page_of_the_demo_is_small_and_alone(demo: Path, large: Document) -> None:
    assert [path.name for path in demo.parent.iterdir()] == ["report.html"]
    text = demo.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    assert text.count("&lt;won&gt;") == len(DEMO)
    assert not re.search(r"https?:|src=|@import|url\(data|<link|<img|xmlns", text)
    hrefs = set(re.findall(r'(?<!:)href="([^"]*)"', text))
    assert hrefs == {f"{name}/report.html" for name in DEMO}
    for method in large.methods:
        assert html.escape(re.split(r"[|+]", method.name)[0]) in text


def test_the_demo_has_the_charts_of_both_reports(demo: Path) -> None:
    text = demo.read_text(encoding="utf-8")
    names = [f"{part}-{name}" for part in DEMO for name in PICTURES if name in CHARTS]
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert found is not None
    assert list(json.loads(found[1])) == names
    assert text.count("Puts a chart that can be asked") == 1  # charts.js, once for all
    # What is there without it: a picture in each figure, of which nothing has a name twice.
    still = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    figures = re.findall(r'<figure id="figure-([^"]*)">.*?</figure>', still, flags=re.DOTALL)
    assert figures == names
    assert len(re.findall(r'<svg role="img" aria-label="[^"]+', still)) == len(names)
    ids = re.findall(r' id="([^"]*)"', still)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:xlink:href="|url\()#([^")]*)', still)) <= set(ids)


def test_the_demo_shows_failures_as_the_report_does(demo: Path) -> None:
    text = demo.read_text(encoding="utf-8")
    assert text.count("What failed") == len(DEMO)
    assert text.count("Traceback &lt;most recent&gt;") == len(DEMO)
    assert "<most recent>" not in text


def test_the_page_of_a_demo_in_which_all_failed(tmp_path: Path) -> None:
    lost, _ = odd_documents()["all failed"]
    text = write_demo([DemoPart("Model", "model", lost)], tmp_path).read_text(encoding="utf-8")
    assert not re.search("<figure|<svg|<script", text)
    assert 'class="failed"' in text
    assert "E: no" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")
def test_a_browser_shows_the_demo(demo: Path, tmp_path: Path) -> None:
    frames, said = measure(demo, tmp_path)
    assert "CONSOLE" not in said, said
    for frame in frames:
        assert frame["needs"] <= frame["width"], "the page scrolls sideways"
        assert frame["loaded"] == []
        played = frame["played"]
        assert len(frame["pictures"]) == played["charts"] == len(DEMO) * len(CHARTS)
        # A method is hidden in the charts of one model, not in those of the other.
        assert 0 < played["before"] - played["without"] <= len(CHARTS)
        assert played["after"] == played["before"]
    assert printed(demo, tmp_path).startswith(b"%PDF")
