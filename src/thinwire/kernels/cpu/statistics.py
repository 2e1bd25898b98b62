"""Passes over x + r for the scale of a whole tensor.

Partial results are kept for runs of fixed length and combined in order, so that the thread count
never shows.
"""

import math

import numpy as np
import torch

from thinwire.kernels.cpu.jit import from_ordered, jit, load, ordered, sum_jit
from thinwire.kernels.cpu.source import Source

RUN = 1 << 13


@jit
def _extent(x, r):
    low = high = ordered(x[0] + r[0] if r.size else x[0])
    for i in range(x.size):
        p = ordered(x[i] + r[i] if r.size else x[i])
        low = min(low, p)
        high = max(high, p)
    return from_ordered(low, x[0]), from_ordered(high, x[0])


def extent(x: torch.Tensor, r: torch.Tensor | None):
    """(min, max) of x + r, or None if not all are finite."""
    found = Source(x, r).scan(lambda lo, hi, xs, rs: _extent(xs, rs))
    ends = [float(end) for pair in found for end in pair]
    # NaN lies beyond the infinities in this order, so it is always found at an end.
    return (min(ends), max(ends)) if all(map(math.isfinite, ends)) else None


@sum_jit
def _sums(buffer, unit):
    total, squares = 0.0, 0.0
    for i in range(buffer.size):
        v = np.float64(buffer[i]) * unit
        total += v
        squares += v * v
    return total, squares


@jit
def _moments(x, r, unit, out):
    buffer = np.empty(RUN, x.dtype)
    for j in range(out.shape[0]):
        lo = j * RUN
        here = buffer[: min(RUN, x.size - lo)]
        load(x[lo:], r[lo : x.size], here)
        out[j, 0], out[j, 1] = _sums(here, unit)


def moments(x: torch.Tensor, r: torch.Tensor | None, unit: float):
    """The means of v and of v^2 with v = (x + r) * unit; `unit` keeps them from overflowing."""
    source = Source(x, r)
    out = np.empty((-(-source.size // RUN), 2))

    def work(lo, hi, xs, rs):
        _moments(xs, rs, unit, out[lo // RUN : -(-hi // RUN)])

    source.scan(work, RUN)
    total, squares = out.sum(0)
    return float(total) / source.size, float(squares) / source.size
