"""What one rank measures of a training: loss, seconds and bytes after each step."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from thinwire.compare import counters
from thinwire.compare.events import tell

_EVERY = 0.3  # seconds between two lines on how far it has come


class Meter:
    """Counts from `start` on; what happens between `pause` and `resume` is left out."""

    def __init__(self, world: int, loopback: bool, speaks: bool) -> None:
        self._world, self._loopback, self._speaks = world, loopback, speaks
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.evaluations: list[tuple[int, float]] = []
        self._exposed = 0.0  # seconds that backward waited for the network at its end
        self._last_gradient = self._told = 0.0

    def watch(self, model: nn.Module) -> None:
        """Note when the last gradient is there: what backward takes from then on is waiting."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                hook(self._note_gradient)

    def _note_gradient(self, _: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def start(self) -> None:
        self._first_bytes = self._sent()
        self._begin = time.perf_counter()

    def pause(self) -> None:
        self._paused, self._paused_bytes = time.perf_counter(), self._sent()

    def resume(self) -> None:
        self._begin += time.perf_counter() - self._paused
        self._first_bytes += self._sent() - self._paused_bytes

    def backward_ended(self) -> None:
        if self._last_gradient:
            self._exposed += time.perf_counter() - self._last_gradient

    def stepped(self, loss: float, steps: int | None) -> None:
        now = time.perf_counter()
        self.losses.append(loss)
        self.seconds.append(now - self._begin)
        self.bytes.append(self._sent() - self._first_bytes)
        if self._speaks and (now - self._told >= _EVERY or len(self.losses) == steps):
            self._told = now
            tell(
                "step",
                step=len(self.losses),
                steps=steps,
                loss=loss,
                seconds=self.seconds[-1],
                bytes=self.bytes[-1],
            )

    def evaluated(self, value: float) -> None:
        self.evaluations.append((len(self.losses), value))

    def result(self, stats: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the run came to, in plain values; `stats` are thinwire's own, if it took part."""
        steps = max(1, len(self.losses))
        found: dict[str, Any] = {
            "losses": self.losses,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "evaluations": self.evaluations,
            "exposed": self._exposed / steps,
            "reported": None,
            "inside": {},
            "tensors": [],
        }
        if stats is not None:
            found["reported"] = stats["total"]["network_bytes"]
            found["inside"] = {
                kind: seconds / steps
                for kind, seconds in stats["seconds"].items()
                if kind in ("encode", "network", "decode")
            }
            found["tensors"] = [
                {"name": name, **{key: row[key] for key in _TENSOR}}
                for name, row in stats["tensors"].items()
            ]
        return found

    def _sent(self) -> int:
        return counters.sent(self._world, self._loopback)


_TENSOR = ("numel", "ratio", "relative_error", "bytes_sent", "compressor", "collective")
