"""Small integers as bits: the packing and unpacking that quantising kernels do in the cache.

Level i lies in bits [i * width, (i + 1) * width) of a little-endian bit stream. Width TRITS stands
for three levels, five to a byte: l0 + 3 l1 + 9 l2 + 27 l3 + 81 l4.
"""

import numpy as np

from thinwire.kernels.cpu.jit import jit

u8, u64 = np.uint8, np.uint64
TRITS = 0


@jit
def bytes_before(count, width):
    """Bytes that `count` levels take, for a count that fills its last byte."""
    return count // 5 if width == TRITS else count * width // 8


def packed_bytes(count: int, width: int) -> int:
    """Bytes that any number of levels takes."""
    return -(-count // 5) if width == TRITS else -(-count * width // 8)


@jit
def _pack_trits(levels, count, out, at):
    for g in range((count + 4) // 5):
        byte, unit = 0, 1
        for i in range(5 * g, min(5 * g + 5, count)):
            byte += levels[i] * unit
            unit *= 3
        out[at + g] = byte


@jit
def _unpack_trits(packed, at, count, levels):
    for g in range((count + 4) // 5):
        byte = np.int32(packed[at + g])
        for i in range(5 * g, min(5 * g + 5, count)):
            levels[i] = byte % 3
            byte //= 3


@jit
def pack(levels, count, width, out, at):
    """levels[:count] into out from byte `at` on; `at` times 8 is a multiple of the width."""
    if width == TRITS:
        _pack_trits(levels, count, out, at)
        return
    if width == 8:
        for i in range(count):
            out[at + i] = levels[i]
        return
    whole = count // 8
    if width == 4:
        for i in range(4 * whole):
            out[at + i] = levels[2 * i] | (levels[2 * i + 1] << u8(4))
    elif width == 2:
        for i in range(2 * whole):
            out[at + i] = (
                levels[4 * i]
                | (levels[4 * i + 1] << u8(2))
                | (levels[4 * i + 2] << u8(4))
                | (levels[4 * i + 3] << u8(6))
            )
    else:
        for g in range(whole):
            word = u64(0)
            for i in range(8):
                word |= u64(levels[8 * g + i]) << u64(i * width)
            for b in range(width):
                out[at + g * width + b] = u8(word >> u64(8 * b))
    if whole * 8 < count:
        word = u64(0)
        for i in range(count - whole * 8):
            word |= u64(levels[8 * whole + i]) << u64(i * width)
        for b in range(((count - whole * 8) * width + 7) // 8):
            out[at + whole * width + b] = u8(word >> u64(8 * b))


@jit
def unpack(packed, at, count, width, levels):
    """The inverse of `pack`."""
    if width == TRITS:
        _unpack_trits(packed, at, count, levels)
        return
    if width == 8:
        for i in range(count):
            levels[i] = packed[at + i]
        return
    whole = count // 8
    if width == 4:
        for i in range(4 * whole):
            levels[2 * i] = packed[at + i] & u8(15)
            levels[2 * i + 1] = packed[at + i] >> u8(4)
    elif width == 2:
        for i in range(2 * whole):
            byte = packed[at + i]
            levels[4 * i] = byte & u8(3)
            levels[4 * i + 1] = (byte >> u8(2)) & u8(3)
            levels[4 * i + 2] = (byte >> u8(4)) & u8(3)
            levels[4 * i + 3] = byte >> u8(6)
    else:
        mask = u64((1 << width) - 1)
        for g in range(whole):
            word = u64(0)
            for b in range(width):
                word |= u64(packed[at + g * width + b]) << u64(8 * b)
            for i in range(8):
                levels[8 * g + i] = u8((word >> u64(i * width)) & mask)
    if whole * 8 < count:
        mask = u64((1 << width) - 1)
        word = u64(0)
        for b in range(((count - whole * 8) * width + 7) // 8):
            word |= u64(packed[at + whole * width + b]) << u64(8 * b)
        for i in range(count - whole * 8):
            levels[8 * whole + i] = u8((word >> u64(i * width)) & mask)
