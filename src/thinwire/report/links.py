"""Step time against the rate of the links, and where a method stops paying."""

import math
from typing import Any, NamedTuple

from thinwire.lab import parse_rate
from thinwire.report.figure import log_axis, style_axes
from thinwire.report.picture import Picture, add_legend, legend_rows, looks
from thinwire.report.words import digits, listing, rate, times


class Point(NamedTuple):
    bits: int
    seconds: dict[str, float]  # of a step, by method


def links(document: dict[str, Any]) -> Picture | str:
    """Step times at the rates of the sweep, or why there is no picture of them."""
    points = _points(document)
    if len(points) < 2:
        return "Only one rate was tried."
    known = {name for point in points for name in point.seconds}
    names = [method["name"] for method in document["methods"] if method["name"] in known]
    if not names:
        return "No step times at other rates are known."
    look = looks(document)
    chosen = [look[name] for name in names]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name in names:
            here = [p for p in points if name in p.seconds]
            x, y = [p.bits / 1e6 for p in here], [p.seconds[name] for p in here]
            kind = look[name]
            style = {"color": kind.color, "ls": kind.line, "lw": kind.width}
            axes.plot(x, y, marker=kind.marker, ms=5.5, **style)
        log_axis(axes, "x")
        log_axis(axes, "y")
        axes.set_xticks([p.bits / 1e6 for p in points], labels=[rate(p.bits) for p in points])
        axes.set_xticks([], minor=True)
        style_axes(axes, "rate of the links", "seconds a step")
        add_legend(figure, chosen)

    text = "Both axes are logarithmic. A method pays where it is below the baseline."
    if len(points) < len(document["sweep"]):
        text += " Links that are no single rate are left out."
    height = 3.4 + 0.19 * legend_rows(chosen)
    return Picture("links", "Step time by rate of the links", text, height, draw)


def where_it_pays(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Each method's name and a sentence on the rates at which it beats the baseline's step."""
    points, baseline = _points(document), document["baseline"]
    sentences = []
    for method in document["methods"]:
        name = method["name"]
        here = [p for p in points if name in p.seconds and baseline in p.seconds]
        if name != baseline and len(here) > 1:
            gains = [(p, p.seconds[baseline] / p.seconds[name]) for p in here]
            sentences.append((name, _sentence(gains)))
    return sentences


def _sentence(gains: list[tuple[Point, float]]) -> str:
    pays = [gain > 1 for _, gain in gains]
    (first, slow), (last, fast) = gains[0], gains[-1]
    ends = f"{times(slow)} at {rate(first.bits)}, {times(fast)} at {rate(last.bits)}"
    if all(pays):
        return f"pays at all rates tried: {ends}."
    if not any(pays):
        return f"pays at none of the rates tried: {ends}."
    turn = pays.index(False)
    if turn and not any(pays[turn:]):
        (a, gain_a), (b, gain_b) = gains[turn - 1], gains[turn]
        # The gain as a power of the rate between the two: straight on logarithmic axes.
        part = math.log(gain_a) / (math.log(gain_a) - math.log(gain_b))
        even = math.exp(math.log(a.bits) + part * math.log(b.bits / a.bits))
        near = f"{digits(even / 1e6)} Mbit/s" if even < 1e9 else rate(even)
        return f"stops paying at about {near}: {ends}."
    good = listing(rate(p.bits) for p, gain in gains if gain > 1)
    return f"pays at {good} and not at the other rates tried: {ends}."


def _points(document: dict[str, Any]) -> list[Point]:
    """The sweep by rising rate; a link that is no rate has no place on the axis."""
    known = {method["name"] for method in document["methods"]}
    points: dict[int, Point] = {}
    for entry in document["sweep"]:
        try:
            bits = parse_rate(entry["link"])
        except ValueError:
            continue
        times = {n: s for n, s in entry["step_seconds"].items() if n in known and s and s > 0}
        points[bits] = Point(bits, times)
    return [points[bits] for bits in sorted(points)]
