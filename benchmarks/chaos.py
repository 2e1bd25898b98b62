"""Do something to a rank of a training, many times over, and check what the others make of it.

    python benchmarks/chaos.py [--runs 500] [--seed 0] [--only WORDS] [--jobs 2] [-v] [--out FILE]

Real trainings of two to four processes on loopback, in each of which one rank is killed, stopped,
paused, made to raise an error or has a connection half-closed, at a chosen point of its work or at
a random moment. A run is as promised if

- every other rank either finishes or gets an error of thinwire's (or of torch's, where DDP itself
  exchanges), within the hard limit, and no process crashes;
- no rank takes a step without the one that is lost;
- tensors, gradients and residuals of a failed call are as before it;
- replicas have the same bits after every step, and again after the survivors have gone on in a
  smaller group of their own;
- threads, descriptors and children are as before when all groups are left;
- a training restarted by torchrun has the losses of an undisturbed one, bit for bit.

Seeds count up from --seed, and each says all of a run: `--seed 17 --runs 1` repeats it, with the
same --only. That is a list of what to choose from: kinds of faults, points, trainings, sizes, as in
`--only kill,stop,finish,ddp-gather,4`. Exit status 1 if a promise is broken, 130 after Ctrl-C.
"""

import argparse
import contextlib
import json
import multiprocessing.connection
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import chaos_rank
import forked
from chaos_faults import (
    BETWEEN,
    KINDS,
    LASTING,
    POINTS,
    RANDOM,
    SAVING,
    Fault,
    changes_allowed,
)
from chaos_trainings import TRAININGS
from forked import Child, Message
from recording import read_options, write_record
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

HARD_LIMIT = 60.0  # seconds for a run
PATIENCE = 15.0  # seconds to exit after the last message
LAST_LINES = 25
ELASTIC = ("elastic", "torchrun")  # an agent of our own that forks, and the command
RARE = {"torchrun": 0.1}  # how often, to the others' 1: all its processes load torch
LONGER = {"elastic": 2, "torchrun": 5}  # hard limits, for processes that are started twice
RESUMED = ("ddp-gather", "ddp-twoshot", "ddp-powersgd")
WORDS = (*KINDS, *POINTS, BETWEEN, SAVING, RANDOM, *TRAININGS, *ELASTIC, "2", "3", "4")


@dataclass(frozen=True)
class Plan:
    """All that is to be known of a run; follows from its seed and from what it may choose.

    Args:
        training: a name of TRAININGS, or of ELASTIC.
        resumed: the training that an elastic one restarts.
        size: ranks.
        store: who holds the store, "driver" or "rank 0".
    """

    seed: int
    training: str
    resumed: str
    size: int
    store: str
    fault: Fault

    @classmethod
    def of(cls, seed: int, only: Sequence[str] = ()) -> "Plan":
        """What a seed says, among what `only` leaves to choose from."""
        chance = random.Random(seed)

        def choose(given: Sequence[str], weights: dict[str, float]) -> str:
            return chance.choices(given, [weights.get(each, 1.0) for each in given])[0]

        trainings = [each for each in among((*TRAININGS, *ELASTIC), only) if choices_of(each, only)]
        if not trainings:
            raise ValueError(f"nothing can be chosen of {', '.join(only)}")
        training = choose(trainings, RARE)
        points = choices_of(training, only)
        where = choose([each for each in points_of(training) if each in points], {})
        kind = choose(points[where], {"none": 0.3})
        size = int(choose(among(sizes_of(training), only), {}))
        first = where == "connecting"
        fault = Fault(
            kind,
            where,
            rank=chance.randrange(size),
            step=0 if first else chance.randrange(chaos_rank.STEPS - 1),
            hit=1 if where in (BETWEEN, SAVING, "hook", "connecting") else chance.randint(1, 3),
            after=where != BETWEEN and chance.random() < 0.5,
            delay=chance.random() * (0.03 if where == RANDOM else 0.003),
            pause=chance.choice([0.3, 1.5 * chaos_rank.TIMEOUT]),
            seed=seed,
        )
        store = "rank 0" if chance.random() < 0.25 else "driver"
        return cls(seed, training, chance.choice(RESUMED), size, store, fault)

    @property
    def label(self) -> tuple[str, str]:
        """The row of the table that it counts in: what was done, where."""
        elastic = " (elastic)" if self.training in ELASTIC else ""
        return f"{self.fault.kind}{elastic}", "" if self.fault.kind == "none" else self.fault.where

    def __str__(self) -> str:
        again = f" of {self.resumed}" if self.training in ELASTIC else ""
        what = "nothing" if self.fault.kind == "none" else str(self.fault)
        return f"{self.training}{again}, {self.size} ranks, store at {self.store}: {what}"


def among(given: Sequence[str], only: Sequence[str]) -> list[str]:
    """Those that are wanted; all, if none is named."""
    return [each for each in given if each in only] or list(given)


def points_of(training: str) -> list[str]:
    if training in ELASTIC:
        return [SAVING, SAVING, BETWEEN, RANDOM, "exchange", "finish", "hook"]
    return [*(p for p in POINTS if p not in TRAININGS[training].lacks), BETWEEN, RANDOM]


def sizes_of(training: str) -> list[str]:
    if training in ELASTIC:
        return ["2"]
    return ["4"] if training == "ddp-hierarchical" else ["2", "3", "4"]


def choices_of(training: str, only: Sequence[str]) -> dict[str, list[str]]:
    """The points of a training that are wanted, with the faults that are wanted and possible."""
    found = {}
    sizes = set(only) & {"2", "3", "4"}
    if sizes and not sizes & set(sizes_of(training)):
        return {}
    wanted = among((*POINTS, BETWEEN, SAVING, RANDOM), only)
    for where in points_of(training):
        kinds = [kind for kind in among(KINDS, only) if _possible(kind, where, training)]
        if where in wanted and kinds:
            found[where] = kinds
    return found


def _possible(kind: str, where: str, training: str) -> bool:
    if kind == "raise" and where == RANDOM:
        return False
    # An agent does not notice who is merely stopped.
    return training not in ELASTIC or kind in ("kill", "raise", "none")


@dataclass
class RunResult:
    """What came of a run.

    Args:
        broken: promises, in words.
        left_over: what survivors still held when all groups were left: a broken promise, too.
        seconds: from the fault to the error, of each rank that got one.
        committed: whether the point was reached.
        last_words: what ranks wrote, of a run that was not as promised.
    """

    plan: Plan
    broken: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    committed: bool = False
    errors: list[str] = field(default_factory=list)
    duration: float = 0.0
    last_words: str = ""

    @property
    def flaws(self) -> list[str]:
        """All that was not as promised."""
        return [*self.broken, *self.left_over]

    def as_json(self) -> Message:
        return {
            "seed": self.plan.seed,
            "plan": str(self.plan),
            "training": self.plan.training,
            "size": self.plan.size,
            "fault": asdict(self.plan.fault),
            "committed": self.committed,
            "broken": self.broken,
            "left_over": self.left_over,
            "seconds": [round(each, 3) for each in self.seconds],
            "errors": self.errors,
            "duration": round(self.duration, 2),
            "last_words": self.last_words,
        }


class Suite:
    """Carries out runs; several may be under way at a time.

    Args:
        context: of the server that processes fork from.
        hard_limit: seconds for a run.
    """

    def __init__(self, context: Any, hard_limit: float = HARD_LIMIT) -> None:
        import torch.distributed as dist

        forked.wait_for(context)  # that time is no run's
        self.context, self.hard_limit = context, hard_limit
        self.folder = Path(tempfile.mkdtemp(prefix="thinwire-chaos-"))
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._references: dict[str, dict[str, str]] = {}
        self._reference_lock = threading.Lock()
        self._runs: list[PlainRun | ElasticRun] = []
        self._lock = threading.Lock()
        self._stopped = False

    def __enter__(self) -> "Suite":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and remove all files."""
        with self._lock:
            self._stopped = True
            for run in self._runs:
                run.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def port(self) -> int:
        return int(self._store.port)

    def run(self, plan: Plan) -> RunResult:
        """One run; what it started has ended afterwards."""
        began = time.monotonic()
        if plan.training in ELASTIC:
            result = self._run_elastic(plan)
        else:
            result = self._carry_out(PlainRun(self, plan))
        result.duration = time.monotonic() - began
        return result

    def _carry_out(self, run: "PlainRun | ElasticRun") -> RunResult:
        with self._lock:
            if self._stopped:
                raise InterruptedError("the suite is closed")
            self._runs.append(run)
        try:
            run.start()
            run.follow()
            return run.result
        finally:
            run.end()
            with self._lock:
                self._runs.remove(run)

    def _run_elastic(self, plan: Plan) -> RunResult:
        with self._reference_lock:
            if plan.resumed not in self._references:
                undisturbed = Fault("none", BETWEEN, 0, 0)
                quiet = Plan(plan.seed, "elastic", plan.resumed, plan.size, "driver", undisturbed)
                reference = ElasticRun(self, quiet)
                result = self._carry_out(reference)
                if result.broken:
                    return result
                self._references[plan.resumed] = reference.losses
        run = ElasticRun(self, plan)
        result = self._carry_out(run)
        if not result.broken and run.losses != self._references[plan.resumed]:
            result.broken.append("losses are not those of an undisturbed training")
        return result

    def new_folder(self, plan: Plan) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{plan.seed}-", dir=self.folder))


class PlainRun:
    """Ranks of one group, that go on without the one they lose.

    1. Start all; hear "fault" from the victim; wake it again if it was paused.
    2. Hear "ended" from all but a lost one, which leave their group before they say so.
    3. If any has failed: tell the survivors who they are, so that they go on as a new group.
    4. Hear "left" and wait until each has exited; judge.
    """

    def __init__(self, suite: Suite, plan: Plan) -> None:
        self.result = RunResult(plan)
        self._suite, self._plan = suite, plan
        self._folder = suite.new_folder(plan)
        self._children: list[Child] = []
        self._fault: Message = {}
        self._wake = 0.0
        self._ended: dict[int, Message] = {}
        self._left: dict[int, Message] = {}
        self._deadline = 0.0

    def start(self) -> None:
        plan, suite = self._plan, self._suite
        self._deadline = time.monotonic() + suite.hard_limit
        port = suite.port if plan.store == "driver" else free_port()
        for rank in range(plan.size):
            group = {
                "name": f"{self._folder.name}/first",
                "port": port,
                "master": plan.store != "driver" and rank == 0,
                "rank": rank,
                "size": plan.size,
            }
            job = {
                "folder": str(self._folder),
                "rank": rank,
                "training": plan.training,
                "fault": plan.fault.as_json(),
                "group": group,
            }
            self._children.append(Child(suite.context, chaos_rank.live, job))

    def end(self) -> None:
        for child in self._children:
            child.end()
        self._children.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def follow(self) -> None:
        ranks = range(self._plan.size)
        try:
            self._hear("ended", self._ended, list(ranks))
            self._send_on()
            self._hear("left", self._left, [r for r in ranks if r in self._ended])
            self._judge()
        except TimeoutError as late:
            self.result.broken.append(f"hangs: {late}")
            self._look_at_stacks()
        if self.result.flaws:
            self.result.last_words = self._last_words()

    # Hearing

    def _hear(self, event: str, found: dict[int, Message], ranks: list[int]) -> None:
        """Until each of these ranks has said so, or is lost as it should be."""
        awaited = {self._children[rank].pipe: rank for rank in ranks}
        while awaited:
            # A rank that is stopped for good closes nothing.
            if self._fault and self._plan.fault.kind == "stop":
                awaited.pop(self._children[self._plan.fault.rank].pipe, None)
                if not awaited:
                    return
            self._wake_if_due()
            pause = min(0.05 if self._wake else 1.0, self._deadline - time.monotonic())
            if pause <= 0:
                raise TimeoutError(f"ranks {sorted(awaited.values())} have not {event}")
            for pipe in multiprocessing.connection.wait(list(awaited), pause):
                rank = awaited[pipe]
                message = self._children[rank].hear()
                if message is not None and message["event"] == "fault":
                    self._note_fault(message)
                    continue
                del awaited[pipe]
                if message is not None:
                    found[rank] = message

    def _note_fault(self, message: Message) -> None:
        self._fault, self.result.committed = message, True
        if self._plan.fault.kind == "pause":
            self._wake = time.monotonic() + self._plan.fault.pause

    def _wake_if_due(self) -> None:
        if self._wake and time.monotonic() > self._wake:
            self._wake = 0.0
            self._children[self._plan.fault.rank].signal(signal.SIGCONT)

    def _send_on(self) -> None:
        """The survivors learn who they are; all leave if nothing has gone wrong."""
        survivors = sorted(self._ended)
        unhurt = len(survivors) == self._plan.size
        unhurt = unhurt and not any(self._ended[rank]["error"] for rank in survivors)
        for place, rank in enumerate(survivors):
            group = {
                "name": f"{self._folder.name}/second",
                "port": self._suite.port,
                "master": False,
                "rank": place,
                "size": len(survivors),
            }
            self._children[rank].tell({"group": None if unhurt else group})

    # Judging

    def _judge(self) -> None:
        plan, fault, broken = self._plan, self._plan.fault, self.result.broken
        for rank, ended in sorted(self._ended.items()):
            who = f"rank {rank}"
            if ended["error"]:
                self.result.errors.append(f"{who}: {ended['error'][:200]}")
                if self._fault and rank != fault.rank:
                    self.result.seconds.append(ended["at"] - self._fault["at"])
            if not self._may_get(rank, ended["kind"]):
                broken.append(f"{who} got {ended['error'][:200]}")
            allowed = rank == fault.rank and changes_allowed(fault, ended["changed"])
            if ended["changed"] and not allowed:
                broken.append(f"{who}: changed by a failed call: {ended['changed'][:4]}")
            lost = self._fault and fault.kind in LASTING
            if lost and ended["completed"] > self._fault["completed"] + 1:
                broken.append(f"{who} took a step without rank {fault.rank}")
        self._judge_replicas()
        self._judge_endings()
        if (
            plan.fault.kind != "none"
            and not self._fault
            and any(ended["error"] for ended in self._ended.values())
        ):
            broken.append("an error although nothing was done")

    def _may_get(self, rank: int, kind: str) -> bool:
        """Whether a rank may see an error of this kind."""
        if kind in ("none", "ours"):
            return True
        if kind == "injected":
            return rank == self._plan.fault.rank
        return kind == "torch's" and TRAININGS[self._plan.training].torch_speaks

    def _judge_replicas(self) -> None:
        broken = self.result.broken
        for step in range(1, chaos_rank.STEPS + 1):
            found = {
                ended["digests"][str(step)]
                for ended in self._ended.values()
                if str(step) in ended["digests"]
            }
            if len(found) > 1:
                broken.append(f"replicas differ after step {step}")
                break
        again = {rank: left["again"] for rank, left in self._left.items() if left["again"]}
        for rank, outcome in again.items():
            if outcome["error"]:
                broken.append(f"rank {rank} could not go on: {outcome['error'][:200]}")
        if len({outcome.get("result") for outcome in again.values()}) > 1:
            broken.append("replicas differ among the survivors that went on")

    def _judge_endings(self) -> None:
        fault, broken = self._plan.fault, self.result.broken
        for rank, child in enumerate(self._children):
            if self._fault and rank == fault.rank and fault.kind == "stop":
                continue
            code = child.wait(min(PATIENCE, self._deadline - time.monotonic()))
            killed = bool(self._fault) and rank == fault.rank and fault.kind == "kill"
            if code is None:
                broken.append(f"rank {rank} does not exit")
            elif code != (-signal.SIGKILL if killed else 0):
                broken.append(f"rank {rank} ended with {_ending(code)}")
            left = self._left.get(rank)
            if left is not None and left["left_over"]:
                words = ", ".join(f"{n} {what}" for what, n in left["left_over"].items())
                self.result.left_over.append(f"rank {rank} has left over: {words}")

    def _look_at_stacks(self) -> None:
        """Have those that still live write where they are."""
        for child in self._children:
            child.signal(signal.SIGUSR1)
        time.sleep(0.5)

    def _last_words(self) -> str:
        return last_words(sorted(self._folder.glob("*.log")))


class ElasticRun:
    """Workers that an agent restarts, and that go on from a checkpoint."""

    def __init__(self, suite: Suite, plan: Plan) -> None:
        self.result = RunResult(plan)
        self.losses: dict[str, str] = {}
        self._suite, self._plan = suite, plan
        self._folder = suite.new_folder(plan)
        self._limit = LONGER[plan.training] * suite.hard_limit
        self._agent: Child | None = None
        self._program: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        plan = self._plan
        job = {"training": plan.resumed, "fault": plan.fault.as_json()}
        (self._folder / "job.json").write_text(json.dumps(job))
        if plan.training == "elastic":
            args = (str(self._folder), plan.size)
            self._agent = Child(self._suite.context, chaos_rank.launch, *args)
            return
        here = str(Path(__file__).resolve().parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        argv = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(plan.size), "--max-restarts", str(chaos_rank.ATTEMPTS)),
            *(chaos_rank.__file__, str(self._folder)),
        ]
        with open(self._folder / "agent.log", "wb") as log:
            self._program = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us
                env=os.environ | {"PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )

    def end(self) -> None:
        if self._agent is not None:
            self._agent.end()
            self._agent = None
        if self._program is not None:
            self._program.kill()
            self._program.wait()
            self._program = None
        for name in self._folder.glob("pid*"):  # workers of an agent that had to be killed
            pid = int(name.name.removeprefix("pid"))
            if _is_worker(pid, self._folder.name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def follow(self) -> None:
        code = self._wait()
        broken = self.result.broken
        faults = self._lines("fault.json")
        self.result.committed = bool(faults)
        if code is None:
            broken.append(f"hangs: not done after {self._limit:g} s")
        elif code != 0:
            broken.append(f"the agent ended with {_ending(code)}")
        done = [line for rank in range(self._plan.size) for line in self._lines(f"done{rank}.json")]
        if not broken and len(done) != self._plan.size:
            broken.append(f"only {len(done)} of {self._plan.size} workers have finished")
        if len({line["replicas"] for line in done}) > 1:
            broken.append("replicas differ")
        if not broken and faults and all(line["attempt"] == 0 for line in done):
            broken.append("was not restarted")
        for attempt in range(chaos_rank.ATTEMPTS + 1):
            for rank in range(self._plan.size):
                for line in self._lines(f"losses{attempt}-{rank}.json"):
                    self._take(f"rank {rank} step {line['step']}", line["loss"])
        if broken:
            self.result.last_words = last_words(sorted(self._folder.glob("*.log")))

    def _take(self, which: str, loss: str) -> None:
        """Steps after the checkpoint are taken again, and must come to the same."""
        if self.losses.setdefault(which, loss) != loss:
            self.result.broken.append(f"{which}: another loss when it was taken again")

    def _wait(self) -> int | None:
        if self._program is not None:
            try:
                return self._program.wait(self._limit)
            except subprocess.TimeoutExpired:
                return None
        assert self._agent is not None
        end = time.monotonic() + self._limit
        if not self._agent.pipe.poll(self._limit):
            return None
        message = self._agent.hear()
        if message is not None and message["error"]:
            self.result.broken.append(message["error"].splitlines()[0])
        return self._agent.wait(end - time.monotonic())

    def _lines(self, name: str) -> list[Message]:
        path = self._folder / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _is_worker(pid: int, name: str) -> bool:
    """Whether a process writes into the folder of this name: numbers of processes come again."""
    with contextlib.suppress(OSError):
        return name in os.readlink(f"/proc/{pid}/fd/2")
    return False


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_words(logs: Sequence[Path]) -> str:
    found = []
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        found.append("\n".join([f"--- {log.name}", *lines]))
    return "\n".join(found)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# What is shown


def table_of(results: Sequence[RunResult]) -> Table:
    table = Table(title="what was done to a rank, and what the others made of it")
    for column in ("what", "where"):
        table.add_column(column, no_wrap=True)
    for column in ("runs", "done", "kept", "median s", "worst s"):
        table.add_column(column, justify="right")
    table.add_column("broken (seeds)", overflow="fold")
    rows: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        rows.setdefault(result.plan.label, []).append(result)
    for (what, where), found in sorted(rows.items()):
        seconds = [each for result in found for each in result.seconds]
        table.add_row(
            what,
            where,
            str(len(found)),
            str(sum(result.committed for result in found)),
            str(sum(not result.flaws for result in found)),
            f"{statistics.median(seconds):.2f}" if seconds else "-",
            f"{max(seconds):.2f}" if seconds else "-",
            " ".join(str(result.plan.seed) for result in found if result.flaws),
        )
    return table


def show_broken(console: Console, results: Sequence[RunResult], only: Sequence[str]) -> None:
    more = f" --only '{','.join(only)}'" if only else ""
    for result in results:
        if result.flaws:
            console.print(f"\n{result.plan}", style="bold", markup=False, soft_wrap=True)
            for line in result.flaws:
                console.print(f"  {line}", markup=False, soft_wrap=True)
            again = f"python benchmarks/chaos.py --seed {result.plan.seed} --runs 1{more} -v"
            console.print(f"  again: {again}", markup=False, soft_wrap=True)


def carry_out(
    suite: Suite, plans: Sequence[Plan], jobs: int, console: Console, verbose: bool
) -> tuple[list[RunResult], bool]:
    """The results, and whether all runs were made."""
    results: list[RunResult] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ThreadPoolExecutor(jobs) as pool,
    ):
        task = progress.add_task("runs", total=len(plans))
        waiting = list(reversed(plans))
        under_way: set[Future[RunResult]] = set()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < jobs:
                    under_way.add(pool.submit(suite.run, waiting.pop()))
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    results.append(result)
                    broken = sum(bool(each.flaws) for each in results)
                    words = f"runs, {broken} broken" if broken else "runs"
                    progress.update(task, advance=1, description=words)
                    if verbose:
                        text = line_of(result)
                        console.print(text, markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            suite.close()  # the threads then see their processes end
            return results, False
    return results, True


def line_of(result: RunResult) -> str:
    state = "BROKEN" if result.flaws else "ok" if result.committed else "ok, not reached"
    if result.plan.fault.kind == "none" and not result.flaws:
        state = "ok"
    seconds = f", {max(result.seconds):.2f} s to the error" if result.seconds else ""
    text = f"{result.plan.seed:>6} {state}: {result.plan} ({result.duration:.1f} s{seconds})"
    told = [*result.flaws, *(result.errors if result.flaws else result.errors[:1])]
    words = [result.last_words] if result.flaws else []
    return "\n".join([text, *(f"         {line}" for line in told), *words])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=500, help="how many (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: 0)")
    parser.add_argument("--only", default="", metavar="WORDS", help=f"of {', '.join(WORDS)}")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=HARD_LIMIT, help="seconds for a run")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for every run")
    options = read_options(parser)
    only = [word.strip() for word in options.only.split(",") if word.strip()]
    unknown = [word for word in only if word not in WORDS]
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(WORDS)}")
    if options.runs < 1 or options.jobs < 1:
        parser.error("--runs and --jobs must be at least 1")
    console = Console()
    try:
        plans = [Plan.of(seed, only) for seed in range(options.seed, options.seed + options.runs)]
    except ValueError as error:
        parser.error(f"--only: {error}")
    began = time.monotonic()
    try:
        with console.status("loading torch"):
            suite = Suite(forked.server("chaos"), options.limit)
        with suite:
            results, whole = carry_out(suite, plans, options.jobs, console, options.verbose)
    except KeyboardInterrupt:
        return 130
    finally:
        forked.stop()
    console.print(table_of(results))
    show_broken(console, results, only)
    broken = sum(bool(result.flaws) for result in results)
    seconds = time.monotonic() - began
    console.print(f"{len(results)} runs in {seconds:.0f} s, {broken} with a broken promise")
    if options.out:
        ordered = sorted(results, key=lambda result: result.plan.seed)
        write_record(options, "thinwire-chaos/1", [each.as_json() for each in ordered])
    return 130 if not whole else int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
