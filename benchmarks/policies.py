"""What adaptive policies bring: the fastest step, a link that changes, too strong a start, a
setting for each layer.

    python benchmarks/policies.py auto      [--seconds 240] [--out ...]
    python benchmarks/policies.py link      [--workload images:hidden=256] [--phase 60] [--out ...]
    python benchmarks/policies.py accuracy  [--steps 300] [--seeds 3] [--out ...] [--picture ...]
    python benchmarks/policies.py layers    [--steps 120] [--out ...]

auto      `auto` against plain DDP and every strength that it chooses from: images under SGD, text
          under AdamW, on four hosts at 10 and 100 Mbit/s and 1 Gbit/s in network namespaces, and on
          loopback. All methods train in the same processes, a few steps each in turn, so that
          whatever else the machine does meets all of them; two models of plain DDP show how much
          that leaves to chance. A step is the median over turns of the mean in a turn: a rank that
          is late in one step is early in the next. Each cell is written to the record when
          it is done; the same call goes on after the last one.
link      Four hosts in network namespaces. Their links drop from --fast to --slow after --phase
          steps and come back after as many: dense, `bandwidth`, and an oracle that switches by
          hand at the right steps. Seconds of training; the machine's cores are shared by all.
accuracy  `accuracy` begins far too strong and is told of a validation every 20 steps; wanted is the
          curve of a dense training. Ranks are threads of one process (`one_process.py`): figures of
          accuracy, not of speed. With --progress it goes on where an earlier run was.
layers    `Layerwise.solve` against the uniform setting it is to be as good as: bytes, the error
          ||p - C(p)||^2 really made, and the loss. On loopback.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from harness import Target, conclude, read_options, run_ranks
from one_process import Task, Trainings, add_training_options
from recording import write_record
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thinwire.compressors import Compressor, parse
from thinwire.kernels import Key
from thinwire.lab import Cluster, Lab, Loopback
from thinwire.policies import Choice, Chooser, Policy, PolicyContext, TensorInfo, policy_of
from thinwire.policies.base import Around

EVERY = 20  # steps between validations
LIMIT = 3600.0  # seconds


@dataclass(frozen=True)
class ByHand(Policy):
    """Somebody who knows when the link is slow."""

    phase: int
    strong: str
    name: ClassVar[str] = "by hand"

    @property
    def main(self) -> Compressor:
        return parse(self.strong)

    def begin(self, setting: PolicyContext) -> Chooser:
        return _ByHand(self)


class _ByHand(Chooser):
    def __init__(self, policy: ByHand) -> None:
        self._policy = policy

    def choose(self, tensor: TensorInfo, step: int) -> Choice:
        phase = self._policy.phase
        return self._policy.main if phase < step <= 2 * phase else None


@dataclass(frozen=True)
class Metered(Policy):
    """Another policy, with the error that it makes."""

    inner: Policy
    name: ClassVar[str] = "metered"

    @property
    def main(self) -> Compressor:
        return self.inner.main

    def begin(self, setting: PolicyContext) -> Chooser:
        return _Metered(self.inner.begin(setting))


class _Metered(Around):
    """Looks at every fourth step."""

    def __init__(self, inner: Chooser) -> None:
        super().__init__(inner)
        self.error = 0.0

    def watches(self, step: int) -> bool:
        return step % 4 == 0 or super().watches(step)

    def watch(self, tensor: TensorInfo, step: int, x: Tensor, residual: Tensor | None) -> None:
        if super().watches(step):
            super().watch(tensor, step, x, residual)
        choice = self.choose(tensor, step)
        if step % 4 == 0 and choice is not None:
            values = x.float() if residual is None else x + residual
            left = values.clone()
            zero = None if residual is None else torch.zeros_like(values)
            choice.draft(values, residual=zero, key=Key(2, step)).add_to(left, -1.0)
            self.error += float(left.square().sum())


def policy_named(name: str, job: dict[str, Any]) -> Any:
    if name == "by hand":
        return ByHand(job["phase"], job["strong"])
    return Metered(policy_of(name)) if job.get("metered") else policy_of(name)


def rank_main(job: dict[str, Any]) -> None:
    """What runs on each rank: one training; rank 0 prints a line for each step."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire as tw
    from thinwire.workloads import workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    task = workload(job["workload"])
    model = DistributedDataParallel(task.model(job["seed"]), bucket_cap_mb=1)
    optimizer = task.optimizer(model)
    policy = policy_named(job["policy"], job)
    granularity = job.get("granularity", "bucket")
    wire = tw.attach(model, policy, seed=job["seed"], measure_every=0, granularity=granularity)
    schedule = task.schedule(optimizer, job["steps"])
    dist.barrier()
    begin, sent = time.perf_counter(), 0
    for step, batch in enumerate(task.batches(rank, size, job["seed"]), 1):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        row: dict[str, Any] = {"step": step, "loss": loss.item()}
        row["seconds"] = time.perf_counter() - begin
        tensors = wire.stats()["tensors"]
        total = sum(tensors[name]["bytes_sent"] for name in wire._choices.tensors)
        row["bytes"], sent = total - sent, total
        row["error"] = getattr(getattr(wire._choices, "chooser", None), "error", 0.0)
        row["now"] = sorted({str(wire._choices.compressor_of(n)) for n in wire._choices.tensors})
        if rank == 0:
            print(json.dumps(row), flush=True)
        if "go" in job and step % job["phase"] == 0:  # the links are changed now
            while rank == 0 and not Path(job["go"], str(step)).exists():
                time.sleep(0.002)
            dist.barrier()
        if step == job["steps"]:
            break
    if rank == 0:
        decisions = [decision._asdict() for decision in wire.decisions]
        print(json.dumps({"decisions": decisions, "explain": wire.explain()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# The fastest step.

PLAIN, PLAIN_AGAIN = "ddp", "ddp again"
WIDE = "images:hidden=512"  # as `thinwire compare` has it: long to send, quick to compute
LINKS = ("10mbit", "100mbit", "1gbit", "loopback")
BITS = ["cast:bf16", "quantize:8", "quantize:4"]
# Each kind of `auto`, and what it chooses from besides uncompressed.
LADDERS = {
    "images": {"auto": [f"topk:{ratio}|quantize:4" for ratio in (0.3, 0.1, 0.03, 0.01)]},
    "text": {
        "auto": BITS,
        "auto:low_rank=true": [*BITS, "powersgd:16", "powersgd:8", "powersgd:4"],
    },
}
FIRST, AUTOS_FIRST = 3, 10  # steps of each method that are not looked at
TURN = 4  # steps of a method before it is the next one's turn
LONGEST = 120.0  # seconds of turns in a cell, after which no other round begins
MOST_ROUNDS = 96


class Contestant:
    """One method, with a model of its own."""

    def __init__(self, name: str, job: dict[str, Any], rank: int, size: int) -> None:
        from torch.nn.parallel import DistributedDataParallel

        import thinwire as tw
        from thinwire.workloads import workload

        self.task = workload(job["workload"])
        self.model = DistributedDataParallel(self.task.model(0))
        self.optimizer = self.task.optimizer(self.model)
        self.schedule = self.task.schedule(self.optimizer, job["steps"])
        self.batches = iter(self.task.batches(rank, size, 0))
        self.wire = (
            None if name in (PLAIN, PLAIN_AGAIN) else tw.attach(self.model, name, measure_every=0)
        )
        self.name, self.seconds = name, list[float]()

    def train(self, steps: int, counts: bool = True) -> None:
        import torch.distributed as dist

        dist.barrier()
        if self.wire is not None:
            self.wire._hook._ended = time.perf_counter()  # the turns of others are no step
        for _ in range(steps):
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            self.task.loss(self.model, next(self.batches)).backward()
            self.optimizer.step()
            self.schedule.step()
            if counts:
                self.seconds.append(time.perf_counter() - begin)
        if self.wire is not None:
            self.wire._choices.state()  # have reports and probes ended, not in the turns of others

    @property
    def step(self) -> float:
        """Seconds: the median over turns of the mean in a turn."""
        starts = range(0, len(self.seconds), TURN)
        return statistics.median(statistics.fmean(self.seconds[i : i + TURN]) for i in starts)


def turns_main(job: dict[str, Any]) -> None:
    """What runs on each rank: all methods in turn."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = [Contestant(name, job, rank, size) for name in job["methods"]]
    for each in found:
        each.train(AUTOS_FIRST if _decides(each.name) else FIRST, counts=False)
    begin = time.perf_counter()
    for turn in range(MOST_ROUNDS):
        late = torch.tensor(float(time.perf_counter() - begin > LONGEST))
        dist.broadcast(late, 0)
        if late:
            break
        for each in found[turn % len(found) :] + found[: turn % len(found)]:
            each.train(TURN)
    if rank == 0:
        for each in found:
            row: dict[str, Any] = {"method": each.name, "step": each.step}
            row["seconds"] = each.seconds
            if _decides(each.name):
                row["explain"] = each.wire.explain()
                row["decisions"] = [decision._asdict() for decision in each.wire.decisions]
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _decides(method: str) -> bool:
    return method.startswith("auto")


def auto(options: argparse.Namespace, console: Console) -> tuple[list[Any], list[Target]]:
    begin, schema = time.monotonic(), "thinwire.policies-auto/2"
    found: list[Any] = []
    if options.out and options.out.exists():
        found = json.loads(options.out.read_text())["measured"]
    workloads = [options.workload] if options.workload else [WIDE, "text"]
    for workload, link in itertools.product(workloads, options.links.split(",")):
        if any((each["workload"], each["link"]) == (workload, link) for each in found):
            continue
        if options.seconds and time.monotonic() - begin > options.seconds:
            break
        ladder = LADDERS[workload.partition(":")[0]]
        fixed = itertools.chain(*ladder.values())
        methods = list(dict.fromkeys([PLAIN, *ladder, PLAIN_AGAIN, "none", *fixed]))
        steps = FIRST + AUTOS_FIRST + TURN * MOST_ROUNDS
        job = {"turns": True, "workload": workload, "methods": methods, "steps": steps}
        cluster = Loopback(options.ranks) if link == "loopback" else Lab(options.ranks, link)
        rows: list[dict[str, Any]] = []
        with console.status(f"{workload}, {link}: {len(methods)} methods in turn ..."):
            run_ranks(cluster, __file__, job, rows.append, limit=LIMIT)
        found.append({"workload": workload, "link": link, "methods": rows})
        show_cell(found[-1], console)
        if options.out:
            write_record(options, schema, found, auto_targets(found), [NOTE])
    return found, auto_targets(found)


def show_cell(cell: dict[str, Any], console: Console) -> None:
    words = ", ".join(f"{row['method']} {1e3 * row['step']:.1f}" for row in cell["methods"])
    console.print(f"{cell['workload']}, {cell['link']}: ms per step: {words}")
    for ours in (row for row in cell["methods"] if _decides(row["method"])):
        for decision in ours["decisions"]:
            words = f"{decision['compressor']}: {decision['why']}"
            console.print(f"    {ours['method']}, step {decision['step']}: {words}")
        console.print(ours["explain"], highlight=False)


def auto_targets(found: list[dict[str, Any]]) -> list[Target]:
    targets = []
    for cell in found:
        where = f"{cell['workload']}, {cell['link']}"
        steps = {row["method"]: row["step"] for row in cell["methods"]}
        plain = statistics.fmean((steps[PLAIN], steps[PLAIN_AGAIN]))
        for name, ladder in LADDERS[cell["workload"].partition(":")[0]].items():
            best = min(plain, *(steps[each] for each in ("none", *ladder)))
            what, ours = where if name == "auto" else f"{where}, {name}", steps[name]
            targets += [
                Target.at_most(f"{what}: step / best fixed method's", ours / best, 1.10),
                Target.at_most(f"{what}: step / plain DDP's", ours / plain, 1.03),
            ]
        if (cell["workload"], cell["link"]) == (WIDE, "1gbit"):
            strong = LADDERS["images"]["auto"][-1]
            what = f"{where}: {strong}: times faster than plain DDP"
            targets.append(Target.at_least(what, plain / steps[strong], 1.6))
    return targets


def train(
    job: dict[str, Any], cluster: Cluster, console: Console, on_step: Any = None
) -> dict[str, Any]:
    """The rows of one training, with a line of progress."""
    rows: list[dict[str, Any]] = []
    with console.status(f"{job['policy']}, seed {job['seed']} ...") as status:

        def on_row(row: dict[str, Any]) -> None:
            rows.append(row)
            if "step" in row:
                words = f"{job['policy']}, seed {job['seed']}: step {row['step']} of {job['steps']}"
                status.update(words)
                if on_step is not None:
                    on_step(row["step"])

        run_ranks(cluster, __file__, job, on_row, limit=LIMIT)
    end = rows.pop()
    last = rows[-1]
    console.print(
        f"{job['policy']}, seed {job['seed']}: {last['seconds']:.1f} s, loss {last['loss']:.3f}, "
        f"{sum(row['bytes'] for row in rows) / 1e6:.2f} MB"
    )
    return {"policy": job["policy"], "seed": job["seed"], "rows": rows, **end}


# A link that changes.


def link(options: argparse.Namespace, console: Console) -> tuple[list[Any], list[Target]]:
    phase = options.phase
    names = ("none", f"bandwidth:({options.strong})", "by hand")
    found = []
    for name in names:
        lab = Lab(options.ranks, options.fast)
        with tempfile.TemporaryDirectory() as go:

            def changed(step: int, lab: Any = lab, go: str = go) -> None:
                if step % phase == 0:
                    for host in range(options.ranks):
                        lab.set_link(host, options.slow if step == phase else options.fast)
                    Path(go, str(step)).touch()

            job = {
                "workload": options.workload or "images:hidden=256",
                "policy": name,
                "seed": 0,
                "steps": 3 * phase,
                "phase": phase,
                "strong": options.strong,
                "go": go,
            }
            found.append(train(job, lab, console, changed))
    table = Table(title=f"seconds at {options.fast}, then {options.slow}, then {options.fast}")
    for column in ("policy", "first", "second", "third", "all"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for each in found:
        ends = [each["rows"][i * phase - 1]["seconds"] for i in (1, 2, 3)]
        parts = [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
        table.add_row(each["policy"], *(f"{part:.1f}" for part in [*parts, ends[-1]]))
    console.print(table)
    console.print(found[1]["explain"])
    return found, link_targets(found)


def link_targets(found: list[dict[str, Any]]) -> list[Target]:
    dense, ours, oracle = (each["rows"][-1]["seconds"] for each in found)
    rows = found[1]["rows"]
    phase = len(rows) // 3
    return [
        Target.at_most("steps until it follows the drop", _followed(rows, phase), 20),
        Target.at_most("steps until it follows the return", _followed(rows, 2 * phase), 20),
        Target.at_most("time / the oracle's", ours / oracle, 1.25),
        Target("times faster than dense", dense / ours, ">= 3", dense / ours >= 3),
    ]


def _followed(rows: list[dict[str, Any]], since: int) -> int:
    """Steps from a change of the link until steps take what they take at the end of the phase: the
    median of five at most a quarter more than that of the last twenty."""
    ends = [0.0, *(row["seconds"] for row in rows)]
    phase = len(rows) // 3
    times = [b - a for a, b in pairwise(ends)][since : since + phase]
    settled = 1.25 * statistics.median(times[-20:])
    return next(i for i in range(phase) if statistics.median(times[i : i + 5]) <= settled)


# Too strong a start.


def accuracy(options: argparse.Namespace, console: Console) -> tuple[list[Any], list[Target]]:
    """Dense first, for its curve; then the policy with that as its target, and the fixed start."""
    start, seeds = options.first, range(options.seeds)
    steps, workload = options.steps or 300, options.workload or "images"
    trainings = Trainings(options)

    def task(policy: str, seed: int) -> Task:
        return Task(workload, policy, options.ranks, steps, seed, evaluate_every=EVERY)

    dense = {seed: task("none", seed) for seed in seeds}
    curves = trainings.run(list(dense.values()), console)
    ours = {}
    for seed in seeds:
        points = curves[dense[seed].key]["evaluations"]
        curve = "; ".join(f"{step}={value:.10g}" for step, value in points)
        ours[seed] = task(f"accuracy:({start}),{options.band},({curve})", seed)
    fixed = {seed: task(start, seed) for seed in seeds}
    found = curves | trainings.run([*ours.values(), *fixed.values()], console)
    rows = []
    for seed in seeds:
        ways = {
            "none": dense[seed],
            f"accuracy:({start}),{options.band},dense's curve": ours[seed],
            start: fixed[seed],
        }
        rows += [_curve(name, each, found[each.key]) for name, each in ways.items()]
    ends = [each["rows"][-1]["metric"] for each in rows]
    means = [statistics.fmean(ends[i::3]) for i in range(3)]
    table = Table(title="accuracy in the end, means over seeds")
    for column in ("policy", "accuracy", "MB"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for i, metric in enumerate(means):
        moved = statistics.fmean(sum(r["bytes"] for r in each["rows"]) for each in rows[i::3])
        table.add_row(rows[i]["policy"], f"{metric:.2f}", f"{moved / 1e6:.1f}")
    console.print(table)
    options.resumed = trainings.resumed
    if options.picture:
        draw_accuracy(rows, options.picture)
    short = 100 * (means[0] - means[1]) / means[0]
    return rows, [Target.at_most("% below dense in the end", short, 0.5)]


def _curve(policy: str, task: Task, found: dict[str, Any]) -> dict[str, Any]:
    """A training as the record has it: a row for each step."""
    metrics = dict(found["evaluations"])
    sizes = [b - a for a, b in pairwise([0, *found["sent"]])]
    rows = [
        {"step": step, "bytes": size} | ({"metric": metrics[step]} if step in metrics else {})
        for step, size in enumerate(sizes, 1)
    ]
    return {"policy": policy, "seed": task.seed, "rows": rows, "decisions": found["decisions"]}


def draw_accuracy(found: list[dict[str, Any]], path: Path) -> None:
    from thinwire.report.figure import INK, new_figure

    figure = new_figure(8.0, 6.0)
    above, below = figure.subplots(2, 1, sharex=True)
    colors = ("#555555", "#0072B2", "#D55E00")
    full = [row["bytes"] for row in found[0]["rows"]]
    for each, color in zip(found[:3], colors, strict=True):
        points = [(row["step"], row["metric"]) for row in each["rows"] if "metric" in row]
        above.plot(*zip(*points, strict=True), color=color, label=each["policy"])
        ratios = [a / max(1, row["bytes"]) for a, row in zip(full, each["rows"], strict=True)]
        below.plot([row["step"] for row in each["rows"]], ratios, color=color)
    above.set_ylabel("validation accuracy, %")
    above.set_title("Compression that follows the accuracy, from too strong a start")
    above.legend(frameon=False, fontsize=9, loc="lower right")
    below.set_yscale("log")
    below.set_ylabel("times fewer bytes than dense")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(visible=True, color=INK, alpha=0.15, lw=0.6)
    figure.savefig(path, format="png", facecolor="white")


# A setting for each layer.


def layers(options: argparse.Namespace, console: Console) -> tuple[list[Any], list[Target]]:
    found = []
    profile = 20
    for name in (options.uniform, f"solve:({options.uniform}),{options.budget},{profile}"):
        job = {
            "workload": options.workload or "text",
            "policy": name,
            "seed": 0,
            "steps": options.steps or 120,
            "metered": True,
            "granularity": "tensor",
        }
        found.append(train(job, Loopback(options.ranks), console))
    first = profile + 3 + 1
    parts = []
    for each in found:
        rows = each["rows"][first:]
        moved = sum(row["bytes"] for row in rows)
        parts.append((moved, rows[-1]["error"] - rows[0]["error"], rows[-1]["loss"]))
    (a, error, _), (b, ours, _) = parts
    table = Table(title=f"after {first} steps, rank 0")
    for column in ("policy", "MB", "error / uniform's", "loss of the last step"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for each, (moved, made, loss) in zip(found, parts, strict=True):
        table.add_row(each["policy"], f"{moved / 1e6:.2f}", f"{made / error:.3f}", f"{loss:.3f}")
    console.print(table)
    console.print(found[1]["explain"])
    return found, [
        Target("times fewer bytes than uniform", a / b, ">= 1.5", a / b >= 1.5),
        Target.at_most("error / uniform's", ours / error, 1.05),
    ]


NOTE = "all hosts and ranks share this machine's cores"
STUDIES = {"auto": auto, "link": link, "accuracy": accuracy, "layers": layers}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", nargs="?", choices=tuple(STUDIES), default="link")
    parser.add_argument("--workload", help="a bundled one; each study has its own")
    parser.add_argument("--ranks", type=int, default=4, help="ranks or hosts (4)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings, of accuracy (3)")
    parser.add_argument("--steps", type=int, help="of accuracy (300) and layers (120)")
    parser.add_argument("--phase", type=int, default=60, help="steps of each rate, of link (60)")
    parser.add_argument("--fast", default="1gbit", help="rate, of link (1gbit)")
    parser.add_argument("--slow", default="20mbit", help="rate, of link (20mbit)")
    parser.add_argument("--strong", default="topk:0.01|quantize:4", help="compressor, of link")
    parser.add_argument("--first", default="topk:0.0003", help="compressor, of accuracy")
    parser.add_argument("--band", type=float, default=0.25, help="in %%, of accuracy (0.25)")
    parser.add_argument("--uniform", default="topk:0.01", help="compressor, of layers")
    parser.add_argument("--budget", type=float, default=1.0, help="of error, of layers (1)")
    add_training_options(parser)
    parser.add_argument("--picture", type=Path, help="draw accuracy's study as a PNG")
    parser.add_argument("--links", default=",".join(LINKS), help="of auto (%(default)s)")
    parser.add_argument("--seconds", type=float, help="begin no cell of auto later than this")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = read_options(parser)
    if options.as_rank:
        job = json.loads(options.as_rank.read_text())
        turns_main(job) if job.get("turns") else rank_main(job)
        return 0
    console = Console(width=110)
    found, targets = STUDIES[options.study](options, console)
    note = NOTE
    if getattr(options, "resumed", 0):
        note += f". Put together from several runs: {options.resumed} trainings are older"
    return conclude(console, options, f"thinwire.policies-{options.study}/1", found, targets, note)


if __name__ == "__main__":
    sys.exit(main())
