"""Labels beside the points of a plot that cover neither points nor each other."""

import math
from typing import Any, NamedTuple

STEPS = (7, 11, 16, 23, 32, 44)  # distances from the point, in typographical points
FAR = 3  # of these steps: from there on a line leads to the point
ANGLES = 16
Point = tuple[float, float]


class Box(NamedTuple):
    """A rectangle on the canvas, in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return width * height if width > 0 and height > 0 else 0.0

    def distance(self, point: Point) -> float:
        """From a point to the nearest edge; zero inside."""
        dx = max(self.left - point[0], 0.0, point[0] - self.right)
        dy = max(self.bottom - point[1], 0.0, point[1] - self.top)
        return math.hypot(dx, dy)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def place(axes: Any, points: list[Point], texts: list[str], color: str, **style: Any) -> None:
    """Write each text near its point (in data coordinates), with a line to it where it is far.

    Each label in turn takes the nearest place among some hundred that costs least: area in common
    with points, with labels already there, and with what lies outside the axes.
    """
    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    pixel = figure.dpi / 72
    frame = Box(*axes.get_window_extent(renderer).extents)
    at = [tuple(axes.transData.transform(point)) for point in points]
    taken = [Box(x - 5 * pixel, y - 5 * pixel, x + 5 * pixel, y + 5 * pixel) for x, y in at]
    # The most crowded first: later ones have more room to give way.
    order = sorted(range(len(at)), key=lambda i: sum(math.dist(at[i], other) for other in at))
    style = {"textcoords": "offset points", "ha": "center", "va": "center", "color": color, **style}
    for i in order:
        note = axes.annotate(texts[i], points[i], (0, 0), fontsize=7.5, **style)
        size = note.get_window_extent(renderer)
        others = [point for point in at if point != at[i]]
        dx, dy, box, far = _best(at[i], others, (size.width, size.height), taken, frame, pixel)
        note.remove()
        line = {"arrowstyle": "-", "lw": 0.6, "color": color, "shrinkA": 0, "shrinkB": 4}
        arrow = {"arrowprops": line} if far else {}
        axes.annotate(texts[i], points[i], (dx, dy), fontsize=7.5, **style, **arrow)
        taken.append(box)


def _best(
    point: Point,
    others: list[Point],
    size: tuple[float, float],
    taken: list[Box],
    frame: Box,
    pixel: float,
) -> tuple[float, float, Box, bool]:
    """(dx, dy) from point to label's centre, in typographical points; its box; is it far."""
    width, height = size
    best: tuple[float, float, float, Box, bool] | None = None
    for i, step in enumerate(STEPS):
        for turn in range(ANGLES):
            angle = 2 * math.pi * turn / ANGLES
            # The nearest edge of the label, not its centre, is `step` away.
            dx = math.cos(angle) * (step * pixel + width / 2)
            dy = math.sin(angle) * (step * pixel + height / 2)
            x, y = point[0] + dx, point[1] + dy
            box = Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            cost = sum(box.overlap(other) for other in taken)
            if any(box.distance(other) < box.distance(point) for other in others):
                cost += box.area / 4  # a reader would take it for the other's label
            cost += 4 * (box.area - box.overlap(frame)) + 0.5 * step * pixel
            if best is None or cost < best[0]:
                best = (cost, dx / pixel, dy / pixel, box, i >= FAR)
    assert best is not None
    return best[1:]
