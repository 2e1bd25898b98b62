"""The document of a comparison: what `thinwire compare` writes to data.json and a report draws.

Pydantic, because it names the field that is wrong and what stands there, and keeps fields that it
does not know, such as the targets of a benchmark. Import this module only where a document is read
or written: ranks and `thinwire --help` do without it.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from thinwire.compare.settings import BASELINE, ParallelName

SCHEMA = "thinwire.compare/1"


class DocumentPart(BaseModel):
    """Types are not converted, numbers are finite, and fields that are not known are kept."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class Spread(DocumentPart):
    """A figure over seeds."""

    mean: float
    lowest: float
    highest: float


class TimeToTarget(DocumentPart):
    """Seconds until a loss within 2 % of the baseline's final one, and how many times sooner."""

    seconds: float
    speedup: float | None


class StepSplit(DocumentPart):
    """What a step spends its seconds on."""

    compute: float
    encode: float
    network: float
    decode: float

    @property
    def whole(self) -> float:
        """Seconds of the step."""
        return self.compute + self.encode + self.network + self.decode


class MetricPoint(DocumentPart):
    """The metric after a step; None if it was not finite."""

    step: int
    seconds: float
    megabytes: float | None = None
    value: float | None


class TensorFigures(DocumentPart):
    """One tensor of the model, as thinwire reports it."""

    name: str
    numel: int
    ratio: float | None
    relative_error: float | None
    bytes_sent: float | None = None
    compressor: str = ""
    collective: str = ""


class TrainingRun(DocumentPart):
    """One training: a method and a seed. Lists have an entry for each step."""

    seed: int
    steps: int
    losses: list[float | None]  # mean over ranks; None if it was not finite
    seconds: list[float]  # since the start, of the slowest rank
    megabytes: list[float]  # that a host has sent since the start
    evaluations: list[MetricPoint]
    final_loss: float | None
    final_metric: float | None
    step_seconds: float  # see thinwire.compare.rank.typical_step
    split: StepSplit
    bytes_counted: int  # by the kernel
    bytes_reported: int | None  # by thinwire
    tensors: list[TensorFigures]

    @model_validator(mode="after")
    def _as_many_of_each(self) -> Self:
        lengths = len(self.losses), len(self.seconds), len(self.megabytes)
        if len(set(lengths)) > 1:
            raise ValueError(
                "expected as many seconds and megabytes as losses, got {} losses, {} seconds, "
                "{} megabytes".format(*lengths)
            )
        return self

    @property
    def finite_losses(self) -> list[float] | None:
        """The losses, if all of them are finite."""
        found = [loss for loss in self.losses if loss is not None]
        return found if len(found) == len(self.losses) else None


class MethodSummary(DocumentPart):
    """What all runs of a method come to, compared with the baseline."""

    final_metric: Spread | None
    final_loss: Spread | None
    step_seconds: float | None
    seconds: float | None = None
    megabytes_a_step: float | None
    fewer_bytes: float | None
    step_speedup: float | None
    to_target: TimeToTarget | None


class MethodResult(DocumentPart):
    """What became of a method."""

    name: str
    title: str
    kind: str = "thinwire"
    error: str | None
    output: str | None = None  # of a failure: how each host ended, and its last lines
    diverged: bool
    runs: list[TrainingRun]
    summary: MethodSummary | None = None


class SweepEntry(DocumentPart):
    """Seconds per step of each method at one rate."""

    link: str
    step_seconds: dict[str, float | None]


class DocumentSettings(DocumentPart):
    """What was asked for."""

    workload: str
    parallel: ParallelName = BASELINE
    weights: str | None = None
    metric: str | None
    higher_is_better: bool | None
    parameters: int | None = None
    hosts: int
    links: list[str]
    delay: str | None = None
    jitter: str | None = None
    loss: float | None = None
    racks: int = 1
    inter: str | None = None
    network: Literal["lab", "projected"]
    steps: int | None = None
    seconds: float | None = None
    target: float | None = None
    seeds: list[int]
    command: str


class Document(DocumentPart):
    """A whole comparison; `SCHEMA` is added when it is written."""

    date: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    notes: list[str]
    settings: DocumentSettings
    baseline: str | None
    methods: list[MethodResult]
    target_loss: float | None = None
    sweep: list[SweepEntry] = []
    verdict: str = ""
    interrupted: bool = False

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise ValueError(f"methods: expected names that differ, got {names}")
        return self

    @property
    def projected(self) -> bool:
        """Whether seconds are computed for the links rather than measured."""
        return self.settings.network == "projected"

    @property
    def base(self) -> MethodResult | None:
        """The baseline, if it is among the methods."""
        return next((method for method in self.methods if method.name == self.baseline), None)

    def to_json(self) -> str:
        """The text of a data.json. Raises ValueError if what was put in is not of its type."""
        values = {"schema": SCHEMA, **self.model_dump(warnings=False)}
        # What an earlier version wrote stays as it is, with the fewer settings of that time.
        values["settings"] = self.settings.model_dump(warnings=False, exclude_unset=True)
        for method in values["methods"]:
            if method["output"] is None:
                del method["output"]
        parse_document(values)  # what was assigned after it was made has not been checked
        return json.dumps(values, indent=1, allow_nan=False) + "\n"


def read_document(path: Path) -> Document:
    """The document in a data.json. Raises OSError, and ValueError that names what is wrong."""
    text = path.read_bytes()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected the data.json of a comparison, got what is not JSON: {error}"
        ) from None
    try:
        return parse_document(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_document(found: object) -> Document:
    """The document in plain JSON types. Raises ValueError that names the field that is wrong."""
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(found, dict) or schema != SCHEMA:
        got = f"schema {schema!r}" if schema else "no schema"
        hint = ""
        if isinstance(schema, str) and schema.startswith("thinwire.compare/"):
            hint = "; it was written by another version of thinwire: read it with that one"
        raise ValueError(f"expected a document of schema {SCHEMA!r}, got one of {got}{hint}")
    try:
        return Document.model_validate({k: v for k, v in found.items() if k != "schema"})
    except ValidationError as error:
        raise ValueError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    """The first thing that is wrong: where, what was expected and what came."""
    problems = error.errors(include_url=False)
    first, others = problems[0], len(problems) - 1
    more = f" (and {others} more)" if others else ""
    return f"{_problem(first)}{more}"


def _problem(found: ErrorDetails) -> str:
    *parents, last = found["loc"] or ("",)
    if found["type"] == "missing":
        return f"{_path(parents) or 'the document'}: expected a field {last!r}, got none"
    where = _path([*parents, last])
    if found["type"] == "value_error":
        message = found["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    value = repr(found["input"])
    value = value if len(value) <= 60 else f"{value[:60]}…"
    expected = found["msg"].removeprefix("Input should be ").replace("valid ", "")
    return f"{where}: expected {expected}, got {value}"


def _path(parts: Any) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")
