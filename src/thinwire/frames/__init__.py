"""Payloads, the codes they are written in, and frames of bytes."""

from thinwire.frames.frame import MAX_NUMEL, longest_frame
from thinwire.frames.packing import decode, pack, unpack
from thinwire.frames.payload import Payload, add_all

__all__ = ["MAX_NUMEL", "Payload", "add_all", "decode", "longest_frame", "pack", "unpack"]
