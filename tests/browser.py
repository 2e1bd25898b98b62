"""A page as a real browser lays it out, without a screen and without a network."""

import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

# Two frames of the page, as a desktop and as a phone have it; what they measure ends in the DOM.
WRAPPER = """<!doctype html>
<meta charset="utf-8"><meta name="color-scheme" content="light dark">
<iframe src="report.html" style="width: 1280px; height: 900px; border: 0"></iframe>
<iframe src="report.html" style="width: 390px; height: 844px; border: 0"></iframe>
<pre id="found"></pre>
<script>
// What a reader may do with a chart, and what comes of it.
const play = (page, view) => {
  const chart = page.querySelector(".chart");
  if (!chart) return null;
  const svg = chart.querySelector("svg"), box = svg.getBoundingClientRect();
  const lines = () => page.querySelectorAll(".chart path[fill=none]").length;
  const pressed = each => each.getAttribute("aria-pressed");
  const hover = (clientX, clientY) =>
    svg.dispatchEvent(new view.PointerEvent("pointermove", { clientX, clientY }));
  let said = "";
  for (let i = 1; i < 20 && !said; i++) for (let j = 1; j < 20 && !said; j++) {
    hover(box.left + box.width * i / 20, box.top + box.height * j / 20);
    said = chart.querySelector(".tip").hidden ? "" : chart.querySelector(".tip").textContent;
  }
  const before = lines(), first = chart.querySelector(".legend button");
  first.click();
  const without = lines(), off = pressed(first);
  first.click();
  const scales = [...chart.querySelectorAll(".bar button")].map(each => {
    const was = pressed(each), drawn = svg.innerHTML;
    each.click();
    const changed = was !== pressed(each) && drawn !== svg.innerHTML;
    each.click();
    return changed && drawn === svg.innerHTML;
  });
  const charts = page.querySelectorAll(".chart").length;
  return { charts, said, before, without, off, after: lines(), scales };
};
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement;
    page.querySelectorAll("details").forEach(each => each.open = true);
    const boxes = [...page.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect())
      .filter(box => box.width);  // a picture or the chart in its place
    return {
      width: view.innerWidth, needs: root.scrollWidth,
      headings: [...page.querySelectorAll("h2")].map(each => each.textContent),
      pictures: boxes.map(box => [box.left, box.right, box.height]),
      letters: [...page.querySelectorAll("svg use")].filter(each => each.getBBox().width).length,
      paper: view.getComputedStyle(page.body).backgroundColor,
      ink: view.getComputedStyle(page.querySelector("svg")).color,
      played: play(page, view),
      loaded: view.performance.getEntriesByType("resource").map(each => each.name),
    };
  });
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def measure(page: Path, folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """What the frames found in the page, and what Chromium had to say on the way.

    `folder` takes a copy of the page alone, and the browser's own files.
    """
    (folder / "report.html").write_bytes(page.read_bytes())
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER, encoding="utf-8")
    return _found(wrapper, *options)


def _found(wrapper: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    dom, said = _browse(wrapper, "--dump-dom", *options)
    found = re.search(r'<pre id="found">(.+?)</pre>', dom)
    assert found, f"the page was not measured; Chromium said:\n{said}"
    return json.loads(html.unescape(found[1])), said


# Pages of a site, each as a desktop and as a phone have it.
SITE = """<!doctype html>
<meta charset="utf-8"><meta name="color-scheme" content="light dark">
FRAMES<pre id="found"></pre>
<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, view = frame.contentWindow;
    return {
      page: frame.getAttribute("src"), width: view.innerWidth,
      needs: page.documentElement.scrollWidth,
      paper: view.getComputedStyle(page.body).backgroundColor,
      outside: view.performance.getEntriesByType("resource").map(each => each.name)
        .filter(name => !name.startsWith("file:") && !name.startsWith("data:")),
    };
  });
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""


def measure_pages(pages: list[Path], site: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """What frames of two widths found in pages of a site, which also takes the browser's files."""
    frames = "".join(
        f'<iframe src="{page.relative_to(site)}" style="width: {width}px; height: 900px; '
        'border: 0"></iframe>\n'
        for page in pages
        for width in (1280, 390)
    )
    wrapper = site / "wrapper.html"
    wrapper.write_text(SITE.replace("FRAMES", frames), encoding="utf-8")
    return _found(wrapper, *options)


def printed(page: Path, folder: Path) -> bytes:
    """The page as a PDF."""
    (folder / "report.html").write_bytes(page.read_bytes())
    out = folder / "report.pdf"
    _, said = _browse(folder / "report.html", f"--print-to-pdf={out}", "--no-pdf-header-footer")
    assert out.exists(), f"the page was not printed; Chromium said:\n{said}"
    return out.read_bytes()


def evaluate(script: str, folder: Path) -> Any:
    """What a script comes to, as JSON: its last statement is `return ...`."""
    page = folder / "script.html"
    text = f"document.title = JSON.stringify((() => {{ {script} }})());"
    page.write_text(f"<!doctype html><meta charset=utf-8><script>{text}</script>", encoding="utf-8")
    dom, said = _browse(page, "--dump-dom")
    found = re.search(r"<title>(.+?)</title>", dom, re.DOTALL)
    assert found, f"the script did not end; Chromium said:\n{said}"
    return json.loads(html.unescape(found[1]))


def _browse(page: Path, *options: str) -> tuple[str, str]:
    """What came on stdout and stderr; no process is left behind."""
    command = [
        *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions"),
        "--disable-dev-shm-usage",  # small in containers
        *("--no-first-run", "--enable-logging=stderr", "--allow-file-access-from-files"),
        *(f"--user-data-dir={page.parent / 'profile'}", "--window-size=1400,1000"),
        *(*options, page.as_uri()),
    ]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return started.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
