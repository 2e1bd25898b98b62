"""What `thinwire` on the command line calls."""

import os
import sys
from collections.abc import Sequence

from thinwire.cli import bench, compare, compile, demo, lab, listings, plan, selftest
from thinwire.cli.parsing import INTERRUPTED, Parser

_DESCRIPTION = "Communication compression for distributed training."
_EXAMPLES = """\
examples:
  thinwire plan --parameters 125M --hosts 8 --link 1gbit --step 0.5s
                           will it pay? predict it
  thinwire demo            what it brings: two small trainings on a slow network
  thinwire compare         does it pay? train on a slow network and see
  thinwire compressors     every compressor and its arguments
  thinwire bench           compare them on this machine
  thinwire bench --with "topk:0.01; onebit" --plot bench.html
  thinwire selftest --device cuda
  thinwire lab run --hosts 4 --link 100mbit -- python train.py

`thinwire COMMAND --help` says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for wrong arguments, 130 after Ctrl-C."""
    parser = _parser()
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        arguments = parser.parse_args(words)
        arguments.argv = words
        if arguments.version:
            from thinwire import __version__

            print(f"thinwire {__version__}")
            return 0
        if arguments.run is None:
            parser.print_help()
            return 0
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse leaves this way
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        print("thinwire: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone, `head` for one; Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> Parser:
    parser = Parser(prog="thinwire", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for module in (plan, demo, compare, listings, bench, lab, compile, selftest):
        module.add(commands)
    return parser
