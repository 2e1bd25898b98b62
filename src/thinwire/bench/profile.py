"""A training step on this machine, alone: how long it takes, and when each gradient is there.

`python -m thinwire.bench.profile SCRIPT [ARGUMENTS]` runs a script as the only rank, watches the
first optimizer that steps, prints a line of JSON after a few steps and ends. What it takes apart is
one process on this machine: no network, no other ranks.
"""

import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.plan.sizes import Layer, LayeredModel
from thinwire.workloads import workload

STEPS, SKIPPED = 12, 3  # that are timed, and before them, while kernels and buffers are made
MARK = "thinwire.profile "


class StepProfile(NamedTuple):
    """A step of one rank alone."""

    seconds: float
    model: LayeredModel


class StepWatch:
    """Notes when gradients arrive and when steps end.

    Args:
        named: parameters by name, in the order of the model.
    """

    def __init__(self, named: dict[str, Tensor]) -> None:
        self._named = {name: p for name, p in named.items() if p.requires_grad}
        self._times: dict[str, list[float]] = {name: [] for name in self._named}
        self._lengths: list[float] = []
        self._arrived: dict[str, float] = {}
        self._begin = time.perf_counter()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._noting(name))
            for name, parameter in self._named.items()
        ]

    def _noting(self, name: str) -> Any:
        def note(_: Tensor) -> None:
            self._arrived[name] = time.perf_counter() - self._begin

        return note

    def stepped(self) -> bool:
        """A step has ended; whether enough have."""
        now = time.perf_counter()
        length, self._begin = now - self._begin, now
        arrived, self._arrived = self._arrived, {}
        self._lengths.append(length)
        for name, seconds in arrived.items():
            self._times[name].append(seconds / length)
        return len(self._lengths) >= STEPS + SKIPPED

    def profile(self) -> StepProfile:
        for handle in self._handles:
            handle.remove()
        layers = [
            Layer(name, tuple(p.shape), statistics.median(times) if times else 1.0)
            for (name, p), times in zip(
                self._named.items(), (each[SKIPPED:] for each in self._times.values()), strict=True
            )
        ]
        seconds = statistics.median(self._lengths[SKIPPED:])
        return StepProfile(seconds, LayeredModel(tuple(layers)))


def profile_workload(spec: str) -> StepProfile:
    """A step of a bundled workload, with the threads that torch has."""
    task = workload(spec)
    model = task.model()
    optimizer = task.optimizer(model)
    watch = StepWatch(dict(model.named_parameters()))
    for batch in task.batches():
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        if watch.stepped():
            break
    return watch.profile()


def profile_script(script: Path, arguments: Sequence[str], patience: float) -> StepProfile:
    """A step of a user's script, run in a process of its own as the only rank.

    Raises ValueError with the end of what the script said.
    """
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    command = [sys.executable, "-m", "thinwire.bench.profile", str(script), *arguments]
    try:
        done = subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, timeout=patience
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{script} made fewer than {STEPS + SKIPPED} optimizer steps in {patience:g} s: give "
            "--parameters and --step instead"
        ) from None
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return from_json(json.loads(line.removeprefix(MARK)))
    said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
    raise ValueError(
        f"{script} ended before {STEPS + SKIPPED} optimizer steps (exit code {done.returncode}): "
        f"{said or 'it said nothing'}"
    )


def _free_port() -> str:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def to_json(profile: StepProfile) -> dict[str, Any]:
    layers = [layer._asdict() for layer in profile.model.layers]
    return {"seconds": profile.seconds, "layers": layers}


def from_json(document: dict[str, Any]) -> StepProfile:
    layers = [
        Layer(each["name"], tuple(each["shape"]), each["ready"]) for each in document["layers"]
    ]
    return StepProfile(document["seconds"], LayeredModel(tuple(layers)))


class _Enough(BaseException):
    """Ends a script from inside of its optimizer."""


def main(words: list[str]) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    watches: dict[int, StepWatch] = {}

    def stepped(optimizer: Any, *_: Any) -> None:
        if not watches:
            named = {
                f"{group}.{number}": parameter
                for group, members in enumerate(optimizer.param_groups)
                for number, parameter in enumerate(members["params"])
            }
            watches[id(optimizer)] = StepWatch(named)
        watch = watches.get(id(optimizer))
        if watch is not None and watch.stepped():
            print(f"\n{MARK}{json.dumps(to_json(watch.profile()))}", flush=True)
            raise _Enough

    register_optimizer_step_post_hook(stepped)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except _Enough:
        # Threads of the script's own (data loaders, process groups) must not keep this process.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
