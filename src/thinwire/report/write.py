"""Writing a report into a folder."""

import json
import os
from pathlib import Path
from typing import Any

from thinwire.report.document import check
from thinwire.report.figure import require_matplotlib
from thinwire.report.page import draw

PAGE, DATA = "report.html", "data.json"


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """Write report.html, a PNG for each of its pictures and data.json; the paths, page first.

    The data, which took minutes to measure, is written first, and the page last, when all that it
    links to is there. A file is replaced as a whole or not at all. The same document gives the same
    bytes.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: the document has not the shape of a report; nothing is written.
    """
    require_matplotlib("a report")
    check(document)
    text = json.dumps(document, indent=1, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    data = _put(folder / DATA, f"{text}\n".encode())
    drawn = draw(document)
    pictures = [_put(folder / name, content) for name, content in drawn.pictures.items()]
    page = _put(folder / PAGE, drawn.html.encode())
    return [page, data, *pictures]


def _put(path: Path, content: bytes) -> Path:
    """Under a name of its own first: whoever looks sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path
