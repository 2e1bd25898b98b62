"""Unsigned integers as little-endian base-128 digits (LEB128), and a reader that never overruns."""

from thinwire.errors import FrameError

MOST = 1 << 64


def varint(value: int) -> bytes:
    """The bytes of an integer in [0, 2^64)."""
    if not 0 <= value < MOST:
        raise ValueError(f"varint: {value} is not in [0, 2^64)")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Reader:
    """Reads a header from front to back; FrameError when it ends too early."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def byte(self) -> int:
        if self.at >= len(self._data):
            raise FrameError("the frame ends within its header")
        self.at += 1
        return self._data[self.at - 1]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            digit = self.byte()
            value |= (digit & 0x7F) << shift
            if digit < 0x80:
                if value >= MOST or (digit == 0 and shift):
                    break
                return value
        raise FrameError(f"a number in the header is malformed (byte {self.at})")
