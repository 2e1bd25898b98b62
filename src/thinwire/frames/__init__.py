"""Payloads, the codes they are written in, and frames of bytes."""

from thinwire.frames.packing import MAX_NUMEL, decode, pack, unpack
from thinwire.frames.payload import Payload, add_all

__all__ = ["MAX_NUMEL", "Payload", "add_all", "decode", "pack", "unpack"]
