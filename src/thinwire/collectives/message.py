"""Messages: the frames that one rank sends another in one piece.

Everything in a message starts at a multiple of 64 bytes, so that it can be used where it arrives.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.compressors import LocalCompressor
from thinwire.errors import FrameError
from thinwire.frames import Payload, unpack
from thinwire.frames.code import Extent

ALIGNMENT = 64
LENGTH = "a message of so many bytes"


class Expected(NamedTuple):
    """A frame that a message must hold: of so many elements of a type, by this compressor."""

    extent: Extent
    compressor: LocalCompressor

    @property
    def max_bytes(self) -> int:
        """Most that it can be long."""
        return self.compressor.max_payload_bytes(self.extent.numel, self.extent.dtype)


def aligned(length: int) -> int:
    """The next multiple of the alignment."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def padded(message: Tensor, length: int) -> Tensor:
    """The message with zeros behind it."""
    missing = length - message.numel()
    return torch.nn.functional.pad(message, (0, missing)) if missing else message


def joined(messages: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """The messages one behind the other, each with zeros up to its length."""
    room = messages[0].new_empty(sum(lengths))
    for message, slot in zip(messages, torch.split(room, list(lengths)), strict=True):
        slot[: message.numel()].copy_(message)
        slot[message.numel() :].zero_()
    return room


def bundle(frames: Sequence[Tensor]) -> Tensor:
    """Frames of several tensors as one message: a table of their lengths, then the frames."""
    if len(frames) == 1:
        return frames[0]
    device = frames[0].device
    table = torch.tensor([f.numel() for f in frames], dtype=torch.int64).view(torch.uint8)
    pieces = [table.to(device), *frames]
    return torch.cat([padded(piece, aligned(piece.numel())) for piece in pieces])


def max_message_bytes(expected: Sequence[Expected]) -> int:
    """The longest message that `bundle` makes of such frames."""
    return bundled_bytes([each.max_bytes for each in expected])


def bundled_bytes(lengths: Sequence[int]) -> int:
    """The length of a message with frames of these lengths."""
    return lengths[0] if len(lengths) == 1 else sum(map(aligned, [8 * len(lengths), *lengths]))


def unbundle(message: Tensor, expected: Sequence[Expected]) -> list[Payload]:
    """The payloads in a message, checked to be of these types, lengths and compressors."""
    frames = [message] if len(expected) == 1 else _frames(message, len(expected))
    payloads = []
    for frame, (extent, compressor) in zip(frames, expected, strict=True):
        payload = unpack(frame, max_numel=extent.numel)
        if payload.extent != extent or payload.fingerprint != compressor.fingerprint:
            raise FrameError(
                f"expected {extent.numel} elements of {extent.dtype} from {compressor} "
                f"({compressor.fingerprint:#010x}), got {payload.numel} of {payload.dtype} from "
                f"{payload.fingerprint:#010x}"
            )
        payloads.append(payload)
    return payloads


def _frames(message: Tensor, count: int) -> list[Tensor]:
    at = aligned(8 * count)
    if message.numel() < at:
        raise FrameError(f"a message of {message.numel()} bytes has no table of {count} lengths")
    lengths = message[: 8 * count].cpu().view(torch.int64).tolist()
    frames = []
    for length in lengths:
        if length < 0 or at + length > message.numel():
            raise FrameError("the lengths of frames do not fit the message")
        frames.append(message[at : at + length])
        at += aligned(length)
    return frames
