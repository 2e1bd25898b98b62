"""pack, unpack and decode: payloads as bytes, and back.

One payload is packed as a frame (`frame`), several under names as a container:

    "TWC1" | entries | bytes of the table | CRC-32 | table: name and length of each frame | frames

Nothing of a container is believed either: its table must be intact and fill its place, names must
be different, and frames must fill the rest to the last byte. What is allocated is bounded by the
container's own length, apart from what the claimed numbers of elements need.
"""

import struct
import zlib
from collections.abc import Mapping
from typing import Any, overload

import numpy as np
from torch import Tensor

from thinwire.errors import FrameError
from thinwire.formatting import read_bytes
from thinwire.frames.arrays import Array, Bytes, bytes_of
from thinwire.frames.code import Reader, varint
from thinwire.frames.frame import default_bytes, pack_frame, unpack_frame
from thinwire.frames.header import ALIGNMENT, CONTAINER
from thinwire.frames.payload import Payload

HEAD = struct.Struct("<4sIII")
COUNTED = slice(4, 12)  # of the head: what the CRC-32 covers besides the table


@overload
def pack(payload: Payload) -> Tensor: ...
@overload
def pack(payload: Mapping[str, Payload]) -> bytes: ...
def pack(payload: Payload | Mapping[str, Payload]) -> Tensor | bytes:
    """A payload as a frame, or payloads by name as a container.

    Args:
        payload: that a compressor's `encode` has made; or several of them by name, as of all
            tensors of a model.

    Returns:
        The frame: a uint8 tensor of `payload.num_bytes` bytes on its device. Or the container:
        bytes, whose length is that of the frames and some bytes for each name.
    """
    if isinstance(payload, Payload):
        return pack_frame(payload)
    if isinstance(payload, Mapping):
        return _pack_container(payload)
    raise TypeError(f"pack takes a payload, or payloads by name, got {_not_payload(payload)}")


@overload
def unpack(
    frame: Tensor, *, max_numel: int | None = None, max_bytes: int | str | None = None
) -> Payload: ...
@overload
def unpack(
    frame: Bytes | Array, *, max_numel: int | None = None, max_bytes: int | str | None = None
) -> Any: ...
def unpack(
    frame: Tensor | Bytes | Array,
    *,
    max_numel: int | None = None,
    max_bytes: int | str | None = None,
) -> Any:
    """The payload in a frame, or the payloads by name in a container.

    Frames of strangers are safe to read: what they can make this process allocate is limited. Give
    `max_numel` where the size of the tensor is known.

    Args:
        frame: a frame as a one-dimensional uint8 tensor, whose memory is shared, not copied, if it
            is aligned. Or a frame or a container as bytes, or as an array of bytes; they are
            copied.
        max_numel: refuse frames, and containers, that claim more elements than this; by default
            2^32.
        max_bytes: refuse frames, and containers, whose decoding would take more memory than this,
            the tensors included, as a number or "512MiB". By default, with `max_numel`, what every
            compressor needs for that many elements (64 bytes each, 128 for float64); without it
            1024 times the length of what is given, but at least 256 MiB and at most 16 GiB.

    Returns:
        A `Payload`; a dictionary of them, in the order they were packed in, for a container.

    Raises:
        FrameError: the bytes are neither, or exceed a limit; the message says why.
    """
    most = None if max_bytes is None else read_bytes(max_bytes)
    if isinstance(frame, Tensor):
        return unpack_frame(frame, max_numel, most)
    if isinstance(frame, Payload):
        raise TypeError("this is a payload already: payload.restore() is its tensor")
    if not isinstance(frame, Bytes | np.ndarray):
        raise TypeError(
            f"a frame is a one-dimensional uint8 tensor or bytes, got {type(frame).__name__}"
        )
    data = bytes_of(frame)
    if data[: len(CONTAINER)].numpy().tobytes() == CONTAINER:
        return _unpack_container(data, max_numel, most)
    return unpack_frame(data, max_numel, most)


@overload
def decode(
    frame: Tensor, *, max_numel: int | None = None, max_bytes: int | str | None = None
) -> Tensor: ...
@overload
def decode(
    frame: Bytes | Array, *, max_numel: int | None = None, max_bytes: int | str | None = None
) -> Any: ...
def decode(
    frame: Tensor | Bytes | Array,
    *,
    max_numel: int | None = None,
    max_bytes: int | str | None = None,
) -> Any:
    """The tensor in a frame, or the tensors by name in a container; nothing else is needed.

    Arguments and errors are those of `unpack`.
    """
    found = unpack(frame, max_numel=max_numel, max_bytes=max_bytes)
    if isinstance(found, Payload):
        return found.restore()
    return {name: payload.restore() for name, payload in found.items()}


def _pack_container(payloads: Mapping[str, Payload]) -> bytes:
    table, pieces = b"", list[bytes]()
    for name, payload in payloads.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a payload must be a string, got {name!r}")
        if not isinstance(payload, Payload):
            raise TypeError(f"{name}: expected a payload, got {_not_payload(payload)}")
        frame, written = pack_frame(payload).cpu().numpy().tobytes(), name.encode()
        table += varint(len(written)) + written + varint(len(frame))
        pieces += [frame, bytes(-len(frame) % ALIGNMENT)]
    table += bytes(-len(table) % ALIGNMENT)
    head = HEAD.pack(CONTAINER, len(payloads), len(table), 0)
    head = HEAD.pack(CONTAINER, len(payloads), len(table), _check(head, table))
    return b"".join([head, table, *pieces])


def _check(head: bytes, table: bytes) -> int:
    return zlib.crc32(table, zlib.crc32(head[COUNTED]))


def _unpack_container(
    data: Tensor, max_numel: int | None, max_bytes: int | None
) -> dict[str, Payload]:
    head = data[: HEAD.size].numpy().tobytes()
    if len(head) < HEAD.size:
        raise FrameError(f"{len(head)} bytes are too few for a container")
    _, count, size, check = HEAD.unpack(head)
    at = HEAD.size + size
    if size % ALIGNMENT or at > data.numel():
        raise FrameError(f"a table of {size} bytes in a container of {data.numel()}")
    table = data[HEAD.size : at].numpy().tobytes()
    if _check(head, table) != check:
        raise FrameError("the table of the container is damaged: its CRC-32 is another")
    if max_numel is None and max_bytes is None:
        max_bytes = default_bytes(data.numel())  # for all frames together
    payloads: dict[str, Payload] = {}
    for name, length in _entries(table, count):
        end = at + length
        behind = end + -length % ALIGNMENT
        if name in payloads or behind > data.numel() or bool(data[end:behind].any()):
            raise FrameError(f"{name!r}: twice, or of a length that does not fit the container")
        try:
            payloads[name] = payload = unpack_frame(data[at:end], max_numel, max_bytes)
        except FrameError as error:
            raise FrameError(f"{name!r}: {error}") from None
        if max_numel is not None:
            max_numel -= payload.numel
        if max_bytes is not None:
            max_bytes -= payload.decoded_bytes
        at = behind
    if at != data.numel():
        raise FrameError(f"{data.numel() - at} bytes follow the last frame of the container")
    return payloads


def _entries(table: bytes, count: int) -> list[tuple[str, int]]:
    """Names of payloads and lengths of frames; no more than the table has room for."""
    reader, found = Reader(table, 0), []
    try:
        for _ in range(count):
            name = reader.take(reader.varint()).decode()
            found.append((name, reader.varint()))
    except UnicodeDecodeError:
        raise FrameError("a name in the container is not UTF-8") from None
    except FrameError as error:
        raise FrameError(f"the table of the container: {error}") from None
    if len(table) - reader.at >= ALIGNMENT or any(table[reader.at :]):
        raise FrameError("the table of the container does not end in zeros at a multiple of 8")
    return found


def _not_payload(given: object) -> str:
    kind = type(given).__name__
    if isinstance(given, Tensor | np.ndarray):
        return f"{kind}: compressor.encode(x) makes one, tw.NoCompression() an uncompressed one"
    return kind
