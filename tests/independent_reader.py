"""A decoder from docs/reference/wire-format.md alone: NumPy, zlib and zstandard, no torch.

Written for clarity, not for speed. NumPy has no bfloat16: such tensors come back as float32.
"""

import functools
import itertools
import math
import zlib
from typing import NamedTuple

import numpy as np
import zstandard

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
U8, WORD, F4, F8, F2 = map(np.dtype, ("u1", "<u8", "<f4", "<f8", "<f2"))
BF16 = np.dtype([("bits", "<u2")])
TYPES = [None, F4, F8, F2, BF16, *map(np.dtype, ("i1", "u1", "<i2", "<i4", "<i8", "?"))]
LARGEST = {F2: np.float32(65504), BF16: np.float32(3.3895313892515355e38)}
PARAMETERS = (0, 0, 1, 1, 4, 6, 3, 4, 2, 1, 1, 0, 1, 1)  # by code id; the sizes of Zipped apart
NESTED = {4: 1, 5: 1, 11: 2, 12: 1}


class BadFrameError(ValueError):
    """The bytes are not a valid frame."""


def need(condition, what):
    if not condition:
        raise BadFrameError(what)


def ceil(a, b):
    return -(-a // b)


# Building blocks


def bits(array):
    return np.unpackbits(array.view(U8), bitorder="little").astype(int)


def unpack(packed, width, count):
    """Packed levels; trits for width 0."""
    if width == 0:
        return (packed[:, None] // 3 ** np.arange(5) % 3).flatten()[:count]
    return bits(packed)[: count * width].reshape(count, width) @ (1 << np.arange(width))


def gaps(words, count):
    """How many 0 bits stand before each 1 bit."""
    places = np.flatnonzero(bits(words))
    need(len(places) == count, "another number of 1 bits")
    return (np.diff(places, prepend=-1) - 1).tolist()


def rice(words, count, k, unary_words):
    """Positions in Golomb-Rice streams, as Python's integers, which do not overflow."""
    rests = unpack(words[unary_words:], k, count).tolist() if k else [0] * count
    both = zip(gaps(words[:unary_words], count), rests, strict=True)
    ends = itertools.accumulate((quotient << k) + rest + 1 for quotient, rest in both)
    return [end - 1 for end in ends]


def elias(words, count, limit, unary_words):
    """Levels in Elias streams."""
    binary, at, levels = bits(words[unary_words:]).tolist(), 0, []
    for e in gaps(words[:unary_words], count):
        need(e <= 7 and at + e <= len(binary), "a level past the end")
        number = (1 << e) + sum(binary[at + i] << i for i in range(e))
        at += e
        need(number <= 2 * limit + 1, "a level beyond the limit")
        levels.append(-(number // 2) if number % 2 else number // 2)
    return np.array(levels, int)


@functools.lru_cache(maxsize=64)
def philox(group, seed, step, tensor, stream):
    c = (group & M32, (group >> 32) ^ (stream << 24), step, tensor)
    a, b = seed & M32, seed >> 32
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((q >> 32) ^ c[1] ^ a, q & M32, (p >> 32) ^ c[3] ^ b, p & M32)
        a, b = (a + 0x9E3779B9) & M32, (b + 0xBB67AE85) & M32
    return c[:3]


def word(i, key):
    k0, k1, k2 = philox(i // 512, *key)
    v = (i % 512 * 0x9E3779B1 + k0) & M32
    v = ((v ^ (v >> 17)) * 0xED5AD4BB & M32) ^ k1
    v = (v ^ (v >> 11)) * 0xAC4C1B51 & M32
    v = (v ^ (v >> 15)) * 0x31848BAB & M32
    return v ^ (v >> 14) ^ k2


def permuted(n, key):
    """permute(0), permute(1), ..., as far as they are below n."""

    def mix32(v):
        v = v * 0x9E3779B1 & M32
        v = (v ^ (v >> 15)) * 0x85EBCA77 & M32
        return v ^ (v >> 13)

    width = max(8, (n - 1).bit_length())
    left, right = width // 2, width - width // 2
    keys = [word(r, key) for r in range(8)]
    for x in range(1 << width):
        high, low = x >> right, x & ((1 << right) - 1)
        for r in (0, 2, 4, 6):
            high ^= mix32(low ^ keys[r]) & ((1 << left) - 1)
            low ^= mix32(high ^ keys[r + 1]) & ((1 << right) - 1)
        if (value := high << right | low) < n:
            yield value


def draw(n, count, chance, key):
    if chance == 0:
        return sorted(itertools.islice(permuted(n, key), count))
    return [i for i in range(n) if word(i, key) < chance]


def e4m3(data):
    exponent, fraction = (data >> 3 & 15).astype(int), data & 7
    size = np.where(exponent, np.ldexp(8.0 + fraction, exponent - 10), fraction * 2.0**-9)
    return np.where(data & 127 == 127, np.nan, np.where(data >> 7, -size, size))


# Codes


class Section(NamedTuple):
    dtype: np.dtype
    count: int

    @property
    def num_bytes(self):
        return self.dtype.itemsize * self.count

    def array(self, data):
        array = np.frombuffer(data, self.dtype, self.count)
        if self.dtype == BF16:
            return (array["bits"].astype("<u4") << 16).view(F4)
        need(self.dtype != "?" or (array.view(U8) < 2).all(), "a truth value that is not 0 or 1")
        return array

    def expand(self, data, coder):
        """The array from the bytes that Zipped stores."""
        size = self.num_bytes
        if len(data) == size:
            return self.array(data)
        need(size <= (1032 if coder == 1 else 32768) * len(data), "no stream expands so far")
        try:
            if coder == 1:
                stream = zlib.decompressobj()
                planes = stream.decompress(data, size + 1)
                need(stream.eof and not stream.unused_data, "the end of a zlib stream")
            else:
                need(zstandard.frame_content_size(data) == size, "the size in a zstd frame")
                planes = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        except (zlib.error, zstandard.ZstdError) as error:
            raise BadFrameError(str(error)) from None
        need(len(planes) == size, "the size of an expanded section")
        return self.array(np.frombuffer(planes, U8).reshape(-1, self.count).T.tobytes())


def total(terms, n, real):
    """The sum of what `code` yields, one after the other."""
    out = None
    for term in terms:
        if isinstance(term, tuple):
            out = np.zeros(n, real) if out is None else out
            out[term[0]] += term[1]
        else:
            out = term.astype(real) if out is None else out + term
    return out


def bare(record):
    """A record without what is zipped around it."""
    return bare(record[-1]) if record[0] == 12 else record


def overlaid(record):
    """Whether there is an Overlay in a record."""
    nested = record[len(record) - NESTED.get(record[0], 0) :]
    return record[0] == 11 or any(map(overlaid, nested))


def code(record, t, n):
    """A code that describes n elements of type t: a generator that yields its list of sections,
    is sent their arrays and yields a list of what to add up: arrays, or (positions, values)."""
    real = F8 if t == F8 else F4

    def blocks(block, each=1):
        need(block % 8 == 0, "a block that is no multiple of 8")
        return Section(real, each * (ceil(n, block) if block else 1))

    def of(block):
        return np.arange(n) // min(block or M32, M32)

    match record:
        case [0]:  # NonFinite
            yield []
            yield [np.full(n, np.nan)]
        case [1]:  # Raw
            yield (yield [Section(t, n)])
        case [2, 1 | 2 as kind]:  # Narrow
            yield (yield [Section(F2 if kind == 1 else BF16, n)])
        case [3, block] if block:  # Scaled8
            scales, data = yield [Section(real, ceil(n, block)), Section(U8, n)]
            yield [e4m3(data).astype(real) * scales[of(block)]]
        case [4, count, form, k, unary, inner] if count <= n and form <= 2:  # Sparse
            need(form == 2 or k == unary == 0, "parameters of another form")
            need(
                k <= min(48, n.bit_length()) and 64 * (unary - 1) <= count + (n >> k), "Rice codes"
            )
            need(64 * unary << k < 1 << 62 and (count or bare(inner) == [1]), "Rice codes")
            plain = Section(np.dtype("<i4" if n < 1 << 31 else "<i8"), count)
            coded = Section(WORD, unary + ceil(count * k, 64))
            own = (plain, Section(WORD, ceil(n, 64)), coded)[form]
            nested = code(inner, t, count)
            at, *rest = yield [own, *next(nested)]
            if form:
                at = np.flatnonzero(bits(at)) if form == 1 else rice(at, count, k, unary)
            need(len(at) == count and (np.diff([-1, *at, n]) > 0).all(), "positions")
            yield [(at, total(nested.send(rest), count, real))]
        case [5, count, chance, *key, inner] if count <= n and chance <= 1 << 32:  # Seeded
            need(max(key[1:3]) <= M32 and key[3] < 256, "the key")
            need(count or bare(inner) == [1], "no values in a code for numbers")
            nested = code(inner, t, count)
            rest = yield next(nested)
            at = draw(n, count, chance, tuple(key))
            need(len(at) == count, "another number of positions drawn")
            yield [(at, total(nested.send(rest), count, real))]
        case [6, width, limit, block] if width <= 8 and (width or not block):  # Uniform
            need(1 <= limit <= ((1 << width) - 1 if width else 2) // 2, "levels")
            size = ceil(n * width, 8) if width else ceil(n, 5)
            scales, packed = yield [blocks(block), Section(U8, size)]
            yield [(unpack(packed, width, n) - limit).astype(real) * scales[of(block)]]
        case [7, limit, block, unary, binary] if 1 <= limit <= 127:  # Elias
            need(n <= 64 * unary and max(unary, binary) <= ceil(n, 8), "the number of words")
            scales, words = yield [blocks(block), Section(WORD, unary + binary)]
            yield [elias(words, n, limit, unary).astype(real) * scales[of(block)]]
        case [8, width, block] if 1 <= width <= 8:  # Affine
            own = blocks(block)
            lows, scales, packed = yield [own, own, Section(U8, ceil(n * width, 8))]
            unit, base = 0.5 * scales.astype(F8)[of(block)], 0.5 * lows.astype(F8)[of(block)]
            yield [(2 * (unpack(packed, width, n).astype(F8) * unit + base)).astype(real)]
        case [9, block]:  # Pairs
            pairs, signs = yield [blocks(block, 2), Section(U8, ceil(n, 8))]
            yield [pairs[2 * of(block) + bits(signs)[:n]]]
        case [10, biased] if 100 <= biased <= 2124:  # Powers
            (data,) = yield [Section(U8, n)]
            c = (data & 127).astype(int)
            size = np.where(c, np.ldexp(1.0, biased - 1100 + c - 127), 0.0)
            yield [np.where(data >> 7, -size, size).astype(real)]
        case [11, lower, upper] if not (overlaid(lower) or overlaid(upper)):  # Overlay
            low, high = code(lower, t, n), code(upper, t, n)
            own = next(low)
            arrays = yield own + next(high)
            yield low.send(arrays[: len(own)]) + high.send(arrays[len(own) :])
        case [12, 1 | 2 as coder, sizes, inner]:  # Zipped
            nested = code(inner, t, n)
            plain = next(nested)
            need(len(sizes) == len(plain), "the number of compressed sections")
            need(all(s <= p.num_bytes for s, p in zip(sizes, plain, strict=True)), "their sizes")
            stored = yield [Section(U8, size) for size in sizes]
            whole = [p.expand(s.tobytes(), coder) for s, p in zip(stored, plain, strict=True)]
            yield nested.send(whole)
        case [13, block]:  # SignedPairs
            pairs, packed = yield [blocks(block, 2), Section(U8, ceil(n, 4))]
            level = unpack(packed, 2, n)
            size = pairs[2 * of(block) + level // 2]
            yield [np.where(level % 2, -size, size)]
        case _:
            raise BadFrameError(f"a code that makes no sense here: {record}")


# Frames


class Header:
    """Reads a header from front to back."""

    def __init__(self, data):
        self.data, self.at = data, 20

    def varint(self):
        value = 0
        for place in range(10):
            need(self.at < len(self.data), "the frame ends within its header")
            digit = self.data[self.at]
            self.at += 1
            value |= (digit & 127) << (7 * place)
            if digit < 128:
                need(value <= M64 and (digit or not place), "a malformed varint")
                return value
        raise BadFrameError("a varint of more than ten bytes")

    def record(self, depth=1):
        """[id, parameters..., nested records...]; the sizes of Zipped are a list."""
        number = self.varint()  # ids are below 128, so a byte
        need(number < len(PARAMETERS) and depth <= 12, "an unknown code, or one too deep")
        need(number or depth == 1, "a NonFinite inside another code")
        record = [number, *(self.varint() for _ in range(PARAMETERS[number]))]
        if number == 12:
            sizes = self.varint()
            need(sizes <= 16, "too many compressed sections")
            record.append([self.varint() for _ in range(sizes)])
        return record + [self.record(depth + 1) for _ in range(NESTED.get(number, 0))]


def checksum(frame):
    total = int.from_bytes(frame[:8], "little")
    words = np.frombuffer(frame[16:] + bytes(-len(frame) % 8), WORD)
    for i, w in enumerate(words.tolist(), start=1):
        z = (w + i * 0x9E3779B97F4A7C15) & M64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
        total += z ^ (z >> 31)
    return total & M64


def narrow(values, t, flagged):
    """float32 values as float16, or as those float32 numbers that bfloat16 has."""
    if not flagged:
        values = np.clip(values, -LARGEST[t], LARGEST[t])
    raw = values.view("<u4")
    upper = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16 << 16
    return values.astype(F2) if t == F2 else np.where(np.isnan(values), values, upper.view(F4))


@np.errstate(all="ignore")
def decode(frame, max_numel=1 << 32):
    """The tensor in a frame of bytes, as an array; BadFrameError if the bytes are not a frame."""
    need(len(frame) >= 20 and frame[:4] == b"TWF1", "not a TWF1 frame")
    number, flags, dimensions, zero = frame[4:8]
    need(1 <= number <= 10 and flags <= 1 and dimensions <= 16 and zero == 0, "fixed fields")
    header = Header(frame[:512])
    shape = [header.varint() for _ in range(dimensions)]
    need(math.prod(size or 1 for size in shape) <= max_numel, "too many elements")
    record = header.record()
    at = ceil(header.at, 8) * 8
    need(at <= len(header.data) and not any(frame[header.at : at]), "the end of the header")

    t, n = TYPES[number], math.prod(shape)
    kind = bare(record)
    need(kind == [1] or (number <= 4 and n and (kind != [0] or flags)), "a code for other tensors")
    reader = code(record, t, n)
    sections = next(reader)
    need(len(frame) == at + sum(s.num_bytes for s in sections), "the length of the frame")
    need(checksum(frame) == int.from_bytes(frame[8:16], "little"), "the checksum")
    arrays = [None] * len(sections)
    for i in sorted(range(len(sections)), key=lambda i: -sections[i].dtype.itemsize):
        arrays[i] = sections[i].array(frame[at : at + sections[i].num_bytes])
        at += sections[i].num_bytes
    terms = reader.send(arrays)
    values = terms[0] if kind == [1] else total(terms, n, F8 if t == F8 else F4)
    if t in LARGEST and kind != [1]:
        values = narrow(values, t, flags)
    return values.reshape(shape)


def container(data, max_numel=1 << 32):
    """The arrays by name in a container of bytes."""
    need(len(data) >= 16 and data[:4] == b"TWC1", "not a TWC1 container")
    count, size, check = np.frombuffer(data[4:16], "<u4").tolist()
    need(size % 8 == 0 and 16 + size <= len(data), "the length of the table")
    table = Header(data[16 : 16 + size])
    need(zlib.crc32(data[4:12] + table.data) == check, "the CRC-32")
    table.at, at, found = 0, 16 + size, {}
    for _ in range(count):
        length = table.varint()
        name = table.data[table.at : table.at + length]
        table.at += length
        length = table.varint()
        need(at + length <= len(data), "a frame beyond the end")
        found[name.decode()] = array = decode(data[at : at + length], max_numel)
        max_numel -= array.size
        at += ceil(length, 8) * 8
    need(len(table.data) - table.at < 8 and not any(table.data[table.at :]), "the end of the table")
    need(len(found) == count and at == len(data), "the end of the container")
    return found
