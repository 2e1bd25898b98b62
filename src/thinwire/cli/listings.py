"""`thinwire compressors`, `feedbacks`, `methods`, `policies`: what there is, with its specs."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.cli.parsing import Commands

if TYPE_CHECKING:
    from thinwire.spec import Kind

Rows = Iterable[Sequence[str]]  # the cells of one thing each

_COMPRESSORS = """\
A spec is the name, then the arguments in order or by name. Arguments in
capitals are required, the others show their default. A bar sends the values of
one compressor through the next:

  topk:0.01
  quantize:4,stochastic=true
  topk:0.01|quantize:4|lossless
  tiered:0.01,small=(quantize:4)

qsgd:4 has 4 levels, qsgd:4bit as many as 4 bits can hold (7).
"""
_FEEDBACKS = """\
A feedback is what is remembered between steps of what compression left out. It
goes to tw.attach, or follows a compressor after a plus sign:

  tw.attach(model, "topk:0.01", feedback="ef21")
  thinwire compare --with "topk:0.01+ef14, topk:0.01+none"

Without one a compressor gets the one that belongs to it.
"""
_METHODS = """\
Those of gradients go to tw.attach and to thinwire compare:

  tw.attach(model, "dgc:0.001", optimizer=optimizer)
  tw.attach(model, "powersgd:4")
  thinwire compare --with "dgc:0.001, powersgd:2, arc:0.1, signsgd"

Those with a number of steps exchange what optimizers have done instead of
gradients. They go to tw.LocalSteps and to thinwire compare:

  tw.LocalSteps(model, optimizer, "diloco:100")
  thinwire compare --workload text --with "adam-update, sparseloco, diloco:50"

Any compressor is a method too (see thinwire compressors); without a feedback it
gets the one that belongs to it. Adam in one bit and DeMo are optimizers:
tw.optim.OneBitAdam, OneBitLamb, ZeroOneAdam, DeMo; in a comparison they take
the place of the workload's Adam.
"""
_POLICIES = """\
They go to tw.attach and to thinwire compare. THEN is a compressor or a policy,
in parentheses:

  tw.attach(model, "auto")
  tw.attach(model, "warmup:500,(bandwidth:(topk:0.001|quantize:4))")
  thinwire compare --with "auto; layerwise:(embed*=topk:0.001; *=quantize:4)"
"""


class Listing(NamedTuple):
    """A command that lists something."""

    command: str
    help: str
    description: str
    epilog: str
    columns: dict[str, str]  # the key in JSON and the heading of each
    usage_width: int  # of the column of specs, before they are broken
    rows: Callable[[], Rows]


def add(commands: Commands) -> None:
    for listing in LISTINGS:
        parser = commands.add_parser(
            listing.command,
            help=listing.help,
            description=listing.description,
            epilog=listing.epilog,
        )
        parser.add_argument(
            "--json", action="store_true", help="print a JSON list instead of a table"
        )
        parser.set_defaults(run=partial(run, listing))


def run(listing: Listing, arguments: argparse.Namespace) -> int:
    from thinwire.formatting import TableColumn, break_after_commas, console, table

    keys, rows = list(listing.columns), listing.rows()
    if arguments.json:
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
        return 0
    columns = [
        TableColumn(title, wrap=key not in ("name", "usage"), bold=key == keys[0])
        for key, title in listing.columns.items()
    ]
    broken = [
        [
            break_after_commas(cell, listing.usage_width) if key == "usage" else cell
            for key, cell in zip(keys, row, strict=True)
        ]
        for row in rows
    ]
    console().print(table(columns, broken))
    return 0


def _compressors() -> Rows:
    from thinwire.compressors.registry import COMPRESSORS

    return _with_usage(COMPRESSORS)


def _feedbacks() -> Rows:
    from thinwire.feedback.registry import FEEDBACKS

    return _with_usage(FEEDBACKS)


def _with_usage(kind: "Kind[Any]") -> Rows:
    from thinwire.spec import usage

    return [(name, usage(kind.classes[name]), line) for name, line in kind.lines().items()]


def _methods() -> Rows:
    from thinwire import optim
    from thinwire.compare.method import OPTIMIZERS, read
    from thinwire.methods import usages

    yield from usages().values()
    for name, (kind, _) in OPTIMIZERS.items():
        found = getattr(optim, kind)
        made_of = f"tw.optim.{kind}: {read(name).policy}, {found.collective}"
        yield name, made_of, (found.__doc__ or "").partition("\n")[0]


def _policies() -> Rows:
    from thinwire.policies.registry import usages

    return usages()


LISTINGS = (
    Listing(
        "compressors",
        "list the compressors",
        "List every compressor with its arguments.",
        _COMPRESSORS,
        {"name": "name", "usage": "spec, with defaults", "description": "what it sends"},
        34,
        _compressors,
    ),
    Listing(
        "feedbacks",
        "list the feedbacks",
        "List what can be remembered between steps of what compression left out.",
        _FEEDBACKS,
        {"name": "name", "usage": "spec, with defaults", "description": "what it does"},
        34,
        _feedbacks,
    ),
    Listing(
        "methods",
        "list the named methods",
        "List the methods that papers have a name for.",
        _METHODS,
        {
            "usage": "spec, with defaults",
            "made of": "compressor + feedback, collective",
            "description": "what it does",
        },
        24,
        _methods,
    ),
    Listing(
        "policies",
        "list the policies",
        "List the policies: what chooses a compressor for each tensor and step.",
        _POLICIES,
        {"usage": "spec, with defaults", "description": "what it chooses"},
        30,
        _policies,
    ),
)
