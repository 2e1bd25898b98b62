"""Records: what a benchmark measured, and what it was measured with.

A benchmark reads its arguments with `read_options`, which adds `--out` and notes what the run
starts from, and ends with `write_record`, or `stamped` if it has a document of its own. So every
record knows the commit at which its run *started*, and none is written from a tree with
uncommitted code unless `--allow-dirty` asks for it, which the record then says.
"""

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.machine import Checkout, Ticks, busy, checkout, machine, versions

_NOT_SETTINGS = ("out", "as_rank", "allow_dirty", "start")
STOLEN = 0.02  # of the time: what a hypervisor may take before a record says so


class Target(NamedTuple):
    """One target: what, the figure, its bound, and whether it is met."""

    what: str
    figure: float
    bound: str
    met: bool

    @classmethod
    def at_most(cls, what: str, figure: float | None, bound: float) -> "Target":
        value = math.nan if figure is None else figure  # not measured: missed
        return cls(what, value, f"<= {bound:g}", value <= bound)

    @classmethod
    def at_least(cls, what: str, figure: float | None, bound: float) -> "Target":
        value = math.nan if figure is None else figure
        return cls(what, value, f">= {bound:g}", value >= bound)


class Start(NamedTuple):
    """What a run starts from."""

    date: str
    checkout: Checkout | None
    versions: dict[str, str | None]
    command: str
    notes: tuple[str, ...]
    clock: float
    ticks: Ticks

    @classmethod
    def now(cls) -> "Start":
        note = busy()
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            checkout=checkout(),
            versions=versions(),
            command=shlex.join(["python", *sys.argv]),
            notes=(note,) if note else (),
            clock=time.monotonic(),
            ticks=Ticks.now(),
        )

    @property
    def problem(self) -> str | None:
        """Why a record of this run could not be repeated, if so."""
        if self.checkout is None:
            return "this is not a git checkout of thinwire, so a record could not name its commit"
        changed = self.checkout.changed
        if not changed:
            return None
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return f"uncommitted code in {', '.join(changed[:3])}{more}"


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The arguments, `--out` and `--allow-dirty` among them, and the `start` of the run.

    Refuses to begin a run whose record could not be repeated from a commit.
    """
    parser.add_argument("--out", type=Path, help="write a JSON record here")
    parser.add_argument(
        "--allow-dirty",
        action="store_true",
        help="write the record even if code is not committed; it says so",
    )
    options = parser.parse_args(arguments)
    if getattr(options, "as_rank", None):
        return options  # a rank writes no record
    options.start = Start.now()
    for note in options.start.notes:
        print(note, file=sys.stderr)
    if options.out and options.start.problem and not options.allow_dirty:
        parser.error(f"--out: {options.start.problem}. Commit it first, or give --allow-dirty")
    return options


def stamped(start: Start) -> dict[str, Any]:
    """The fields of every record that say where it comes from."""
    notes = list(start.notes)
    stolen = Ticks.now().stolen_since(start.ticks)
    if stolen > STOLEN:
        notes.append(
            f"the hypervisor gave {100 * stolen:.0f} % of this machine's time to others meanwhile"
        )
    now, then = checkout(), start.checkout
    if now != then:
        notes.append(
            f"the checkout changed while this ran, and ended at {now or 'no commit'}: processes "
            "that started late may have run the later code"
        )
    return {
        "date": start.date,
        "started": {
            "commit": then and then.commit,
            "dirty": bool(then and then.changed),
            "changed": list(then.changed) if then else [],
            "command": start.command,
        },
        "seconds": round(time.monotonic() - start.clock),
        "machine": machine()._asdict(),
        "versions": start.versions,
        "notes": notes,
    }


def write_record(
    options: argparse.Namespace,
    schema: str,
    measured: Any,
    targets: Sequence[Target] = (),
    notes: Sequence[str] = (),
) -> None:
    """The record of a run as JSON: its start, machine, versions, settings, figures."""
    settings = {key: str(v) for key, v in vars(options).items() if key not in _NOT_SETTINGS}
    fields = stamped(options.start)
    document = {
        "schema": schema,
        **fields,
        "settings": settings,
        "notes": list(dict.fromkeys([*notes, *fields["notes"]])),
        "measured": measured,
        "targets": [target._asdict() for target in targets],
    }
    write_json(options.out, document)


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written: {path}", file=sys.stderr)
