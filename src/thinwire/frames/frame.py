"""Frames: a payload as one self-describing run of bytes, and back.

    header | sections, widest elements first

Nothing of a frame is believed. Its length must be exactly what the header implies, the checksum
must fit, and positions and coded levels are decoded and checked before anybody can use them. What
is allocated is bounded by the frame's own length, apart from what the claimed number of elements
needs.
"""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import Extent, Section, as_bytes
from thinwire.frames.header import ALIGNMENT, CHECKSUM, Header, read_header
from thinwire.frames.payload import Payload
from thinwire.frames.values import NonFinite

LONGEST_HEADER = 512


def pack_frame(payload: Payload) -> Tensor:
    """The payload as a uint8 tensor of `payload.num_bytes` bytes on its device."""
    header = payload.header
    pieces = [torch.frombuffer(bytearray(header), dtype=torch.uint8).to(payload.device)]
    pieces += [as_bytes(payload.sections[i]) for i in _order([s.dtype for s in payload.sections])]
    frame = torch.cat(pieces)
    value = _checksum(frame).to_bytes(8, "little")
    frame[CHECKSUM] = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(frame.device)
    return frame


def unpack_frame(frame: Tensor, max_numel: int) -> Payload:
    """The payload in a one-dimensional uint8 tensor; its memory is shared, not copied, if it is
    aligned. Raises FrameError if the bytes are not a valid frame."""
    if frame.dtype != torch.uint8 or frame.dim() != 1:
        raise TypeError(
            f"a frame is a one-dimensional uint8 tensor, got {frame.dtype} of shape "
            f"{tuple(frame.shape)}"
        )
    frame = frame.contiguous()
    if frame.data_ptr() % ALIGNMENT:
        frame = frame.clone()
    header = read_header(frame[:LONGEST_HEADER].cpu().numpy().tobytes(), max_numel)
    extent = Extent(header.dtype, header.shape.numel())
    if not isinstance(header.code, NonFinite):
        header.code.check(extent)
    elif not header.non_finite:
        raise FrameError("a frame without content does not say that its tensor is non-finite")
    plain = not header.dtype.is_floating_point or extent.numel == 0
    if plain and not header.code.verbatim:
        raise FrameError(f"{extent.numel} elements of {header.dtype} in a code for real numbers")
    layout = header.code.sections(extent)
    _check_length(frame, header, layout)
    payload = Payload(
        header.code,
        header.dtype,
        header.shape,
        _cut(frame, header.length, layout),
        frame.device,
        header.non_finite,
        header.fingerprint,
    )
    _ = payload.opened  # decodes and checks positions and coded levels
    return payload


def _order(dtypes: list[torch.dtype]) -> list[int]:
    """Widest elements first, so that every section is aligned without filling."""
    return sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize)


def _check_length(frame: Tensor, header: Header, layout: list[Section]) -> None:
    expected = header.length + sum(section.num_bytes for section in layout)
    if frame.numel() != expected:
        raise FrameError(f"the frame has {frame.numel()} bytes, its header implies {expected}")
    found = _checksum(frame)
    if found != header.checksum:
        raise FrameError(f"the checksum is {found:#x}, the header says {header.checksum:#x}")


def _checksum(frame: Tensor) -> int:
    """Over all that stands after the checksum, plus the eight bytes before it as a number."""
    before = int.from_bytes(frame[: CHECKSUM.start].cpu().numpy().tobytes(), "little")
    after = int(kernels.on(frame.device).checksum(frame[CHECKSUM.stop :]))
    return (before + after) & 0xFFFFFFFFFFFFFFFF


def _cut(frame: Tensor, at: int, layout: list[Section]) -> tuple[Tensor, ...]:
    sections: list[Tensor] = [frame] * len(layout)
    for i in _order([section.dtype for section in layout]):
        size = layout[i].num_bytes
        sections[i] = frame[at : at + size].view(layout[i].dtype)
        at += size
    return tuple(sections)
