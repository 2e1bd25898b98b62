"""Frames: a payload as one self-describing run of bytes, and back.

    header | sections, widest elements first

Nothing of a frame is believed. Its length must be exactly what the header implies, the checksum
must fit, and positions and coded levels are decoded and checked before anybody can use them. What
the claims of all codes come to in memory, those of nested ones included, is computed and held
against a limit before anything is allocated.
"""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.formatting import show_bytes
from thinwire.frames.code import Extent, Section, as_bytes
from thinwire.frames.header import ALIGNMENT, CHECKSUM, LONGEST_HEADER, Header, read_header
from thinwire.frames.payload import Payload
from thinwire.frames.values import NonFinite

MAX_NUMEL = 1 << 32

# What decoding may take where the caller says nothing: so much for any frame (one that says "not
# finite" is 24 bytes long whatever its tensor), more for longer ones, but never above the last.
ALWAYS = 256 << 20
EXPANSION = 1 << 10
MAX_BYTES = 16 << 30
# Where he says how many elements he expects: so many values for each of them. Three sparsifiers
# that all take everything, squeezed, come to 11.
VALUES = 16
MARGIN = 1 << 20


def pack_frame(payload: Payload) -> Tensor:
    """The payload as a uint8 tensor of `payload.num_bytes` bytes on its device."""
    header = payload.header
    pieces = [torch.frombuffer(bytearray(header), dtype=torch.uint8).to(payload.device)]
    pieces += [as_bytes(payload.sections[i]) for i in _order([s.dtype for s in payload.sections])]
    frame = torch.cat(pieces)
    value = bytearray(_checksum(header, frame).to_bytes(8, "little"))
    if frame.device.type == "cpu":
        frame.numpy().data[CHECKSUM] = value  # a third of what torch takes for eight bytes
    else:
        frame[CHECKSUM] = torch.frombuffer(value, dtype=torch.uint8).to(frame.device)
    return frame


def unpack_frame(frame: Tensor, max_numel: int | None, max_bytes: int | None) -> Payload:
    """The payload in a one-dimensional uint8 tensor, whose memory is shared, not copied, if it is
    aligned. Limits and errors are those of `packing.unpack`."""
    if frame.dtype != torch.uint8 or frame.dim() != 1:
        raise TypeError(
            f"a frame is a one-dimensional uint8 tensor, got {frame.dtype} of shape "
            f"{tuple(frame.shape)}"
        )
    frame = frame.contiguous()
    if frame.data_ptr() % ALIGNMENT:
        frame = frame.clone()
    most = MAX_NUMEL if max_numel is None else max_numel
    head = frame[:LONGEST_HEADER].cpu().numpy().tobytes()
    header = read_header(head, most)
    extent = Extent(header.dtype, header.shape.numel())
    if not isinstance(header.code, NonFinite):
        header.code.check(extent)
    elif not header.non_finite:
        raise FrameError("a frame without content does not say that its tensor is non-finite")
    plain = not header.dtype.is_floating_point or extent.numel == 0
    if plain and not header.code.verbatim:
        raise FrameError(f"{extent.numel} elements of {header.dtype} in a code for real numbers")
    layout = header.code.sections(extent)
    _check_length(head, frame, header, layout)
    payload = Payload(
        header.code,
        header.dtype,
        header.shape,
        _cut(frame, header.length, layout),
        frame.device,
        header.non_finite,
        header.fingerprint,
    )
    if max_bytes is None:
        max_bytes = _default_limit(frame.numel(), extent, max_numel is not None)
    if payload.decoded_bytes > max_bytes:
        raise FrameError(
            f"{extent.numel} elements from a frame of {frame.numel()} bytes would take "
            f"{show_bytes(payload.decoded_bytes)} of memory, the limit is {show_bytes(max_bytes)} "
            "(max_bytes=)"
        )
    _ = payload.opened  # decodes and checks positions and coded levels
    return payload


def longest_frame(extent: Extent) -> int:
    """No compressor makes a longer frame of such a tensor, whichever it is.

    The longest are those of `Tiered`: all elements twice, and a bitmap or two.
    """
    width = max(extent.dtype.itemsize, extent.real.itemsize)
    return LONGEST_HEADER + 4096 + 4 * width * extent.numel


def _default_limit(length: int, extent: Extent, expected: bool) -> int:
    """Most memory that a frame may take to decode.

    Args:
        length: of the frame.
        extent: what it claims to hold.
        expected: the caller has said that so many elements are fine.
    """
    if expected:
        return VALUES * extent.real.itemsize * extent.numel + MARGIN
    return default_bytes(length)


def default_bytes(length: int) -> int:
    """Most memory that so many bytes of strangers may take to decode."""
    return min(max(ALWAYS, EXPANSION * length), MAX_BYTES)


def _order(dtypes: list[torch.dtype]) -> list[int]:
    """Widest elements first, so that every section is aligned without filling."""
    if len(dtypes) == 1:
        return [0]
    return sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize)


def _check_length(head: bytes, frame: Tensor, header: Header, layout: list[Section]) -> None:
    expected = header.length + sum(section.num_bytes for section in layout)
    if frame.numel() != expected:
        raise FrameError(f"the frame has {frame.numel()} bytes, its header implies {expected}")
    found = _checksum(head, frame)
    if found != header.checksum:
        raise FrameError(f"the checksum is {found:#x}, the header says {header.checksum:#x}")


def _checksum(head: bytes, frame: Tensor) -> int:
    """Over all that stands after the checksum, plus the eight bytes before it as a number; `head`
    are the first bytes of the frame."""
    before = int.from_bytes(head[: CHECKSUM.start], "little")
    after = int(kernels.on(frame.device).checksum(frame[CHECKSUM.stop :]))
    return (before + after) & 0xFFFFFFFFFFFFFFFF


def _cut(frame: Tensor, at: int, layout: list[Section]) -> tuple[Tensor, ...]:
    sections: list[Tensor] = [frame] * len(layout)
    for i in _order([section.dtype for section in layout]):
        size = layout[i].num_bytes
        sections[i] = frame[at : at + size].view(layout[i].dtype)
        at += size
    return tuple(sections)
