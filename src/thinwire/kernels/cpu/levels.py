"""Small integers as bits: the packing and unpacking that quantising kernels do in the cache.

Level i lies in bits [i * width, (i + 1) * width) of a little-endian bit stream. Width TRITS stands
for three levels, five to a byte: l0 + 3 l1 + 9 l2 + 27 l3 + 81 l4.
"""

import numpy as np

from thinwire.kernels.cpu.jit import jit

u8, u32, u64 = np.uint8, np.uint32, np.uint64
TRITS = 0


@jit
def packed_bytes(count, width):
    """Bytes that so many levels take."""
    return (count + 4) // 5 if width == TRITS else (count * width + 7) // 8


@jit
def _pack_trits(levels, out):
    whole = levels.size // 5
    for g in range(whole):
        high = u8(levels[5 * g + 3] + u8(3) * levels[5 * g + 4])
        high = u8(levels[5 * g + 2] + u8(3) * high)
        high = u8(levels[5 * g + 1] + u8(3) * high)
        out[g] = u8(levels[5 * g] + u8(3) * high)
    for g in range(whole, out.size):
        byte = 0
        for i in range(levels.size - 1, 5 * g - 1, -1):
            byte = 3 * byte + levels[i]
        out[g] = byte


@jit
def _unpack_trits(packed, levels):
    whole = levels.size // 5
    for g in range(whole):
        byte = u32(packed[g])
        for i in range(5):
            third = u32((byte * u32(171)) >> u32(9))  # byte // 3 for all bytes
            levels[5 * g + i] = u8(byte - u32(3) * third)
            byte = third
    for i in range(5 * whole, levels.size):
        levels[i] = (packed[whole] // 3 ** (i - 5 * whole)) % 3


@jit
def _pack_group(levels, width, out):
    """Up to eight levels, which fill `width` bytes."""
    word = u64(0)
    for i in range(levels.size):
        word |= u64(levels[i]) << u64(i * width)
    for b in range(out.size):
        out[b] = u8(word >> u64(8 * b))


@jit
def _unpack_group(packed, width, levels):
    word = u64(0)
    for b in range(packed.size):
        word |= u64(packed[b]) << u64(8 * b)
    mask = u64((1 << width) - 1)
    for i in range(levels.size):
        levels[i] = u8((word >> u64(i * width)) & mask)


@jit
def pack(levels, width, out):
    """All levels into out, which has `packed_bytes` of them."""
    if width == TRITS:
        _pack_trits(levels, out)
        return
    if width == 8:
        for i in range(levels.size):
            out[i] = levels[i]
        return
    whole = levels.size // 8
    if width == 4:
        for i in range(4 * whole):
            out[i] = levels[2 * i] | (levels[2 * i + 1] << u8(4))
    elif width == 2:
        for i in range(2 * whole):
            low = levels[4 * i] | (levels[4 * i + 1] << u8(2))
            high = levels[4 * i + 2] | (levels[4 * i + 3] << u8(2))
            out[i] = low | (high << u8(4))
    else:
        for g in range(whole):
            word = u64(0)
            for i in range(8):
                word |= u64(levels[8 * g + i]) << u64(i * width)
            for b in range(width):
                out[width * g + b] = u8(word >> u64(8 * b))
    _pack_group(levels[8 * whole :], width, out[width * whole :])


@jit
def unpack(packed, width, levels):
    """The inverse of `pack`."""
    if width == TRITS:
        _unpack_trits(packed, levels)
        return
    if width == 8:
        for i in range(levels.size):
            levels[i] = packed[i]
        return
    whole = levels.size // 8
    if width == 4:
        for i in range(4 * whole):
            levels[2 * i] = packed[i] & u8(15)
            levels[2 * i + 1] = packed[i] >> u8(4)
    elif width == 2:
        for i in range(2 * whole):
            byte = packed[i]
            levels[4 * i] = byte & u8(3)
            levels[4 * i + 1] = (byte >> u8(2)) & u8(3)
            levels[4 * i + 2] = (byte >> u8(4)) & u8(3)
            levels[4 * i + 3] = byte >> u8(6)
    else:
        mask = u64((1 << width) - 1)
        for g in range(whole):
            word = u64(0)
            for b in range(width):
                word |= u64(packed[width * g + b]) << u64(8 * b)
            for i in range(8):
                levels[8 * g + i] = u8((word >> u64(i * width)) & mask)
    _unpack_group(packed[width * whole :], width, levels[8 * whole :])
