"""Compiles the kernels that tests use, in the background while tests run that use none.

On a fresh clone that is a minute and a half of work, half of it for each type. Compiled kernels are
kept beside their sources; whoever needs one that is not there yet compiles it too.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

NICENESS = 5  # tests come first


TYPES = ("float32", "float64")  # half precision is widened first


def start() -> list[subprocess.Popen[bytes]]:
    """Begin, in a process for each type; the caller ends them."""
    return [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), dtype],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for dtype in TYPES
    ]


def main() -> None:
    os.nice(NICENESS)
    import torch
    from rows import ROWS

    import thinwire as tw

    warnings.simplefilter("ignore")
    dtype = getattr(torch, sys.argv[1])
    for row in ROWS:
        x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
        residuals = [None, torch.zeros_like(x)] if row.residual else [None]
        for residual in residuals:
            payload = row.compressor.encode(x, residual=residual, key=tw.Key(1))
            payload.add_to(torch.zeros(3000), 0.5)
            tw.decode(tw.pack(payload))


if __name__ == "__main__":
    main()
