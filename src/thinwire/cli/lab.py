"""`thinwire lab`: run a program on hosts with slow links, all on this machine."""

import argparse
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.parsing import Commands, add_distance, complain

if TYPE_CHECKING:
    from thinwire.lab import Counters, Lab

_TIMED_OUT = 124  # as of timeout(1)
_SIGNALLED = 128  # plus the number of the signal, by the custom of shells
_COLOURS = ("36", "33", "32", "35", "34", "31")

_DESCRIPTION = "A slow network on this machine, to try distributed training over (Linux only)."
_RUN = """\
Run a program on every host of a lab, as torchrun would with one process per
node.

Each host is a network namespace with a link of its own. The program gets RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
GLOO_SOCKET_IFNAME and THINWIRE_RACK. What it prints is shown as it comes, after
the number of its host; what the links carried comes at the end, on stderr.
"""
_RUN_EPILOG = """\
examples:
  thinwire lab run --hosts 4 --link 100mbit -- python train.py --epochs 1
  thinwire lab run --link 1gbit,1gbit,20mbit -- python train.py
  thinwire lab run --hosts 4 --link 100mbit --delay 15ms -- python train.py
  thinwire lab run --link "1gbit,1gbit,20mbit delay=40ms" -- python train.py
  thinwire lab run --hosts 4 --racks 2 --inter 20mbit -- python train.py
  thinwire lab run --hosts 4 --racks 2 --inter "20mbit delay=15ms" -- ./run.sh

A delay is one way, of all that a host sends: with --delay 15ms a round trip
between any two hosts takes 30 ms.

Exit code: 0; that of the first host that failed, or 128 + N if signal N ended
it; 124 when time was up; 130 after Ctrl-C; 2 for wrong arguments and where no
lab can be made; 1 if the lab broke down. However it ends, no process and no
interface is left.
"""
_CLEAN = """\
End processes that a lab has left behind.

There are none after an ordinary end, nor after `kill -9`. There may be after
the command and the process that holds its namespaces were both killed while a
program had asked not to be. Only processes of a lab whose owner, the process
that opened it, is gone are ended, and only your own unless you are root.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "lab", help="run a program on hosts with slow links", description=_DESCRIPTION
    )

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=show_help)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=type(parser))
    _add_run(verbs)
    clean = verbs.add_parser("clean", help="end what labs have left behind", description=_CLEAN)
    clean.set_defaults(run=run_clean)


def _add_run(verbs: Commands) -> None:
    parser = verbs.add_parser(
        "run",
        help="run a program on every host",
        usage="thinwire lab run [options] -- PROGRAM [ARGUMENT ...]",
        description=_RUN,
        epilog=_RUN_EPILOG,
    )
    network = parser.add_argument_group("the network")
    network.add_argument(
        "--hosts", metavar="N", type=int, help="how many; default: as many as there are rates"
    )
    rates = network.add_mutually_exclusive_group()
    rates.add_argument(
        "--link",
        metavar="LINK[,LINK...]",
        help="rate of all links in either direction, or one for each host, and after it delay=, "
        "jitter= and loss= where they differ from the following; default: 100mbit",
    )
    rates.add_argument(
        "--links", metavar="FILE", type=Path, help="a file with a link for each host, one per line"
    )
    add_distance(network)
    network.add_argument(
        "--racks", metavar="N", type=int, default=1, help="divide the hosts over N switches"
    )
    network.add_argument(
        "--inter",
        metavar="LINK",
        help="rate between racks, in either direction, and after it delay=, jitter= and loss= of "
        "what one rack sends another; default: none of the latter",
    )
    running = parser.add_argument_group("the run")
    running.add_argument(
        "--timeout", metavar="SECONDS", type=float, help="end all when it takes longer"
    )
    running.add_argument(
        "--no-tags", action="store_true", help="show lines without the number of their host"
    )
    running.add_argument("--quiet", action="store_true", help="do not show what the links carried")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from thinwire.errors import MissingExtraError
    from thinwire.lab import HostFailedError, Lab, LabError, RunTimeoutError

    try:
        command = _command(arguments.command)
        links = _links(arguments)
        if arguments.timeout is not None and not arguments.timeout > 0:
            raise ValueError(f"--timeout must be more than 0 seconds, got {arguments.timeout:g}")
        lab = Lab(
            len(links),
            links,
            delay=arguments.delay,
            jitter=arguments.jitter,
            loss=arguments.loss,
            racks=arguments.racks,
            inter=arguments.inter,
        )
    except ValueError as error:
        return complain("lab run", error)
    opened = False
    try:
        with lab:
            opened = True
            with _told(lab, arguments):
                lab.run(
                    command,
                    # Else Python keeps back what it prints into a pipe until it has 8 kB of it.
                    env={"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1")},
                    timeout=arguments.timeout,
                    on_line=_line_writer(tags=not arguments.no_tags),
                )
    except HostFailedError as error:
        print(f"thinwire lab run: {error.results[error.host].ending}", file=sys.stderr)
        code = error.exit_code
        return code if code > 0 else _SIGNALLED - code
    except RunTimeoutError as error:
        late = ", ".join(f"host {host}" for host in error.late)
        print(
            f"thinwire lab run: ended after {arguments.timeout:g} s, not done: {late}",
            file=sys.stderr,
        )
        return _TIMED_OUT
    except (LabError, MissingExtraError) as error:
        if opened:
            print(f"thinwire lab run: {error}", file=sys.stderr)
            return 1
        # The reason says what to do where it can be mended here.
        why = f"no lab can be made here: {error} (see docs/guides/lab.md)"
        return complain("lab run", LabError(why))
    return 0


def run_clean(arguments: argparse.Namespace) -> int:
    from thinwire.lab import LabError, clean

    if sys.platform != "linux":
        return complain("lab clean", LabError("a lab needs Linux, so there is none here"))
    orphans = clean()
    for orphan in orphans:
        what = "ended" if orphan.ended else "could not end"
        command = textwrap.shorten(orphan.command, 100, placeholder=" ...")
        print(f"{what} process {orphan.pid} of the lab of process {orphan.owner}: {command}")
    if not orphans:
        print("nothing left")
    return 0 if all(orphan.ended for orphan in orphans) else 1


def _command(words: list[str]) -> list[str]:
    """The program and its arguments, of all that followed the options."""
    if not words or words == ["--"]:
        raise ValueError("no program to run: write it last, after --, like -- python train.py")
    if words[0] != "--":
        raise ValueError(f"write -- between the options and the program, before {words[0]!r}")
    if shutil.which(words[1]) is None:
        raise ValueError(f"no program {words[1]!r} to start")
    return words[1:]


def _links(arguments: argparse.Namespace) -> list[str]:
    """One link for each host."""
    from thinwire.lab import parse_link, read_links

    if arguments.links is not None:
        try:
            rates, option = read_links(arguments.links), f"{arguments.links} has"
        except OSError as error:
            raise ValueError(f"cannot read {arguments.links}: {error.strerror}") from None
    else:
        given = "100mbit" if arguments.link is None else arguments.link
        rates = [rate.strip() for rate in given.split(",")]
        option = "--link has"
        for rate in rates:
            parse_link(rate)
    several = len(rates) > 1 or arguments.links is not None
    hosts: int | None = arguments.hosts
    if hosts is None:
        if not several:
            raise ValueError("--hosts is needed, or a rate for each host")
        return rates
    if hosts < 1:
        raise ValueError(f"--hosts must be at least 1, got {hosts}")
    if several and len(rates) != hosts:
        raise ValueError(f"{option} {len(rates)} rates for {hosts} hosts")
    return rates if several else rates * hosts


def _line_writer(tags: bool) -> Callable[[int, str, str], None]:
    colourful = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def write(host: int, stream: str, line: str) -> None:
        file = sys.stdout if stream == "stdout" else sys.stderr
        tag = f"[{host}] " if tags else ""
        if tag and colourful and file.isatty():
            tag = f"\x1b[{_COLOURS[host % len(_COLOURS)]}m[{host}]\x1b[0m "
        # A program may print what this terminal cannot show; that must not end a run.
        coding = file.encoding or "utf-8"
        file.write(f"{tag}{line}\n".encode(coding, "replace").decode(coding))
        file.flush()

    return write


@contextmanager
def _told(lab: "Lab", arguments: argparse.Namespace) -> Iterator[None]:
    """Tell at the end of the block, however it ends, what the links have carried in it."""
    from thinwire.lab import LabError

    began = time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - began
        if not arguments.quiet:
            try:
                lines = [*_table(_rows(lab)), *([str(late)] if (late := lab.lateness()) else [])]
            except LabError:  # broken down: the error under way says why
                lines = []
            for line in lines:
                print(line, file=sys.stderr)
            print(f"{seconds:.1f} s", file=sys.stderr)


def _rows(lab: "Lab") -> list[tuple[str, ...]]:
    uplinks = lab.inter_counters()
    hosts = [
        (f"host {host.number}" + (f", rack {host.rack}" if uplinks else ""), link)
        for host, link in zip(lab.hosts, lab.links, strict=True)
    ]
    racks = [(f"uplink of rack {rack}", lab.inter or "") for rack in range(len(uplinks))]
    counted = [*lab.counters(), *uplinks]
    return [
        (*names, *_figures(counters))
        for names, counters in zip((*hosts, *racks), counted, strict=True)
    ]


def _figures(counters: "Counters") -> tuple[str, str, str]:
    return (
        f"{counters.sent_bytes / 1e6:.2f}",
        f"{counters.received_bytes / 1e6:.2f}",
        str(counters.dropped_packets),
    )


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    table = [("", "link", "MB sent", "MB received", "packets dropped"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *rest in table:
        cells = (word.rjust(width) for word, width in zip(rest, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *cells))
