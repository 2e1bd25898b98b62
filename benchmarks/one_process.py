"""All ranks of a training in one process: what a method comes to, without the cost of processes.

Ranks are threads that compute their gradients one after the other on one model and average them
with thinwire's own reducers: policies, feedback, plans, compressors, keys, collectives and byte
counts are those of a real training. Only the connections are not: a link here hands tensors from
thread to thread. Buckets are those that DistributedDataParallel forms after its first step. Sums
are formed in rank order where gloo has an order of its own, so figures agree with a real training
to rounding at first, and later as two trainings agree that differ in rounding
(`tests/test_one_process.py` compares the two).
"""

import argparse
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from thinwire.collectives.connect import Members, Pulse
from thinwire.collectives.link import Link
from thinwire.compare.method import Method, read
from thinwire.compressors import Compressor
from thinwire.feedback import Feedback
from thinwire.kernels.compiling import compile_kernels
from thinwire.machine import versions
from thinwire.parallel import Reducer
from thinwire.parallel.model import described
from thinwire.parallel.plan import Piece, PlannedExchange
from thinwire.policies.base import Policy
from thinwire.torch_internals import Backend
from thinwire.workloads import Workload, workload

LIMIT = timedelta(seconds=300)
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, of DistributedDataParallel
MIN_NUMEL = 1024  # of `attach`


class Meeting:
    """Where threads show each other what they have."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT.total_seconds())
        self.shown: list[Any] = [None] * size

    @contextmanager
    def of_all(self, index: int, mine: Any) -> Iterator[list[Any]]:
        """What all show; nobody goes on before everybody has looked."""
        self.shown[index] = mine
        self.barrier.wait()
        yield self.shown
        self.barrier.wait()


class ThreadLink(Link):
    """A link between threads, with the byte counts of one over gloo."""

    def __init__(self, members: Members, meeting: Meeting) -> None:
        self._meeting = meeting
        super().__init__(members, LIMIT, lambda: False)

    def _connect(self, limit: timedelta) -> None:
        self._group = self._meeting

    def _branch(self, *_: Any) -> Link:
        return self

    def close(self, farewell: bool = False) -> None:
        self._meeting.barrier.abort()

    def all_gather(self, mine: Tensor, limit: timedelta) -> Tensor:
        size = self.members.size
        moved = (size - 1) * mine.nbytes
        self._count(moved, moved, 2 * (size - 1))
        with self._meeting.of_all(self.members.index, mine) as shown:
            return torch.cat(shown)

    def all_reduce(self, tensor: Tensor, op: Any, limit: timedelta) -> None:
        assert op == dist.ReduceOp.SUM
        size = self.members.size
        moved = 2 * (size - 1) * tensor.nbytes // size
        self._count(moved, moved, 4 * (size - 1))
        with self._meeting.of_all(self.members.index, tensor) as shown:
            total = shown[0].clone()
            for each in shown[1:]:
                total.add_(each)
        tensor.copy_(total)

    def _post_all_to_all(
        self,
        out: Tensor,
        outgoing: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        limit: timedelta,
    ) -> Any:
        me = self.members.index
        mine = torch.split(outgoing, list(sent))
        with self._meeting.of_all(me, mine) as shown:
            for room, theirs in zip(torch.split(out, list(received)), shown, strict=True):
                if room.numel():
                    room[: theirs[me].numel()].copy_(theirs[me])

    def _finish(self, limit: timedelta, *posted: Any) -> None:
        pass


class ThreadGroup:
    """What a reducer takes for a process group, of one thread."""

    group_name = "threads"

    def __init__(self, index: int, size: int, meeting: Meeting) -> None:
        self._index, self._size = index, size
        backend = Backend("gloo", dist.HashStore(), None, LIMIT)
        world = dist.group.WORLD
        assert world is not None, "threads_as_ranks has made it"
        pulse = Pulse(world)
        members = Members("threads", tuple(range(size)), index, backend, pulse)
        self.channel = ThreadChannel(members, meeting)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._index


class ThreadChannel:
    """Carries out each exchange at once."""

    def __init__(self, members: Members, meeting: Meeting) -> None:
        self.members, self.count = members, 0
        self.logged: set[tuple[str, str]] = set()
        self.link = ThreadLink(members, meeting)

    def submit(self, exchange: Any) -> None:
        link, account = self.link, exchange.handle.account
        before = (link.bytes_sent, link.bytes_received, link.network_bytes)
        self.count += 1
        exchange.run(link, LIMIT)
        account.bytes_sent = link.bytes_sent - before[0]
        account.bytes_received = link.bytes_received - before[1]
        account.network_bytes = link.network_bytes - before[2]
        exchange.complete(link)
        exchange.handle._end(None)

    call = submit


class BucketReducer(Reducer):
    """Averages gradients in the buckets of DistributedDataParallel, as `attach` does.

    They come in the order of the mapping that `average` gets. In the first step they are one
    bucket.
    """

    def __init__(
        self, model: nn.Module, *args: Any, granularity: str = "bucket", **options: Any
    ) -> None:
        super().__init__(*args, min_numel=MIN_NUMEL, **options)
        self._granularity = granularity
        parameters = dict(model.named_parameters())
        self._learn_tensors(described(model, parameters), parameters)

    def _planned(self, tensors: Mapping[str, Tensor], together: bool) -> list[PlannedExchange]:
        buckets = [list(self._parameters)] if self.step == 1 else buckets_of(tensors)
        planner = self._planner(self._granularity)
        plan: list[PlannedExchange] = []
        for i, names in enumerate(buckets):
            pieces = [Piece(name, tensors[name].nbytes, tensors[name].dtype) for name in names]
            plan += planner.add(pieces, last=i == len(buckets) - 1)
        return plan


def buckets_of(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of the tensors in each bucket, when they come in this order."""
    names = list(tensors)
    places, _ = dist._compute_bucket_assignment_by_size(
        list(tensors.values()), [FIRST_BUCKET, BUCKET]
    )
    return [[names[place] for place in bucket] for bucket in places]


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """In which reducers take a `ThreadGroup`."""
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def channel_of(group: Any, device: torch.device) -> Any:
        return group.channel

    def compile_here(group: Any, device: torch.device, uses: Any) -> None:
        compile_kernels(uses)

    try:
        with (
            mock.patch("thinwire.collectives.exchange.process_group", lambda group: group),
            mock.patch("thinwire.collectives.exchange.channel_of", channel_of),
            mock.patch("thinwire.parallel.wire.compile_in", compile_here),
        ):
            yield
    finally:
        if begun:
            dist.destroy_process_group()


class Training:
    """One training of a workload with one method on `ranks` threads from one seed.

    Args:
        compressor, feedback, granularity: as for `attach`; "ddp" for uncompressed.
        evaluate_every: steps between two evaluations, which policies are told of; 0 for one at the
            end.
    """

    def __init__(
        self,
        task: Workload,
        compressor: Compressor | Policy | str,
        feedback: Feedback | str = "auto",
        *,
        ranks: int = 4,
        seed: int = 0,
        steps: int | None = None,
        granularity: str = "bucket",
        evaluate_every: int = 0,
    ) -> None:
        self._task, self._ranks, self._seed = task, ranks, seed
        self._steps = steps or task.default_steps
        self._every = evaluate_every
        self.model = task.model(seed)
        self._named = dict(self.model.named_parameters())
        self._order: list[str] = []  # in which gradients come
        for name, parameter in self._named.items():
            parameter.register_post_accumulate_grad_hook(partial(self._note_order, name))
        self.optimizer = task.optimizer(self.model)
        self._meeting = meeting = Meeting(ranks)
        groups = [ThreadGroup(rank, ranks, meeting) for rank in range(ranks)]
        self._link = groups[0].channel.link
        self.reducers = [
            BucketReducer(
                self.model,
                "none" if compressor == "ddp" else compressor,
                feedback=feedback,
                granularity=granularity,
                group=groups[rank],
                seed=seed,
                # The momentum of one optimizer is taken over once.
                optimizer=self.optimizer if rank == 0 else task.optimizer(task.model(seed)),
                measure_every=0,
            )
            for rank in range(ranks)
        ]
        self.losses: list[float] = []
        self.sent: list[int] = []  # bytes of the first rank, after each step
        self.evaluations: list[tuple[int, float]] = []

    def run(self, on_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
        """Train; the metric, the bytes that leave a rank per step, and the curve."""
        task = self._task
        schedule = task.schedule(self.optimizer, self._steps)
        streams = [task.batches(rank, self._ranks, self._seed) for rank in range(self._ranks)]
        with ThreadPoolExecutor(self._ranks) as pool:
            for step in range(1, self._steps + 1):
                gradients = [self._gradients(next(batches)) for batches in streams]
                raise_cause(list(pool.map(self._average, range(self._ranks), gradients)))
                for name, mean in gradients[0].items():
                    self._named[name].grad = mean
                self.optimizer.step()
                schedule.step()
                self.sent.append(self._link.network_bytes)
                if step == self._steps or (self._every and step % self._every == 0):
                    self.evaluations.append((step, task.evaluate(self.model)))
                    self.reducers[0].observe(self.evaluations[-1][1])
                on_step(step)
        sent = self.reducers[0].stats()["total"]["network_bytes"]
        return {
            "metric": self.evaluations[-1][1],
            "unit": task.metric,
            "megabytes_a_step": sent / self._steps / 1e6,
            "losses": [round(loss, 4) for loss in self.losses[:: max(1, self._steps // 30)]],
            "evaluations": self.evaluations,
            "sent": self.sent if self._every else [],
            "decisions": [each._asdict() for each in self.reducers[0].decisions],
        }

    def _gradients(self, batch: Any) -> dict[str, Tensor]:
        """Of one rank; the loss of the first one is noted."""
        self.model.zero_grad(set_to_none=True)
        loss = self._task.loss(self.model, batch)
        loss.backward()
        if len(self.losses) == self.reducers[0].step:
            self.losses.append(loss.item())
        found = {name: self._named[name].grad for name in self._order}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def _note_order(self, name: str, _: Tensor) -> None:
        if len(self._order) < len(self._named):
            self._order.append(name)

    def _average(self, rank: int, gradients: dict[str, Tensor]) -> Exception | None:
        try:
            self.reducers[rank].average(gradients)
        except Exception as error:
            self._meeting.barrier.abort()  # the others wait in vain
            return error
        return None


def raise_cause(errors: Sequence[Exception | None]) -> None:
    """Raise what went wrong on a rank, if anything did, and not that others waited for it."""
    found = [error for error in errors if error is not None]
    found.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if found:
        raise found[0]


def train(
    spec: str,
    workload_spec: str,
    *,
    ranks: int = 4,
    seed: int = 0,
    steps: int | None = None,
    granularity: str = "bucket",
    evaluate_every: int = 0,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """What a method comes to that is written as for `thinwire compare`."""
    torch.set_num_threads(1)
    with threads_as_ranks():
        training = Training(
            workload(workload_spec),
            *_given(read(spec)),
            ranks=ranks,
            seed=seed,
            steps=steps,
            granularity=granularity,
            evaluate_every=evaluate_every,
        )
        return training.run(on_step)


def _given(method: Method) -> tuple[Any, Any]:
    """Compressor and feedback of a method, as `attach` takes them."""
    if method.kind == "torch":
        assert method.name == "ddp", f"{method.name} is no method of ours"
        return "none", "auto"
    if method.named:
        return method.name, "auto"
    return method.policy, method.feedback


# Many of them.


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of a benchmark that has `Trainings`."""
    parser.add_argument("--at-once", type=int, default=2, help="trainings beside each other (2)")
    parser.add_argument("--run-with", default="", help="what to start trainings with, as 'nice'")
    parser.add_argument("--progress", type=Path, help="note here what is done, and go on from it")


class Task(NamedTuple):
    """One training."""

    workload: str
    method: str
    ranks: int
    steps: int
    seed: int
    granularity: str = "bucket"
    evaluate_every: int = 0

    @property
    def key(self) -> str:
        return json.dumps(self)


class Trainings:
    """Trainings, each in a process of its own, some at a time.

    Args:
        options: as `add_training_options` has them.

    Attributes:
        resumed: how many an earlier run had done.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._command, self._at_once = shlex.split(options.run_with), options.at_once
        self._progress: Path | None = options.progress
        self._commit = versions()["commit"]
        self._done: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        path = self._progress
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                if found["commit"] != self._commit:
                    raise SystemExit(f"{path} is of commit {found['commit']}: name another file")
                self._done[found["key"]] = found["row"]
        self._before = frozenset(self._done)
        self.resumed = 0

    def run(self, tasks: Sequence[Task], console: Console) -> dict[str, dict[str, Any]]:
        """What each came to, by its key."""
        self.resumed += sum(task.key in self._before for task in tasks)
        missing = [task for task in tasks if task.key not in self._done]
        with (
            Progress(
                TextColumn("{task.description}"),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
            ) as shown,
            ThreadPoolExecutor(self._at_once) as pool,
        ):
            bar = shown.add_task("trainings", total=len(missing))
            try:
                for task, row in pool.map(self._train, missing):
                    shown.advance(bar)
                    figure = f"{row['metric']:.4g}, {row['megabytes_a_step']:.4f} MB per step"
                    console.print(
                        f"{task.workload}, {task.method}, {task.ranks} ranks, seed {task.seed}: "
                        f"{figure}"
                    )
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return {task.key: self._done[task.key] for task in tasks}

    def _train(self, task: Task) -> tuple[Task, dict[str, Any]]:
        argv = [*self._command, sys.executable, __file__, "--train", json.dumps(task._asdict())]
        ended = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{task} ended with {ended.returncode}")
        row = json.loads(ended.stdout.splitlines()[-1])
        with self._lock:
            self._done[task.key] = row
            if self._progress is not None:
                line = {"commit": self._commit, "key": task.key, "row": row}
                with self._progress.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return task, row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", type=json.loads, required=True, help="a `Task` as JSON")
    asked = dict(parser.parse_args().train)
    print(json.dumps(train(asked.pop("method"), asked.pop("workload"), **asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
