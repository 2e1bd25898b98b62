"""What is compared, and where. Free of torch, so that `thinwire compare --help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

ParallelName = Literal["ddp", "fsdp", "hsdp"]
BASELINE: ParallelName = "ddp"
# Always in the picture. A hook of PyTorch's that fails is shown with its error.
BASELINES = (BASELINE, "torch:fp16", "torch:bf16", "torch:powersgd")
METHODS = ("quantize:4+ef14", "onebit+ef14", "topk:0.01+ef14")
# Wide, so that a step takes long to send, but hardly longer to compute; gentle, so that few steps
# give a smooth curve.
WORKLOAD, STEPS = "images:hidden=512,learning_rate=0.15", 40
HOSTS, LINK = 4, "100mbit"
EVALUATIONS = 5
SWEEP_STEPS = 4
REPLICAS = 2  # of a model's shards, where no racks say how many


class Parallelism(NamedTuple):
    """How PyTorch divides training over hosts, which methods are compared with.

    Args:
        title: as people read it.
        baselines: always in the picture, plain PyTorch first: that has the name of the parallelism.
        methods: by default.
    """

    title: str
    baselines: tuple[str, ...]
    methods: tuple[str, ...]


PARALLELISMS: dict[ParallelName, Parallelism] = {
    BASELINE: Parallelism("DDP", BASELINES, METHODS),
    "fsdp": Parallelism(
        "FSDP2", ("fsdp",), ("none", "cast:bf16", "quantize:8", "quantize:4", "topk:0.01+ef14")
    ),
    "hsdp": Parallelism("HSDP", ("hsdp",), METHODS),
}


class ComparisonSettingError(ValueError):
    """A comparison that cannot be made as it was asked for; the message is meant for the user."""


@dataclass(frozen=True)
class ComparisonSettings:
    """What is compared, and where.

    Args:
        workload: the spec of a bundled workload, or the path of a script.
        arguments: of the script.
        parallel: one of `PARALLELISMS`.
        methods: names of methods, see `thinwire.compare.method`, without the baselines.
        baselines: of them a failure is shown but is no failure of the comparison.
        hosts: how many, with one process each.
        weights: with "fsdp", the compressor of the parameters that methods of ours gather; None
            for uncompressed.
        links: the rate of each host's link, or more of it, see `thinwire.lab.parse_link`.
        delay, jitter, loss: of what hosts send, see `thinwire.lab.Lab`; they need a lab.
        racks, inter: how many switches, and the links between them.
        sweep: rates at which the seconds per step are measured too.
        steps: of one training; None for the workload's own number, or as many as `seconds` has room
            for.
        seconds: how long to train instead.
        target: the value of the metric at which training ends.
        seeds: one training for each.
        evaluations: how often the metric is taken in a training.
        project: run on loopback and compute times for the links, even where a lab can be made.
        patience: seconds without a step after which a method counts as hanging; by default many
            times what a dense step takes.
    """

    workload: str = WORKLOAD
    arguments: tuple[str, ...] = ()
    parallel: ParallelName = BASELINE
    methods: tuple[str, ...] = METHODS
    baselines: tuple[str, ...] = BASELINES
    weights: str | None = None
    hosts: int = HOSTS
    links: tuple[str, ...] = (LINK,) * HOSTS
    delay: str | None = None
    jitter: str | None = None
    loss: float | None = None
    racks: int = 1
    inter: str | None = None
    sweep: tuple[str, ...] = ()
    steps: int | None = STEPS
    seconds: float | None = None
    target: float | None = None
    seeds: tuple[int, ...] = (0,)
    evaluations: int = EVALUATIONS
    project: bool = False
    patience: float | None = None

    @property
    def script(self) -> Path | None:
        """The user's own script, if it is one."""
        return Path(self.workload) if self.workload.endswith(".py") else None

    @property
    def replicas(self) -> int:
        """How often there is a whole model: with DDP on each host, with HSDP in each rack."""
        if self.parallel == "hsdp":
            return self.racks if self.racks > 1 else REPLICAS
        return 1 if self.parallel == "fsdp" else self.hosts

    @property
    def names(self) -> tuple[str, ...]:
        """All methods, each once."""
        return tuple(dict.fromkeys((*self.baselines, *self.methods)))


def distance_in_words(delay: str | None, jitter: str | None, loss: float | None) -> str:
    """What is to be said after links, with a comma before it; nothing if there is no distance.

    >>> distance_in_words("15ms", None, 0.001)
    ', 15ms of delay each way, 0.1% loss'
    """
    parts = [
        f"{delay} of delay each way" if delay else "",
        f"up to {jitter} of jitter" if jitter else "",
        f"{100 * loss:g}% loss" if loss else "",
    ]
    return "".join(f", {part}" for part in parts if part)
