"""Standard output as rich sees it."""

import os
import sys

from rich.console import Console

WIDTH = 100  # of a pipe or a file, unless COLUMNS says otherwise


def console() -> Console:
    """A console on standard output."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=sys.stdout, width=None if known else WIDTH, highlight=False)
