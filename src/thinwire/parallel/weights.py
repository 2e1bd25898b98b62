"""The parameters of a sharded model, compressed on their way to all ranks.

Before each forward pass of a module FSDP gathers its parameters. Here every rank keeps what all of
them hold of the whole module, and a rank sends only how its own part has changed against that:

    difference <- own part - what all ranks hold of it
    all-gather the differences, compressed
    what all ranks hold <- the same plus all decoded differences

So all ranks, the sender too, go on with the same parameters, and what compression leaves out of a
difference is part of the next one: errors do not pile up. For backward nothing is sent, as it needs
what the forward pass had. Every `resync_every` gathers the parameters themselves are sent.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import check
from thinwire.collectives.allgather import AllGather
from thinwire.collectives.options import Options
from thinwire.compressors import Compressor, LocalCompressor, local_of
from thinwire.compressors.base import FLOATS
from thinwire.formatting import show_bytes
from thinwire.frames.code import wide_type
from thinwire.kernels import Key
from thinwire.parallel.shards import NamedGroup, stretches
from thinwire.reducer.units import STEPS, UNCOMPRESSED
from thinwire.telemetry import Ledger, Parcel, span
from thinwire.torch_internals import backward_pass


@dataclass(frozen=True)
class WeightSettings:
    """How parameters are sent.

    Args:
        compressor: of differences.
        resync_every: gathers of a module after which its parameters themselves are sent; 0 for
            never but the first time.
        exclude: patterns of names of parameters whose differences are sent uncompressed.
        seed: for compressors that draw random numbers.
    """

    compressor: LocalCompressor
    resync_every: int
    exclude: tuple[str, ...]
    seed: int

    @classmethod
    def of(
        cls, compressor: Compressor | str, resync_every: int, exclude: tuple[str, ...], seed: int
    ) -> "WeightSettings":
        check.whole("attach", "resync_every", resync_every, 0)
        return cls(local_of(compressor), resync_every, exclude, seed)


class DifferenceGather(AllGather):
    """Differences of one module's parameters; ranks must agree in which, and in how many there
    were before."""

    def __init__(
        self,
        what: str,
        output: Tensor,
        own: Tensor,
        compressor: LocalCompressor,
        options: Options,
        key: Key,
    ) -> None:
        super().__init__(output, own, None, compressor, options, key)
        self.details += (("parameters", f"{what}, gathered {key.step} times before"),)


class TorchMemory:
    """Buffers of FSDP's collectives, from torch's own allocator."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class WeightGather(TorchMemory):
    """The all-gather of one module, as FSDP calls it.

    Args:
        group: the module's parameters.
        options: the group of ranks, and the limits.
        ledger: in which bytes and seconds are noted.

    Attributes:
        count: gathers that have sent something.
    """

    def __init__(
        self, group: NamedGroup, settings: WeightSettings, options: Options, ledger: Ledger
    ) -> None:
        self._group, self._settings = group, settings
        self._options, self._ledger = options, ledger
        self.count = 0
        self._common: Tensor | None = None
        self._lost = False  # something of it is not finite
        self._saved_row: Tensor | None = None  # of it, from a checkpoint
        excluded: list[slice] = []
        chosen: list[slice] = []
        for shard, where in stretches(group.shards):
            exact = any(fnmatchcase(shard.name, pattern) for pattern in settings.exclude)
            (excluded if exact else chosen).append(where)
        self._tracks = [
            (compressor, places)
            for compressor, places in ((settings.compressor, chosen), (UNCOMPRESSED, excluded))
            if places
        ]

    @property
    def num_bytes(self) -> int:
        """That a copy of the module takes on each rank."""
        return sum(
            shard.count * shard.padded_numel * wide_type(shard.place.data.dtype).itemsize
            for shard in self._group.shards
        )

    @property
    def common(self) -> Tensor | None:
        """What all ranks hold, a row for each rank's part."""
        return self._common

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        if input_tensor.dtype not in FLOATS:
            raise TypeError(
                f"{self._group.title} gathers {input_tensor.dtype}: parameters that bring bytes of "
                "their own (float8 or int8 subclasses) are compressed already. Leave out weights="
            )
        size = dist.get_world_size(group)
        if size != self._group.shards[0].count:
            # After forward FSDP has cut them anew over fewer ranks (reshard_after_forward=n).
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        if self._common is None or backward_pass() < 0:
            begin = time.perf_counter()
            # What stays is written to in the next training step, also if an evaluation comes first.
            with span("gather"), torch.inference_mode(False), torch.no_grad():
                self._renew(input_tensor)
            self._ledger.add_seconds("gathering", time.perf_counter() - begin)
        assert self._common is not None
        output_tensor.view(size, -1).copy_(self._common)
        return None

    def _renew(self, own: Tensor) -> None:
        """Have all ranks hold what they have now."""
        wide, every = wide_type(own.dtype), self._settings.resync_every
        if self._saved_row is not None:
            self._common = self._gathered("saved parameters", self._saved_row, UNCOMPRESSED)
            self._saved_row = None
        due = every > 0 and self.count > 0 and self.count % every == 0
        if self._common is None or self._lost or due:
            self._common = self._gathered("all", own.to(wide), UNCOMPRESSED)
            arrived = [self._common]
        else:
            difference = own.to(wide) - self._common[self._group.shards[0].index]
            arrived = [
                self._gathered("differences", _cat(difference, places), compressor)
                for compressor, places in self._tracks
            ]
            for rows, (_, places) in zip(arrived, self._tracks, strict=True):
                widths = [place.stop - place.start for place in places]
                for place, part in zip(places, rows.split(widths, 1), strict=True):
                    self._common[:, place].add_(part)
        # The same on all ranks. A difference to NaN is NaN.
        self._lost = not all(bool(torch.isfinite(rows).all()) for rows in arrived)
        self.count += 1

    def _gathered(self, what: str, own: Tensor, compressor: LocalCompressor) -> Tensor:
        """What ranks have, a row for each."""
        rows = own.new_empty(self._group.shards[0].count, own.numel())
        title = f"{self._group.title} (parameters)"
        key = Key(self._settings.seed, self.count % STEPS, zlib.crc32(title.encode()))
        exchange = DifferenceGather(
            f"{what} of {self._group.title}", rows, own, compressor, self._options, key
        )
        handle = exchange.start(async_op=True)
        self._ledger.note(handle, [Parcel((title,), [own])], [compressor])
        handle.wait()
        return rows

    # Checkpoints hold a rank's own part of what all ranks hold.

    def state(self) -> dict[str, Any]:
        row = self._saved_row
        if row is None and self._common is not None:
            row = self._common[self._group.shards[0].index].clone()
        return {"count": self.count, **({} if row is None else {"row": row})}

    def check(self, state: Any) -> None:
        """Refuse what cannot be a state of it."""
        who = f"Wire: parameters of {self._group.title}"
        if not isinstance(state, dict) or not check.is_whole(state.get("count")):
            raise ValueError(f"{who}: not a state of them")
        row, numel = state.get("row"), sum(s.padded_numel for s in self._group.shards)
        if row is not None and (not isinstance(row, Tensor) or row.numel() != numel):
            raise ValueError(f"{who}: the model has changed")

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from a state; from nothing if it comes from another number of ranks."""
        self._common, self._saved_row, self.count, self._lost = None, None, 0, False
        if state is not None and "row" in state:
            device = self._group.shards[0].place.data.device
            self._saved_row, self.count = state["row"].to(device), state["count"]


def _cat(flat: Tensor, places: Sequence[slice]) -> Tensor:
    parts = [flat[place] for place in places]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def explanation(gathers: Sequence[WeightGather], settings: WeightSettings) -> str:
    """In plain words."""
    taken = show_bytes(sum(gather.num_bytes for gather in gathers))
    again = f"whole every {settings.resync_every} times" if settings.resync_every else "whole once"
    return (
        f"Parameters are gathered as differences to what all ranks hold ({settings.compressor}), "
        f"{again}, and not again for backward: a copy of the model takes {taken} of memory on "
        "each rank."
    )
