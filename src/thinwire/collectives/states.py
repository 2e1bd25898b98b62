"""Nested dictionaries and lists of tensors and plain values, from every rank to the first."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.channel import process_group
from thinwire.collectives.exchange import Exchange
from thinwire.collectives.options import Options
from thinwire.collectives.transport import Transport
from thinwire.torch_internals import common_device

ROUND = 1 << 28  # bytes that all ranks together send at once, and the first one holds twice
LEAST = 1 << 16  # bytes that a rank sends at once
LENGTH = 8  # bytes that say how long the text of a state is


class GatherStates(Exchange):
    """Brings what each rank has to the first rank of the group, into the host's memory.

    Text is sent as JSON and tensors as their bytes: nothing that arrives is executed.

    Args:
        state: of this rank: dictionaries by strings or whole numbers, and lists, of tensors,
            numbers, strings, bools and None.
        what: it is, in words: ranks must agree in it.
        everywhere: bring it to all ranks, each of which then holds all of it.

    Attributes:
        states: of all ranks, in their order, when it has ended; none where they are not brought to.
    """

    def __init__(
        self, state: Any, what: str, options: Options, *, everywhere: bool = False
    ) -> None:
        nothing = torch.empty(0, device=common_device(process_group(options.group)))
        super().__init__("gather", [nothing], options, what=f"gathering of {what}")
        self.states: list[Any] = []
        self._state, self._everywhere = state, everywhere
        self.details = (("what", what), ("everywhere", f"{everywhere}"))

    def alone(self) -> None:
        self.prepare()
        tensors = [tensor.to("cpu", copy=True) for tensor in self._tensors]
        self.states = [_restored(json.loads(self._text), tensors)]

    def prepare(self) -> None:
        self._tensors: list[Tensor] = []
        self._text = json.dumps(_written(self._state, self._tensors, ""))
        self._total = sum(tensor.nbytes for tensor in self._tensors)

    def exchange(self, transport: Transport) -> None:
        text = torch.frombuffer(bytearray(self._text.encode()), dtype=torch.uint8)
        records = transport.meet([text.numel(), self._total])
        texts = self._bring(transport, text, [record.numbers[0] for record in records])
        totals = [record.numbers[1] for record in records]
        wanted = [json.loads(bytes(each.numpy())) for each in texts]
        found = [_empty(tree, total) for tree, total in zip(wanted, totals, strict=bool(wanted))]
        # In rounds: nobody has to hold a state a second time.
        length = max(ROUND // self.size, LEAST)
        for begin in range(0, max(totals), length):
            pieces = [each.cpu() for each in _stretch(self._tensors, begin, begin + length)]
            mine = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
            lengths = [max(0, min(length, total - begin)) for total in totals]
            for tensors, got in zip(found, self._bring(transport, mine, lengths), strict=True):
                rooms = _stretch(tensors, begin, begin + length)
                for room, part in zip(rooms, got.split([r.numel() for r in rooms]), strict=True):
                    room.copy_(part)
        self._found = [_restored(tree, own) for tree, own in zip(wanted, found, strict=True)]

    def _bring(self, transport: Transport, mine: Tensor, lengths: list[int]) -> list[Tensor]:
        """The messages of all ranks, where they are wanted."""
        mine, none = mine.to(self.device), mine.new_empty(0, device=self.device)
        if self._everywhere:
            return [each.cpu() for each in transport.gather(mine, lengths)]
        sent = [mine, *[none] * (self.size - 1)]
        got = transport.swap(sent, lengths if self.rank == 0 else [0] * self.size)
        return [each.cpu() for each in got] if self.rank == 0 else []

    def finish(self) -> None:
        self.states = self._found


def state_to_bytes(state: Any) -> Tensor:
    """What `GatherStates` takes, as bytes in the host's memory; read by `state_from_bytes`."""
    tensors: list[Tensor] = []
    text = json.dumps(_written(state, tensors, "")).encode()
    head = bytearray(len(text).to_bytes(LENGTH, "little") + text)
    pieces = [piece.cpu() for piece in _stretch(tensors, 0, sum(t.nbytes for t in tensors))]
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *pieces])


def state_from_bytes(data: Tensor) -> Any:
    """The state that was written as these bytes; what follows it is not looked at."""
    if data.numel() < LENGTH:
        raise ValueError(f"not a state: only {data.numel()} bytes")
    begin = LENGTH + int.from_bytes(bytes(data[:LENGTH].numpy()), "little")
    tree = json.loads(bytes(data[LENGTH:begin].numpy()))
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in _kinds(tree)]
    total = sum(tensor.nbytes for tensor in tensors)
    if data.numel() - begin < total:
        raise ValueError(f"not a whole state: {total - data.numel() + begin} bytes are missing")
    rooms = _stretch(tensors, 0, total)
    parts = data[begin : begin + total].split([r.numel() for r in rooms])
    for room, part in zip(rooms, parts, strict=True):
        room.copy_(part)
    return _restored(tree, tensors)


# A tree in JSON: what JSON has not is a list that begins with a word.


def _written(value: Any, tensors: list[Tensor], path: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            raise TypeError(f"{path}: a tensor that is not dense, real and plain")
        tensors.append(value.detach())
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, Mapping):
        pairs = []
        for key, entry in value.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"{path}: a key must be a string or a whole number, got {key!r}")
            pairs.append([key, _written(entry, tensors, f"{path}.{key}".lstrip("."))])
        return ["dict", pairs]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_written(e, tensors, f"{path}.{i}") for i, e in enumerate(value)]]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", repr(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path}: tensors and plain values can be gathered, not {type(value).__name__}")


def _restored(tree: Any, tensors: list[Tensor]) -> Any:
    return _read(tree, iter(tensors))


def _read(tree: Any, tensors: Any) -> Any:
    if not isinstance(tree, list):
        return tree
    match tree:
        case ["tensor", _, _]:
            return next(tensors)
        case ["dict", pairs]:
            return {key: _read(entry, tensors) for key, entry in pairs}
        case ["list", entries]:
            return [_read(entry, tensors) for entry in entries]
        case ["tuple", entries]:
            return tuple(_read(entry, tensors) for entry in entries)
        case ["float", text]:
            return float(text)
    raise ValueError(f"not a tree: {tree!r:.60}")


def _kinds(tree: Any) -> list[tuple[torch.dtype, list[int]]]:
    """Type and shape of each tensor of a tree, in the order of `_written`."""
    match tree:
        case ["tensor", dtype, shape]:
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise ValueError(f"not a type of tensors: {dtype!r}")
            return [(kind, shape)]
        case ["dict", pairs]:
            return [kind for _, entry in pairs for kind in _kinds(entry)]
        case ["list" | "tuple", entries]:
            return [kind for entry in entries for kind in _kinds(entry)]
    return []


def _empty(tree: Any, num_bytes: int) -> list[Tensor]:
    """Room for the tensors of a tree, which come to so many bytes."""
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in _kinds(tree)]
    if sum(tensor.nbytes for tensor in tensors) != num_bytes:
        raise ValueError(f"the tensors of a rank's state do not come to {num_bytes} bytes")
    return tensors


def _stretch(tensors: list[Tensor], begin: int, end: int) -> list[Tensor]:
    """The bytes from `begin` to `end` of all the tensors, one behind the other, as views where that
    is possible."""
    pieces, at = [], 0
    for tensor in tensors:
        lo, hi = max(begin - at, 0), min(end - at, tensor.nbytes)
        if lo < hi:
            pieces.append(tensor.contiguous().view(-1).view(torch.uint8)[lo:hi])
        at += tensor.nbytes
    return pieces
