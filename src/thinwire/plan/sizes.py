"""What a model's exchanges are: from its number of parameters, or from its layers.

`UniformModel` knows only how many parameters there are, and takes them for those of a transformer
in the proportions of GPT-2: d / 64 layers of width d, each with 12 d^2 parameters in matrices and
13 d in tensors of one dimension. `LayeredModel` knows every tensor, and asks DDP's rule for buckets
and thinwire's own `Planner` what is sent when.
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from thinwire.collectives.costs import FORWARD, Coding, Due
from thinwire.compressors import Compressor, JointCompressor
from thinwire.parallel.plan import DENSE_ENOUGH, Piece, PlannedExchange, Planner
from thinwire.policies.codecs import WIDTH, CodecTable

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, as DDP fills buckets
MIN_NUMEL = 1024  # elements below which tensors are sent uncompressed, as `attach` has it
WIDTH_PER_LAYER = 64  # d / layers of GPT-2 and its like
MATRICES, VECTORS = 12, 13  # of a layer: times d^2 and d
# Sum over a layer's matrices (3d x d, d x d, 4d x d, d x 4d) of rows and of columns, in d.
ROWS, COLUMNS = 3 + 1 + 4 + 1, 1 + 1 + 1 + 4
SMALL_MODULE = 0.01  # of the parameters: less is not worth sharding by itself
MOST_HEADER = 100 << 20  # bytes of a safetensors header, the format's own limit
JSON_INDEX = ".safetensors.index.json"


class Model(Protocol):
    """What is exchanged per step, and when."""

    @property
    def parameters(self) -> int: ...

    def plain(self) -> list[Due]:
        """Buckets of plain DDP, in their order."""
        ...

    def compressed(self, compressor: Compressor | None, table: CodecTable, ranks: int) -> list[Due]:
        """Exchanges of thinwire's hook among so many ranks."""
        ...

    def fragment(
        self, compressor: Compressor | None, table: CodecTable, fragments: int
    ) -> list[Due]:
        """Exchanges of one of so many parts, all at once, as local steps send them."""
        ...

    def modules(self) -> list[float]:
        """Elements of the parts that FSDP shards each by itself."""
        ...


# Parameters alone. JavaScript has these functions too.


def width_of(parameters: float) -> float:
    """d of a transformer with so many parameters."""
    return float((WIDTH_PER_LAYER * parameters / MATRICES) ** (1 / 3))


def vector_share(parameters: float) -> float:
    """The share of parameters in tensors of one dimension, which are sent uncompressed."""
    return VECTORS / (MATRICES * width_of(parameters) + VECTORS)


def low_rank_bytes(parameters: float, rank: float) -> tuple[float, float]:
    """Bytes per element that PowerSGD of a rank sends, and the share of its first sum.

    That has M Q of each matrix and all vectors, the second one has M^T P.
    """
    d, vectors = width_of(parameters), vector_share(parameters)
    # Not a low rank of matrices as small as this.
    share = min(1.0, rank * (ROWS + COLUMNS) / (MATRICES * d))
    first = vectors + (1 - vectors) * share * ROWS / (ROWS + COLUMNS)
    second = (1 - vectors) * share * COLUMNS / (ROWS + COLUMNS)
    return WIDTH * (first + second), first / (first + second)


def uniform_buckets(parameters: float) -> list[tuple[float, float]]:
    """Elements of each bucket, and when it is full as a share of the step."""
    buckets: list[tuple[float, float]] = []
    done = 0.0
    while done < parameters:
        room = (FIRST_BUCKET if not buckets else BUCKET) / WIDTH
        numel = min(room, parameters - done)
        done += numel
        buckets.append((numel, FORWARD + (1 - FORWARD) * done / parameters))
    return buckets


def uniform_exchanges(parameters: float, coding: Coding, uncompressed: Coding) -> list[Due]:
    """What thinwire sends of such buckets: vectors wait until they are worth an exchange."""
    if coding.kind == "joint":
        return [Due(coding, parameters, 1.0)]
    if coding.kind == "plain":
        return [Due(coding, numel, ready) for numel, ready in uniform_buckets(parameters)]
    vectors, pending, due = vector_share(parameters), 0.0, []
    buckets = uniform_buckets(parameters)
    for number, (numel, ready) in enumerate(buckets):
        due.append(Due(coding, (1 - vectors) * numel, ready))
        pending += vectors * numel
        if WIDTH * pending >= DENSE_ENOUGH or number == len(buckets) - 1:
            due.append(Due(uncompressed, pending, ready))
            pending = 0.0
    return due


@dataclass(frozen=True)
class UniformModel:
    """A transformer of which only the number of parameters is known."""

    parameters: int

    def plain(self) -> list[Due]:
        return uniform_exchanges(self.parameters, Coding("plain"), Coding("plain"))

    def compressed(self, compressor: Compressor | None, table: CodecTable, ranks: int) -> list[Due]:
        return uniform_exchanges(
            self.parameters, self.coding(compressor, table), table.coding(None)
        )

    def coding(self, compressor: Compressor | None, table: CodecTable) -> Coding:
        """What a compressor costs on such a model."""
        if isinstance(compressor, JointCompressor):
            return table.coding(compressor, *self._joint_bytes(compressor))
        return table.coding(compressor)

    def _joint_bytes(self, compressor: JointCompressor) -> tuple[float, float]:
        rank = getattr(compressor, "rank", None)
        if rank is not None:
            return low_rank_bytes(self.parameters, rank * getattr(compressor, "iterations", 1))
        # A matrix as a layer of this width has: its share is that of all.
        d, vectors = round(width_of(self.parameters)), vector_share(self.parameters)
        share = compressor.sent(torch.Size((d, 4 * d))) / (4 * d * d)
        return WIDTH * ((1 - vectors) * min(1.0, share) + vectors), 0.5

    def fragment(
        self, compressor: Compressor | None, table: CodecTable, fragments: int
    ) -> list[Due]:
        coding = self.coding(compressor, table)
        numel, vectors = self.parameters / fragments, vector_share(self.parameters)
        if coding.kind == "joint":
            return [Due(coding, numel, 1.0)]
        return [
            Due(table.coding(None), vectors * numel, 1.0),
            Due(coding, (1 - vectors) * numel, 1.0),
        ]

    def modules(self) -> list[float]:
        count = max(1, round(width_of(self.parameters) / WIDTH_PER_LAYER))
        return [self.parameters / count] * count


# Layers


class Layer(NamedTuple):
    """A tensor of a model.

    Args:
        ready: when its gradient is there, as a share of the step; None if that is not known.
    """

    name: str
    shape: tuple[int, ...]
    ready: float | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayeredModel:
    """A model of which every tensor is known, in the order of its parameters."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("a model must have at least one tensor with elements in it")

    @property
    def parameters(self) -> int:
        return sum(layer.numel for layer in self.layers)

    def buckets(self) -> list[tuple[list[Layer], float]]:
        """Layers as DDP puts them into buckets, the last ones first, and when each is full."""
        buckets: list[tuple[list[Layer], float]] = []
        own: list[Layer] = []
        size, done, ready = 0, 0, 0.0
        layers = [layer for layer in reversed(self.layers) if layer.numel]
        for layer in layers:
            own.append(layer)
            size += WIDTH * layer.numel
            done += layer.numel
            by_size = FORWARD + (1 - FORWARD) * done / self.parameters
            ready = max(ready, by_size if layer.ready is None else layer.ready)
            if size >= (FIRST_BUCKET if not buckets else BUCKET):
                buckets.append((own, ready))
                own, size = [], 0
        if own:
            buckets.append((own, ready))
        return buckets

    def plain(self) -> list[Due]:
        return [
            Due(Coding("plain"), sum(layer.numel for layer in bucket), ready)
            for bucket, ready in self.buckets()
        ]

    def compressed(self, compressor: Compressor | None, table: CodecTable, ranks: int) -> list[Due]:
        buckets = self.buckets()
        planner, due = Planner(self._choice(compressor), "bucket", size=ranks), []
        for number, (bucket, ready) in enumerate(buckets):
            last = number == len(buckets) - 1
            pieces = [Piece(each.name, WIDTH * each.numel, torch.float32) for each in bucket]
            due += [
                self._due(compressor, planned, table, ready)
                for planned in planner.add(pieces, last)
            ]
        return due

    def _choice(self, compressor: Compressor | None) -> Callable[[str], Compressor | None]:
        shapes = {layer.name: layer.shape for layer in self.layers}

        def choose(name: str) -> Compressor | None:
            shape = shapes[name]
            small = len(shape) < 2 or math.prod(shape) < MIN_NUMEL
            return None if small else compressor

        return choose

    def _due(
        self,
        compressor: Compressor | None,
        planned: PlannedExchange,
        table: CodecTable,
        ready: float,
    ) -> Due:
        own = [layer for layer in self.layers if layer.name in planned.names]
        numel = sum(layer.numel for layer in own)
        if not planned.compressed:
            return Due(table.coding(None), numel, ready)
        if not isinstance(compressor, JointCompressor):
            names = {n for unit in planned.units if unit.compressor for n in unit.names}
            compressed = sum(layer.numel for layer in own if layer.name in names)
            coding = table.coding(compressor)
            # What rides along is sent as it is, in the same message.
            riding = WIDTH * (numel - compressed) / compressed
            return Due(coding._replace(frame=coding.frame + riding), compressed, ready)
        coding = table.joint_coding(compressor, [torch.Size(layer.shape) for layer in own])
        return Due(coding, numel, ready)

    def fragment(
        self, compressor: Compressor | None, table: CodecTable, fragments: int
    ) -> list[Due]:
        planner = Planner(self._choice(compressor), "bucket", size=2, apart=True)
        pieces = [Piece(each.name, WIDTH * each.numel, torch.float32) for each in self.layers]
        planned = planner.add(pieces, last=True)
        found = [self._due(compressor, each, table, 1.0) for each in planned]
        return [due._replace(numel=due.numel / fragments) for due in found]

    def modules(self) -> list[float]:
        """Tensors that share a name up to a number: "blocks.3.mlp.weight" belongs to blocks.3. What
        is small, or has no number, belongs to the model as a whole."""
        found: dict[str, float] = {}
        for layer in self.layers:
            words = layer.name.split(".")
            number = next((i for i, word in enumerate(words) if word.isdigit()), None)
            module = ".".join(words[: number + 1]) if number is not None else ""
            found[module] = found.get(module, 0.0) + layer.numel
        least = SMALL_MODULE * self.parameters
        large = [numel for name, numel in found.items() if name and numel >= least]
        rest = self.parameters - sum(large)
        return [*large, rest] if rest else large


def read_layers(path: Path) -> LayeredModel:
    """The layers in a safetensors file, or in the index of several.

    Only headers are read. Raises ValueError.
    """
    if path.is_dir():
        indices = [*sorted(path.glob(f"*{JSON_INDEX}")), *sorted(path.glob("*.safetensors"))]
        if not indices:
            raise ValueError(f"{path}: expected a .safetensors file in it, found none")
        path = indices[0]
    if path.name.endswith(JSON_INDEX):
        files = _indexed(path)
    elif path.suffix == ".safetensors":
        files = [path]
    else:
        raise ValueError(
            f"{path}: expected a .safetensors file, its index or a folder with one. Other "
            "checkpoints are pickles, which run what they hold: save the weights as safetensors, "
            "or give --parameters"
        )
    layers = [layer for file in files for layer in _header(file)]
    try:
        return LayeredModel(tuple(layers))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _indexed(path: Path) -> list[Path]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        return [path.parent / name for name in dict.fromkeys(map(str, names))]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not an index of safetensors files: {error}") from None


def _header(path: Path) -> list[Layer]:
    """Names and shapes of the float tensors in a file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MOST_HEADER:
                raise ValueError(f"a header of {length:,} bytes")
            header = json.loads(file.read(length))
        return [
            Layer(str(name), tuple(int(n) for n in entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__" and str(entry["dtype"]).startswith(("F", "BF"))
        ]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from None


def layers_of(named: Sequence[tuple[str, Sequence[int]]]) -> LayeredModel:
    """A model of these tensors."""
    return LayeredModel(tuple(Layer(name, tuple(shape)) for name, shape in named))
