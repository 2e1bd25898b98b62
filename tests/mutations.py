"""Damaged and hostile frames and containers, the checksum mostly right: valid ones changed at
random, and trees of codes with numbers that no writer uses.

Shared by test_frames.py, test_hostile_frames.py, trials.py and benchmarks/fuzz.py.
"""

import dataclasses
import random
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from tensors import content, normal
from torch import Tensor

import thinwire as tw
from thinwire.frames.code import Code, Extent, as_bytes, varint
from thinwire.frames.frame import MAX_NUMEL as MOST_BY_DEFAULT
from thinwire.frames.frame import _order
from thinwire.frames.header import (
    ALIGNMENT,
    CHECKSUM,
    CODES,
    CONTAINER,
    DTYPES,
    FIXED,
    LONGEST_HEADER,
    header_bytes,
    read_header,
)
from thinwire.frames.packing import COUNTED, HEAD
from thinwire.frames.positions import Overlay, Seeded, Sparse
from thinwire.frames.zipped import Zipped
from thinwire.kernels.cpu.checksum import _sum

F32 = torch.float32
NESTING = {kind.id for kind in (Sparse, Seeded, Overlay, Zipped)}
MAX_NUMEL = 1 << 20  # that a reader of these frames expects, where it says so
LONGEST = 1 << 16  # bytes that a mutation makes a frame at most

SPECS = [
    *("none", "lossless", "lossless:zlib", "cast:fp16", "cast:bf16", "cast:fp8", "cast:fp8,8"),
    *("topk:0.02", "topk:0.2", "topk:0.9", "randomk:0.1,shared=true", "bernoulli:0.2,shared=true"),
    *("threshold:0.5", "quantize:8", "quantize:4,8", "quantize:2,none", "quantize:4,entropy=true"),
    *("quantize:8,symmetric=false", "quantize:2,8,symmetric=false", "qsgd:2,8", "qsgd:7,none"),
    *("qsgd:7,entropy=true", "onebit:8", "onebit:none", "scaledsign", "terngrad", "natural"),
    *("tiered:0.1", "tiered:0.1,large=(none),small=(onebit)", "topk:0.3|quantize:4"),
    *("topk:0.3|qsgd:7,entropy=true|lossless:zlib", "quantize:4|lossless", "topk:0.5|topk:0.5"),
    *("randomk:0.2,shared=true|cast:fp16", "topk:0.5|tiered:0.1|lossless", "twobit:8"),
    *("twobit:none", "topk:0.3,chunk=16|twobit"),
]


def repair(data: bytearray) -> None:
    """Give a frame a right checksum.

    In NumPy, and past everything that the reader does about it: most of the time that a mutation
    takes to make went there.
    """
    if len(data) < CHECKSUM.stop:
        return
    words = np.frombuffer(data + bytes(-len(data) % 8), np.uint64)
    total = int(words[0]) + int(_sum(words[CHECKSUM.stop // 8 :], 0))
    data[CHECKSUM] = (total & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")


def seal(data: bytes) -> Tensor:
    """Bytes as a frame with a right checksum."""
    frame = bytearray(data)
    repair(frame)
    return torch.from_numpy(np.frombuffer(frame, np.uint8).copy())


def frame_of(
    code: Code, dtype: torch.dtype, shape: list[int], *sections: Tensor, non_finite: bool = False
) -> Tensor:
    """A frame put together by hand, whether it makes sense or not."""
    data = header_bytes(code, dtype, shape, non_finite, 0)  # type: ignore[arg-type]
    for i in _order([section.dtype for section in sections]):
        data += as_bytes(sections[i]).numpy().tobytes()
    return seal(data)


class ValidFrame(NamedTuple):
    """A frame to damage."""

    data: bytes
    head: int  # bytes of its header
    codes: int  # a bit for the id of every code in it


def valid_frames() -> list[ValidFrame]:
    """Small frames of every code and element type."""
    payloads = []
    for i, spec in enumerate(SPECS):
        for j, n in enumerate((0, 1, 9, 100, 300)):
            dtype = (torch.float32, torch.float64, torch.float16, torch.bfloat16)[(i + j) % 4]
            shape = (n,) if n != 100 else (4, 1, 25)
            x = normal(n, i, dtype).view(shape)
            payloads.append(tw.parse(spec).encode(x, key=tw.Key(i, j)))
    payloads.append(tw.TopK(0.1).encode(torch.full((50,), float("nan"))))
    raw = content("normal", 30, torch.float32, 0) * 50
    payloads += [tw.NoCompression().encode(raw.to(dtype)) for dtype in DTYPES]
    payloads += [tw.Lossless().encode(raw.to(dtype).repeat(9)) for dtype in DTYPES]
    return [_valid(payload) for payload in payloads]


def _valid(payload: tw.Payload) -> ValidFrame:
    codes = 0
    for code in (payload.code, *payload.code.descendants()):
        codes |= 1 << code.id
    return ValidFrame(tw.pack(payload).numpy().tobytes(), len(payload.header), codes)


def implied(data: bytes | bytearray, most: int = MAX_NUMEL) -> int:
    """The length of the frame that a header implies; 0 if that is none worth making."""
    try:
        header = read_header(bytes(data[:LONGEST_HEADER]), most)
        extent = Extent(header.dtype, header.shape.numel())
        size = header.length + header.code.section_bytes(extent)
    except (tw.FrameError, ZeroDivisionError, KeyError):
        return 0
    return size if size <= LONGEST else 0


def claim(head: bytes, fill: int) -> Tensor:
    """A frame of this header, with a right checksum and one byte repeated for its body."""
    return seal(head + bytes([fill]) * max(0, implied(head) - len(head)))


NUMBERS = [
    *(0, 1, 2, 3, 4, 7, 8, 9, 16, 63, 64, 127, 128, 255, 256, 1100, 4096, 1 << 20, 1 << 31),
    *(1 << 32, (1 << 32) + 1, 1 << 48, (1 << 63) - 8, 1 << 63, (1 << 64) - 8, (1 << 64) - 1),
]
# Numbers of elements, and those around the limits of a reader that expects so many, and of one that
# does not: 2^26 of four bytes each are the memory that any frame may take. Few of the latter are
# made, since a frame that passes takes a thousand times as long as others.
SIZES = [0, 2, 8, 50, 256, 1000, 1 << 10, 1 << 12, 1 << 14]
EXPECTED = [1 << 16, 1 << 18, MAX_NUMEL, MAX_NUMEL + 1, 1 << 32]
UNEXPECTED = [
    *(MAX_NUMEL + 1, 1 << 22, 1 << 24, 1 << 25, 1 << 26, (1 << 26) + 1, 1 << 28, 1 << 31),
    *((1 << 32) - 1, 1 << 32, (1 << 32) + 1),
]
BYTES = [0, 1, 2, 3, 4, 8, 0x7F, 0x80, 0xFF]
NAMES = [b"", b"a", b"b", b"weight", b"layer.0.bias", "\N{GREEK SMALL LETTER ALPHA}".encode()]
FIELDS = {
    kind: [(field.name, field.type in ("Code", Code)) for field in dataclasses.fields(kind)]
    for kind in CODES.values()
}
KINDS = list(CODES.values())
LEAVES = [kind for kind in KINDS if kind.id not in NESTING]


class Mutation(NamedTuple):
    """A frame or container that is probably not valid."""

    data: bytes | bytearray
    kind: str  # what was done to it
    codes: int  # a bit for the id of every code that it was made from
    by_default: bool  # read without a word on how many elements are expected

    @property
    def is_container(self) -> bool:
        return self.kind in IN_CONTAINERS

    @property
    def max_numel(self) -> int | None:
        return None if self.by_default else MAX_NUMEL

    @property
    def frame(self) -> Tensor:
        return torch.from_numpy(np.frombuffer(self.data, np.uint8).copy())


class Mutator:
    """Makes mutations of valid frames; the random numbers alone decide which."""

    def __init__(self, rng: random.Random, frames: list[ValidFrame]) -> None:
        self._rng, self._frames = rng, frames
        self._random = rng.random
        self._by_default = False
        self._change = {name: getattr(self, f"_{name}") for name in CHANGES}

    def next(self) -> Mutation:
        """Most are damaged, some invented or in containers; a tenth is read with default limits."""
        self._by_default = self._random() < 0.1
        chance = self._random()
        if chance < 0.08:
            return self.container()
        return self.invented() if chance < 0.22 else self.damaged()

    def _numel(self) -> int:
        if self._random() < (0.8 if self._by_default else 0.95):
            return self._choice(SIZES)
        return self._choice(UNEXPECTED if self._by_default else EXPECTED)

    def _implied(self, data: bytearray) -> int:
        return implied(data, MOST_BY_DEFAULT if self._by_default else MAX_NUMEL)

    # Damaged frames

    def damaged(self) -> Mutation:
        """A valid frame changed in some places."""
        frame = self._choice(self._frames)
        data = bytearray(frame.data)
        kind = "several changes"
        for _ in range(count := self._choice((1, 1, 1, 2, 3))):
            name = self._choice(CHANGES)
            if data:
                self._change[name](data)
            if count == 1:
                kind = name
        if self._random() < 0.1:
            # The header is filled up again to a multiple of 8 bytes after its length has changed.
            at = 64  # beyond the header of all but the deepest chains: what follows moves along
            data[at:at] = bytes(-len(data) % ALIGNMENT)
        if self._random() < 0.6:
            self._fit(data, frame)
        del data[LONGEST:]
        if self._random() < 0.9:
            repair(data)
        else:
            kind = "checksum not repaired"
        return Mutation(data, kind, frame.codes, self._by_default)

    def _fit(self, data: bytearray, frame: ValidFrame) -> None:
        """A body of the length that the header now implies, so that the content gets read."""
        before, after = slice(CHECKSUM.start), slice(CHECKSUM.stop, frame.head)
        if data[before] == frame.data[before] and data[after] == frame.data[after]:
            size = len(frame.data)
        else:
            size = self._implied(data) or len(data)
        del data[size:]
        data += self._rng.randbytes(size - len(data))

    def _somewhere(self, data: bytes | bytearray) -> int:
        """A place in the frame, every other time in its header."""
        return self._below(len(data) if self._random() < 0.5 else min(len(data), 64))

    def _flip(self, data: bytearray) -> None:
        data[self._somewhere(data)] ^= 1 << self._below(8)

    def _replace(self, data: bytearray) -> None:
        new = self._choice(BYTES) if self._random() < 0.9 else self._below(256)
        data[self._somewhere(data)] = new

    def _truncate(self, data: bytearray) -> None:
        del data[self._somewhere(data) :]

    def _extend(self, data: bytearray) -> None:
        data += self._rng.randbytes(self._choice((1, 7, 8, 64)))

    def _splice(self, data: bytearray) -> None:
        other = self._choice(self._frames).data
        data[self._somewhere(data) :] = other[self._somewhere(other) :]

    def _insert(self, data: bytearray) -> None:
        at = self._somewhere(data)
        data[at:at] = self._rng.randbytes(self._choice((1, 1, 2, 8)))

    def _delete(self, data: bytearray) -> None:
        at = self._somewhere(data)
        del data[at : at + self._choice((1, 1, 2, 8))]

    def _number(self, data: bytearray) -> None:
        """A huge number in place of a byte of the header's variable part."""
        at = FIXED + self._below(min(44, max(1, len(data) - FIXED)))
        digits = b"\xff" * self._choice((1, 2, 3, 4, 8, 9, 10))
        data[at : at + 1] = digits + bytes([self._choice((0, 1, 0x0F, 0x7F))])

    def _size(self, data: bytearray) -> None:
        """Another number of elements in place of the first dimension, in a header that fits."""
        size = self._numel()
        try:
            header = read_header(bytes(data[:LONGEST_HEADER]), MOST_BY_DEFAULT)
        except tw.FrameError:
            data[FIXED : FIXED + 1] = varint(size)
            return
        shape = [size, *header.shape[1:]]
        data[: header.length] = header_bytes(
            header.code,
            header.dtype,
            shape,  # type: ignore[arg-type]
            header.non_finite,
            header.fingerprint,
        )

    def _type(self, data: bytearray) -> None:
        data[4:5] = bytes([self._below(12)])

    # Invented frames

    def invented(self) -> Mutation:
        """Codes in any order and depth with any numbers, with a body of some valid frame."""
        numel = self._choice((1, 4, 9, 64, 100, 1000, None))
        if numel is None:
            numel = self._numel() if self._random() < 0.5 else self._choice(NUMBERS)
        sizes = [[numel], [numel], [1, numel, 1]]
        shape = self._choice(sizes) if self._random() < 0.75 else [numel, self._choice(NUMBERS)]
        dtype = self._choice((F32, F32, torch.float64, torch.float16, None))
        code, codes = self._tree(numel, self._choice((1, 2, 2, 3, 4, 13)))
        data = bytearray(
            header_bytes(
                code,
                dtype or self._choice(list(DTYPES)),
                shape,  # type: ignore[arg-type]
                self._random() < 0.2,
                0,
            )
        )
        size = self._implied(data) or len(data) + 64
        body = self._below(3)
        if body == 1:
            data += self._choice(self._frames).data[32:]
        elif body == 2:
            data += bytes([self._choice((0, 1, 0x7F, 0xFF))]) * size
        del data[size:]
        data += self._rng.randbytes(size - len(data))
        del data[LONGEST:]
        repair(data)
        return Mutation(data, "invented", codes, self._by_default)

    def _tree(self, numel: int, depth: int) -> tuple[Code, int]:
        """A code with parameters and nested codes at random, and the ids in it as bits."""
        kind = self._choice(KINDS if depth > 1 else LEAVES)
        codes = 1 << kind.id
        if kind is Zipped:
            inner, within = self._tree(numel, depth - 1)
            try:
                plain = [section.num_bytes for section in inner.sections(Extent(F32, numel))]
            except (ZeroDivisionError, KeyError):
                plain = [8]
            sizes = (self._zipped_size(size, numel) for size in plain[:16])
            return Zipped(self._choice((1, 2, 2, 9)), tuple(sizes), inner), codes | within
        given: list[Any] = []
        few = numel
        for name, nests in FIELDS[kind]:
            if nests:
                inner, within = self._tree(few, depth - 1)
                codes |= within
                given.append(inner)
                continue
            given.append(self._parameter(numel))
            few = min(numel, given[-1]) if name == "count" else few
        return kind(*given), codes

    def _zipped_size(self, plain: int, numel: int) -> int:
        size = self._choice((plain, plain, plain // 2, None))
        return min(self._parameter(numel) if size is None else size, NUMBERS[-1])

    def _parameter(self, numel: int) -> int:
        """Mostly one that makes sense, else one at a limit."""
        if self._random() < 0.75:
            return self._choice((0, 1, 2, 4, 7, 8, numel // 2, max(0, numel - 1), numel))
        return self._choice(NUMBERS)

    # Containers

    def container(self) -> Mutation:
        """Several frames, some of them damaged; or their table or any byte is."""
        kind = self._choice(IN_CONTAINERS)
        codes, frames = 0, list[bytes | bytearray]()
        if kind == "many frames in a container":
            frame = self._choice(self._frames)
            data = bytearray(frame.data)
            self._size(data)
            repair(data)
            codes, frames = frame.codes, [data] * self._choice((2, 3, 4, 8, 20))
        else:
            for _ in range(self._choice((0, 1, 1, 2, 3, 4))):
                damaged = kind == "frames in a container" and self._random() < 0.3
                source = self.damaged() if damaged else self._choice(self._frames)
                frames.append(source.data)
                codes |= source.codes
        table = bytearray()
        for i, data in enumerate(frames):
            plain = len(frames) > len(NAMES) or self._random() < 0.8
            name = b"%d" % i if plain else self._choice(NAMES)
            table += varint(len(name)) + name + varint(len(data))
        count = len(frames)
        if kind == "table of a container":
            if self._random() < 0.2:
                count = self._choice(NUMBERS) & 0xFFFFFFFF
            elif table:
                self._change[self._choice(CHANGES)](table)
        table += bytes(-len(table) % ALIGNMENT)
        packed = bytearray(HEAD.pack(CONTAINER, count, len(table), 0))
        check = zlib.crc32(table, zlib.crc32(packed[COUNTED]))
        packed = bytearray(HEAD.pack(CONTAINER, count, len(table), check)) + table
        for data in frames:
            packed += data + bytes(-len(data) % ALIGNMENT)
        if kind == "bytes of a container":
            self._change[self._choice(CHANGES)](packed)
        return Mutation(bytes(packed), kind, codes, self._by_default)

    # Random numbers: `Random.choice` and `randrange` take several times as long.

    def _below(self, n: int) -> int:
        return int(self._random() * n)

    def _choice(self, given: Any) -> Any:
        return given[int(self._random() * len(given))]


CHANGES = [
    *("flip", "flip", "replace", "replace", "truncate", "extend", "splice", "insert", "delete"),
    *("number", "type", "size"),
]
IN_CONTAINERS = [
    *(["frames in a container", "table of a container", "bytes of a container"] * 3),
    "many frames in a container",
]
MUTATIONS = {*CHANGES, *IN_CONTAINERS, "several changes", "checksum not repaired", "invented"}
