"""The wire format: golden frames, hostile frames with their messages, a fuzz of the reader."""

import random
import struct
import zlib
from pathlib import Path

import independent_reader
import numpy as np
import pytest
import torch
import zstandard
from golden.make import FRAMES, decoded, encode
from mutations import Mutator, frame_of, seal, valid_frames
from tensors import normal, same
from trials import attempt, fuzz, memory_limit

import thinwire as tw
from thinwire import kernels
from thinwire.errors import FrameError
from thinwire.frames.code import Code, varint
from thinwire.frames.header import CODES, MOST_DEPTH, header_bytes
from thinwire.frames.levels import Affine, Elias, Pairs, Powers, SignedPairs, Uniform
from thinwire.frames.positions import Overlay, Seeded, Sparse
from thinwire.frames.values import Narrow, NonFinite, Raw, Scaled8
from thinwire.frames.zipped import Zipped

GOLDEN = Path(__file__).parent / "golden"
F32 = torch.float32
ZLIB, ZSTD = 1, 2


def stored(name: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(GOLDEN / f"{name}.bin", np.uint8))


def words(*values: int) -> torch.Tensor:
    """64-bit words, given as unsigned numbers."""
    return torch.from_numpy(np.array(values, np.uint64).view(np.int64))


# Golden frames


@pytest.mark.parametrize("name", FRAMES)
def test_golden_frames_are_still_read(name):
    wanted = np.load(GOLDEN / f"{name}.npy")
    got = decoded(stored(name))
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", [name for name, golden in FRAMES.items() if golden.repeatable])
def test_golden_frames_are_still_written(name):
    assert same(encode(FRAMES[name]), stored(name))


@pytest.mark.parametrize("name", [name for name, golden in FRAMES.items() if not golden.repeatable])
def test_golden_values_are_still_written(name):
    assert same(tw.decode(encode(FRAMES[name])), tw.decode(stored(name)))


def test_golden_frames_cover_all_codes():
    def ids(code: Code) -> set[int]:
        return {code.id}.union(*(ids(child) for child in code.children()))

    assert set().union(*(ids(tw.unpack(stored(name)).code) for name in FRAMES)) == set(CODES)


def test_no_golden_frame_is_forgotten():
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(FRAMES)


# Reading


def test_any_alignment_and_stride_is_read():
    frame = tw.pack((tw.TopK(0.1) | tw.Quantize(4)).encode(normal(1000)))
    wanted = tw.decode(frame)
    for offset in range(1, 9):
        room = torch.zeros(frame.numel() + offset, dtype=torch.uint8)
        room[offset:] = frame
        assert same(tw.decode(room[offset:]), wanted)
    assert same(tw.decode(frame.repeat_interleave(2)[::2]), wanted)


@pytest.mark.parametrize("frame", [torch.zeros(40), torch.zeros(5, 8, dtype=torch.uint8)])
def test_what_is_no_frame_is_refused(frame):
    for read in (tw.unpack, tw.decode):
        with pytest.raises(TypeError, match="a frame is a one-dimensional uint8 tensor, got"):
            read(frame)


# Bytes, arrays, and several tensors at once


def as_array(frame: torch.Tensor) -> np.ndarray:
    array = frame.numpy().copy()
    array.flags.writeable = False
    return array


FORMS = {
    "bytes": lambda frame: frame.numpy().tobytes(),
    "bytearray": lambda frame: bytearray(frame.numpy().tobytes()),
    "memoryview": lambda frame: memoryview(frame.numpy().tobytes()),
    "part of a buffer": lambda frame: memoryview(b"abc" + frame.numpy().tobytes())[3:],
    "every other byte": lambda frame: memoryview(frame.repeat_interleave(2).numpy())[::2],
    "array": as_array,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_frame_may_come_as_bytes(form):
    payload = tw.TopK(0.2).encode(normal(50, 1).view(5, 10))
    given = FORMS[form](tw.pack(payload))
    assert same(tw.decode(given), payload.restore())
    assert tw.unpack(given).fingerprint == payload.fingerprint
    with pytest.raises(FrameError, match="the limit is 49"):
        tw.decode(given, max_numel=49)
    with pytest.raises(FrameError):
        tw.decode(given[:-1])
    with pytest.raises(FrameError, match="too few"):
        tw.decode(given[:0])


def test_a_payload_does_not_follow_the_buffer_it_came_in():
    buffer = bytearray(tw.pack(tw.NoCompression().encode(torch.ones(4))).numpy().tobytes())
    payload = tw.unpack(buffer)
    buffer[:] = bytes(len(buffer))
    assert same(payload.restore(), torch.ones(4))


NAMED = {
    "layer.weight": lambda: tw.TopK(0.2).encode(normal(50, 1).view(5, 10)),
    "": lambda: tw.Quantize(4).encode(normal(7, 2, torch.float64)),
    "größe": lambda: tw.NoCompression().encode(torch.arange(3)),
    "empty": lambda: tw.NoCompression().encode(torch.empty(0, 3)),
    "nan": lambda: tw.TopK(0.5).encode(torch.full((3,), torch.nan)),
}


def container() -> bytes:
    return tw.pack({name: make() for name, make in NAMED.items()})


def test_several_tensors_go_into_one_container():
    data = container()
    found, payloads = tw.decode(data), tw.unpack(bytearray(data))
    assert list(found) == list(payloads) == list(NAMED)
    for name, make in NAMED.items():
        assert same(found[name], make().restore())
        assert payloads[name].fingerprint == make().fingerprint
    frames = sum(-(-make().num_bytes // 8) * 8 for make in NAMED.values())
    table = sum(len(name.encode()) + 2 for name in NAMED)  # lengths below 128 take a byte each
    assert len(data) == 16 + -(-table // 8) * 8 + frames
    assert tw.decode(tw.pack({})) == {}


def test_containers_are_what_the_page_says():
    assert independent_reader.container(container()).keys() == NAMED.keys()
    for name, found in independent_reader.container(container()).items():
        wanted = NAMED[name]().restore().numpy()
        assert found.shape == wanted.shape
        assert np.array_equal(found, wanted, equal_nan=True)


def sealed(data: bytes) -> bytes:
    """A container whose table has the right CRC-32 again."""
    _, count, size, _ = struct.unpack("<4sIII", data[:16])
    check = zlib.crc32(data[4:12] + data[16 : 16 + size])
    return struct.pack("<4sIII", b"TWC1", count, size, check) + data[16:]


def test_every_changed_byte_of_a_container_is_seen():
    data, before = container(), tw.decode(container())
    rng = random.Random(0)
    frames = 16 + struct.unpack("<I", data[8:12])[0]
    for at in [*range(frames + 40), *range(frames + 40, len(data), 7)]:
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        with pytest.raises(FrameError):
            tw.decode(changed)
        try:  # with the right CRC-32: other names, or nothing
            found = tw.decode(sealed(bytes(changed)))
        except FrameError:
            continue
        assert all(same(a, b) for a, b in zip(found.values(), before.values(), strict=True))
    for end in range(0, len(data), 3):
        with pytest.raises(FrameError):
            tw.decode(data[:end])


ONE = tw.pack({"a": tw.NoCompression().encode(torch.ones(2))})  # 16 bytes, 8, then the frame
BAD_CONTAINERS = {
    "twice": (
        struct.pack("<4sIII", b"TWC1", 2, 8, 0) + ONE[16:19] * 2 + bytes(2) + ONE[24:] * 2,
        "'a': twice",
    ),
    "more than there are": (ONE[:4] + struct.pack("<I", 2**32 - 1) + ONE[8:], "table of the cont"),
    "a table beyond the end": (ONE[:8] + struct.pack("<I", 2**32 - 8) + ONE[12:], "a table of 42"),
    "a frame beyond the end": (ONE[:18] + b"\xff\xff\xff\x7f" + ONE[22:], "does not fit"),
    "a name beyond the table": (ONE[:16] + b"\x70" + ONE[17:], "table of the container"),
    "no UTF-8": (ONE[:17] + b"\xff" + ONE[18:], "UTF-8"),
    "something behind": (ONE + bytes(8), "8 bytes follow"),
    "no end of the table": (ONE[:23] + b"\1" + ONE[24:], "end in zeros"),
    "a frame of a frame": (ONE[:24] + container()[:16] + ONE[40:], "'a': a container, not a frame"),
}


@pytest.mark.parametrize("case", BAD_CONTAINERS)
def test_hostile_containers_are_refused(case):
    data, message = BAD_CONTAINERS[case]
    with pytest.raises(FrameError, match=message):
        tw.unpack(sealed(data))


def test_the_limit_is_for_all_tensors_of_a_container():
    tw.unpack(container(), max_numel=63)
    with pytest.raises(FrameError, match="the frame claims 3 elements, the limit is 2"):
        tw.unpack(container(), max_numel=62)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: tw.decode("frame"), "uint8 tensor or bytes, got str"),
        (lambda: tw.decode([1, 2]), "uint8 tensor or bytes, got list"),
        (lambda: tw.decode(np.zeros(40)), "one-dimensional and uint8, got float64"),
        (lambda: tw.decode(tw.TopK(0.5).encode(torch.ones(4))), "a payload already"),
        (lambda: tw.pack(torch.ones(3)), r"got Tensor: compressor.encode\(x\)"),
        (lambda: tw.pack(np.ones(3)), r"got ndarray: compressor.encode\(x\)"),
        (lambda: tw.pack({"a": torch.ones(3)}), "a: expected a payload, got Tensor"),
        (lambda: tw.pack({3: tw.TopK(0.5).encode(torch.ones(4))}), "must be a string, got 3"),
        (lambda: tw.pack(b"abc"), "got bytes"),
    ],
)
def test_what_cannot_be_packed_or_unpacked_is_said(attempt, message):
    with pytest.raises(TypeError, match=message):
        attempt()


def test_the_limit_is_the_callers():
    frame = tw.pack(tw.TopK(0.1).encode(normal(1000)))
    assert tw.decode(frame, max_numel=1000).numel() == 1000
    with pytest.raises(tw.FrameError, match="claims 1000 elements, the limit is 999"):
        tw.decode(frame, max_numel=999)


def test_too_many_dimensions_are_not_written():
    payload = tw.NoCompression().encode(torch.ones([1] * 17))
    with pytest.raises(ValueError, match="up to 16 dimensions"):
        tw.pack(payload)
    assert tw.decode(tw.pack(tw.NoCompression().encode(torch.ones([1] * 16)))).dim() == 16


def test_every_changed_byte_is_seen():
    data = bytearray(tw.pack(tw.TopK(0.1).encode(normal(100))).numpy().tobytes())
    for i in range(len(data)):
        for by in (1, 0x80, 0xFF):
            data[i] ^= by
            with pytest.raises(tw.FrameError):
                tw.unpack(torch.frombuffer(data, dtype=torch.uint8).clone())
            data[i] ^= by


@pytest.mark.parametrize("spec", ["topk:0.002", "topk:0.05", "topk:0.5"])
def test_positions_are_safe_once_checked(spec):
    """A receive buffer that is used again must not lead writes outside the tensor."""
    frame = tw.pack(tw.parse(spec).encode(normal(1000)))
    payload = tw.unpack(frame)
    wanted = payload.picked()[0].clone()
    frame.fill_(0x60)
    assert torch.equal(payload.picked()[0], wanted)
    assert payload.restore().shape == (1000,)


# Hostile frames


def changed(at: int, value: bytes, spec: str = "none") -> torch.Tensor:
    """A frame of four ones with some bytes replaced."""
    data = bytearray(tw.pack(tw.parse(spec).encode(torch.ones(4))).numpy().tobytes())
    data[at : at + len(value)] = value
    return seal(bytes(data))


def with_header(tail: bytes, body: bytes = b"", dims: int = 1) -> torch.Tensor:
    """A frame whose header has this variable part, filled up with zeros."""
    head = header_bytes(Raw(), F32, torch.Size([]), False, 0)[:20] + tail
    head = head[:6] + bytes([dims]) + head[7:]
    return seal(head + bytes(-len(head) % 8) + body)


def shaped(*sizes: int) -> bytes:
    return b"".join(map(varint, sizes)) + Raw().write()


def plain(*positions: int, numel: int = 10, count: int | None = None) -> torch.Tensor:
    """A sparse frame with plainly written positions."""
    code = Sparse(len(positions) if count is None else count, 0, 0, 0, Raw())
    at = torch.tensor(positions, dtype=torch.int32)
    return frame_of(code, F32, [numel], at, torch.ones(len(positions)))


def zipped(data: bytes, section: int, coder: int = ZSTD, code: Code | None = None) -> torch.Tensor:
    """One compressed section that stands for a float32 tensor of so many bytes."""
    code = Zipped(coder, (len(data),), code or Raw())
    content = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return frame_of(code, F32, [section // 4], content)


def deep(depth: int) -> Code:
    """Codes nested so deep, the innermost counted."""
    code: Code = Raw()
    for _ in range(depth - 1):
        code = Sparse(1, 1, 0, 0, code)
    return code


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


ZEROS = bytes(8000)
LEVELS = torch.zeros(16, dtype=torch.uint8)
SCALE = torch.ones(1)

HOSTILE = {
    # The header
    "empty": (lambda: seal(b""), "0 bytes are too few"),
    "short": (lambda: seal(b"TWF1" + bytes(15)), "19 bytes are too few"),
    "magic": (lambda: changed(0, b"TWF9"), "not a frame: it starts with b'TWF9'"),
    "element type": (lambda: changed(4, b"\x63"), "unknown element type 99"),
    "flags": (lambda: changed(5, b"\x02"), "unknown flags 0x2"),
    "zero byte": (lambda: changed(7, b"\x01"), "unknown flags 0x0, 0x1"),
    "dimensions": (lambda: changed(6, b"\x11"), "17 dimensions"),
    "absurd shape": (lambda: with_header(shaped(1 << 40)), "claims 1099511627776 elements"),
    "hidden shape": (lambda: with_header(shaped(0, 1 << 40), dims=2), "claims 1099511627776"),
    "product": (lambda: with_header(shaped(*[1 << 30] * 16), dims=16), "claims .* elements"),
    "long number": (lambda: with_header(b"\xff" * 10 + b"\x01"), "malformed"),
    "large number": (lambda: with_header(b"\xff" * 9 + b"\x02"), "malformed"),
    "padded number": (lambda: with_header(b"\x84\x00" + Raw().write()), "malformed"),
    "cut number": (
        lambda: seal(bytes(with_header(b"\x84").numpy())[:21]),
        "ends within its header",
    ),
    "cut code": (lambda: seal(bytes(with_header(b"\x04").numpy())[:21]), "ends within its header"),
    "unknown code": (lambda: with_header(varint(4) + b"\x63"), "unknown code 99"),
    "depth": (
        lambda: frame_of(deep(MOST_DEPTH + 1), F32, [1], *[words(1)] * MOST_DEPTH, SCALE),
        f"codes nest deeper than {MOST_DEPTH}",
    ),
    "filling": (lambda: changed(23, b"\x01"), "does not end in zeros"),
    # The body
    "trailing": (lambda: seal(changed(0, b"T").numpy().tobytes() + b"\0"), "its header implies 40"),
    "cut": (lambda: seal(changed(0, b"T").numpy().tobytes()[:-1]), "has 39 bytes"),
    "checksum": (lambda: changed(0, b"T").index_fill_(0, torch.tensor([8]), 1), "the checksum is"),
    "no content": (lambda: frame_of(NonFinite(), F32, [4]), "does not say that its tensor is"),
    "no content within": (
        lambda: frame_of(Sparse(1, 1, 0, 0, NonFinite()), F32, [4], words(1)),
        "stands inside another",
    ),
    "whole numbers": (
        lambda: frame_of(Uniform(8, 127, 0), torch.int32, [16], SCALE, LEVELS),
        "torch.int32 in a code for real numbers",
    ),
    "not whole numbers": (
        lambda: frame_of(NonFinite(), torch.int32, [4], non_finite=True),
        "torch.int32 in a code for real numbers",
    ),
    "truth": (
        lambda: frame_of(Raw(), torch.bool, [2], torch.tensor([1, 2], dtype=torch.uint8)),
        "a truth value is neither 0 nor 1",
    ),
    # Positions
    "descending": (lambda: plain(5, 3), "not ascending or lie outside"),
    "twice": (lambda: plain(5, 5), "not ascending or lie outside"),
    "negative": (lambda: plain(-1, 3), "not ascending or lie outside"),
    "outside": (lambda: plain(3, 10), "not ascending or lie outside"),
    "more than elements": (lambda: plain(0, 1, 2, 3, numel=3), "4 positions in a tensor of 3"),
    "bitmap with more": (
        lambda: frame_of(Sparse(2, 1, 0, 0, Raw()), F32, [64], words(0b111), torch.ones(2)),
        "not exactly 2 that lie inside",
    ),
    "bitmap with less": (
        lambda: frame_of(Sparse(4, 1, 0, 0, Raw()), F32, [64], words(0b111), torch.ones(4)),
        "not exactly 4 that lie inside",
    ),
    "bitmap outside": (
        lambda: frame_of(Sparse(1, 1, 0, 0, Raw()), F32, [9], words(1 << 9), torch.ones(1)),
        "not exactly 1 that lie inside",
    ),
    "rice with more": (
        lambda: frame_of(Sparse(1, 2, 0, 1, Raw()), F32, [64], words(0b11), torch.ones(1)),
        "not exactly 1 that lie inside",
    ),
    "rice with less": (
        lambda: frame_of(Sparse(2, 2, 0, 1, Raw()), F32, [64], words(1), torch.ones(2)),
        "not exactly 2 that lie inside",
    ),
    "rice outside": (
        lambda: frame_of(Sparse(1, 2, 3, 1, Raw()), F32, [9], words(2, 1), torch.ones(1)),
        "not exactly 1 that lie inside",
    ),
    "rice wrapping": (
        lambda: frame_of(Sparse(2, 2, 48, 1, Raw()), F32, [9], words(3, 0, 0), torch.ones(2)),
        "longer Rice codes",
    ),
    "form": (lambda: frame_of(Sparse(0, 3, 0, 0, Raw()), F32, [4]), "unknown form 3"),
    "rice parameter": (lambda: frame_of(Sparse(1, 2, 49, 1, Raw()), F32, [4]), "Rice parameter 49"),
    "parameter without rice": (
        lambda: frame_of(Sparse(1, 1, 2, 0, Raw()), F32, [4]),
        "Rice parameter 2 makes no sense",
    ),
    "rice words": (lambda: frame_of(Sparse(1, 2, 0, 9, Raw()), F32, [4]), "longer Rice codes"),
    # Drawn positions
    "drawn otherwise": (
        lambda: frame_of(Seeded(4, 1 << 30, 1, 1, 1, 0, Raw()), F32, [400], torch.ones(4)),
        "the key draws .* positions, not 4",
    ),
    "chance": (
        lambda: frame_of(Seeded(0, (1 << 32) + 1, 1, 1, 1, 0, Raw()), F32, [4]),
        "a probability above one",
    ),
    "key": (
        lambda: frame_of(Seeded(1, 0, 1, 1 << 32, 1, 0, Raw()), F32, [4], SCALE),
        "Key: step must be an integer in",
    ),
    "stream": (
        lambda: frame_of(Seeded(1, 0, 1, 1, 1, 256, Raw()), F32, [4], SCALE),
        "Key: stream must be an integer in",
    ),
    # Levels
    "width": (lambda: frame_of(Uniform(9, 127, 0), F32, [16], SCALE, LEVELS), "into 9 bits"),
    "limit": (lambda: frame_of(Uniform(4, 8, 0), F32, [16], SCALE, LEVELS), "levels up to 8"),
    "no levels": (lambda: frame_of(Uniform(4, 0, 0), F32, [16], SCALE, LEVELS), "levels up to 0"),
    "block": (
        lambda: frame_of(Uniform(4, 7, 12), F32, [16], SCALE, LEVELS),
        "block of 12 elements",
    ),
    "trits in blocks": (
        lambda: frame_of(Uniform(0, 1, 8), F32, [16], torch.ones(2), LEVELS[:4]),
        "five levels to a byte need one scale",
    ),
    "affine width": (lambda: frame_of(Affine(0, 0), F32, [16]), "levels of 0 bits"),
    "elias above the limit": (
        lambda: frame_of(Elias(2, 0, 1, 1), F32, [1], SCALE, words(0b1000, 0)),
        "not exactly 1 levels within 2",
    ),
    "elias with more": (
        lambda: frame_of(Elias(2, 0, 1, 1), F32, [1], SCALE, words(0b11, 0)),
        "not exactly 1 levels within 2",
    ),
    "elias without bits": (
        lambda: frame_of(Elias(2, 0, 1, 0), F32, [2], SCALE, words(0b1010)),
        "not exactly 2 levels within 2",
    ),
    "elias too short": (lambda: frame_of(Elias(2, 0, 1, 1), F32, [65]), "cannot hold 65 levels"),
    "elias too long": (lambda: frame_of(Elias(2, 0, 10, 1), F32, [65]), "more words than 65"),
    "narrow": (lambda: frame_of(Narrow(3), F32, [4]), "unknown narrow type 3"),
    "no block": (lambda: frame_of(Scaled8(0), F32, [4]), "has no elements"),
    "powers": (lambda: frame_of(Powers(3000), F32, [16], LEVELS), "powers of two up to 2.1900"),
    "pairs": (lambda: frame_of(Pairs(9), F32, [16]), "block of 9 elements"),
    "signed pairs": (lambda: frame_of(SignedPairs(12), F32, [16]), "block of 12 elements"),
    "short levels of signed pairs": (
        lambda: frame_of(SignedPairs(0), F32, [16], torch.ones(2), LEVELS[:3]),
        "its header implies",
    ),
    "signed pairs of integers": (
        lambda: frame_of(SignedPairs(0), torch.int32, [16], torch.ones(2), LEVELS[:4]),
        "in a code for real numbers",
    ),
    "overlays": (
        lambda: frame_of(Overlay(Overlay(Raw(), Raw()), Raw()), F32, [1], *[SCALE] * 3),
        "an overlay within an overlay",
    ),
    # Compressed sections
    "zip bomb": (
        lambda: zipped(zstd(bytes(100)), 1 << 30),
        "compressed bytes cannot hold 1073741824",
    ),
    "zlib bomb": (lambda: zipped(zlib.compress(bytes(1 << 20)), 8000, ZLIB), "does not end where"),
    "lying size": (lambda: zipped(zstd(bytes(7996)), 8000), "states another size than the frame"),
    "unknown size": (
        lambda: zipped(zstandard.ZstdCompressor(write_content_size=False).compress(ZEROS), 8000),
        "states another size than the frame",
    ),
    "damaged zstd": (lambda: zipped(zstd(ZEROS)[:-1] + b"\xff", 8000), "section is damaged"),
    "damaged zlib": (lambda: zipped(b"\xff" * 50, 8000, ZLIB), "section is damaged"),
    "cut zlib": (lambda: zipped(zlib.compress(ZEROS)[:-5], 8000, ZLIB), "does not end where it"),
    "zlib and more": (
        lambda: zipped(zlib.compress(ZEROS) + b"x", 8000, ZLIB),
        "does not end where",
    ),
    "short zlib": (lambda: zipped(zlib.compress(bytes(7999)), 8000, ZLIB), "holds 7999 bytes, not"),
    "nothing zipped": (lambda: zipped(b"", 8000), "0 compressed bytes cannot hold 8000"),
    "coder": (lambda: zipped(zstd(ZEROS), 8000, coder=9), "unknown lossless coder 9"),
    "larger than its content": (lambda: zipped(bytes(9), 8), "larger than its content"),
    "missing section": (
        lambda: frame_of(Zipped(ZSTD, (9,), Uniform(8, 127, 0)), F32, [16], LEVELS[:9]),
        "1 compressed sections instead of 2",
    ),
    "many sections": (
        lambda: with_header(varint(4) + bytes([12, ZSTD, 99])),
        "99 compressed sections",
    ),
    "bomb of words": (
        lambda: zipped(zstd(bytes(1 << 20)), 8, code=Sparse(1, 2, 0, 1 << 17, Raw())),
        "longer Rice codes",
    ),
}


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_frames_are_refused(case, name):
    make, says = HOSTILE[case]
    frame = make()
    with kernels.use(name), memory_limit(), pytest.raises(tw.FrameError, match=says):
        tw.decode(frame)


@pytest.mark.parametrize("block", [256, 1 << 40, (1 << 63) - 8, (1 << 64) - 8])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_blocks_beyond_the_tensor_cost_nothing(block, name):
    """What is allocated follows the tensor, not the block."""
    frames = [
        frame_of(Uniform(8, 127, block), F32, [16], SCALE, LEVELS),
        frame_of(Affine(8, block), F32, [16], SCALE, SCALE, LEVELS),
        frame_of(Elias(1, block, 1, 0), F32, [16], SCALE, words(0xFFFF)),
        frame_of(Pairs(block), F32, [16], torch.ones(2), LEVELS[:2]),
        frame_of(SignedPairs(block), F32, [16], torch.ones(2), LEVELS[:4]),
        frame_of(Scaled8(block), F32, [16], SCALE, LEVELS),
    ]
    with kernels.use(name), memory_limit():
        for frame in frames:
            assert tw.decode(frame).shape == (16,)


@pytest.mark.parametrize("block", [1 << 24, 1 << 40])
def test_long_blocks_may_be_asked_for(block):
    x = normal(1000)
    for c, whole in (
        (tw.Quantize(8, block=block), tw.Quantize(8, block=None)),
        (tw.Quantize(8, block=block, symmetric=False), tw.Quantize(8, block=None, symmetric=False)),
        (tw.QSGD(7, bucket=block, norm="max"), tw.QSGD(7, bucket=None, norm="max")),
        (tw.OneBit(block), tw.OneBit(None)),
        (tw.TwoBit(block), tw.TwoBit(None)),
        (tw.Cast("fp8", block=block), tw.Cast("fp8", block=1000)),
    ):
        assert torch.allclose(c.decode(c.encode(x)), whole.decode(whole.encode(x)), rtol=1e-6)


# Fuzz


def test_fuzz():
    """Damaged frames: FrameError or a tensor of the claimed shape, nothing else.

    A million of them: make test-thorough.
    """
    tally = fuzz(20, 6_000)
    assert tally.done == 6_000
    # Of no use if most were refused at the door, or if the checksum let most of them pass.
    assert 600 < tally.read < 5_400
    assert not tally.missing


def test_fuzz_of_both_readers():
    """Numba and PyTorch agree on which frames are valid, and on what is in them."""
    mutator = Mutator(random.Random(19), valid_frames())
    for i in range(2000):
        frame = (mutator.damaged() if i % 5 else mutator.invented()).frame
        outcome = attempt(frame)
        with kernels.use("reference"):
            other = attempt(frame)
        assert (outcome.tensor is None) == (other.tensor is None), bytes(frame.numpy()).hex()
        if outcome.tensor is not None:
            a, b = outcome.tensor, other.tensor
            assert ((a == b) | ((a != a) & (b != b))).all(), bytes(frame.numpy()).hex()
