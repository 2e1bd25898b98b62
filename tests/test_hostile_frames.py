"""Frames with a right checksum and hostile claims: only FrameError, and little memory.

What each code refuses, with its message, is in test_frames.py. Here are claims that multiply.
"""

import itertools
import random

import numpy as np
import pytest
import torch
import zstandard
from mutations import NESTING, Mutator, claim, frame_of, valid_frames
from rows import ROWS
from tensors import normal, same
from trials import attempt, memory_limit

import thinwire as tw
from thinwire import kernels
from thinwire.frames.code import Code, varint
from thinwire.frames.frame import ALWAYS, EXPANSION, MARGIN, MAX_BYTES, VALUES
from thinwire.frames.header import CODES, header_bytes
from thinwire.frames.levels import Affine, Elias, Pairs, Powers, SignedPairs, Uniform
from thinwire.frames.positions import BITMAP, PLAIN, RICE, Overlay, Seeded, Sparse
from thinwire.frames.values import Narrow, NonFinite, Raw, Scaled8
from thinwire.frames.zipped import Zipped

F32, F64 = torch.float32, torch.float64
ZLIB, ZSTD = 1, 2
KEY = (1, 1, 1, 0)  # seed, step, tensor, stream
SMALL = 64 << 20  # what a refusal may take: the stacks of threads more than anything
HUGE = [0, 1, 8, (1 << 31) - 1, 1 << 32, (1 << 63) - 8, (1 << 64) - 1]


def zipped_zeros(count: int, layers: int) -> tuple[bytes, list[int]]:
    """So many zero bytes through zstd again and again, and the length after each time."""
    data, lengths = bytes(count), []
    for _ in range(layers):
        data = zstandard.ZstdCompressor().compress(data)
        lengths.append(len(data))
    return data, lengths


def bomb(numel: int, drawn: int, layers: int = 2) -> torch.Tensor:
    """A short frame: zeros zipped several times, drawn from positions of positions."""
    count = numel // 8
    data, lengths = zipped_zeros(count, layers)
    code: Code = Pairs(0)
    for length in lengths:
        code = Zipped(ZSTD, (8, length), code)
    for _ in range(drawn):
        code = Seeded(numel, 0, *KEY, code)
    body = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return frame_of(code, F32, [numel], torch.zeros(8, dtype=torch.uint8), body)


# What claims multiply to


@pytest.mark.parametrize("read", [tw.unpack, tw.decode])
def test_nested_claims_are_multiplied_out_before_anything_is_allocated(read):
    frame = bomb(1 << 24, drawn=8)
    assert frame.numel() < 512
    with memory_limit(SMALL), pytest.raises(tw.FrameError, match=r"would take .* the limit is"):
        read(frame)


def test_a_short_frame_may_not_claim_a_large_tensor():
    frame = frame_of(NonFinite(), F32, [1 << 31], non_finite=True)
    with memory_limit(SMALL), pytest.raises(tw.FrameError, match=r"would take 8\.59 GB"):
        tw.decode(frame)


def test_nested_claims_are_refused_where_the_size_is_expected():
    frame = bomb(1 << 20, drawn=9, layers=1)
    with memory_limit(SMALL), pytest.raises(tw.FrameError, match="would take"):
        tw.decode(frame, max_numel=1 << 20)


def test_a_bernoulli_draw_that_lies_about_its_number_is_not_drawn():
    code = Seeded(1, 1 << 32, *KEY, Raw())  # draws all
    frame = frame_of(code, F32, [1 << 26], torch.ones(1))
    with memory_limit(SMALL), pytest.raises(tw.FrameError, match="would take 537 MB"):
        tw.decode(frame)


def test_the_limit_of_memory_is_the_callers():
    frame = tw.pack(tw.Quantize(8).encode(normal(1000)))
    for fits in (4000, "4kB", 1 << 40):
        assert tw.decode(frame, max_bytes=fits).numel() == 1000
    for limit in (3999, "3 kB", 0):
        with pytest.raises(tw.FrameError, match=r"would take 4 kB of memory, the limit is"):
            tw.unpack(frame, max_bytes=limit)
    with pytest.raises(ValueError, match="a size is a number of bytes"):
        tw.decode(frame, max_bytes="many")


def test_honest_frames_pass_whatever_they_hold():
    """Not finite, nothing above a threshold, zeros: short frames of long tensors."""
    n = 5_000_000
    assert 4 * n < ALWAYS
    for c, x in (
        (tw.TopK(0.01), torch.full((n,), torch.nan)),
        (tw.Threshold(1.0), torch.zeros(n)),
        (tw.Lossless(), torch.zeros(n)),
    ):
        frame = tw.pack(c.encode(x))
        assert 1000 * frame.numel() < 4 * n
        assert tw.decode(frame).numel() == n


def test_default_limits_grow_with_the_frame():
    assert 8 < EXPANSION * ALWAYS < 1 << 40
    assert ALWAYS < MAX_BYTES
    n = 80_000_000  # 320 MB: more than any frame may take
    assert 4 * n > ALWAYS
    few = torch.arange(0, n, 1 << 8, dtype=torch.int32)
    code = Sparse(few.numel(), PLAIN, 0, 0, Raw())
    frame = frame_of(code, F32, [n], few, torch.ones(few.numel()))
    assert EXPANSION * frame.numel() > 4 * n
    assert tw.unpack(frame).numel == n
    one = frame_of(Sparse(1, PLAIN, 0, 0, Raw()), F32, [n], few[:1], torch.ones(1))
    with pytest.raises(tw.FrameError, match="would take 320 MB"):
        tw.unpack(one)
    assert tw.unpack(one, max_numel=n).numel == n


DEEP = [
    *("topk:1.0|topk:1.0|topk:1.0|lossless", "randomk:1.0,shared=true|topk:1.0|onebit|lossless"),
    *("tiered:1.0,(topk:1.0|quantize:8|lossless),(topk:1.0|natural|lossless)", "lossless:zlib"),
    *("topk:1.0|tiered:1.0|lossless", "bernoulli:1.0,shared=true|cast:fp8|lossless"),
]


@pytest.mark.parametrize("spec", [*DEEP, *(str(row.compressor) for row in ROWS)])
def test_every_compressor_fits_the_limit_of_the_expected_size(spec):
    """Values that zip well, in frames whose claims are as large as they get."""
    n = 100_000
    for dtype, x in itertools.product((F32, F64, torch.float16), (torch.ones(n), normal(n))):
        payload = tw.parse(spec).encode(x.to(dtype), key=tw.Key(1))
        frame = tw.pack(payload)
        assert payload.decoded_bytes < VALUES * payload.extent.real.itemsize * n + MARGIN
        assert tw.unpack(frame, max_numel=n).numel == n


@pytest.mark.parametrize("spec", ["topk:0.3", "lossless", "randomk:0.5,shared=true|onebit"])
def test_memory_is_not_underestimated(spec):
    """Decoding fits what was computed, and a little for threads."""
    x = normal(4_000_000)
    frame = tw.pack(tw.parse(spec).encode(x, key=tw.Key(1)))
    wanted = tw.decode(frame)
    with memory_limit(tw.unpack(frame).decoded_bytes + (32 << 20)):
        assert same(tw.decode(frame), wanted)


# Claims at their limits, for every code


def records(value: int, inner: Code) -> dict[int, list[Code]]:
    """Every code with this number in the place of each of its parameters."""
    return {
        NonFinite.id: [NonFinite()],
        Raw.id: [Raw()],
        Narrow.id: [Narrow(value)],
        Scaled8.id: [Scaled8(value)],
        Sparse.id: [
            *(Sparse(value, form, 0, 0, inner) for form in (PLAIN, BITMAP, RICE)),
            Sparse(4, RICE, value, 1, inner),
            Sparse(4, RICE, 2, value, inner),
            Sparse(4, RICE, value, value, inner),
            Sparse(4, value, 0, 0, inner),
        ],
        Seeded.id: [
            *(Seeded(value, chance, *KEY, inner) for chance in (0, 1, 1 << 31, 1 << 32)),
            Seeded(4, value, *KEY, inner),
            *(Seeded(4, 0, *(value if i == j else 1 for i in range(4)), inner) for j in range(4)),
        ],
        Uniform.id: [Uniform(value, 1, 0), Uniform(4, value, 0), Uniform(4, 7, value)],
        Elias.id: [Elias(value, 0, 1, 1), Elias(1, value, 1, 1), Elias(1, 0, value, value)],
        Affine.id: [Affine(value, 0), Affine(8, value)],
        Pairs.id: [Pairs(value)],
        SignedPairs.id: [SignedPairs(value)],
        Powers.id: [Powers(value)],
        Overlay.id: [Overlay(inner, Sparse(value, BITMAP, 0, 0, Raw())), Overlay(inner, inner)],
        Zipped.id: [
            Zipped(value, (8,), inner),
            *(Zipped(ZSTD, (value,) * count, inner) for count in (0, 1, 2, 16)),
        ],
    }


INNER = [
    *(Raw(), Elias(1, 0, 1, 1), Sparse(4, BITMAP, 0, 0, Raw()), Overlay(Raw(), Raw())),
    Zipped(ZSTD, (8, 8), Zipped(ZSTD, (8, 8), Pairs(0))),
]


def filled(code: Code, dtype: torch.dtype, shape: list[int], fill: int) -> torch.Tensor:
    """A frame with these claims, and sections of one byte repeated if they are short enough."""
    head = header_bytes(code, dtype, shape, isinstance(code, NonFinite), 0)  # type: ignore[arg-type]
    return claim(head, fill)


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("number", CODES)
def test_parameters_at_their_limits(number, value):
    """Every code is read or refused, with zeros and NaN for scales, in tensors of all sizes."""
    shapes = [[4], [1 << 14], [1 << 32], [2, 1 << 63], [0]]
    with memory_limit(SMALL * 4):
        for inner, shape in itertools.product(INNER if number in NESTING else [Raw()], shapes):
            for code in records(value, inner)[number]:
                for dtype, fill in ((F32, 0), (F64, 0xFF)):
                    try:
                        payload = tw.unpack(filled(code, dtype, shape, fill), max_bytes="32MiB")
                        tensor = payload.restore()
                    except tw.FrameError:
                        continue
                    assert list(tensor.shape) == shape


@pytest.mark.parametrize("limit", [1 << 62, 1 << 63, 1 << 70])
def test_shapes_beyond_64_bits_are_refused_whatever_the_limit(limit):
    for shape in ([(1 << 63) - 1], [1 << 63], [1 << 32, 1 << 32], [0, (1 << 64) - 1], [1 << 59, 2]):
        for code in (Raw(), NonFinite()):
            frame = filled(code, F64, shape, 0)
            with memory_limit(SMALL), pytest.raises(tw.FrameError):
                tw.decode(frame, max_numel=limit, max_bytes=limit)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_scales_may_be_anything(name):
    """NaN, infinities and the largest numbers as scales: values, never a crash."""
    levels = torch.arange(16, dtype=torch.uint8)
    for dtype in (F32, F64):
        for scale in (torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, 5e-324):
            one = torch.tensor([scale], dtype=dtype)
            frames = [
                frame_of(Uniform(8, 127, 0), dtype, [16], one, levels),
                frame_of(Uniform(0, 1, 0), dtype, [16], one, levels[:4]),
                frame_of(Affine(8, 0), dtype, [16], one, one, levels),
                frame_of(Pairs(0), dtype, [16], one.repeat(2), levels[:2]),
                frame_of(SignedPairs(0), dtype, [16], one.repeat(2), levels[:4]),
                frame_of(Scaled8(16), dtype, [16], one, levels),
            ]
            for frame in frames:
                with kernels.use(name):
                    assert tw.decode(frame).shape == (16,)


POSITIONS = {
    "reversed": [3, 2, 1, 0],
    "equal": [1, 1, 1, 1],
    "the last twice": [0, 1, 9, 9],
    "beyond": [0, 1, 2, 10],
    "far beyond": [0, 1, 2, (1 << 31) - 1],
    "negative": [-1, 1, 2, 3],
    "most negative": [-(1 << 31), 1, 2, 3],
    "dip": [5, 4, 6, 7],
}


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("case", POSITIONS)
def test_positions_out_of_order_or_range(case, name):
    at = torch.tensor(POSITIONS[case], dtype=torch.int32)
    plain = Sparse(4, PLAIN, 0, 0, Raw())
    wrapped = Zipped(ZLIB, (16, 16), plain)
    data = at.view(torch.uint8), torch.zeros(16, dtype=torch.uint8)
    over = Overlay(Raw(), plain)
    for frame in (
        frame_of(plain, F32, [10], at, torch.ones(4)),
        frame_of(wrapped, F32, [10], *data),
        frame_of(over, F32, [10], torch.ones(10), at, torch.ones(4)),
        frame_of(Seeded(10, 0, *KEY, plain), F32, [10], at, torch.ones(4)),
    ):
        with kernels.use(name), pytest.raises(tw.FrameError, match="not ascending or lie outside"):
            tw.decode(frame)


def test_random_trees_of_codes_with_hostile_numbers():
    """Claims that no writer makes, nested at random, under a right checksum."""
    mutator = Mutator(random.Random(5), valid_frames())
    read = 0
    with memory_limit():
        for _ in range(2000):
            read += attempt(mutator.invented().frame).tensor is not None
    assert 50 < read < 1950  # of no use if all were refused at the door


def test_varints_of_all_lengths_in_a_header():
    """Every code's record, cut at every byte, and with a long number from there on."""
    for number, codes in records(4, Raw()).items():
        for code in codes:
            record = code.write()
            for at in range(len(record)):
                for tail in (
                    record[:at],
                    record[:at] + b"\xff" * 10,
                    record[:at] + varint(1 << 63),
                ):
                    head = header_bytes(Raw(), F32, torch.Size([]), False, 0)[:20]
                    head = head[:6] + b"\x01" + head[7:] + varint(16) + tail
                    head += bytes(-len(head) % 8)
                    try:
                        tw.decode(claim(head, 0))
                    except tw.FrameError:
                        continue
                    assert number in CODES


def test_frames_of_a_container_share_one_limit():
    """Many small frames, each of which claims just what a frame of its own may take."""
    empty = tw.TopK(0.01).encode(torch.full((ALWAYS // 8,), torch.nan))
    assert len(tw.pack(empty)) < 100
    assert tw.unpack(tw.pack(empty)).non_finite
    with pytest.raises(tw.FrameError, match=r"'c'.*memory"):
        tw.unpack(tw.pack(dict.fromkeys("abc", empty)))
