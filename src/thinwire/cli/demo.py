"""`thinwire demo` trains two models on a slow network, with and without compression."""

import argparse
import math
import shlex
import sys

from thinwire.cli.compare import compare, show
from thinwire.cli.parsing import (
    INTERRUPTED,
    Commands,
    add_folder,
    complain,
    ended_gently,
    patient,
)
from thinwire.compare.settings import BASELINE, HOSTS, ComparisonSettingError, ComparisonSettings

LINK, SECONDS = "30mbit", 10.0
# What docs/guides/which-method.md recommends for each optimizer, and what chooses by itself.
PARTS = {
    "images": ("A convolutional network under SGD", ("topk:0.01|quantize:4", "auto")),
    "text": ("A transformer under AdamW", ("adam-update", "auto")),
}
_DESCRIPTION = f"""\
Train two small models on {HOSTS} hosts with slow links inside this machine: a
convolutional network under SGD and a transformer under AdamW. Each is trained
by plain DDP, with the method that suits its optimizer and with "auto", for as
many steps as there is time for. Writes a page that says what it brought, and
links to a full report on each.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo", help="what compression brings, in two minutes", description=_DESCRIPTION
    )
    parser.add_argument(
        "--link", metavar="RATE", default=LINK, help=f"rate of every host's link; default: {LINK}"
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=float,
        default=SECONDS,
        help=f"seconds of each training; default: {SECONDS:g}",
    )
    add_folder(parser, "the page, and a folder for each model")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.errors import MissingExtraError
    from thinwire.lab import LabError, parse_rate
    from thinwire.report import require_matplotlib
    from thinwire.report.demo_page import DemoPart, write_demo

    command = shlex.join(["thinwire", *arguments.argv])
    parts: list[DemoPart] = []
    codes: list[int] = []
    try:
        if not 0 < arguments.seconds < math.inf:
            raise ComparisonSettingError(
                f"--seconds must be finite and more than 0, got {arguments.seconds}"
            )
        try:
            parse_rate(arguments.link)
        except ValueError as error:
            raise ComparisonSettingError(f"--link: {error}") from None
        require_matplotlib("thinwire demo")
        for number, (name, (title, methods)) in enumerate(PARTS.items(), 1):
            print(f"{number} of {len(PARTS)}: {title}", file=sys.stderr, flush=True)
            settings = ComparisonSettings(
                workload=name,
                methods=methods,
                baselines=(BASELINE,),
                links=(arguments.link,) * HOSTS,
                steps=None,
                seconds=arguments.seconds,
            )
            with ended_gently():
                document, code = compare(settings, command, arguments.out / name)
                with patient():
                    show(document, arguments.out / name)
            parts.append(DemoPart(title, name, document))
            codes.append(code)
            if document.interrupted:
                break
    except (ComparisonSettingError, MissingExtraError, LabError) as error:
        return complain("demo", error)
    with patient():
        page = write_demo(parts, arguments.out)
    print(f"wrote {page}, which links to a report on each", file=sys.stderr)
    return INTERRUPTED if INTERRUPTED in codes else max(codes)
