"""`thinwire policies`: what chooses compressors, and how a spec string names it."""

import argparse
from typing import TYPE_CHECKING

from thinwire.cli.listing import show

if TYPE_CHECKING:
    from thinwire.cli.parser import Parser

_DESCRIPTION = "List the policies: what chooses a compressor for each tensor and step."
_EPILOG = """\
They go to tw.attach and to thinwire compare. THEN is a compressor or a policy, in parentheses:

  tw.attach(model, "auto")
  tw.attach(model, "warmup:500,(bandwidth:(topk:0.001|quantize:4))")
  thinwire compare --with "auto; layerwise:(embed*=topk:0.001; *=quantize:4)"
"""


def add(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "policies", help="list the policies", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.policies.registry import usages

    titles = ("spec, with defaults", "what it chooses")
    return show(usages(), ("usage", "description"), titles, arguments.json)
