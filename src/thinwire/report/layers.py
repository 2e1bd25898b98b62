"""Layer by layer: how much was saved, and at which error."""

import itertools
from typing import Any

import numpy as np

from thinwire.report.figure import PAPER, style_axes
from thinwire.report.picture import WIDTH, Picture
from thinwire.report.words import labels

MOST = 20  # layers in a picture
NAME = 20  # letters of a name
LEVEL = 5  # more methods than this are named upright
NONE = "No method reported its tensors."


def layers_ratio(document: dict[str, Any]) -> Picture | str:
    """Compression ratio of each layer, or why there is no picture of it."""
    text = "Bytes of the gradient / bytes sent for it; brighter is smaller on the wire."
    return _heat(document, "ratio", ("layers-ratio", "Compression ratio by layer", text))


def layers_error(document: dict[str, Any]) -> Picture | str:
    """Relative error of each layer, or why there is no picture of it."""
    text = "||x - y|| / ||x|| of what was sent in a step, before feedback makes up for it; "
    text += "brighter is worse."
    about = ("layers-error", "Relative error by layer", text)
    return _heat(document, "relative_error", about)


def _heat(document: dict[str, Any], field: str, about: tuple[str, str, str]) -> Picture | str:
    sizes: dict[str, int] = {}
    found: dict[str, dict[str, list[float]]] = {}
    for method in document["methods"]:
        for tensor in (tensor for run in method["runs"] for tensor in run["tensors"]):
            sizes[tensor["name"]] = max(tensor["numel"], sizes.get(tensor["name"], 0))
            values = found.setdefault(method["name"], {}).setdefault(tensor["name"], [])
            if tensor[field] is not None:
                values.append(tensor[field])
    if not sizes:
        return NONE
    # Python's sort is stable: layers of one size stay in the model's order.
    rows = sorted(sizes, key=lambda name: -sizes[name])[:MOST]
    columns = list(found)
    means = [[_mean(found[method].get(row, [])) for method in columns] for row in rows]
    cells = np.array(means, dtype=np.float64)
    if not np.isfinite(cells).any():
        return f"No method reported a {field.replace('_', ' ')} by layer."
    name, title, text = about
    if len(sizes) > MOST:
        text += f" The {MOST} largest of {len(sizes)} tensors, largest first."

    if not np.isfinite(cells).all():
        text += " Blank: not measured."
    prefix = _prefix(rows)
    if prefix:
        text += f" All names begin with {prefix}…"

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        _draw_cells(axes, cells, log=field == "ratio")
        short = labels(columns, NAME)
        turned = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
        if len(columns) > LEVEL:
            turned = {"rotation": 90, "ha": "center"}
        axes.set_xticks(range(len(columns)), labels=[short[c] for c in columns], **turned)
        names = labels([row.removeprefix(prefix) for row in rows], NAME)
        axes.set_yticks(
            range(len(rows)),
            labels=[f"{names[row.removeprefix(prefix)]}  {_size(sizes[row])}" for row in rows],
        )
        style_axes(axes, "")
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)

    return Picture(name, title, text, 1.1 + 0.24 * max(4, len(rows)), draw)


def _draw_cells(axes: Any, cells: Any, log: bool) -> None:
    import matplotlib
    from matplotlib.colors import LogNorm, Normalize

    known = cells[np.isfinite(cells) & ((cells > 0) | (not log))]
    low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)
    norm = LogNorm(low, max(high, 1.01 * low)) if log else Normalize(0.0, max(1.0, high))
    map_ = matplotlib.colormaps["cividis"]
    axes.set_xlim(-0.5, cells.shape[1] - 0.5)
    axes.set_ylim(cells.shape[0] - 0.5, -0.5)
    # About 0.62 of the width is left for cells, and four digits are 2.7 times as wide as high.
    size = min(7.5, 72 * WIDTH * 0.62 / cells.shape[1] / 2.7)
    for (i, j), value in np.ndenumerate(cells):
        if not np.isfinite(value):
            continue
        color = map_(norm(max(value, low) if log else value))
        axes.add_patch(
            matplotlib.patches.Rectangle((j - 0.5, i - 0.5), 1, 1, fc=color, ec=PAPER, lw=1)
        )
        # Luminance of sRGB, roughly: cividis grows evenly in it.
        dark = 0.2126 * color[0] + 0.7152 * color[1] + 0.0722 * color[2] < 0.5
        ink = "#ffffff" if dark else "#000000"
        note = axes.text(j, i, _cell(value), ha="center", va="center", fontsize=size, color=ink)
        note.set_in_layout(False)  # it is inside, and hundreds of them take their time


def _cell(value: float) -> str:
    """At most four letters: columns are narrow."""
    if value >= 9999.5:
        return _size(value)
    return f"{value:.{0 if value >= 9.95 else 1 if value >= 0.995 else 2}f}"


def _size(number: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.{0 if number >= 9.95 * factor else 1}f}{unit}"
    return f"{number:.0f}"


def _prefix(names: list[str]) -> str:
    """What all names begin with, up to a dot, where it takes the room of what tells them apart."""
    if len(names) < 2 or max(map(len, names)) <= NAME:
        return ""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return "".join(f"{level[0]}." for level in common)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
