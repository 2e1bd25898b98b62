"""Feed damaged frames to the reader, for as long as you like.

    python benchmarks/fuzz.py [--frames 1000000] [--seed 0] [--save FOLDER]

Every frame must be refused with FrameError or decode to a tensor of the shape it claims. The first
one that does anything else is written to a file, and the exit status is 1. The frames are those of
tests/mutations.py; a seed always makes the same ones. Ctrl-C stops and says how far it came.
"""

import argparse
import contextlib
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from mutations import MisreadError, fuzz


def report(done: int, read: int, started: float, end: str) -> None:
    rate = done / max(time.monotonic() - started, 1e-9)
    shown = f"{done:,} frames, {read:,} of them still readable, {rate:,.0f} per second"
    print(f"\r{shown}  ", end=end, file=sys.stderr, flush=True)


def survey(count: int, seed: int, save: Path) -> int:
    """Try so many frames; the exit status."""
    started = shown = time.monotonic()
    done = read = status = 0
    with contextlib.suppress(KeyboardInterrupt):
        try:
            for readable in fuzz(seed, count):
                done, read = done + 1, read + readable
                if time.monotonic() - shown > 0.5:
                    shown = time.monotonic()
                    report(done, read, started, "")
        except MisreadError as misread:
            path = save / f"fuzz-{seed}-{done}.bin"
            path.write_bytes(misread.data)
            traceback.print_exc()
            print(f"frame {done} of seed {seed} is saved as {path}", file=sys.stderr)
            status = 1
    report(done, read, started, "\n")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many (default: 1000000)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--save", type=Path, default=Path(), help="folder for an offending frame")
    arguments = parser.parse_args()
    return survey(arguments.frames, arguments.seed, arguments.save)


if __name__ == "__main__":
    sys.exit(main())
