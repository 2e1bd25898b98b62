"""The document of `thinwire compare`: reading it from a file, and checking its shape.

What a report draws must be there and of its type; what it only mentions may be missing, and keys
that it does not know are left alone.
"""

import json
import math
from pathlib import Path
from typing import Any

from thinwire.compare.settings import SCHEMA

Document = dict[str, Any]

_SPREAD = {"mean": float, "lowest": float, "highest": float}
_RUN = {
    "seed": int,
    "losses": [(float, None)],
    "seconds": [float],
    "megabytes": [float],
    "evaluations": [{"step": int, "seconds": float, "value": (float, None)}],
    "final_metric": (float, None),
    "split": {"compute": float, "encode": float, "network": float, "decode": float},
    "tensors": [
        {"name": str, "numel": int, "ratio": (float, None), "relative_error": (float, None)}
    ],
}
_SUMMARY = {
    "final_metric": (_SPREAD, None),
    "final_loss": (_SPREAD, None),
    "step_seconds": (float, None),
    "megabytes_a_step": (float, None),
    "fewer_bytes": (float, None),
    "step_speedup": (float, None),
    "to_target": ({"seconds": float, "speedup": (float, None)}, None),
}
_SHAPE = {
    "date": str,
    "machine": dict,
    "versions": dict,
    "notes": [str],
    "settings": {
        "workload": str,
        "metric": (str, None),
        "higher_is_better": (bool, None),
        "hosts": int,
        "links": [str],
        "network": str,
        "seeds": [int],
        "command": str,
    },
    "baseline": (str, None),
    "methods": [
        {
            "name": str,
            "title": str,
            "error": (str, None),
            "diverged": bool,
            "runs": [_RUN],
            "summary": (_SUMMARY, None),
        }
    ],
    "sweep": [{"link": str, "step_seconds": dict}],
    "verdict": str,
}
_WORDS: dict[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a finite number",
    int: "a whole number",
    list: "a list",
    str: "text",
}


def read(path: Path) -> Document:
    """The document in a data.json. Raises ValueError where that is none, and OSError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected the data.json of a report, got what is not JSON: {error}"
        ) from None
    try:
        check(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    assert isinstance(document, dict)
    return document


def check(document: object) -> None:
    """Raise ValueError, with the place in the document, where its shape is not that of a report."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or schema != SCHEMA:
        found = f"schema {schema!r}" if schema else "no schema"
        raise ValueError(f"expected a document of schema {SCHEMA!r}, got one of {found}")
    _check(document, _SHAPE, "")
    names = [method["name"] for method in document["methods"]]
    if len(set(names)) < len(names):
        raise ValueError(f"methods: expected names that differ, got {names}")
    for i, method in enumerate(document["methods"]):
        for j, run in enumerate(method["runs"]):
            lengths = [len(run[name]) for name in ("losses", "seconds", "megabytes")]
            if len(set(lengths)) > 1:
                raise ValueError(
                    f"methods[{i}].runs[{j}]: expected as many seconds and megabytes as losses, "
                    f"got {lengths[0]} losses, {lengths[1]} seconds, {lengths[2]} megabytes"
                )
    for i, entry in enumerate(document["sweep"]):
        for name, seconds in entry["step_seconds"].items():
            _check(seconds, (float, None), f"sweep[{i}].step_seconds[{name!r}]")


def _check(value: Any, shape: Any, where: str) -> None:
    """A shape is a type, {key: shape}, [shape of each] or (shape, None) for what may be null."""
    if isinstance(shape, dict) and isinstance(value, dict):
        for key, inner in shape.items():
            if key not in value:
                raise ValueError(f"{where or 'the document'}: expected a field {key!r}, got none")
            _check(value[key], inner, f"{where}.{key}" if where else key)
    elif isinstance(shape, list) and isinstance(value, list):
        # Thousands of numbers: those of a plain type need no call each.
        if not (shape[0] is float and all(type(v) is float and math.isfinite(v) for v in value)):
            for i, item in enumerate(value):
                _check(item, shape[0], f"{where}[{i}]")
    elif isinstance(shape, tuple):
        if value is not None:
            _check(value, shape[0], where)
    elif not _is(value, shape):
        word = _WORDS[shape if isinstance(shape, type) else type(shape)]
        raise ValueError(f"{where}: expected {word}, got {_show(value)}")


def _is(value: Any, shape: Any) -> bool:
    if shape is float:
        return _is(value, int) or (isinstance(value, float) and math.isfinite(value))
    if shape is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(shape, type) and isinstance(value, shape)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
