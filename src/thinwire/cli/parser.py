"""An argparse that reports a mistake in one line."""

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: object) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def complain(command: str, error: Exception) -> int:
    """Report a mistake of the user's, on one line; returns the exit code."""
    print(f"thinwire {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
