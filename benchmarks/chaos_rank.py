"""One rank of a run of chaos.py: trains until it is done or something fails, then goes on.

    live            a rank of a plain group, which the driver talks with over a pipe
    launch          an agent of torch.distributed.elastic, as torchrun makes it, with its workers
    python chaos_rank.py FOLDER   a worker under torchrun itself

What a rank tells the driver: {"event": "fault"} just before its fault, "ended" when its training
has ended in one way or another, "left" when it has gone on with the others and left all groups.
"""

import contextlib
import faulthandler
import gc
import json
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chaos_faults import RANDOM, SAVING, Fault, InjectedError, Injector
from chaos_trainings import TRAININGS, Attached, Training, digest
from forked import Message, die_with_parent
from resources import held, left_over

import thinwire as tw

STEPS = 5
MORE = 2  # steps that survivors take in their new group
TIMEOUT = 2.0  # seconds that exchanges wait where they are to wait in vain
PATIENT = 20.0  # and where they are not: on a busy machine, too
GROUP_TIMEOUT = 15.0  # of the process group, and of what DDP exchanges by itself
# Seconds for threads to end after their group: one that connects waits for the store, too.
SETTLING = GROUP_TIMEOUT + 5.0
ATTEMPTS = 3


class Pipe:
    """The end of a rank: messages of several threads."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def tell(self, message: Message) -> None:
        with self._lock:
            self._pipe.send_bytes(json.dumps(message).encode())

    def hear(self) -> Message:
        message: Message = json.loads(self._pipe.recv_bytes())
        return message


class Rank:
    """What a rank has come to; holds no tensor of the training itself and no group.

    Args:
        fault: of the run, whichever rank it is for. If it comes after the first step, ranks connect
            before they train, with more time than exchanges have: a busy machine is no fault.
    """

    def __init__(self, training: str, fault: Fault, injector: Injector) -> None:
        self._make, self._timeout = TRAININGS[training], timeout_for(fault)
        self.connects_first = fault.step > 0
        self._injector = injector
        self.snapshots: dict[int, Any] = {0: None}
        self.digests: dict[int, str] = {}
        self.completed = 0
        self.changed: list[str] = []

    def train(self, steps: int) -> None:
        """From the last snapshot on."""
        training = self._make(self._timeout)
        try:
            start = self.snapshots[self.completed]
            if start is not None:
                training.restore(start)
            for number in range(self.completed, steps):
                self._injector.begin_step(self.completed)
                training.step(number)
                self._complete(training)
        finally:
            self.changed += training.changed

    def _complete(self, training: Training) -> None:
        self.completed += 1
        self.snapshots[self.completed] = training.snapshot()
        self.digests[self.completed] = digest(training.replicated())

    def go_on(self) -> str:
        """With whoever is left, from the last step that all of them have completed."""
        least = torch.tensor([self.completed])
        dist.all_reduce(least, dist.ReduceOp.MIN)
        self.completed, self._timeout = int(least), PATIENT
        self.train(self.completed + MORE)
        return self.digests[self.completed]


def live(pipe: Any, job: Message) -> None:
    """A rank of a plain group."""
    settle_in(Path(job["folder"]) / f"rank{job['rank']}.log")
    told = Pipe(pipe)
    torch_once()
    before = held()
    fault = Fault(**job["fault"])
    injector = Injector(fault if fault.rank == job["rank"] else None, told.tell)
    rank = Rank(job["training"], fault, injector)
    ended = attempt(train_in_group, rank, job["group"])
    injector.remove()
    leave()
    told.tell(
        {
            "event": "ended",
            **ended,
            "completed": rank.completed,
            "digests": rank.digests,
            "changed": rank.changed,
            "left": time.monotonic(),
        }
    )
    order = told.hear()
    again: Message = {}
    if order["group"] is not None:
        rank.changed.clear()
        again = attempt(go_on_in_group, rank, order["group"])
        leave()
    del rank
    told.tell({"event": "left", "again": again, "left_over": left_over(before, SETTLING)})


def timeout_for(fault: Fault) -> float:
    """Who dies is noticed at once, but not while ranks still connect; who stops never is."""
    connecting = fault.where == "connecting" or (fault.where, fault.step) == (RANDOM, 0)
    prompt = fault.kind in ("kill", "raise") and not connecting
    return PATIENT if prompt or fault.kind == "none" else TIMEOUT


def train_in_group(rank: Rank, group: Message) -> str:
    join(group)
    if rank.connects_first:
        tw.all_reduce(torch.ones(1), "none", timeout=PATIENT)
    rank.train(STEPS)
    return ""


def go_on_in_group(rank: Rank, group: Message) -> str:
    join(group)
    return rank.go_on()


def attempt(work: Callable[[Rank, Message], str], rank: Rank, group: Message) -> Message:
    """What came of it, without anything that an error would hold."""
    try:
        result = work(rank, group)
    except Exception as error:
        at = time.monotonic()
        frames = traceback.extract_tb(error.__traceback__)
        sys.stderr.write(traceback.format_exc())
        return {
            "error": f"{type(error).__name__}: {error}",
            "kind": _kind_of(error, frames[-1].filename),
            "at": at,
        }
    return {"error": "", "kind": "none", "at": time.monotonic(), "result": result}


def _kind_of(error: Exception, raised_in: str) -> str:
    if isinstance(error, tw.ThinwireError):
        return "ours"
    if isinstance(error, InjectedError):
        return "injected"
    return "torch's" if "/torch/" in raised_in else "other"


def settle_in(log: Path) -> None:
    """What every rank does first: output to a file, one thread, no sudden crash without a word."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs
    torch.set_num_threads(1)


def torch_once() -> None:
    """Have torch make what it makes once in a process, before anything is counted."""
    x = torch.ones(2, 2, requires_grad=True)
    (x @ x).sum().backward()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.barrier()
    del store
    leave()


def join(group: Message) -> None:
    """A process group; whoever is the master holds the store of all."""
    store = dist.TCPStore(
        "127.0.0.1",
        group["port"],
        is_master=group["master"],
        wait_for_workers=False,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(group["name"], store),
        rank=group["rank"],
        world_size=group["size"],
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    dist.barrier()  # or one may be done and gone while another still connects


def leave() -> None:
    gc.collect()  # a model that an error held, and with it its group
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


# Elastic restarts


def work(folder: str) -> None:
    """A worker: trains from the last checkpoint on; saves one after each step from the second."""
    place = Path(folder)
    job = json.loads((place / "job.json").read_text())
    rank, attempt_number = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (place / f"pid{os.getpid()}").touch()
    die_with_parent()
    settle_in(place / f"rank{rank}.log")
    fault = Fault(**job["fault"])
    mine = fault if fault.rank == rank and attempt_number == 0 else None
    injector = Injector(mine, lambda message: _note(place / "fault.json", message))
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))
    training = TRAININGS[job["training"]](timeout_for(fault))
    assert isinstance(training, Attached)
    start, found = 0, tw.load_checkpoint(place / "checkpoints")
    if found is not None:
        start = found.step
        training.restore(found.state)
    for number in range(start, STEPS + 1):
        injector.begin_step(number)
        training.step(number)
        losses = {"rank": rank, "step": number, "loss": training.loss.hex()}
        _note(place / f"losses{attempt_number}-{rank}.json", losses)
        if number >= 1:
            injector.reach(SAVING)
            tw.save_checkpoint(place / "checkpoints", training.snapshot(), step=number + 1)
    result = {"replicas": digest(training.replicated()), "attempt": attempt_number}
    _note(place / f"done{rank}.json", result)
    injector.remove()
    del training
    leave()


def _note(path: Path, message: Message) -> None:
    """A line of its own, with one write."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(message).encode() + b"\n")


def launch(pipe: Any, folder: str, size: int) -> None:
    """What torchrun --standalone --max-restarts does, in a process that has torch loaded."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    place = Path(folder)
    settle_in(place / "agent.log")
    os.environ["TMPDIR"] = folder  # where torch leaves files of failed workers
    tempfile.tempdir = None
    # Workers must not find keys of an earlier attempt in the agent's store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=place.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=ATTEMPTS,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    # Workers fork from the server that this process comes from, which it would otherwise not find.
    multiprocessing.forkserver._forkserver.ensure_running = _nothing
    error = ""
    try:
        elastic_launch(config, work)(folder)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    with contextlib.suppress(OSError):
        pipe.send_bytes(json.dumps({"event": "left", "error": error}).encode())


def _nothing() -> None:
    return None


if __name__ == "__main__":
    work(sys.argv[1])
