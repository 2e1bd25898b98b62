"""`thinwire report`: draw the report of a comparison anew from its data."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.parser import complain

if TYPE_CHECKING:
    from thinwire.cli.parser import Parser

_DESCRIPTION = "Draw the page and pictures of a comparison from the data.json that it wrote."


def add(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "report", help="draw a comparison's report again", description=_DESCRIPTION
    )
    parser.add_argument("data", metavar="DATA.json", type=Path, help="written by thinwire compare")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="where to; default: where the data is"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.errors import MissingExtraError
    from thinwire.report import read_document, write

    try:
        page, *_ = write(read_document(arguments.data), arguments.out or arguments.data.parent)
    except (OSError, ValueError, MissingExtraError) as error:
        return complain("report", error)
    print(f"wrote {page}", file=sys.stderr)
    return 0
