"""`thinwire bench`: measure compressors on this machine."""

import argparse
import json
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.bench.settings import (
    COMPRESSORS,
    DATA,
    ROUNDS,
    SIZE,
    BenchSettingError,
    BenchSettings,
    read_size,
)
from thinwire.cli.parsing import INTERRUPTED, Commands, complain, patient, reserve

if TYPE_CHECKING:
    from thinwire.bench.results import BenchReport

# Of torch: some tens of thousands end the process, as no more can be started.
_MOST_THREADS = 1024
_DESCRIPTION = """\
Measure speed, size, error and memory of compressors on this machine.

Every round times one r += g over the tensor and then each compressor once;
medians are shown. The first use of a compressor compiles its kernels, which
takes some seconds and is not timed.
"""
_EPILOG = f"""\
compressors measured unless --with is given:
{textwrap.fill("; ".join(COMPRESSORS), 78, initial_indent="  ", subsequent_indent="  ")}

examples:
  thinwire bench
  thinwire bench --with "topk:0.01; onebit" --size 1M 25.6M --data heavy
  thinwire bench --input gradients.safetensors --plot report/bench.html
  thinwire bench --no-eager --json > bench.json
  thinwire bench --for-plan

Ctrl-C stops a run and shows what was done until then.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure compressors on this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--with",
        dest="specs",
        metavar="SPECS",
        action="append",
        help="compressors, separated by ';' (see thinwire compressors); with --for-plan, beside "
        "the usual ones",
    )
    what.add_argument(
        "--size",
        metavar="N",
        nargs="+",
        help=f"elements of the tensors, such as 10k, {SIZE} (the default) or 25.6M",
    )
    kinds = "; ".join(f"{name}: {line}" for name, line in DATA.items())
    what.add_argument(
        "--data",
        metavar="KIND",
        nargs="+",
        help=f"kinds of tensors, by default all. {kinds}",
    )
    what.add_argument(
        "--input",
        metavar="FILE",
        type=Path,
        help="measure on the float tensors of a .npy or .safetensors file instead, laid end to end "
        "as one tensor",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=ROUNDS,
        help=f"times to measure; default: {ROUNDS}",
    )
    how.add_argument("--threads", metavar="N", type=int, help="default: as many as torch uses")
    how.add_argument(
        "--no-eager", action="store_true", help="do not time plain PyTorch for comparison"
    )
    how.add_argument(
        "--for-plan",
        action="store_true",
        help="measure what thinwire plan reckons with instead (some seconds per compressor of each "
        "kind), and keep it in the cache directory, or in --out",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="print a JSON document instead of the table"
    )
    output.add_argument(
        "--out", metavar="FILE.json", type=Path, help="write the document to a file"
    )
    output.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw ratio against error, and speed: .png for a picture, .html for a page with the "
        "table (needs matplotlib)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.errors import MissingExtraError

    if arguments.for_plan:
        return _run_for_plan(arguments)
    try:
        settings = _settings(arguments)
        from thinwire.bench.run import prepare, shown
        from thinwire.bench.run import run as measure

        plan = prepare(settings)
        with _outputs(arguments), shown(plan.num_steps) as tick:
            report = measure(plan, tick)
    except (BenchSettingError, MissingExtraError) as error:
        return complain("bench", error)
    _show(report, arguments)
    if report.interrupted:
        print("thinwire bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _run_for_plan(arguments: argparse.Namespace) -> int:
    """Measure codecs, and leave the table where `thinwire plan` finds it."""
    import torch

    from thinwire.bench.codecs import SPECS, measure_codecs, num_ticks
    from thinwire.bench.run import shown
    from thinwire.policies.codecs import measured_file

    try:
        for name in ("size", "data", "input", "plot"):
            if getattr(arguments, name) is not None:
                raise BenchSettingError(f"--for-plan has its own tensors, so not with --{name}")
        specs = tuple(dict.fromkeys([*SPECS, *(_words(arguments.specs, ";") or ())]))
        _settings(arguments)
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        with _outputs(arguments), shown(num_ticks(specs, arguments.rounds)) as tick:
            table = measure_codecs(specs, arguments.rounds, tick)
    except (BenchSettingError, TypeError, ValueError) as error:
        return complain("bench", error)
    with patient():
        path = arguments.out or measured_file()
        path.write_text(table.to_json(), encoding="utf-8")
        if arguments.json:
            print(table.to_json(), end="")
    print(f"wrote {path}", file=sys.stderr)
    return 0


def _settings(arguments: argparse.Namespace) -> BenchSettings:
    for name in ("rounds", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise BenchSettingError(f"--{name} must be at least 1, got {value}")
    if arguments.threads is not None and arguments.threads > _MOST_THREADS:
        raise BenchSettingError(
            f"--threads must be at most {_MOST_THREADS}, got {arguments.threads}"
        )
    if arguments.input is not None and (arguments.size or arguments.data):
        raise BenchSettingError("--size and --data are for generated tensors, so not with --input")
    kinds = _words(arguments.data, ",") or tuple(DATA)
    for kind in kinds:
        if kind not in DATA:
            raise BenchSettingError(f"--data: unknown kind {kind!r}, known: {', '.join(DATA)}")
    if arguments.specs is not None and not _words(arguments.specs, ";"):
        raise BenchSettingError("--with names no compressor")
    sizes = _words(arguments.size, ",") or (SIZE,)
    return BenchSettings(
        compressors=_words(arguments.specs, ";") or COMPRESSORS,
        sizes=tuple(dict.fromkeys(read_size(size) for size in sizes)),
        data=kinds,
        input=arguments.input,
        rounds=arguments.rounds,
        eager=not arguments.no_eager,
        threads=arguments.threads,
    )


def _words(texts: list[str] | None, separator: str) -> tuple[str, ...]:
    """What the texts name, each once, in their order."""
    words = [word.strip() for text in texts or [] for word in text.split(separator)]
    return tuple(dict.fromkeys(word for word in words if word))


def _outputs(arguments: argparse.Namespace) -> ExitStack:
    """Before minutes of work, see that its results can be written: see `reserve`."""
    plot: Path | None = arguments.plot
    if plot is not None:
        if plot.suffix not in (".png", ".html"):
            raise BenchSettingError(f"--plot: expected a file named .png or .html, got {plot}")
        from thinwire.report import require_matplotlib

        require_matplotlib("thinwire bench --plot")
    for path in (plot, arguments.out):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchSettingError(f"cannot write {path}: {error.strerror}") from None
    try:
        return reserve(plot, arguments.out)
    except ValueError as error:
        raise BenchSettingError(str(error)) from None


def _show(report: "BenchReport", arguments: argparse.Namespace) -> None:
    with patient():
        _print(report, arguments)
    if arguments.plot is not None and report.groups:
        from thinwire.bench.picture import write_page, write_picture

        write = write_page if arguments.plot.suffix == ".html" else write_picture
        write(report, arguments.plot)
        print(f"wrote {arguments.plot}", file=sys.stderr)


def _print(report: "BenchReport", arguments: argparse.Namespace) -> None:
    from thinwire.bench.results import document

    text = json.dumps(document(report), indent=2, allow_nan=False)
    if arguments.json:
        print(text)
    else:
        from thinwire.bench.table import WIDTH, print_report
        from thinwire.formatting import console

        print_report(report, console(width=WIDTH))
    sys.stdout.flush()
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {arguments.out}", file=sys.stderr)
