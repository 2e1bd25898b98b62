"""Methods as rows: the final metric, and what a step spends its time on."""

from typing import Any

import numpy as np

from thinwire.report.figure import INK, PAPER, style_axes
from thinwire.report.picture import Picture, looks
from thinwire.report.words import digits

# Part of a step: colour, hatching, colour of the digits on it.
PARTS = {
    "compute": ("#999999", "", "#000000"),
    "encode": ("#E69F00", "////", "#000000"),
    "network": ("#0072B2", "", "#ffffff"),
    "decode": ("#009E73", "\\\\\\\\", "#000000"),
}
LEGIBLE = 0.09  # the share of a step that has room for its digits


def final_metric(document: dict[str, Any]) -> Picture | str:
    """The metric at the end, seed by seed, or why there is no picture of it."""
    settings = document["settings"]
    values = {
        method["name"]: [r["final_metric"] for r in method["runs"] if r["final_metric"] is not None]
        for method in document["methods"]
    }
    values = {name: found for name, found in values.items() if found}
    if settings["metric"] is None or not values:
        return "No final metric was reported."
    diverged = {method["name"] for method in document["methods"] if method["diverged"]}
    inside = [v for name, found in values.items() if name not in diverged for v in found]
    inside = inside or [v for found in values.values() for v in found]
    low, high = min(inside), max(inside)
    edge = 0.12 * (high - low) or 0.02 * abs(high) or 1.0
    low, high = low - edge, high + edge
    baseline = values.get(document["baseline"])
    better = "Right is better." if settings["higher_is_better"] else "Left is better."
    text = "A marker a seed, a bar for their mean, which stands at the right too. "
    text += "The dashed line is the baseline's mean. " if baseline else ""
    text += f"{better} The axis is cut to the data and does not begin at zero."
    look = looks(document)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, (name, found) in enumerate(values.items()):
            mean = float(np.mean(found))
            color, marker = look[name].color, look[name].marker
            if low <= mean <= high:
                axes.plot([mean, mean], [i - 0.33, i + 0.33], color=color, lw=2.5, alpha=0.9)
                axes.plot(found, [i] * len(found), marker, color=color, ms=6, mec=PAPER, mew=0.6)
            else:
                x, arrow = (low, "◂") if mean < low else (high, "▸")
                side = "left" if mean < low else "right"
                words = f" {arrow} outside "
                axes.text(x, i, words, ha=side, va="center", fontsize=8, color=color)
            end = axes.get_yaxis_transform()
            axes.text(1.02, i, digits(mean), transform=end, va="center", fontsize=8, color=INK)
        if baseline:
            axes.axvline(float(np.mean(baseline)), color=INK, lw=1, ls="--", zorder=0)
        axes.set_xlim(low, high)
        _rows(axes, [look[name].label for name in values])
        style_axes(axes, settings["metric"].replace("$", r"\$"))
        axes.grid(visible=False, axis="y")

    return Picture("final-metric", "Final metric", text, 0.8 + 0.31 * max(4, len(values)), draw)


def step_split(document: dict[str, Any]) -> Picture | str:
    """Seconds of a step, part by part, or why there is no picture of them."""
    return _split(document, share=False)


def step_share(document: dict[str, Any]) -> Picture | str:
    """The parts of a step in percent, or why there is no picture of them."""
    return _split(document, share=True)


def _split(document: dict[str, Any], share: bool) -> Picture | str:
    splits = {
        method["name"]: {part: _mean([r["split"][part] for r in method["runs"]]) for part in PARTS}
        for method in document["methods"]
        if method["runs"]
    }
    if not splits:
        return "No method took a step."
    look = looks(document)
    totals = {name: sum(split.values()) for name, split in splits.items()}
    longest = max(totals.values())
    unit, factor = ("s", 1.0) if longest >= 10 else ("ms", 1e3)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        left = np.zeros(len(splits))
        whole = np.array([(totals[n] or 1.0) / 100 if share else 1 / factor for n in splits])
        for part, (color, hatch, ink) in PARTS.items():
            widths = np.array([split[part] for split in splits.values()]) / whole
            rows = range(len(splits))
            style = {"color": color, "hatch": hatch, "edgecolor": PAPER, "lw": 0.6}
            axes.barh(rows, widths, 0.72, left=left, label=part, **style)
            for i, width in enumerate(widths):
                if share and width >= 100 * LEGIBLE:
                    place = left[i] + width / 2, i
                    around = {"boxstyle": "round,pad=0.15", "fc": color, "ec": "none"}
                    text = {"fontsize": 7.5, "color": ink, "bbox": around if hatch else None}
                    axes.text(*place, f"{width:.0f} %", ha="center", va="center", **text)
            left = left + widths
        if not share:
            for i, total in enumerate(left):
                axes.text(total, i, f" {digits(total)}", va="center", fontsize=8, color=INK)
        axes.set_xlim(0, 100 if share else 1.13 * (longest * factor or 1.0))
        _rows(axes, [look[name].label for name in splits])
        style_axes(axes, "percent of a step" if share else f"{unit} a step")
        axes.grid(visible=False, axis="y")
        figure.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(PARTS),
            frameon=False,
            fontsize=8,
            labelcolor=INK,
        )

    height = 1.0 + 0.31 * max(4, len(splits))
    if share:
        text = f"The same in percent; parts below {100 * LEGIBLE:.0f} % bear no number."
        return Picture("step-share", "Share of each part of a step", text, height, draw)
    text = "Mean over steps and seeds; the number is the whole step."
    return Picture("step-split", "Where the time of a step goes", text, height, draw)


def _rows(axes: Any, names: list[str]) -> None:
    """Methods from top to bottom; few of them do not fill the picture."""
    axes.set_yticks(range(len(names)), labels=names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(len(names), 4) - 0.4, -0.6)


def _mean(values: list[float]) -> float:
    return float(np.mean(values))
