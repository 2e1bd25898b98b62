"""`thinwire compare` trains with and without compression on a slow network and reports on it.

`thinwire report` draws the report of a comparison anew from its data.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.parsing import (
    INTERRUPTED,
    Commands,
    add_distance,
    add_folder,
    complain,
    ended_gently,
    patient,
)
from thinwire.compare.settings import (
    BASELINE,
    EVALUATIONS,
    HOSTS,
    LINK,
    METHODS,
    PARALLELISMS,
    STEPS,
    WORKLOAD,
    ComparisonSettingError,
    ComparisonSettings,
)

if TYPE_CHECKING:
    from thinwire.compare.document import Document

_DESCRIPTION = """\
Train one model with several methods over a slow network, and write a report on
what they bring.

Every host is a process with a link of its own, in a network namespace of this
machine. Where none can be made (no permission, no Linux) ranks talk over
loopback, and times are projected for the link from the bytes sent; every table
and picture says so. A delay is one way, of all that a host sends: with --delay
15ms a round trip between any two hosts takes 30 ms. It cannot be projected.
"""
_EPILOG = f"""\
methods:
  ddp, fsdp, hsdp         plain PyTorch, fp32: of what --parallel says
  torch:fp16, torch:bf16, torch:powersgd[:RANK]
                          PyTorch's own hooks for DDP; always measured there
  dgc:0.001, signsgd ...  named methods (see thinwire methods)
  diloco:50, sparseloco, adam-update, local-sgd:10,compressor=(quantize:4) ...
                          those that exchange what optimizers have done, after
                          every so many steps (see thinwire methods)
  onebit-adam, onebit-lamb, zero-one-adam
                          in place of the workload's Adam
  COMPRESSOR[+FEEDBACK]   such as topk:0.01+ef14 or "topk:0.01|quantize:4"
                          (see thinwire compressors, thinwire feedbacks)
  auto, bandwidth:(...)   what chooses compressors (see thinwire policies)
  script                  your script, unchanged
  by default: {", ".join(METHODS)};
  with --parallel fsdp {", ".join(PARALLELISMS["fsdp"].methods)}

workloads:
  images, text            bundled, with arguments such as images:batch_size=64
  SCRIPT.py               your own, run as by torchrun with what follows --; its
                          DistributedDataParallel models (with --parallel fsdp
                          those that fully_shard was applied to, with hsdp
                          those that it gives to tw.attach) get each method in
                          turn, every backward() is a step, and
                          tw.track(accuracy, "accuracy, %") reports the metric

examples:
  thinwire compare
  thinwire compare --with "topk:0.001, onebit" --link 1gbit --sweep 10mbit
  thinwire compare --workload text --steps 600 --seeds 3 --out report/text
  thinwire compare --workload text --link 10mbit --with "sparseloco, diloco:20"
  thinwire compare --parallel fsdp --workload text --weights quantize:8
  thinwire compare --parallel hsdp --racks 2 --inter 20mbit --link 1gbit
  thinwire compare --link 100mbit --delay 15ms --loss 0.1%
  thinwire compare --workload train.py --hosts 2 --link 50mbit -- --epochs 1

Exit code: 0; 1 if a method that was asked for failed or diverged; 2 for wrong
arguments; 130 after Ctrl-C, SIGTERM or SIGHUP, with a report of what was done
until then.
"""


_REPORT = "Draw the page and pictures of a comparison from the data.json that it wrote."


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="train with and without compression on a slow network",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("--workload", metavar="NAME", default=WORKLOAD, help=f"default: {WORKLOAD}")
    what.add_argument(
        "--parallel",
        choices=list(PARALLELISMS),
        default=BASELINE,
        help="how PyTorch divides training: replicas (ddp), shards (fsdp, FSDP2), or replicas of "
        f"shards (hsdp), one per rack or two; default: {BASELINE}",
    )
    what.add_argument(
        "--weights",
        metavar="COMPRESSOR",
        help="with --parallel fsdp, of the parameters that methods of thinwire gather: quantize:8; "
        "default: uncompressed",
    )
    what.add_argument(
        "--with", dest="methods", metavar="METHODS", action="append", help="methods, see below"
    )
    what.add_argument("--no-torch-hooks", action="store_true", help="leave PyTorch's own hooks out")
    how_long = what.add_mutually_exclusive_group()
    how_long.add_argument(
        "--steps",
        metavar="N",
        type=int,
        help=f"per training; default: {STEPS} for the default workload, else the workload's own",
    )
    how_long.add_argument(
        "--seconds", metavar="S", type=float, help="train for so long instead of so many steps"
    )
    what.add_argument(
        "--target", metavar="X", type=float, help="end a training when its metric has reached this"
    )
    what.add_argument(
        "--seeds", metavar="N", type=int, default=1, help="trainings of each method; default: 1"
    )
    what.add_argument(
        "--evaluations",
        metavar="N",
        type=int,
        default=EVALUATIONS,
        help=f"of the metric per training; default: {EVALUATIONS}",
    )
    where = parser.add_argument_group("on which network")
    where.add_argument("--hosts", metavar="N", type=int, help=f"default: {HOSTS}")
    link = where.add_mutually_exclusive_group()
    link.add_argument(
        "--link", metavar="RATE", help=f"of every host, in either direction; default: {LINK}"
    )
    link.add_argument(
        "--links",
        metavar="FILE",
        type=Path,
        help="a file with a link for each host, one per line: its rate, and after it delay=, "
        "jitter= and loss= where they differ from the following",
    )
    add_distance(where)
    where.add_argument(
        "--racks",
        metavar="N",
        type=int,
        default=1,
        help="divide the hosts over N switches; default: 1",
    )
    where.add_argument(
        "--inter",
        metavar="LINK",
        help="rate of the links between racks, and after it delay=, jitter= and loss= of what one "
        "rack sends another",
    )
    where.add_argument(
        "--sweep",
        metavar="RATES",
        help="measure the time per step at these rates too: 10mbit,1gbit",
    )
    where.add_argument(
        "--project", action="store_true", help="run on loopback and project times in any case"
    )
    where.add_argument(
        "--patience",
        metavar="S",
        type=float,
        help="seconds without a step after which a method counts as hanging; default: many times "
        "what an uncompressed step takes, for a script 300",
    )
    output = parser.add_argument_group("output")
    add_folder(output, "the page, its pictures and the data")
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)
    _add_report(commands)


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report", help="draw a comparison's report again", description=_REPORT
    )
    parser.add_argument("data", metavar="DATA.json", type=Path, help="written by thinwire compare")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="where to; default: where the data is"
    )
    parser.set_defaults(run=run_report)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.errors import MissingExtraError
    from thinwire.lab import LabError

    with ended_gently():
        try:
            settings = _settings(arguments)
            from thinwire.report import require_matplotlib

            require_matplotlib("thinwire compare")
            command = shlex.join(["thinwire", *arguments.argv])
            document, code = compare(settings, command, arguments.out)
        except (ComparisonSettingError, MissingExtraError, LabError) as error:
            return complain("compare", error)
        with patient():
            show(document, arguments.out)
    if document.interrupted:
        print("thinwire compare: interrupted", file=sys.stderr)
    return code


def compare(settings: ComparisonSettings, command: str, folder: Path) -> "tuple[Document, int]":
    """Carry out a comparison, showing how far it is; what came out, and the exit code for it.

    Args:
        folder: where its report will be written.
    """
    from thinwire.compare.run import Comparison, shown

    comparison = Comparison(settings)
    _check_output(folder)
    with shown(comparison.methods, len(settings.seeds)) as watcher:
        document = comparison.run(watcher, command)
    if document.interrupted:
        return document, INTERRUPTED
    found = [method for method in document.methods if method.name in comparison.asked]
    return document, int(any(method.error or method.diverged for method in found))


def run_report(arguments: argparse.Namespace) -> int:
    from thinwire.errors import MissingExtraError
    from thinwire.report import read_document, write

    try:
        page, *_ = write(read_document(arguments.data), arguments.out or arguments.data.parent)
    except (OSError, ValueError, MissingExtraError) as error:
        return complain("report", error)
    print(f"wrote {page}", file=sys.stderr)
    return 0


def _settings(arguments: argparse.Namespace) -> ComparisonSettings:
    from thinwire.compare.method import split

    for name in ("steps", "seconds", "seeds", "evaluations", "hosts", "racks", "patience"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ComparisonSettingError(f"--{name} must be more than 0, got {value}")
    for name in ("seconds", "target"):
        value = getattr(arguments, name)
        if value is not None and not math.isfinite(value):
            raise ComparisonSettingError(f"--{name} must be finite, got {value}")
    methods = tuple(m for text in arguments.methods or [] for m in split(text))
    if arguments.methods is not None and not methods:
        raise ComparisonSettingError("--with names no method")
    workload = arguments.workload
    script = workload.endswith(".py")
    _check_workload(arguments, script)
    steps = arguments.steps
    if steps is None and arguments.seconds is None and workload == WORKLOAD:
        steps = STEPS
    hosts, links = _links(arguments)
    parallelism = PARALLELISMS[arguments.parallel]
    return ComparisonSettings(
        workload=workload,
        arguments=tuple(arguments.arguments),
        parallel=arguments.parallel,
        methods=methods or parallelism.methods,
        baselines=parallelism.baselines[: 1 if arguments.no_torch_hooks else None],
        weights=arguments.weights,
        hosts=hosts,
        links=links,
        delay=arguments.delay,
        jitter=arguments.jitter,
        loss=_loss(arguments),
        racks=arguments.racks,
        inter=arguments.inter,
        sweep=_sweep(arguments, script),
        steps=steps,
        seconds=arguments.seconds,
        target=arguments.target,
        seeds=tuple(range(arguments.seeds)),
        evaluations=arguments.evaluations,
        project=arguments.project,
        patience=arguments.patience,
    )


def _check_workload(arguments: argparse.Namespace, script: bool) -> None:
    if not script:
        from thinwire.workloads import workload

        if arguments.arguments:
            raise ComparisonSettingError(
                f"unexpected {arguments.arguments[0]!r}: only a script takes arguments"
            )
        try:
            workload(arguments.workload)
        except ValueError as error:
            raise ComparisonSettingError(
                f"--workload: {error}, or a script whose name ends in .py"
            ) from None
        return
    if not Path(arguments.workload).is_file():
        raise ComparisonSettingError(f"--workload: no file {arguments.workload}")
    for name in ("steps", "seconds", "target"):
        if getattr(arguments, name) is not None:
            raise ComparisonSettingError(
                f"--{name} is for bundled workloads: a script ends by itself"
            )


def _links(arguments: argparse.Namespace) -> tuple[int, tuple[str, ...]]:
    """How many hosts, and the rate of each one's link."""
    from thinwire.lab import parse_link, read_links

    hosts = arguments.hosts or HOSTS
    if arguments.links is not None:
        try:
            rates = read_links(arguments.links)
        except (OSError, ValueError) as error:
            raise ComparisonSettingError(f"--links: {error}") from None
        if arguments.hosts not in (None, len(rates)):
            raise ComparisonSettingError(
                f"--links has {len(rates)} rates, but --hosts is {arguments.hosts}"
            )
        hosts = len(rates)
    else:
        rates = [LINK if arguments.link is None else arguments.link] * hosts
    if hosts < 2:
        raise ComparisonSettingError("--hosts must be at least 2: one host has nobody to send to")
    if (arguments.inter is None) != (arguments.racks == 1):
        raise ComparisonSettingError("--racks and --inter go together: --racks 2 --inter 20mbit")
    if arguments.racks > hosts:
        raise ComparisonSettingError(
            f"--racks {arguments.racks} is more than there are hosts, {hosts}"
        )
    try:
        for rate in {*rates, *([arguments.inter] if arguments.inter else [])}:
            parse_link(rate)
    except ValueError as error:
        raise ComparisonSettingError(str(error)) from None
    return hosts, tuple(rates)


def _loss(arguments: argparse.Namespace) -> float | None:
    from thinwire.lab import parse_loss

    try:
        return None if arguments.loss is None else parse_loss(arguments.loss)
    except ValueError as error:
        raise ComparisonSettingError(f"--loss: {error}") from None


def _sweep(arguments: argparse.Namespace, script: bool) -> tuple[str, ...]:
    from thinwire.lab import parse_rate

    rates = [rate.strip() for rate in (arguments.sweep or "").split(",") if rate.strip()]
    if rates and (script or arguments.racks > 1):
        raise ComparisonSettingError("--sweep is for bundled workloads without racks")
    try:
        for rate in rates:
            parse_rate(rate)
    except ValueError as error:
        raise ComparisonSettingError(f"--sweep: {error}") from None
    return tuple(dict.fromkeys(rates))


def _check_output(folder: Path) -> None:
    """Before minutes of work, see that its result can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".thinwire").touch()
        (folder / ".thinwire").unlink()
    except OSError as error:
        raise ComparisonSettingError(f"--out: cannot write to {folder}: {error.strerror}") from None


def show(document: "Document", folder: Path) -> None:
    """Print the table, and write the report."""
    from thinwire.compare.table import print_document
    from thinwire.formatting import console
    from thinwire.report import write

    print_document(document, console())
    sys.stdout.flush()
    print("drawing the report ...", file=sys.stderr, flush=True)
    page, *_ = write(document, folder)
    print(f"wrote {page}, with its pictures and data.json beside it", file=sys.stderr)
