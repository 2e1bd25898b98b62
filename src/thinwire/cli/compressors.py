"""`thinwire compressors`: what there is, and how a spec string names it."""

import argparse
import json
import re
from typing import TYPE_CHECKING

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
"""


def add(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "compressors", help="list the compressors", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.compressors.registry import BY_NAME, JOINT, compressors
    from thinwire.compressors.spec import usage

    kinds = {**BY_NAME, **JOINT}
    found = [(name, usage(kinds[name]), line) for name, line in compressors().items()]
    if arguments.json:
        keys = ("name", "usage", "description")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in found], indent=2))
        return 0

    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from thinwire.cli.screen import console

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("spec, with defaults", no_wrap=True)
    table.add_column("what it sends")
    for name, spec, line in found:
        table.add_row(Text(name, "bold"), Text(in_lines(spec)), Text(line))
    console().print(table)
    return 0


def in_lines(spec: str, width: int = 44) -> str:
    """The spec broken after commas."""
    lines = [""]
    for piece in re.findall(r"[^,]+,?", spec):
        if len(lines[-1]) + len(piece) > width:
            lines.append("  ")
        lines[-1] += piece
    return "\n".join(lines)
