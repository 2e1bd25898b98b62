"""`thinwire methods`: the methods of papers, and how a spec string names them."""

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.cli.parser import Parser

_DESCRIPTION = "List the methods that papers have a name for."
_EPILOG = """\
They go to tw.attach and to thinwire compare:

  tw.attach(model, "dgc:0.001", optimizer=optimizer)
  tw.attach(model, "powersgd:4")
  thinwire compare --with "dgc:0.001, powersgd:2, arc:0.1, signsgd"

Any compressor is a method too (see thinwire compressors); without a feedback it gets the one that
belongs to it. Adam in one bit is an optimizer: tw.optim.OneBitAdam, OneBitLamb, ZeroOneAdam.
"""


def add(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "methods", help="list the named methods", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.policies.named import methods

    keys = ("usage", "made of", "description")
    rows = methods()
    if arguments.json:
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
        return 0

    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from thinwire.cli.compressors import in_lines
    from thinwire.cli.screen import console

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("spec, with defaults", no_wrap=True)
    table.add_column("compressor + feedback, collective")
    table.add_column("what it does")
    for usage, made, line in rows:
        table.add_row(Text(in_lines(usage, 30), "bold"), Text(made), Text(line))
    console().print(table)
    return 0
