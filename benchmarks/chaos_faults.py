"""Faults: what is done to a rank, and at which point of its work.

Nothing in thinwire knows of this: the points are methods that are replaced, in the process that the
fault is for, by ones that first or afterwards look whether it is time.
"""

import functools
import importlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

KINDS = ("kill", "stop", "pause", "raise", "half-close", "none")
LASTING = ("kill", "stop")  # the rank does not come back

# All exchanges: these modules have them, and a base class stands for its subclasses.
MODULES = (
    "thinwire.collectives",
    "thinwire.reducer",
    "thinwire.parallel",
    "thinwire.optim",
)
EXCHANGE = "thinwire.collectives.exchange:Exchange"
LINK = "thinwire.collectives.link:Link"

# Methods by the name of the point.
POINTS: dict[str, tuple[tuple[str, str], ...]] = {
    "connecting": (
        (LINK, "_connect"),
        ("thinwire.collectives.connect:Connecting", "_assemble"),
        ("thinwire.collectives.watch:Watch", "__init__"),
    ),
    "prepare": ((EXCHANGE, "prepare"),),
    "exchange": ((EXCHANGE, "exchange"),),
    "finish": ((EXCHANGE, "finish"),),
    "meeting": (("thinwire.collectives.transport:Transport", "_meet"),),
    "transfer": tuple(
        (LINK, n)
        for n in ("all_gather", "all_to_all", "all_to_all_shorter", "all_reduce", "broadcast")
    ),
    "encoding": (("thinwire.compressors:LocalCompressor", "draft"),),
    "decoding": (("thinwire.frames.code:Code", "open"),),
    "hook": (("thinwire.parallel.ddp:DDPHook", "__call__"),),
    "end of backward": (("thinwire.parallel.ddp:DDPHook", "_finish"),),
    "optimizer": (("thinwire.optim.base:ExchangingOptimizer", "_carry"),),
}
# These are called by the training itself, or by a timer.
BETWEEN, SAVING, RANDOM = "between steps", "saving", "random moment"
# Where a rank that raises has begun to write: its own tensors need not be as before.
WRITING = ("finish", "decoding", "end of backward")


def changes_allowed(fault: "Fault", changed: list[str]) -> bool:
    """Whether the rank that a fault makes raise may have changed this.

    At the end of DDP's hook its exchange has been started. If that succeeds, on all ranks, what is
    left out of it is remembered; but the pass is over, and nobody writes the averages.
    """
    if fault.kind != "raise":
        return False
    if fault.where == "hook" and fault.after:
        return all(each.startswith("state of ") for each in changed)
    return fault.where in WRITING


class InjectedError(Exception):
    """Raised by a fault."""


@dataclass(frozen=True)
class Fault:
    """What is done to a rank.

    Args:
        kind: one of KINDS.
        where: a point of POINTS, or one of the three others.
        rank: to which.
        step: of its training from which on the point counts.
        hit: the how-many-th time that the point is reached from then on.
        after: when the method has ended, not when it begins.
        delay: seconds, for a random moment and into a transfer or the saving of a checkpoint.
        pause: seconds between SIGSTOP and SIGCONT.
        seed: which connection is closed, and how.
    """

    kind: str
    where: str
    rank: int
    step: int
    hit: int = 1
    after: bool = False
    delay: float = 0.0
    pause: float = 0.5
    seed: int = 0

    def __str__(self) -> str:
        side = "after" if self.after else "at"
        return f"{self.kind} rank {self.rank} {side} {self.where} {self.hit} from step {self.step}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Injector:
    """Commits one fault, once, in the process it is for.

    Args:
        fault: None for a process that nothing is done to.
        tell: called with a message just before the fault.
    """

    def __init__(self, fault: Fault | None, tell: Callable[[dict[str, Any]], None]) -> None:
        self.done = False
        self._fault = fault if fault is not None and fault.kind != "none" else None
        self._tell = tell
        self._armed, self._hits, self._completed = False, 0, 0
        self._lock = threading.Lock()
        self._replaced: list[tuple[type, str, Any]] = []
        if self._fault is not None and self._fault.where in POINTS:
            for owner, name in methods(self._fault.where):
                self._replace(owner, name)

    def begin_step(self, completed: int) -> None:
        """A step begins, when so many are done."""
        self._completed = completed
        if self._fault is None or completed < self._fault.step or self.done:
            return
        started, self._armed = not self._armed, True
        if self._fault.where == RANDOM and started:
            self._later(self._fault.delay)
        self.reach(BETWEEN)

    def reach(self, where: str) -> None:
        """The training is at a point of its own."""
        if self._fault is not None and self._fault.where == where:
            self._hit()

    def remove(self) -> None:
        """No fault any more; the methods are their own again."""
        self._fault, self._armed = None, False
        for owner, name, whole in reversed(self._replaced):
            setattr(owner, name, whole)
        self._replaced.clear()

    def _replace(self, owner: type, name: str) -> None:
        whole = vars(owner)[name]

        @functools.wraps(whole)
        def watched(*args: Any, **kwargs: Any) -> Any:
            after = self._fault is not None and self._fault.after
            if not after:
                self._hit()
            result = whole(*args, **kwargs)
            if after:
                self._hit()
            return result

        setattr(owner, name, watched)
        self._replaced.append((owner, name, whole))

    def _hit(self) -> None:
        fault = self._fault
        if fault is None or not self._armed:
            return
        with self._lock:
            self._hits += 1
            if self.done or self._hits < fault.hit:
                return
            during = fault.where in ("transfer", SAVING) and fault.kind != "raise"
            if during and not fault.after:
                self._later(fault.delay)
            else:
                self._commit()

    def _later(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._commit)
        timer.daemon = True
        timer.start()

    def _commit(self) -> None:
        fault = self._fault
        if fault is None or self.done:
            return
        chosen = connections() if fault.kind == "half-close" else []
        if fault.kind == "half-close" and not chosen:
            return  # nothing to close yet: at the next hit
        self.done = True
        self._tell({"event": "fault", "at": time.monotonic(), "completed": self._completed})
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind in ("stop", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "half-close":
            half_close(chosen, random.Random(fault.seed))
        else:
            raise InjectedError(f"injected at {fault.where}")


def methods(where: str) -> Iterator[tuple[type, str]]:
    """The classes and methods of a point, those of subclasses too; each once."""
    for module in MODULES:
        importlib.import_module(module)
    known: set[tuple[type, str]] = set()
    for place, name in POINTS[where]:
        module, _, owner = place.partition(":")
        base = getattr(importlib.import_module(module), owner)
        found = [each for each in _descendants(base) if name in vars(each)]
        if not found:
            raise AttributeError(f"{where}: {place} has no {name} any more")
        new = {(each, name) for each in found} - known
        known |= new
        yield from ((each, name) for each in found if (each, name) in new)


def _descendants(owner: type) -> list[type]:
    found = [owner]
    for each in owner.__subclasses__():
        found += [one for one in _descendants(each) if one not in found]
    return found


def connections() -> list[int]:
    """Descriptors of the connected TCP sockets of this process, oldest first."""
    found = []
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.getpeername()
                    found.append(number)
        except OSError:
            continue
    return found


def half_close(descriptors: list[int], chance: random.Random) -> None:
    """Shut one of them down: for writing, for reading, or both."""
    number = chance.choice(descriptors)
    how = chance.choice([socket.SHUT_WR, socket.SHUT_RD, socket.SHUT_RDWR])
    with socket.socket(fileno=os.dup(number)) as one:
        one.shutdown(how)
