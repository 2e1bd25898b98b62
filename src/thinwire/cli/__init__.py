"""The command line, `thinwire`. Commands import what they need when they run, never before."""

from thinwire.cli.entry import main

__all__ = ["main"]
