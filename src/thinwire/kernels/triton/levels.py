"""Small integers as bits; the layout is that of the wire format."""

import triton
import triton.language as tl


@triton.jit
def store_levels(packed_ptr, levels, row, block, n, WIDTH: tl.constexpr):
    """Pack a tile of levels, whose rows are blocks, and write the bytes.

    Args:
        levels: int32, [rows, lanes], zero where there is no element.
        row: int64, [rows, 1]: the numbers of the blocks.
        block: elements of a block, a multiple of 8.
        n: elements of the tensor.
    """
    ROWS: tl.constexpr = levels.shape[0]
    LANES: tl.constexpr = levels.shape[1]
    if WIDTH == 8:
        lane = tl.arange(0, LANES)[None, :]
        at = row * block + lane
        tl.store(packed_ptr + at, levels.to(tl.uint8), mask=(lane < block) & (at < n))
    elif 8 % WIDTH == 0:
        PER: tl.constexpr = 8 // WIDTH
        shifts = (tl.arange(0, PER) * WIDTH)[None, None, :]
        parts = tl.reshape(levels, (ROWS, LANES // PER, PER)) << shifts
        lane = tl.arange(0, LANES // PER)[None, :]
        at = row * (block // PER) + lane
        mask = (lane < block // PER) & (at < (n + PER - 1) // PER)
        tl.store(packed_ptr + at, tl.sum(parts, 2).to(tl.uint8), mask=mask)
    else:
        eight = tl.arange(0, 8)[None, None, :]
        parts = tl.reshape(levels, (ROWS, LANES // 8, 8)).to(tl.int64) << (eight * WIDTH)
        words = tl.sum(parts, 2)
        group = tl.arange(0, LANES // 8)[None, :, None]
        at = (row * (block // 8))[:, :, None] * WIDTH + group * WIDTH + eight
        mask = (eight < WIDTH) & (group < block // 8) & (at < (n * WIDTH + 7) // 8)
        tl.store(packed_ptr + at, (words[:, :, None] >> (8 * eight)).to(tl.uint8), mask=mask)


@triton.jit
def digit(place):
    """3^place for places 0 to 4."""
    low = tl.where(place == 0, 1, tl.where(place == 1, 3, 9))
    return tl.where(place < 3, low, tl.where(place == 3, 27, 81))


@triton.jit
def level_at(packed_ptr, i, mask, WIDTH: tl.constexpr):
    """The levels of these elements, as int32; width 0 is five to a byte."""
    if WIDTH == 0:
        byte = tl.load(packed_ptr + i // 5, mask=mask, other=0).to(tl.int32)
        found = byte // digit((i % 5).to(tl.int32)) % 3
    elif WIDTH == 8:
        found = tl.load(packed_ptr + i, mask=mask, other=0).to(tl.int32)
    elif 8 % WIDTH == 0:
        PER: tl.constexpr = 8 // WIDTH
        byte = tl.load(packed_ptr + i // PER, mask=mask, other=0).to(tl.int32)
        found = (byte >> ((i % PER).to(tl.int32) * WIDTH)) & ((1 << WIDTH) - 1)
    else:
        shift = ((i * WIDTH) % 8).to(tl.int32)
        at = packed_ptr + (i * WIDTH) // 8
        low = tl.load(at, mask=mask, other=0).to(tl.int32)
        high = tl.load(at + 1, mask=mask & (shift + WIDTH > 8), other=0).to(tl.int32)
        found = ((low | (high << 8)) >> shift) & ((1 << WIDTH) - 1)
    return found
