"""A wire as torch.distributed.checkpoint wants it.

That keeps one copy of what has the same key on all ranks, so each vector is a tensor of [ranks,
numel] of which every rank holds its own row. All else is numbers in tensors of sizes that follow
from the model: what is not a tensor would be pickled.

    thinwire_ranks    [ranks]             1 each
    run               [4]                 step, seed in two halves, scale as bits
    tensors           [tensors, 3]        steps, bucket, place in it; -1 for none
    policy            [numbers]           what the policy knows, the same on all ranks
    state.PART.NAME   [ranks, numel]      what is remembered
    recalled.PART.NAME                    what a joint compressor finds again, the same on all ranks
"""

import struct
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thinwire.collectives.channel import process_group
from thinwire.collectives.numbers import GatherNumbers
from thinwire.collectives.states import state_from_bytes, state_to_bytes
from thinwire.compressors import JointCompressor
from thinwire.frames.code import wide_type
from thinwire.parallel.wire import VERSION, Wire
from thinwire.reducer.saved_state import gathered, whose
from thinwire.torch_internals import common_device

HALF = 1 << 32
RANKS = "thinwire_ranks"
LOCAL = "thinwire_local"


class Checkpoint:
    """A `Stateful` for torch.distributed.checkpoint; see `Wire.stateful`."""

    def __init__(self, wire: Wire, path: Any = None) -> None:
        self._wire = wire
        self._group = wire._state_group
        self._path = path

    def state_dict(self) -> dict[str, Any]:
        """What is to be saved, and at the same time the places that loading fills."""
        own = self._wire.state_dict()
        reducer = own["reducer"]
        saved = self._saved_ranks()
        kept = reducer["tensors"]
        state: dict[str, Any] = {
            RANKS: self._sharded(torch.ones(1, dtype=torch.int64), saved),
            "run": torch.tensor([own["step"], *divmod(reducer["seed"], HALF), _bits(own["scale"])]),
            "tensors": self._table(own),
            "policy": torch.tensor(own["policy"], dtype=torch.float64),
        }
        for part in self._wire._reducer.feedback.parts:
            for name, parameter in self._wire._remembered().items():
                wide = wide_type(parameter.dtype)
                row = kept.get(name, {}).get(part)
                if row is None:
                    row = torch.zeros(parameter.numel(), dtype=wide, device=parameter.device)
                state[f"state.{part}.{name}"] = self._sharded(row[None], saved)
        for name, part, shape, like in self._recalled():
            found = reducer["recalled"].get(name, {}).get(part)
            key = f"recalled.{part}.{name}"
            state[key] = like.new_zeros(shape) if found is None else found.to(like)
        return state

    def _recalled(self) -> list[tuple[str, str, tuple[int, ...], Tensor]]:
        """What joint compressors find again: name, part, shape, and a tensor of its type."""
        rows = []
        choices = self._wire._choices
        for name, parameter in self._wire._parameters.items():
            compressor = choices.compressor_of(name)
            # Of choices that change, the next process cannot know the shapes before it has loaded.
            if isinstance(compressor, JointCompressor) and choices.fixed:
                wide = wide_type(parameter.dtype)
                like = torch.empty(0, dtype=wide, device=parameter.device)
                for part, shape in compressor.recalls(parameter.shape).items():
                    rows.append((name, part, shape, like))
        return rows

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was loaded."""
        wire = self._wire
        names = list(wire._parameters)
        table = state["tensors"].tolist()
        saved = state[RANKS].shape[0]
        same = saved == dist.get_world_size(self._group)
        step, high, low, scale = state["run"].tolist()
        tensors: dict[str, dict[str, Any]] = {}
        for name, row in zip(names, table, strict=True):
            if row[0] < 0:
                continue
            tensors[name] = {"steps": row[0]}
            for part in wire._reducer.feedback.parts:
                key = f"state.{part}.{name}"
                if key not in state:  # for which `state_dict` had no place
                    raise ValueError(
                        f"{type(wire).__name__}: the checkpoint remembers a {part} of {name}, "
                        "which is sent uncompressed now: give the same exclude and min_numel"
                    )
                local = state[key].to_local()
                tensors[name][part] = local[0].clone() if same else self._mean(local, saved)
        recalled: dict[str, dict[str, Tensor]] = {}
        for name, part, _, _ in self._recalled():
            recalled.setdefault(name, {})[part] = state[f"recalled.{part}.{name}"].clone()
        wire.load_state_dict(
            {
                "version": VERSION,
                **whose(self._group),
                "step": step,
                "scale": _number(scale),
                "layout": _layout(names, table),
                "policy": state["policy"].tolist(),
                "reducer": {
                    "seed": high * HALF + low,
                    "feedback": str(wire._reducer.feedback),
                    "recalled": recalled,
                    "tensors": tensors,
                },
            }
        )

    def _table(self, own: dict[str, Any]) -> Tensor:
        places = {
            name: (i, j) for i, names in enumerate(own["layout"]) for j, name in enumerate(names)
        }
        reducer = own["reducer"]
        rows = []
        for name in self._wire._parameters:
            kept = reducer["tensors"].get(name, {})
            steps = kept["steps"] if len(kept) > 1 else -1
            rows.append([steps, *places.get(name, (-1, -1))])
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3)

    def _mean(self, rows: Tensor, saved: int) -> Tensor:
        """Of the rows of all ranks that saved, which are now spread over those that load."""
        total = rows.sum(0)
        dist.all_reduce(total, group=self._group)
        return total / saved

    def _sharded(self, row: Tensor, saved: int) -> DTensor:
        """[ranks, ...] of which this rank holds its row; to load, as many rows as were saved."""
        kind = row.device.type
        group: Any = dist.group.WORLD if self._group is None else self._group
        mesh = DeviceMesh.from_group(group, kind)
        size = mesh.size()
        if saved == size:
            return DTensor.from_local(row, mesh, [Shard(0)], run_check=False)
        each = -(-saved // size)
        mine = max(0, min(each, saved - each * mesh.get_local_rank()))
        local = row.new_zeros(mine, *row.shape[1:])
        shape = torch.Size([saved, *row.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def _saved_ranks(self) -> int:
        """How many ranks the checkpoint comes from; as many as there are now, if none is given."""
        if self._path is None:
            return dist.get_world_size(self._group)
        return self._saved_size(RANKS)[0]

    def _saved_size(self, wanted: str) -> torch.Size:
        """Of a tensor in the checkpoint."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        entries = FileSystemReader(self._path).read_metadata().state_dict_metadata
        for key, entry in entries.items():
            if key == wanted or key.endswith(f".{wanted}"):
                size: torch.Size = entry.size  # type: ignore[union-attr]
                return size
        raise ValueError(f"{self._path} holds no state of a {type(self._wire).__name__}")


class LocalCheckpoint(Checkpoint):
    """The same for local steps, see `LocalSteps.stateful`: all that a rank needs, its parameters
    and its optimizer's state too, as one row of bytes.

    thinwire_ranks    [ranks]             1 each
    thinwire_local    [ranks, bytes]      the states of the ranks
    """

    def state_dict(self) -> dict[str, Any]:
        if self._path is None:
            own = state_to_bytes(self._wire.state_dict())
            options = replace(self._wire._reducer.options, group=self._group)
            device = common_device(process_group(self._group))
            lengths = GatherNumbers([own.numel()], "lengths of states", device, options)
            lengths.start()
            length = int(max(row[0] for row in lengths.rows))
            row = own.new_zeros(1, length)
            row[0, : own.numel()] = own
            saved = dist.get_world_size(self._group)
        else:
            saved, length = self._saved_size(LOCAL)
            row = torch.zeros(1, length, dtype=torch.uint8)
        state: dict[str, Any] = {RANKS: self._sharded(torch.ones(1, dtype=torch.int64), saved)}
        same = saved == dist.get_world_size(self._group)
        state[LOCAL] = self._sharded(row, saved) if same else row.expand(saved, length).clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = state[LOCAL]
        if isinstance(rows, DTensor):
            self._wire.load_state_dict(state_from_bytes(rows.to_local()[0]))
        else:
            self._wire.load_state_dict(gathered([state_from_bytes(row) for row in rows]))


def _layout(names: list[str], table: list[list[int]]) -> list[list[str]]:
    """Buckets of names, from each name's place."""
    buckets: dict[int, dict[int, str]] = {}
    for name, (_, i, j) in zip(names, table, strict=True):
        if i >= 0:
            buckets.setdefault(i, {})[j] = name
    return [[own[j] for j in sorted(own)] for _, own in sorted(buckets.items())]


def _bits(scale: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", scale))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
