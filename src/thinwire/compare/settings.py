"""What is compared, and where. Free of torch, so that `thinwire compare --help` is quick."""

from dataclasses import dataclass
from pathlib import Path

BASELINE = "ddp"
# Always in the picture. A hook of PyTorch's that fails is shown with its error.
BASELINES = (BASELINE, "torch:fp16", "torch:bf16", "torch:powersgd")
METHODS = ("quantize:4+ef14", "onebit+ef14", "topk:0.01+ef14")
# Wide, so that a step takes long to send, but hardly longer to compute; gentle, so that few steps
# give a smooth curve.
WORKLOAD, STEPS = "images:hidden=512,learning_rate=0.15", 40
HOSTS, LINK = 4, "100mbit"
EVALUATIONS = 5
SWEEP_STEPS = 4


class ComparisonSettingError(ValueError):
    """A comparison that cannot be made as it was asked for; the message is meant for the user."""


@dataclass(frozen=True)
class ComparisonSettings:
    """What is compared, and where.

    Args:
        workload: the spec of a bundled workload, or the path of a script.
        arguments: of the script.
        methods: names of methods, see `thinwire.compare.method`, without the baselines.
        baselines: of them a failure is shown but is no failure of the comparison.
        hosts: how many, with one process each.
        links: the rate of each host's link.
        racks, inter: how many switches, and the rate of the links between them.
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
    methods: tuple[str, ...] = METHODS
    baselines: tuple[str, ...] = BASELINES
    hosts: int = HOSTS
    links: tuple[str, ...] = (LINK,) * HOSTS
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
    def names(self) -> tuple[str, ...]:
        """All methods, each once."""
        return tuple(dict.fromkeys((*self.baselines, *self.methods)))
