"""How long codecs take on a machine: a table, measured by `thinwire bench --for-plan`.

Some tables ship with the package, in machines.json, which says of each how it was obtained. One
that was measured here takes their place.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from thinwire.collectives.costs import INSIDE, MEETING, PEER, SCHEDULING, START, Coding
from thinwire.compressors import (
    Compressor,
    JointCompressor,
    LocalCompressor,
    SparseCompressor,
    compressor_of,
)
from thinwire.kernels import Key, cache
from thinwire.policies.ladder import knob

SCHEMA = "thinwire.codecs/1"
FILE = "codecs.json"  # in the cache directory of the user
WIDTH = 4  # bytes of a gradient: float32, whatever parameters are trained in
SAMPLE = 1 << 20  # elements: headers do not show in larger ones
# Seconds of Python around an exchange on a core of its own: hook, plan, units, feedback, threads.
# Single exchanges between 2, 4 and 8 hosts on two cores took 1.3 to 2, 2.5 to 3 and 7 to 8 ms
# besides codecs and network (benchmarks/records/costs-2026-11-17.json), so 1.5 ms; the rest is what
# DDP's hook adds, set by training on images with 4 hosts.
EXCHANGE = 2.5e-3
# Times as long that codecs take per element where ranks of one machine use its memory together. On
# two cores one process alone encodes and decodes 4 M elements in 4 or 8 bits, or with Top-K, in 1.3
# to 1.4 ns each, two at the same time in 2.9 to 3.5 ns.
MEMORY = 2.2


@dataclass(frozen=True)
class CodecRow:
    """One compressor on float32; the fields are those of `thinwire.collectives.costs.Coding`.

    Args:
        frame: bytes of a message per element; of joint compressors none, it depends on shapes.
        call: seconds of any call.
        encode, decode, add: seconds per element.
    """

    frame: float
    call: float
    encode: float
    decode: float
    add: float


@dataclass(frozen=True)
class CodecTable:
    """What codecs take on a machine.

    Args:
        name: to ask for it by.
        machine: in words.
        origin: how the figures were obtained.
        threads: that codecs run on.
        rows: by the spec of the compressor.
        exchange: seconds of software around an exchange.
        start, peer: of a round, and of each message in it (`Interconnect`).
        inside: bytes per second between ranks of a host.
        meeting: of a meeting, on top of a round.
    """

    name: str
    machine: str
    origin: str
    threads: int
    rows: dict[str, CodecRow] = field(default_factory=dict)
    exchange: float = EXCHANGE
    start: float = START
    peer: float = PEER
    inside: float = INSIDE
    meeting: float = MEETING

    def shared(self, ranks: int, cores: int) -> "CodecTable":
        """The same where so many ranks have to share the cores of one machine, as in a lab."""
        return self if ranks == 1 else self._slower(max(1.0, ranks / cores), ranks > cores)

    def _slower(self, times: float, crowded: bool) -> "CodecTable":
        rows = {}
        for spec, row in self.rows.items():
            # Joint compressors work on one matrix at a time, which a cache holds.
            each = times * MEMORY if row.frame else times
            figures = (times * row.call, each * row.encode, each * row.decode, each * row.add)
            rows[spec] = CodecRow(row.frame, *figures)
        return replace(
            self,
            rows=rows,
            exchange=times * self.exchange,
            start=times * self.start + (SCHEDULING if crowded else 0.0),
            peer=times * self.peer,
            inside=self.inside / times,
            meeting=times * self.meeting,
        )

    def row_of(self, compressor: Compressor) -> tuple[str, CodecRow]:
        """That of a compressor, or of the same one in the strength that is nearest, and its spec.

        Raises:
            ValueError: there is none.
        """
        spec = str(compressor)
        if spec in self.rows:
            return spec, self.rows[spec]
        mine = knob(compressor)
        kin: list[tuple[float, str]] = []
        for known in self.rows:
            other = compressor_of(known)
            theirs = knob(other)
            if _family(other) == _family(compressor):
                apart = 0.0
                if mine and theirs:
                    apart = abs(math.log(mine[1] / theirs[1]))
                kin.append((apart, known))
        if not kin:
            raise ValueError(
                f"the table of codecs {self.name!r} has no row like {spec}: measure it with "
                f'thinwire bench --for-plan --with "{spec}", known: {", ".join(self.rows)}'
            )
        found = min(kin)[1]
        return found, self.rows[found]

    def coding(
        self, compressor: Compressor | None, sent: float | None = None, first: float = 0.5
    ) -> Coding:
        """The costs of a compressor; None for uncompressed.

        Args:
            sent: bytes of a message per element, where that is known; what a joint compressor
                sends depends on shapes.
            first: the share of its first sum in that.
        """
        if compressor is None:
            compressor = compressor_of("none")
        spec, row = self.row_of(compressor)
        frame = row.frame
        if sent is not None:
            frame = sent
        elif isinstance(compressor, JointCompressor):
            raise ValueError(f"{compressor}: what it sends depends on the shapes of tensors")
        elif spec != str(compressor):
            frame = frame_of(compressor)
        codec = (row.call, row.encode, row.decode, row.add)
        kind, cut = kind_of(compressor), compressor.grain is not None
        return Coding(kind, frame, *codec, self.exchange, first, cut)

    def joint_coding(self, compressor: JointCompressor, shapes: Sequence[torch.Size]) -> Coding:
        """The costs of a joint compressor for tensors of float32 with these shapes."""
        sent = first = 0.0
        for shape in shapes:
            values, seen = compressor.sent(shape), compressor.matrix(shape)
            sent += values
            # Uncompressed ones go with the first sum, and of factors the one with the rows.
            first += values if seen is None else values * seen[0] / sum(seen)
        numel = sum(shape.numel() for shape in shapes)
        return self.coding(compressor, WIDTH * sent / numel, first / sent)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n"


def frame_of(compressor: Compressor) -> float:
    """Bytes of a payload per element of float32, measured on a sample of normal numbers."""
    assert isinstance(compressor, LocalCompressor)
    sample = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0))
    payload = compressor.encode(sample, residual=torch.zeros(SAMPLE), key=Key())
    return payload.num_bytes / SAMPLE


def kind_of(compressor: Compressor) -> str:
    """That of `Coding`."""
    if isinstance(compressor, JointCompressor):
        return "joint"
    if compressor.summable:
        return "summable"
    assert isinstance(compressor, LocalCompressor)
    return "elements" if isinstance(compressor, SparseCompressor) else "whole"


def _family(compressor: Compressor) -> tuple[str, ...]:
    stages: Any = getattr(compressor, "stages", (compressor,))
    return tuple(stage.name for stage in stages)


def table_from(document: Any) -> CodecTable:
    """A table from its JSON. Raises ValueError with what is wrong."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"expected a table of codecs ({SCHEMA}), got {found!r}")
    try:
        rows = {
            str(spec): CodecRow(**{name: _positive(value) for name, value in row.items()})
            for spec, row in document["rows"].items()
        }
        return CodecTable(
            str(document["name"]),
            str(document["machine"]),
            str(document["origin"]),
            int(document["threads"]),
            rows,
            meeting=_positive(document.get("meeting", MEETING)),  # older tables have none
            **{name: _positive(document[name]) for name in ("exchange", "start", "peer", "inside")},
        )
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"a table of codecs that is not whole: {error!r}") from None


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"a figure of a table must be a finite number from 0, got {value!r}")
    return number


def shipped() -> dict[str, CodecTable]:
    """The tables of the package, by name."""
    text = (
        resources.files("thinwire.policies").joinpath("machines.json").read_text(encoding="utf-8")
    )
    tables = [table_from(each) for each in json.loads(text)]
    return {table.name: table for table in tables}


def measured_file() -> Path:
    """Where `thinwire bench --for-plan` leaves its table."""
    return cache.directory() / FILE


def read_table(path: Path) -> CodecTable:
    """A table in a file. Raises ValueError that names the file."""
    try:
        return table_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def table_of(name: str | None) -> CodecTable:
    """The table of a machine: by name, from a file, or (None) measured here, or the default."""
    if name is None:
        found = measured_file()
        return read_table(found) if found.is_file() else shipped()["cores-2"]
    known = shipped()
    if name in known:
        return known[name]
    if name == "here":
        if not measured_file().is_file():
            raise ValueError(
                "nothing was measured on this machine yet: run thinwire bench --for-plan"
            )
        return read_table(measured_file())
    if Path(name).suffix == ".json" or Path(name).is_file():
        return read_table(Path(name))
    raise ValueError(
        f"unknown machine {name!r}, known: {', '.join(known)}, here, or a file that thinwire bench "
        "--for-plan wrote"
    )
