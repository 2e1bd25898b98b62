"""Damaged and hostile frames, the checksum mostly right: valid ones changed at random, and trees of
codes with numbers that no writer uses.

Shared by test_frames.py, test_hostile_frames.py and benchmarks/fuzz.py.
"""

import contextlib
import dataclasses
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensors import content, normal
from torch import Tensor

import thinwire as tw
from thinwire.frames.code import Code, Extent, as_bytes
from thinwire.frames.frame import _checksum, _order
from thinwire.frames.header import CHECKSUM, CODES, DTYPES, header_bytes, read_header
from thinwire.frames.positions import Overlay, Seeded, Sparse
from thinwire.frames.zipped import Zipped

F32 = torch.float32
NESTING = {kind.id for kind in (Sparse, Seeded, Overlay, Zipped)}
MAX_NUMEL = 1 << 20
LONGEST = 1 << 16  # bytes that a mutation makes a frame at most
# Room for a tensor of MAX_NUMEL float64 many times over, and for the stacks and arenas of threads.
MOST_MEMORY = 512 << 20

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


def seal(data: bytes) -> Tensor:
    """Bytes as a frame with a right checksum."""
    frame = np.frombuffer(data, np.uint8).copy()
    if len(frame) >= CHECKSUM.stop:
        value = _checksum(torch.from_numpy(frame))
        frame[CHECKSUM] = np.frombuffer(value.to_bytes(8, "little"), np.uint8)
    return torch.from_numpy(frame)


def frame_of(
    code: Code, dtype: torch.dtype, shape: list[int], *sections: Tensor, non_finite: bool = False
) -> Tensor:
    """A frame put together by hand, whether it makes sense or not."""
    data = header_bytes(code, dtype, shape, non_finite, 0)  # type: ignore[arg-type]
    for i in _order([section.dtype for section in sections]):
        data += as_bytes(sections[i]).numpy().tobytes()
    return seal(data)


def valid_frames() -> list[bytes]:
    """Small frames of every code and element type."""
    frames = []
    for i, spec in enumerate(SPECS):
        for j, n in enumerate((0, 1, 9, 100, 300)):
            dtype = (torch.float32, torch.float64, torch.float16, torch.bfloat16)[(i + j) % 4]
            shape = (n,) if n != 100 else (4, 1, 25)
            x = normal(n, i, dtype).view(shape)
            frames.append(tw.parse(spec).encode(x, key=tw.Key(i, j)))
    frames.append(tw.TopK(0.1).encode(torch.full((50,), float("nan"))))
    raw = content("normal", 30, torch.float32, 0) * 50
    frames += [tw.NoCompression().encode(raw.to(dtype)) for dtype in DTYPES]
    frames += [tw.Lossless().encode(raw.to(dtype).repeat(9)) for dtype in DTYPES]
    return [tw.pack(payload).numpy().tobytes() for payload in frames]


def _somewhere(rng: random.Random, data: bytes) -> int:
    """A place in the frame, every other time in its header."""
    end = len(data) if rng.random() < 0.5 else min(len(data), 64)
    return rng.randrange(end) if end else 0


def _flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = _somewhere(rng, data)
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _replace(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = _somewhere(rng, data)
    value = rng.choice([0, 1, 2, 3, 4, 8, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return data[:at] + bytes([value]) + data[at + 1 :]


def _truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: _somewhere(rng, data)]


def _extend(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data + rng.randbytes(rng.choice([1, 7, 8, 64]))


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: _somewhere(rng, data)] + other[_somewhere(rng, other) :]


def _insert(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = _somewhere(rng, data)
    return data[:at] + rng.randbytes(rng.choice([1, 1, 2, 8])) + data[at:]


def _delete(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = _somewhere(rng, data)
    return data[:at] + data[at + rng.choice([1, 1, 2, 8]) :]


def _blow_up(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A huge number in place of a byte of the header's variable part."""
    at = 20 + rng.randrange(min(44, max(1, len(data) - 20)))
    digits = b"\xff" * rng.choice([1, 2, 3, 4, 8, 9, 10])
    return data[:at] + digits + bytes([rng.choice([0, 1, 0x0F, 0x7F])]) + data[at + 1 :]


def _new_type(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[:4] + bytes([rng.randrange(12)]) + data[5:]


CHANGES = [
    *(_flip, _flip, _replace, _replace, _truncate, _extend, _splice, _insert, _delete, _blow_up),
    _new_type,
]


def _realign(data: bytes) -> bytes:
    """The header filled up again to a multiple of 8 bytes after its length has changed."""
    at = 64  # beyond the header of all but the deepest chains: what follows moves along
    return data[:at] + bytes(-len(data) % 8) + data[at:]


def implied(data: bytes) -> int:
    """The length of the frame that a header implies; 0 if that is none worth making."""
    try:
        header = read_header(data[:512], MAX_NUMEL)
        layout = header.code.sections(Extent(header.dtype, header.shape.numel()))
        size = header.length + sum(section.num_bytes for section in layout)
    except (tw.FrameError, ZeroDivisionError, KeyError):
        return 0
    return size if size <= LONGEST else 0


def _fit(rng: random.Random, data: bytes) -> bytes:
    """A body of the length that the header now implies, so that the content gets read."""
    size = implied(data) or len(data)
    return data[:size] + rng.randbytes(max(0, size - len(data)))


def claim(head: bytes, fill: int) -> Tensor:
    """A frame of this header, with a right checksum and one byte repeated for its body."""
    return seal(head + bytes([fill]) * max(0, implied(head) - len(head)))


NUMBERS = [
    *(0, 1, 2, 3, 4, 7, 8, 9, 16, 63, 64, 127, 128, 255, 256, 1100, 4096, 1 << 20, 1 << 31),
    *(1 << 32, (1 << 32) + 1, 1 << 48, (1 << 63) - 8, 1 << 63, (1 << 64) - 8, (1 << 64) - 1),
]


def _number(rng: random.Random, numel: int) -> int:
    """A parameter: mostly one that makes sense, else one at a limit."""
    if rng.random() < 0.75:
        return rng.choice([0, 1, 2, 4, 7, 8, numel // 2, max(0, numel - 1), numel])
    return rng.choice(NUMBERS)


def _tree(rng: random.Random, numel: int, depth: int) -> Code:
    """A code with parameters and nested codes at random."""
    kinds = [CODES[number] for number in CODES if depth > 1 or number not in NESTING]
    kind = rng.choice(kinds)
    if kind is Zipped:
        inner = _tree(rng, numel, depth - 1)
        try:
            plain = [section.num_bytes for section in inner.sections(Extent(F32, numel))]
        except (ZeroDivisionError, KeyError):
            plain = [8]
        sizes = [rng.choice([size, size, size // 2, _number(rng, numel)]) for size in plain[:16]]
        return Zipped(rng.choice([1, 2, 2, 9]), tuple(min(s, NUMBERS[-1]) for s in sizes), inner)
    given: list[Any] = []
    few = numel
    for field in dataclasses.fields(kind):
        if field.type in ("Code", Code):
            given.append(_tree(rng, few, depth - 1))
            continue
        given.append(_number(rng, numel))
        few = min(numel, given[-1]) if field.name == "count" else few
    return kind(*given)


def invent(rng: random.Random, frames: list[bytes]) -> bytes:
    """A frame made up from codes in any order and depth, with a body of some valid one."""
    numel = rng.choice([1, 4, 9, 64, 100, 1000, rng.choice(NUMBERS)])
    shape = rng.choice([[numel], [numel], [1, numel, 1], [numel, rng.choice(NUMBERS)]])
    dtype = rng.choice([F32, F32, torch.float64, torch.float16, rng.choice(list(DTYPES))])
    code = _tree(rng, numel, rng.choice([1, 2, 2, 3, 4, 13]))
    head = header_bytes(code, dtype, shape, rng.random() < 0.2, 0)  # type: ignore[arg-type]
    size = implied(head) or len(head) + 64
    body = rng.choice(
        [b"", rng.choice(frames)[32:], bytes([rng.choice([0, 1, 0x7F, 0xFF])]) * size]
    )
    data = head + body
    return data[:size] + rng.randbytes(max(0, size - len(data)))


def mutate(rng: random.Random, frames: list[bytes]) -> Tensor:
    """A frame that is probably not valid, most of them damaged, some invented."""
    if rng.random() < 0.15:
        return seal(invent(rng, frames)[:LONGEST])
    data, other = rng.choice(frames), rng.choice(frames)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if data:
            data = rng.choice(CHANGES)(rng, data, other)
    if rng.random() < 0.1:
        data = _realign(data)
    if rng.random() < 0.6:
        data = _fit(rng, data)
    data = data[:LONGEST]
    if rng.random() < 0.9:
        return seal(data)
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


@contextlib.contextmanager
def memory_limit(extra: int = MOST_MEMORY) -> Iterator[None]:
    """So many bytes more than the process has now, and not one beyond."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Outcome(NamedTuple):
    """What became of a frame: a tensor, or the reason why not."""

    tensor: Tensor | None
    reason: str


def attempt(frame: Tensor) -> Outcome:
    """Decode a frame; anything but FrameError or a tensor of the claimed shape comes out."""
    try:
        payload = tw.unpack(frame, max_numel=MAX_NUMEL)
        tensor = payload.restore()
    except tw.FrameError as error:
        return Outcome(None, str(error))
    header = read_header(frame[:512].numpy().tobytes(), MAX_NUMEL)
    assert tensor.shape == header.shape, f"{tensor.shape} instead of {header.shape}"
    assert tensor.dtype == header.dtype, f"{tensor.dtype} instead of {header.dtype}"
    return Outcome(tensor, "decoded")


class MisreadError(Exception):
    """A frame that was neither refused with FrameError nor read as what it claims to be."""

    def __init__(self, number: int, frame: Tensor) -> None:
        self.data = frame.numpy().tobytes()
        super().__init__(f"frame {number}: {self.data.hex()}")


def fuzz(seed: int, count: int) -> Iterator[bool]:
    """Whether each of so many damaged frames could still be read, within a limit of memory.

    A seed always makes the same frames.
    """
    rng, frames = random.Random(seed), valid_frames()
    with memory_limit():
        for number in range(count):
            frame = mutate(rng, frames)
            try:
                yield attempt(frame).tensor is not None
            except Exception as error:
                raise MisreadError(number, frame) from error
