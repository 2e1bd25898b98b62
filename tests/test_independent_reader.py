"""docs/reference/wire-format.md proves itself: a reader written from it alone restores all."""

import ast
import itertools
import math
import random
import re
import zlib
from pathlib import Path

import independent_reader
import numpy as np
import pytest
import torch
from independent_reader import BadFrameError
from tensors import FLOATS, INTEGERS, KINDS, content, normal

import thinwire as tw

KEY = tw.Key(seed=0xFEDCBA9876543210, step=11, tensor=13)
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "wire-format.md"
SPECS = [
    *("none", "cast:fp16", "cast:bf16", "cast:fp8", "cast:fp8,8"),
    *("topk:0.01", "topk:0.3", "topk:0.9", "threshold:1.0"),
    *("randomk:0.1", "randomk:0.1,shared=true", "bernoulli:0.1", "bernoulli:0.1,shared=true"),
    *("quantize:8", "quantize:4", "quantize:2", "quantize:4,8", "quantize:4,entropy=true"),
    *("quantize:4,symmetric=false", "quantize:8,none,false", "quantize:2,none,entropy=true"),
    *("qsgd:7", "qsgd:3", "qsgd:22,entropy=true", "qsgd:127,8", "qsgd:1,none"),
    *("onebit", "onebit:none", "onebit:8", "scaledsign", "terngrad", "natural"),
    *("lossless", "lossless:zlib", "topk:0.1|quantize:4", "quantize:4|lossless"),
    *("topk:0.1|qsgd:7|lossless", "topk:0.5|topk:0.5|onebit", "bernoulli:0.5,shared=true|natural"),
    *("tiered:0.05", "tiered:0.05,(quantize:8),(onebit)", "tiered:0.1,(none),(natural)"),
    *("topk:0.5|tiered:0.1|lossless", "tiered:0.1,(lossless:zlib),(cast:fp8)"),
]
over_specs = pytest.mark.parametrize("spec", SPECS)


def frame_of(spec: str, x: torch.Tensor) -> bytes:
    return tw.pack(tw.parse(spec).encode(x, key=KEY)).numpy().tobytes()


def as_tensor(frame: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(frame, np.uint8).copy())


def by_thinwire(frame: bytes, **limits: int) -> np.ndarray:
    """As the independent reader returns it: bfloat16 as float32."""
    restored = tw.decode(as_tensor(frame), **limits)
    return (restored.float() if restored.dtype == torch.bfloat16 else restored).numpy()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in type, shape and every bit; the bits of NaN are not specified."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind != "f":
        return a.tobytes() == b.tobytes()
    bits = f"u{a.dtype.itemsize}"
    equal = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    return bool((equal | (np.isnan(a) & np.isnan(b))).all())


def agree(frame: bytes) -> bool:
    return same(independent_reader.decode(frame), by_thinwire(frame))


def sealed(frame: bytes) -> bytes:
    """The frame with the checksum that it should have."""
    if len(frame) < 16:
        return frame
    return frame[:8] + independent_reader.checksum(frame).to_bytes(8, "little") + frame[16:]


# Frames of all kinds


@over_specs
def test_every_bit(spec):
    for dtype in FLOATS:
        assert agree(frame_of(spec, normal(333, dtype=dtype).view(37, 9))), dtype


@over_specs
def test_every_content(spec):
    for kind, dtype in itertools.product(KINDS, FLOATS):
        assert agree(frame_of(spec, content(kind, 150, dtype, seed=1))), (kind, dtype)


@over_specs
def test_every_shape(spec):
    for shape in [(), (1,), (0,), (3, 0, 2), (2, 1, 3, 1, 2, 1, 2), (1,) * 16]:
        assert agree(frame_of(spec, normal(math.prod(shape)).view(shape))), shape


@over_specs
def test_not_a_number(spec):
    for dtype in FLOATS:
        x = normal(50, dtype=dtype)
        x[3], x[40] = torch.nan, -torch.inf
        frame = frame_of(spec, x)
        assert frame[5] == 1, dtype
        assert agree(frame), dtype
        found = independent_reader.decode(frame)
        if not tw.parse(spec).lossless:
            assert np.isnan(found).all(), dtype
        elif dtype != torch.bfloat16:
            assert found.tobytes() == x.view(torch.uint8).numpy().tobytes(), dtype


@pytest.mark.parametrize("spec", ["none", "lossless", "lossless:zlib"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(spec, dtype):
    low, high = (0, 2) if dtype == torch.bool else (-(2**62), 2**62)
    x = torch.from_numpy(np.random.default_rng(0).integers(low, high, (20, 15))).to(dtype)
    frame = frame_of(spec, x)
    assert agree(frame)
    assert independent_reader.decode(frame).tobytes() == x.numpy().tobytes()


def test_long():
    """Long enough for threads to share the work of decoding positions."""
    assert agree(frame_of("topk:0.1", normal(1_400_000)))


def test_all_codes_and_forms_occur():
    frames = [frame_of(spec, normal(333)) for spec in SPECS]
    frames.append(frame_of("topk:0.1", torch.tensor([torch.nan])))
    seen = set()

    def visit(record):
        seen.add(f"form {record[2]}" if record[0] == 4 else record[0])
        seen.update(["trits"] if record[:2] == [6, 0] else [])
        for nested in record[len(record) - independent_reader.NESTED.get(record[0], 0) :]:
            visit(nested)

    for frame in frames:
        header = independent_reader.Header(frame)
        for _ in range(frame[6]):
            header.varint()
        visit(header.record())
    assert seen == set(range(13)) - {4} | {"form 0", "form 1", "form 2", "trits"}


# Frames that are none


@over_specs
def test_damage_is_refused(spec):
    frame = frame_of(spec, normal(60))
    for at in range(len(frame)):
        damaged = bytearray(frame)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(BadFrameError):
            independent_reader.decode(bytes(damaged))
    for cut in (frame[:-1], frame[:30], frame[:10], b"", frame + b"\0"):
        with pytest.raises(BadFrameError):
            independent_reader.decode(sealed(cut))


def header_only(rest: bytes, dtype: int = 1, flags: int = 0, dimensions: int = 1) -> bytes:
    """A frame without sections; `rest` is its shape and its code."""
    head = b"TWF1" + bytes([dtype, flags, dimensions, 0]) + bytes(12) + rest
    return sealed(head + bytes(-len(head) % 8))


SPARSE, RAW = b"\x04\0\0\0\0", b"\x01"
ZIPPED = b"\x0c\x01\x01\0"  # one empty section
LIMITS = {
    "twelve codes deep": (True, header_only(b"\0" + 11 * ZIPPED + RAW)),
    "thirteen codes deep": (False, header_only(b"\0" + 12 * ZIPPED + RAW)),
    "sixteen dimensions": (True, header_only(bytes(16) + RAW, dimensions=16)),
    "seventeen dimensions": (False, header_only(bytes(17) + RAW, dimensions=17)),
    "2^32 beside a zero": (True, header_only(b"\0\x80\x80\x80\x80\x10" + RAW, dimensions=2)),
    "2^32 + 1 beside a zero": (False, header_only(b"\0\x81\x80\x80\x80\x10" + RAW, dimensions=2)),
    "a superfluous digit": (False, header_only(b"\x80\0" + RAW)),
    "NonFinite, flagged": (True, header_only(b"\x05\0", flags=1)),
    "NonFinite, not flagged": (False, header_only(b"\x05\0")),
    "NonFinite of integers": (False, header_only(b"\x05\0", dtype=9, flags=1)),
    "NonFinite inside": (False, header_only(b"\0" + SPARSE + b"\0", flags=1)),
    "sizes of seventeen sections": (False, header_only(b"\0\x0c\x01\x11" + bytes(17) + RAW)),
    "integers in Sparse": (False, header_only(b"\0" + SPARSE + RAW, dtype=9)),
    "an unknown code": (False, header_only(b"\0\x0d")),
    "an unknown flag": (False, header_only(b"\0" + RAW, flags=2)),
    "an unknown type": (False, header_only(b"\0" + RAW, dtype=11)),
}


@pytest.mark.parametrize(("fine", "frame"), LIMITS.values(), ids=LIMITS.keys())
def test_limits(fine, frame):
    if fine:
        assert agree(frame)
        return
    with pytest.raises(BadFrameError):
        independent_reader.decode(frame)
    with pytest.raises(tw.FrameError):
        tw.decode(as_tensor(frame))


def test_both_refuse_the_same():
    """Random changes under a right checksum: both readers refuse, or both read the same."""
    rng = random.Random(0)
    xs = [normal(40, dtype=dtype) for dtype in FLOATS]
    frames = [frame_of(spec, x) for spec in SPECS for x in xs]
    frames += [frame_of(spec, torch.arange(40) > 9) for spec in ("none", "lossless")]
    read = 0
    for _ in range(4000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.choice([1, 1, 2, 3])):
            first, last = rng.choice([(4, 8), (20, 40), (20, 40), (20, len(frame))])
            at = rng.randrange(first, min(last, len(frame)))
            frame[at] = rng.choice([rng.randrange(256), rng.randrange(16), frame[at] ^ 1, 128, 255])
        changed = sealed(bytes(frame))
        try:
            found = independent_reader.decode(changed, max_numel=10_000)
        except BadFrameError:
            with pytest.raises(tw.FrameError):
                by_thinwire(changed, max_numel=10_000)
            continue
        assert same(found, by_thinwire(changed, max_numel=10_000)), changed.hex()
        read += 1
    assert read > 500  # or this says nothing


# The page


def test_frames_on_the_page():
    """The two hex dumps are what thinwire writes, and read as what the page says."""
    dumps = re.findall(r"```\n((?:[0-9a-f]{2}  (?:[0-9a-f]{2} ?)+\n)+)```", PAGE.read_text())
    lines = [[line[4:] for line in dump.splitlines()] for dump in dumps]
    sparse, levels = (bytes.fromhex("".join(dump)) for dump in lines)
    rows = [0.5, -2.0, 0.25, 0.0], [1.0, -0.125, 3.0, 0.75], [-0.5, 0.0, -1.5, 0.375]
    x = torch.tensor([*rows, [0.125, -0.25, 0.0, -7.0]])
    assert sparse == frame_of("topk:0.25", x)
    assert levels == frame_of("quantize:4", x.flatten())
    assert agree(sparse)
    assert agree(levels)
    assert int.from_bytes(sparse[16:20], "little") == zlib.crc32(b"topk:0.25") == 0x5E7CB8EC
    assert int.from_bytes(levels[16:20], "little") == zlib.crc32(b"quantize:4") == 0xCDEFAEC3


def test_examples_on_the_page():
    words = lambda *values: np.array(values, "<u8")  # noqa: E731
    data = lambda *values: np.array(values, "u1")  # noqa: E731
    reader = independent_reader
    assert reader.unpack(data(0xD5, 0x11), 3, 5).tolist() == [5, 2, 7, 0, 1]
    assert reader.unpack(data(0xC2, 0x01), 0, 6).tolist() == [2, 1, 0, 1, 2, 1]
    assert reader.rice(words(0x20B, 0x52), 4, 2, 1) == [2, 3, 9, 31]
    bitmap = reader.bits(words(0x8000000000000021, 1))
    assert np.flatnonzero(bitmap).tolist() == [0, 5, 63, 64]
    assert reader.elias(words(0x48C5, 0xC1), 6, 7, 1).tolist() == [0, -1, 4, 0, 6, -2]
    assert reader.e4m3(data(0x38, 0x01, 0xB9, 0x7E)).tolist() == [1.0, 2.0**-9, -1.125, 448.0]
    assert reader.checksum(bytes(16) + bytes(range(1, 10))) == 0xC2E73CAA5FCC9994
    key = (0x0123456789ABCDEF, 11, 13, 1)
    assert reader.philox(0, *key) == (0x11E0B079, 0x45A7F422, 0x90FF5A19)
    drawn = [reader.word(i, key) for i in (0, 1, 2, 511, 512, 1025)]
    assert drawn == [0xB5379315, 0x68EBD0F6, 0xBA6984D7, 0x21DC7BFA, 0xB47F482A, 0x0532123C]
    assert reader.draw(1000, 6, 0, key) == [71, 333, 401, 545, 752, 862]
    assert reader.draw(40, 5, 1 << 30, key) == [12, 16, 18, 20, 32]


def test_the_reader_is_independent():
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes}
    assert names == {"functools", "itertools", "math", "typing", "zlib", "numpy", "zstandard"}
