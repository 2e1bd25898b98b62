"""The header of a frame; docs/reference/wire-format.md has the same as a table."""

import math
from typing import NamedTuple

import torch

from thinwire.errors import FrameError
from thinwire.frames.code import Code, Reader, varint
from thinwire.frames.levels import Affine, Elias, Pairs, Powers, SignedPairs, Uniform
from thinwire.frames.positions import Overlay, Seeded, Sparse
from thinwire.frames.values import Narrow, NonFinite, Raw, Scaled8
from thinwire.frames.zipped import Zipped

MAGIC = b"TWF1"
CONTAINER = b"TWC1"  # of several frames, see `packing`
FIXED = 20  # magic, dtype, flags, dimensions, a zero byte, checksum, fingerprint
CHECKSUM = slice(8, 16)
NON_FINITE = 1
MOST_DIMENSIONS = 16
MOST_NUMEL = 1 << 59  # of eight bytes each, what 64-bit integers can count
MOST_DEPTH = 12  # what chains and Tiered can nest to
ALIGNMENT = 8
LONGEST_HEADER = 512

DTYPES = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.int8: 5,
    torch.uint8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
BY_NUMBER = {number: dtype for dtype, number in DTYPES.items()}

# Ids are part of the wire format: never reuse one.
CODES: dict[int, type[Code]] = {
    code.id: code
    for code in (
        *(NonFinite, Raw, Narrow, Scaled8, Sparse, Seeded, Uniform, Elias, Affine, Pairs, Powers),
        *(Overlay, Zipped, SignedPairs),
    )
}


class Header(NamedTuple):
    """What a header says."""

    code: Code
    dtype: torch.dtype
    shape: torch.Size
    non_finite: bool
    fingerprint: int
    checksum: int
    length: int


def header_bytes(
    code: Code, dtype: torch.dtype, shape: torch.Size, non_finite: bool, fingerprint: int
) -> bytes:
    """The header with an empty checksum, filled with zeros to a multiple of 8 bytes."""
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"frames hold tensors of up to {MOST_DIMENSIONS} dimensions: {shape}")
    head = MAGIC + bytes([DTYPES[dtype], NON_FINITE * non_finite, len(shape), 0])
    head += bytes(8) + fingerprint.to_bytes(4, "little")
    head += b"".join(map(varint, shape)) + code.write()
    return head + bytes(-len(head) % ALIGNMENT)


def read_header(data: bytes, max_numel: int) -> Header:
    """Parse and check a header; `data` holds at least the whole of it if the frame does."""
    if len(data) < FIXED:
        raise FrameError(f"{len(data)} bytes are too few for a frame")
    if data[:4] == CONTAINER:
        raise FrameError("a container, not a frame: give it to tw.unpack or tw.decode as bytes")
    if data[:4] != MAGIC:
        raise FrameError(f"not a frame: it starts with {data[:4]!r} instead of {MAGIC!r}")
    number, flags, dimensions, zero = data[4:8]
    if number not in BY_NUMBER:
        raise FrameError(f"unknown element type {number}")
    if flags & ~NON_FINITE or zero:
        raise FrameError(f"unknown flags {flags:#x}, {zero:#x}")
    if dimensions > MOST_DIMENSIONS:
        raise FrameError(f"{dimensions} dimensions")
    reader = Reader(data, FIXED)
    shape = [reader.varint() for _ in range(dimensions)]
    # Empty dimensions must not hide absurd ones beside them; a limit of nothing allows nothing.
    claimed = math.prod(size or 1 for size in shape)
    max_numel = min(max_numel, MOST_NUMEL)
    if claimed > max(max_numel, 1) or math.prod(shape) > max_numel:
        raise FrameError(
            f"the frame claims {claimed} elements, the limit is {max_numel} (max_numel=)"
        )
    code = _read_code(reader, MOST_DEPTH)
    length = -(-reader.at // ALIGNMENT) * ALIGNMENT
    if length > len(data) or any(data[reader.at : length]):
        raise FrameError("the header does not end in zeros at a multiple of 8 bytes")
    return Header(
        code,
        BY_NUMBER[number],
        torch.Size(shape),
        bool(flags & NON_FINITE),
        int.from_bytes(data[16:20], "little"),
        int.from_bytes(data[CHECKSUM], "little"),
        length,
    )


def _read_code(reader: Reader, depth: int) -> Code:
    if depth == 0:
        raise FrameError(f"codes nest deeper than {MOST_DEPTH}")
    number = reader.byte()
    if number not in CODES:
        raise FrameError(f"unknown code {number}")
    return CODES[number].read(reader, lambda: _read_code(reader, depth - 1))
