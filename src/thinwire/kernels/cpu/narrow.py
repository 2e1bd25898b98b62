"""Rounding to bfloat16 at random, so that the mean is exact.

A bfloat16 is the upper half of a float32. A random number of 16 bits is added to the lower half:
the carry rounds away from zero with the very probability that makes the mean exact.
"""

import numpy as np
import torch

from thinwire.kernels import threads
from thinwire.kernels.cpu.jit import jit, magnitude
from thinwire.kernels.cpu.random import fill, key_words
from thinwire.kernels.key import Key

SPAN = 4096
LARGEST = np.int32(0x7F7F0000)  # finite numbers beyond it would round to infinity
INFINITE, NAN = np.int32(0x7F800000), np.int32(0x7FC00000)


@jit
def _round(x, first, key, out):
    words = np.empty(SPAN + 1024, np.uint32)
    for lo in range(0, x.size, SPAN):
        count = min(SPAN, x.size - lo)
        at = fill(first + lo, count, key, words)
        own, drawn, here = x[lo : lo + count], words[at : at + count], out[lo : lo + count]
        for i in range(count):
            m = magnitude(own[i])
            m = min(m, LARGEST) if m <= INFINITE else NAN
            m = np.int32(np.int32(m + np.int32(drawn[i] >> np.uint32(16))) >> np.int32(16))
            sign = np.int32(np.float32(own[i]).view(np.int32) >> np.int32(16)) & np.int32(0x8000)
            here[i] = np.int16(np.int32(m | sign))


def round_to_bfloat16(x: torch.Tensor, out: torch.Tensor, key: Key) -> None:
    """out = x, float32, rounded up or down to bfloat16; NaN stays.

    What is too large becomes the largest finite number.
    """
    xs, halves, words = x.numpy(), out.view(torch.int16).numpy(), key_words(key)
    threads.run(
        lambda lo, hi: _round(xs[lo:hi], lo, words, halves[lo:hi]), threads.ranges(xs.size, SPAN)
    )
