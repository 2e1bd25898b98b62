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
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement;
    page.querySelectorAll("details").forEach(each => each.open = true);
    const boxes = [...page.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect());
    return {
      width: view.innerWidth, needs: root.scrollWidth,
      headings: [...page.querySelectorAll("h2")].map(each => each.textContent),
      pictures: boxes.map(box => [box.left, box.right, box.height]),
      letters: [...page.querySelectorAll("svg use")].filter(each => each.getBBox().width).length,
      paper: view.getComputedStyle(page.body).backgroundColor,
      ink: view.getComputedStyle(page.querySelector("svg")).color,
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
    dom, said = _browse(wrapper, *options)
    found = re.search(r'<pre id="found">(.+?)</pre>', dom)
    assert found, f"the page was not measured; Chromium said:\n{said}"
    return json.loads(html.unescape(found[1])), said


def evaluate(script: str, folder: Path) -> Any:
    """What a script comes to, as JSON: its last statement is `return ...`."""
    page = folder / "script.html"
    text = f"document.title = JSON.stringify((() => {{ {script} }})());"
    page.write_text(f"<!doctype html><meta charset=utf-8><script>{text}</script>", encoding="utf-8")
    dom, said = _browse(page)
    found = re.search(r"<title>(.+?)</title>", dom, re.DOTALL)
    assert found, f"the script did not end; Chromium said:\n{said}"
    return json.loads(html.unescape(found[1]))


def _browse(page: Path, *options: str) -> tuple[str, str]:
    """The DOM of a page, and what was written to stderr; no process is left behind."""
    command = [
        *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions"),
        "--disable-dev-shm-usage",  # small in containers
        *("--no-first-run", "--enable-logging=stderr", "--allow-file-access-from-files"),
        *(f"--user-data-dir={page.parent / 'profile'}", "--window-size=1400,1000"),
        *(*options, "--dump-dom", page.as_uri()),
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
