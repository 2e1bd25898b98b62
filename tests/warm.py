"""Compiles the kernels that tests use, in the background while tests run that use none.

On a fresh clone that is a minute and a half of work for one core. Compiled kernels are kept beside
their sources; whoever needs one that is not there yet compiles it too.
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


def main() -> None:
    os.nice(NICENESS)
    import torch
    from rows import ROWS

    import thinwire as tw

    warnings.simplefilter("ignore")
    for dtype in (torch.float32, torch.float64):  # half precision is widened first
        for row in ROWS:
            x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
            residuals = [None, torch.zeros_like(x)] if row.residual else [None]
            for residual in residuals:
                payload = row.compressor.encode(x, residual=residual, key=tw.Key(1))
                payload.add_to(torch.zeros(3000), 0.5)
                tw.decode(tw.pack(payload))


if __name__ == "__main__":
    main()
