"""How near a decoded tensor is to the original."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements turned into float64 at a time


class Fidelity(NamedTuple):
    relative_error: float | None  # ||x - y|| / ||x||; None for x = 0, and where y is not finite
    cosine: float | None  # <x, y> / (||x|| ||y||); None where one of them is zero or not finite


def compare(x: Tensor, y: Tensor) -> Fidelity:
    """Compare two flat tensors; sums are float64, in chunks so that memory stays small."""
    low, high = torch.aminmax(x)
    peak = max(-float(low), float(high)) or 1.0  # divided by it, no square leaves the range
    xx = yy = xy = dd = 0.0
    for begin in range(0, x.numel(), CHUNK):
        a, b = (t[begin : begin + CHUNK].double() / peak for t in (x, y))
        d = a - b
        xx += float(a.dot(a))
        yy += float(b.dot(b))
        xy += float(a.dot(b))
        dd += float(d.dot(d))
    if not dd:
        return Fidelity(0.0, 1.0 if xx else None)
    if not xx or not math.isfinite(dd):
        return Fidelity(None, None)
    return Fidelity(math.sqrt(dd / xx), xy / math.sqrt(xx) / math.sqrt(yy) if yy else None)
