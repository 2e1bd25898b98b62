"""What exchanges cost and brought: bytes and seconds, by tensor and in total.

Counting takes a few microseconds an exchange. What would cost passes over the tensors (errors,
norms) is measured only when asked for.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from thinwire.torch_internals import profiler_range


def span(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range ``thinwire::name`` for torch's profiler, if one is running.

    Exchanges run on a thread of their own: the profiler sees its ranges with
    ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
    """
    return profiler_range(f"thinwire::{name}")


_listeners: list[Callable[[float, str, bool], None]] = []


def track(value: float, name: str = "metric", *, higher_is_better: bool = True) -> None:
    """Tell `thinwire compare` how good a model is, after a validation; elsewhere does nothing.

    Args:
        value: of the metric, the same on all ranks or only told by rank 0.
        name: of the metric, with its unit: "test accuracy, %".
    """
    for listener in _listeners:
        listener(float(value), name, higher_is_better)


def listen(listener: Callable[[float, str, bool], None]) -> None:
    """Have a function called by every `track`."""
    _listeners.append(listener)


Size = tuple[str, int, int]  # name, elements, bytes
Parts = tuple[Any, list[Size]]  # a compressor, and the tensors that are compressed together with it
SOME = 32  # exchanges that are booked together: alone each would find the caches cold


class Ended(Protocol):
    """An exchange with its account; see `thinwire.collectives.Handle`."""

    account: Any

    def is_completed(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class Named(Protocol):
    """Tensors that travelled together; see `thinwire.reducer.unit.Unit`."""

    names: tuple[str, ...]
    pieces: Any


@dataclass
class Parcel:
    """Tensors that are sent in one exchange, where they are no units."""

    names: tuple[str, ...]
    pieces: list[Any]


def parts_of(units: Sequence[Named], compressors: Sequence[Any]) -> list[Parts]:
    """The sizes of the tensors of each unit, beside its compressor."""
    sizes = [
        [
            (name, piece.numel(), piece.nbytes)
            for name, piece in zip(unit.names, unit.pieces, strict=True)
        ]
        for unit in units
    ]
    return list(zip(compressors, sizes, strict=True))


@dataclass
class Line:
    """What one tensor came to.

    Args:
        steps: times it was exchanged.
        numel: its elements.
        bytes_in: what a copy of it takes, for all steps.
        bytes_sent: its share of what this rank sent, by elements where tensors are compressed
            together.
        compressor: with which it travelled last.
        collective: through which.
        relative_error: ||p - C(p)|| / ||p|| when last measured, p being what was to be sent.
    """

    numel: int
    steps: int = 0
    bytes_in: int = 0
    bytes_sent: float = 0.0
    compressor: str = ""
    collective: str = ""
    relative_error: float | None = None

    @property
    def ratio(self) -> float:
        """Bytes of the tensor for each byte sent."""
        return self.bytes_in / self.bytes_sent if self.bytes_sent else float("inf")


@dataclass
class Ledger:
    """The lines of all tensors, and the seconds of all exchanges."""

    lines: dict[str, Line] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    network_bytes: int = 0
    between_bytes: int = 0
    exchanges: int = 0
    steps: int = 0  # that have ended
    steps_of_ddp: int = 0  # of these, carried out by DDP itself
    first_seconds: dict[str, float] = field(default_factory=dict)  # all until the end of the first
    _open: list[tuple[Ended, list[Parts]]] = field(default_factory=list)

    def note(self, handle: Ended, units: Sequence[Named], compressors: Sequence[Any]) -> None:
        """An exchange of units has begun, each with its compressor."""
        self._open.append((handle, parts_of(units, compressors)))
        self.fold()

    def note_again(self, handle: Ended, parts: list[Parts]) -> None:
        """An exchange like many before it has begun: it is booked when there are some of them."""
        self._open.append((handle, parts))
        if len(self._open) >= SOME:
            self.fold()

    def add_seconds(self, kind: str, seconds: float) -> None:
        """Time that went into something."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def end_step(self) -> None:
        """All exchanges of a step have ended and are booked."""
        self.steps += 1
        if self.steps == 1:
            self.first_seconds = dict(self.seconds)

    @property
    def seconds_per_step(self) -> dict[str, float]:
        """On average without the first step, which connects the ranks, if there are others."""
        if self.steps < 2:
            return {kind: seconds / max(1, self.steps) for kind, seconds in self.seconds.items()}
        return {
            kind: (seconds - self.first_seconds.get(kind, 0.0)) / (self.steps - 1)
            for kind, seconds in self.seconds.items()
        }

    def fold(self) -> None:
        """Book the exchanges that have ended."""
        running = []
        for entry in self._open:
            if not entry[0].is_completed():
                running.append(entry)
            elif entry[0].exception() is None:
                self._book(*entry)
        self._open = running

    def add_bytes(self, account: Any) -> None:
        """Those of an exchange that has ended, whatever it was about."""
        self.bytes_sent += account.bytes_sent
        self.bytes_received += account.bytes_received
        self.network_bytes += account.network_bytes
        self.between_bytes += account.between_bytes

    def _book(self, handle: Ended, units: list[Parts]) -> None:
        account = handle.account
        self.exchanges += account.exchanges
        self.add_bytes(account)
        for kind, seconds in account.seconds.items():
            self.add_seconds(kind, seconds)
        dense = [sum(num_bytes for _, _, num_bytes in sizes) for _, sizes in units]
        # What all of them came to, records and tables of lengths included, in the proportion of
        # what each was sent as.
        shares = account.tensor_bytes if any(account.tensor_bytes) else dense
        total = sum(shares) or 1
        for (compressor, sizes), share, whole in zip(units, shares, dense, strict=True):
            sent = account.bytes_sent * share / total
            for name, numel, num_bytes in sizes:
                line = self.lines.setdefault(name, Line(numel))
                line.steps += 1
                line.bytes_in += num_bytes
                line.bytes_sent += sent * num_bytes / (whole or 1)
                line.compressor, line.collective = str(compressor), account.collective
