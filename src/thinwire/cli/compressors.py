"""`thinwire compressors`: what there is, and how a spec string names it."""

import argparse
from typing import TYPE_CHECKING

from thinwire.cli.listing import show

if TYPE_CHECKING:
    from thinwire.cli.parser import Parser

_DESCRIPTION = "List every compressor with its arguments."
_EPILOG = """\
A spec is the name, then the arguments in order or by name. Arguments in capitals are required, the
others show their default. A bar sends the values of one compressor through the next:

  topk:0.01
  quantize:4,stochastic=true
  topk:0.01|quantize:4|lossless
  tiered:0.01,small=(quantize:4)

qsgd:4 has 4 levels, qsgd:4bit as many as 4 bits can hold (7).
"""


def add(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "compressors", help="list the compressors", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.compressors.registry import COMPRESSORS
    from thinwire.spec import usage

    lines = COMPRESSORS.lines()
    found = [(name, usage(kind), lines[name]) for name, kind in COMPRESSORS.classes.items()]
    titles = ("name", "spec, with defaults", "what it sends")
    return show(found, ("name", "usage", "description"), titles, arguments.json)
