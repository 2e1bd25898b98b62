"""`thinwire methods`: the methods of papers, and how a spec string names them."""

import argparse
from typing import TYPE_CHECKING

from thinwire.cli.listing import show

if TYPE_CHECKING:
    from thinwire.cli.parser import Parser

_DESCRIPTION = "List the methods that papers have a name for."
_EPILOG = """\
They go to tw.attach and to thinwire compare:

  tw.attach(model, "dgc:0.001", optimizer=optimizer)
  tw.attach(model, "powersgd:4")
  thinwire compare --with "dgc:0.001, powersgd:2, arc:0.1, signsgd"

qsgd:4bit has as many levels as 4 bits can hold (7); qsgd:4 is the compressor with 4 levels.

Any compressor is a method too (see thinwire compressors); without a feedback it gets the one that
belongs to it. Adam in one bit is an optimizer: tw.optim.OneBitAdam, OneBitLamb, ZeroOneAdam; in a
comparison it takes the place of the workload's Adam.
"""


def add(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "methods", help="list the named methods", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.methods import list_methods

    titles = ("spec, with defaults", "compressor + feedback, collective", "what it does")
    rows = [*list_methods().values(), *_optimizers()]
    return show(rows, ("usage", "made of", "description"), titles, arguments.json)


def _optimizers() -> list[tuple[str, str, str]]:
    from thinwire import optim
    from thinwire.compare.method import OPTIMIZERS, read

    return [
        (name, f"tw.optim.{kind}: {read(name).policy}, twoshot",
         (getattr(optim, kind).__doc__ or "").partition("\n")[0])
        for name, (kind, _) in OPTIMIZERS.items()
    ]  # fmt: skip
