"""Compiles the kernels that tests use, in the background while tests run that use none.

On a fresh clone that is half a minute of work. Compiled kernels are kept beside their sources;
whoever needs one that is not there yet compiles it too.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

NICENESS = 5  # tests come first


def start() -> subprocess.Popen[bytes]:
    """Begin, in a process of its own; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def warm() -> None:
    """Load, or compile, every kernel that the rows use. Half precision is widened first."""
    import torch
    from rows import ROWS

    import thinwire as tw

    warnings.simplefilter("ignore")
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
        for row in ROWS:
            c = row.compressor
            payload = tw.unpack(tw.pack(c.encode(x, key=tw.Key(1))))
            c.accumulate([payload, payload], torch.zeros_like(x))
            c.decode(payload)


if __name__ == "__main__":
    os.nice(NICENESS)
    warm()
