"""`thinwire selftest`: is thinwire right on this machine's device, and how fast?"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.parsing import INTERRUPTED, Commands, complain, reserve

if TYPE_CHECKING:
    import torch

    from thinwire.bench.selftest import SelftestReport

PARTS = ("kernels", "collectives", "speed")
_DESCRIPTION = """\
Check thinwire on a device of this machine: every kernel against the plain
PyTorch reference, bit for bit; exchanges between two processes over the
backends that are there; and speed against that of memory.

Takes a minute or two. Nothing leaves this machine.
"""
_EPILOG = """\
examples:
  thinwire selftest                       the CPU, and its Numba kernels
  thinwire selftest --device cuda         a GPU, and its Triton kernels
  thinwire selftest --device cuda --json > selftest.json
  thinwire selftest --only kernels

Exit code 1 if something is wrong. Then, and for any GPU that docs/gpu.md does
not list, please paste the JSON into an issue.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "selftest",
        help="check kernels, exchanges and speed on this machine's CPU or GPU",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--device", metavar="DEVICE", default="cpu", help="cpu (the default), cuda or cuda:1"
    )
    parser.add_argument(
        "--only",
        metavar="PART",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="kernels, collectives or speed, or some of them; by default all",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document, no tables")
    parser.add_argument(
        "--out", metavar="FILE.json", type=Path, help="write the document to a file"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.bench.run import shown
    from thinwire.bench.selftest import SelftestSettings, as_json
    from thinwire.bench.selftest import run as test

    try:
        settings = SelftestSettings(_device(arguments.device), tuple(arguments.only))
        outputs = reserve(arguments.out)
    except ValueError as error:
        return complain("selftest", error)
    try:
        with outputs, shown(settings.num_steps) as tick:
            report = test(settings, tick)
    except KeyboardInterrupt:
        print("thinwire selftest: interrupted", file=sys.stderr)
        return INTERRUPTED
    if arguments.out is not None:
        arguments.out.write_text(as_json(report) + "\n", encoding="utf-8")
        print(f"wrote {arguments.out}", file=sys.stderr)
    if arguments.json:
        print(as_json(report))
    else:
        _show(report, arguments.out is None)
    return 0 if report.passed else 1


def _device(name: str) -> "torch.device":
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: expected cpu, cuda or cuda:1, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu, cuda or cuda:1, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise ValueError("--device: torch finds no CUDA device here (torch.cuda.device_count)")
        if (device.index or 0) >= count:
            raise ValueError(f"--device: there are {count} CUDA devices, got {name!r}")
        device = torch.device("cuda", device.index or 0)
    return device


def _show(report: "SelftestReport", with_json: bool) -> None:
    from thinwire.bench.selftest import as_json, lines
    from thinwire.bench.table import WIDTH
    from thinwire.formatting import TableColumn, console, table

    out = console(width=WIDTH)
    for title, headings, rows in lines(report):
        numbers = ("calls", "bytes each", "time", "GB/s", "share")
        columns = [TableColumn(heading, right=heading in numbers) for heading in headings]
        out.print(table(columns, rows, title=title))
        out.print()
    name, own = report.device["name"], report.device["kernels"]
    verdict = "all is right" if report.passed else "SOMETHING IS WRONG, please report it"
    out.print(f"{name}, kernels '{own}': {verdict}", markup=False, highlight=False)
    if with_json:
        out.print("\nTo paste into an issue:\n", markup=False)
        print(as_json(report))
