"""Numba kernels against the PyTorch reference, bit for bit, and against independent arithmetic."""

import itertools
import math
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import ROWS
from tensors import normal, same

import thinwire as tw
from thinwire import kernels
from thinwire.frames.positions import write_positions
from thinwire.kernels import threads
from thinwire.kernels.cpu import jit
from thinwire.kernels.cpu.radix import select
from thinwire.kernels.cpu.source import Source
from thinwire.kernels.cpu.sparse import COUNTED
from thinwire.kernels.reference import levels as reference_levels

KEY = tw.Key(seed=0xFEDCBA9876543210, step=5, tensor=7)
CPU = torch.device("cpu")
BOTH = ("cpu", "reference")

every = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.spec)
both = pytest.mark.parametrize("name", BOTH)


def encode(row, x, r):
    """(frame, new residual) of a tensor."""
    left = r.clone() if row.residual else None
    payload = row.compressor.encode(x, residual=left, key=KEY)
    return tw.pack(payload), r if left is None else left


# Whole compressors


@every
def test_float32_frames_are_identical(row):
    for n in (1, 7, 64, 1000, 5121, 100_003):
        x, r = normal(n), normal(n, 1)
        frame, left = encode(row, x, r)
        decoded = tw.decode(frame)
        with kernels.use("reference"):
            other, other_left = encode(row, x, r)
            assert same(other, frame), n
            assert same(other_left, left), n
            assert same(tw.decode(frame), decoded), n


@every
def test_float64_frames_are_identical(row):
    for n in (1, 65, 5121):
        x, r = normal(n, dtype=torch.float64), normal(n, 1, torch.float64)
        frame, left = encode(row, x, r)
        with kernels.use("reference"):
            other, other_left = encode(row, x, r)
        if not row.sums:
            assert same(other, frame), n
            assert same(other_left, left), n
            continue
        # Sums of n numbers in another order differ by n eps at most; elements are below 10.
        bound = 10 * n * torch.finfo(torch.float64).eps
        assert ((tw.decode(other) - tw.decode(frame)).abs() <= bound).all(), n
        assert ((other_left - left).abs() <= bound).all(), n


@every
def test_half_precision_is_read_as_if_widened_first(row):
    """Several pieces a thread, and one that is not whole; what is sent is rounded to the type."""
    for n, dtype in ((1, torch.bfloat16), (70_001, torch.float16), (150_003, torch.bfloat16)):
        x, r = normal(n, dtype=dtype), normal(n, 1)
        frame, left = encode(row, x, r)
        with kernels.use("reference"):  # it widens
            other, other_left = encode(row, x, r)
        assert same(other, frame), (n, dtype)
        assert same(other_left, left), (n, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_is_widened_exactly(dtype):
    x = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    ((*_, wide, _),) = Source(x).pieces(0, x.numel())
    found, wanted = torch.from_numpy(wide), x.float()
    number = ~wanted.isnan()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[number].view(torch.int32), wanted[number].view(torch.int32))


@every
def test_accumulate_is_identical(row):
    c, x = row.compressor, normal(5121)
    payloads = [tw.unpack(tw.pack(c.encode(x * w, key=KEY))) for w in (1.0, -0.3)]
    out, other = normal(5121, 3), normal(5121, 3)
    c.accumulate(payloads, out, 0.3)
    with kernels.use("reference"):
        c.accumulate(payloads, other, 0.3)
    assert same(out, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 1000, COUNTED, 3 * COUNTED + 5])
def test_means_over_those_who_hold_an_element_are_identical(n, dtype):
    """Whatever the number of threads."""
    items = []
    for seed, share in enumerate((0.3, 0.0, 0.01, 1.0, 0.5)):
        positions = torch.nonzero(normal(n, seed).sigmoid() < share).squeeze(1).int()
        items.append((positions, normal(positions.numel(), 10 + seed, dtype)))
    for some in (items[:3], items):
        with kernels.use("reference"):
            wanted = torch.full((n,), torch.nan, dtype=dtype)
            kernels.on(CPU).scatter_mean(wanted, some)
        for count in (1, 3):
            out = torch.full((n,), torch.nan, dtype=dtype)
            torch.set_num_threads(count)
            kernels.on(CPU).scatter_mean(out, some)
            assert same(out, wanted)


# Feedback state in less memory


EDGES = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.2e-38, 3.3895e38, 3.4028235e38, -3.4028235e38]


@pytest.mark.parametrize("n", [1, 511, 4097, 140_001])
def test_random_rounding_to_bfloat16_is_identical(n):
    x = normal(n) * 10 ** (9 * normal(n, 1)).clamp(-30, 30)
    edges = torch.tensor([*EDGES, torch.inf, -torch.inf, torch.nan])
    x[: edges.numel()] = edges[:n]
    out, other = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
    kernels.on(CPU).round_to_bfloat16(x, out, KEY)
    with kernels.use("reference"):
        kernels.on(CPU).round_to_bfloat16(x, other, KEY)
    assert same(out, other)
    finite = out[x.isfinite()]
    assert finite.isfinite().all()
    again = torch.empty_like(finite)
    kernels.on(CPU).round_to_bfloat16(finite.float(), again, KEY.substream())
    assert same(again, finite)  # what bfloat16 can hold is never moved


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_that_are_powers_of_two_are_identical_and_exact(dtype, key):
    for n in (1, 255, 5121, 140_001):
        x = normal(n, 0, dtype) * 10 ** (9 * normal(n, 1, dtype)).clamp(-30, 30)
        x[: len(EDGES)] = torch.tensor(EDGES, dtype=dtype)[:n]
        settings = {"limit": 127, "width": 8, "block": 256}
        scales, levels = kernels.on(CPU).encode_uniform(x, None, rule="power", key=key, **settings)
        with kernels.use("reference"):
            others = kernels.on(CPU).encode_uniform(x, None, rule="power", key=key, **settings)
        assert same(others[0], scales)
        assert same(others[1], levels)
        mantissas = torch.frexp(scales)[0]
        assert ((mantissas == 0.5) | (scales == 0)).all()
        back = torch.empty(n, dtype=dtype)
        kernels.on(CPU).add_uniform(back, levels, scales, weight=1.0, fresh=True, **settings)
        assert back.isfinite().all()
        again = torch.empty(n, dtype=dtype)
        scales, levels = kernels.on(CPU).encode_uniform(
            back, None, rule="power", key=tw.Key(9), **settings
        )
        kernels.on(CPU).add_uniform(again, levels, scales, weight=1.0, fresh=True, **settings)
        assert same(again, back)


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="unknown implementation 'cuda', known: reference, cpu, "):
        kernels.use("cuda").__enter__()


# Random numbers


def philox(counter, key):
    """Philox4x32-10 as published (Salmon et al. 2011), in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # kat_vectors of Random123
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    from thinwire.kernels.cpu import random

    assert philox(counter, key) == answer
    assert tuple(map(int, random.philox(*map(np.uint32, (*counter, *key))))) == answer


def word(i, key):
    """The random word of element i, from the description of the wire format."""
    group, j = divmod(i, 512)
    counter = group & ONES, (group >> 32) ^ (key.stream << 24), key.step, key.tensor
    k0, k1, k2, _ = philox(counter, (key.seed & ONES, key.seed >> 32))
    v = (j * 0x9E3779B1 + k0) & ONES
    v = (((v ^ (v >> 17)) * 0xED5AD4BB) & ONES) ^ k1
    v = ((v ^ (v >> 11)) * 0xAC4C1B51) & ONES
    v = ((v ^ (v >> 15)) * 0x31848BAB) & ONES
    return v ^ (v >> 14) ^ k2


@both
@pytest.mark.parametrize(
    "key", [tw.Key(), KEY, tw.Key(2**64 - 1, 2**32 - 1, 2**32 - 1, 255), tw.Key(stream=1)]
)
def test_random_words(name, key):
    with kernels.use(name):
        words = kernels.on(CPU).random_words(2000, key, CPU).tolist()
    assert words == [word(i, key) for i in range(2000)]


def check_uniform(cells, count):
    """Pearson's statistic of `count` numbers below `cells`, against its tail.

    P(X >= D + 2 sqrt(D t) + 2 t) <= exp(-t) for chi-square with D degrees of freedom (Laurent and
    Massart 2000, Lemma 1); t = 16 is one in 1e7.
    """
    seen = np.bincount(cells, minlength=count)
    wanted = len(cells) / count
    freedom, t = count - 1, 16
    assert ((seen - wanted) ** 2).sum() / wanted <= freedom + 2 * math.sqrt(freedom * t) + 2 * t


def test_random_words_are_uniform_and_independent():
    """Every byte of the words, neighbours of several distances, and one element over many keys."""
    words = kernels.on(CPU).random_words(1 << 20, KEY, CPU).numpy()
    for shift in (0, 8, 16, 24):
        check_uniform((words >> shift) & 255, 256)
    for apart in (1, 2, 128, 511, 512, 1024):
        check_uniform((words[apart:] >> 28) * 16 + (words[:-apart] >> 28), 256)
    for field in ("seed", "step", "tensor", "stream"):
        keys = [KEY._replace(**{field: i}) for i in range(256 if field == "stream" else 5000)]
        first = np.array([kernels.on(CPU).random_words(1, key, CPU).item() for key in keys])
        for shift in (0, 28):
            check_uniform((first >> shift) & 15, 16)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 3), (255, 255), (70_000, 900)])
def test_random_positions_are_identical(n, k):
    found = {}
    for name in BOTH:
        with kernels.use(name):
            found[name] = (
                kernels.on(CPU).random_positions(n, k, KEY, CPU),
                kernels.on(CPU).bernoulli_positions(n, k / n, KEY, CPU),
            )
    for one, other in zip(*found.values(), strict=True):
        assert same(one, other)


# Positions and levels as bits


position_sets = st.integers(1, 3000).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=min(n, 200)))
)


@both
@given(drawn=position_sets, parameter=st.integers(0, 12))
def test_rice_round_trip(name, drawn, parameter):
    n, chosen = drawn
    positions = torch.tensor(sorted(chosen), dtype=torch.int32)
    count = len(chosen)
    gaps = np.diff(positions.numpy(), prepend=-1) - 1
    unary_words = -(-(int((gaps >> parameter).sum()) + count) // 64)
    with kernels.use(name):
        words = kernels.on(CPU).rice_encode(positions, parameter, unary_words)
    for reader in BOTH:
        with kernels.use(reader):
            decode = kernels.on(CPU).rice_decode
            assert same(decode(words, count, parameter, unary_words, n), positions)
            assert decode(words, count + 1, parameter, unary_words, n) is None
            if count:
                assert decode(words, count - 1, parameter, unary_words, n) is None
                assert decode(words, count, parameter, unary_words, max(chosen)) is None


@both
@given(drawn=position_sets)
def test_bitmap_round_trip(name, drawn):
    n, chosen = drawn
    positions = torch.tensor(sorted(chosen), dtype=torch.int32)
    count = len(chosen)
    with kernels.use(name):
        words = kernels.on(CPU).bitmap_encode(positions, n)
    assert words.numel() == -(-n // 64)
    for reader in BOTH:
        with kernels.use(reader):
            decode = kernels.on(CPU).bitmap_decode
            assert same(decode(words, count, n), positions)
            assert decode(words, count + 1, n) is None
            if count:
                assert decode(words, count - 1, n) is None
                assert decode(words, count, max(chosen)) is None


@given(drawn=position_sets)
def test_positions_are_written_alike(drawn):
    n, chosen = drawn
    positions = torch.tensor(sorted(chosen), dtype=torch.int32)
    settings, written = write_positions(positions, n)
    with kernels.use("reference"):
        other_settings, other = write_positions(positions, n)
    assert settings == other_settings
    assert same(written, other)
    assert written.numel() * written.itemsize <= min(8 * -(-n // 64), 4 * len(chosen))


@both
@given(
    limit=st.sampled_from([1, 2, 7, 63, 64, 126, 127]),
    raw=st.lists(st.integers(0, 1 << 16), max_size=150),
)
def test_elias_round_trip(name, limit, raw):
    levels = torch.tensor([v % (2 * limit + 1) for v in raw], dtype=torch.uint8)
    count = len(raw)
    with kernels.use(name):
        unary, words = kernels.on(CPU).elias_encode(levels, limit)
    for reader in BOTH:
        with kernels.use(reader):
            decode = kernels.on(CPU).elias_decode
            assert same(decode(words, unary, count, limit), levels)
            assert decode(words, unary, count + 1, limit) is None
            most = int((levels.long() - limit).abs().max()) if count else 0
            if most > 1:
                assert decode(words, unary, count, most - 1) is None


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_positions_take_little_more_than_their_entropy(density):
    """Within 2 % of n H(p) bits: what any code needs for positions drawn independently."""
    n = 4_000_000
    positions = kernels.on(CPU).bernoulli_positions(n, density, KEY, CPU)
    p = positions.numel() / n
    entropy = -n * (p * math.log2(p) + (1 - p) * math.log2(1 - p))
    _, written = write_positions(positions, n)
    assert written.numel() * written.itemsize * 8 <= 1.02 * entropy


def bit_stream(levels, width):
    """Level i in bits [i * width, (i + 1) * width), by Python's integers."""
    number = sum(int(level) << (i * width) for i, level in enumerate(levels))
    return list(number.to_bytes(-(-len(levels) * width // 8), "little"))


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("n", [1, 7, 8, 9, 100, 5131])
def test_levels_are_packed(width, n):
    """Whole numbers 0..top through the affine kernel: scale 1, so that levels are the numbers."""
    top = (1 << width) - 1
    levels = torch.from_numpy(np.random.default_rng(n).integers(0, top + 1, n)).to(torch.uint8)
    for name in BOTH:
        with kernels.use(name):
            kernel = kernels.on(CPU)
            lows, scales, packed = kernel.encode_affine(
                levels.float(), None, width=width, block=None, extent=(0.0, float(top))
            )
            out = torch.empty(n)
            kernel.add_affine(
                out, packed, lows, scales, width=width, block=None, weight=1.0, fresh=True
            )
        assert packed.tolist() == bit_stream(levels.tolist(), width)
        assert torch.equal(out, levels.float())
    assert torch.equal(reference_levels.unpack(packed, width, n), levels)


@pytest.mark.parametrize("n", [1, 4, 5, 6, 100, 5131])
def test_trits_are_packed(n):
    trits = np.random.default_rng(n).integers(0, 3, n)
    filled = np.pad(trits, (0, -n % 5)).reshape(-1, 5)
    x = torch.from_numpy(trits - 1.0).float()
    for name in BOTH:
        with kernels.use(name):
            scales, packed = kernels.on(CPU).encode_uniform(
                x, None, limit=1, width=0, block=None, rule="given", scale=1.0
            )
            out = torch.empty(n)
            kernels.on(CPU).add_uniform(
                out, packed, scales, limit=1, width=0, block=None, weight=1.0, fresh=True
            )
        bytes_ = packed.numpy().astype(int)
        # Digits of trits that are not there may be anything below 3.
        assert [b // 3**i % 3 for b in bytes_ for i in range(5)][:n] == trits.tolist()
        assert (bytes_[:-1] == (filled @ [1, 3, 9, 27, 81])[:-1]).all()
        assert torch.equal(out, x)


# Checksum


@given(st.binary(max_size=300))
def test_checksums_are_equal(data):
    raw = torch.tensor(list(data), dtype=torch.uint8)
    sums = set()
    for name in BOTH:
        with kernels.use(name):
            sums.add(kernels.on(CPU).checksum(raw))
    assert len(sums) == 1


def test_checksums_of_long_data_are_equal():
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 1_000_003, np.uint8))
    wanted = kernels.on(CPU).checksum(raw)
    torch.set_num_threads(1)
    assert kernels.on(CPU).checksum(raw) == wanted
    with kernels.use("reference"):
        assert kernels.on(CPU).checksum(raw) == wanted


def test_every_changed_byte_is_seen():
    raw = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 45, np.uint8))
    checksum = kernels.on(CPU).checksum
    wanted = checksum(raw)
    for i in range(raw.numel()):
        for by in range(1, 256):
            raw[i] ^= by
            assert checksum(raw) != wanted
            raw[i] ^= by


def test_swapped_words_are_seen():
    raw = torch.arange(64, dtype=torch.uint8)
    swapped = torch.cat([raw[8:16], raw[:8], raw[16:]])
    assert kernels.on(CPU).checksum(raw) != kernels.on(CPU).checksum(swapped)


# Threads, processes, memory


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_exception_in_a_range_comes_out(bad):
    parts = [(0, 10), (10, 20), (20, 30)]

    def work(lo, hi):
        if lo == 10 * bad:
            raise ArithmeticError(f"range {lo}")
        return hi

    with pytest.raises(ArithmeticError, match=f"range {10 * bad}"):
        threads.run(work, parts)
    assert threads.run(lambda lo, hi: (lo, hi), parts) == parts


@pytest.mark.parametrize("n", [0, 1, 1000, 65_536, 200_003, 10_000_019])
def test_ranges_cover_everything_once(n):
    for count, quantum in itertools.product((1, 2, 3, 7), (1, 64, 5120)):
        torch.set_num_threads(count)
        parts = threads.ranges(n, quantum)
        assert 1 <= len(parts) <= count
        assert (parts[0][0], parts[-1][1]) == (0, n)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        assert all(lo % quantum == 0 for lo, _ in parts)


def on_fork() -> None:
    torch.set_num_threads(2)
    x = torch.from_numpy(np.arange(300_000, dtype=np.float32) % 1013 - 500)
    specs = ["topk:0.01", "quantize:4", "qsgd:7", "onebit", "natural", "randomk:0.1"]

    def sections() -> list[bytes]:
        payloads = [tw.parse(spec).encode(x, key=KEY) for spec in specs]
        return [bytes(s.numpy()) for payload in payloads for s in payload.sections]

    before = sections()
    child = os.fork()
    if child == 0:
        os._exit(0 if sections() == before else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert sections() == before


def test_a_forked_process_encodes_too():
    """Threads do not survive a fork, so a child that waited for its parent's would hang.

    Those of torch do not survive it either, so that neither process may run a parallel operation of
    torch here: the input is NumPy's, and the frames are compared section by section.
    """
    with ranks.Ranks(1) as process:
        process.run(on_fork)


def test_topk_needs_little_memory():
    """Less than 0.3 of a tensor of 32 MB: candidates only, no copy. NumPy's share."""
    x = normal(1 << 23)
    compressor = tw.TopK(0.01)
    compressor.encode(x)  # whatever is compiled or loaded at first is not meant
    tracemalloc.start()
    try:
        tw.pack(compressor.encode(x))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.3 * x.numel() * x.itemsize


def resident(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def on_encoding(spec: str, dtype: torch.dtype) -> float | None:
    """The peak of the resident set over what there was before, as a share of the tensor."""
    torch.set_num_threads(2)
    c = tw.parse(spec)
    c.encode(torch.ones(1 << 18, dtype=dtype), residual=torch.zeros(1 << 18))
    x = (torch.arange(1 << 23) % 999_983 * 1.0).to(dtype)
    r = torch.zeros(x.shape) + 1
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        return None
    before = resident("VmRSS")
    tw.pack(c.encode(x, residual=r))
    return (resident("VmHWM") - before) / x.nbytes


def test_encoding_needs_little_resident_memory():
    """The same with torch's share, by the kernel's own count of a fresh process.

    In half precision too: a widened copy would be twice the tensor. There a quantiser's two
    payloads of 4 bits (the frame is the second) are half of the tensor, 1.5 MB of scales, buffers
    and what the system counts late a tenth.
    """
    cases = {
        ("topk:0.01", torch.float32): 0.3,
        ("topk:0.01", torch.bfloat16): 0.6,
        ("quantize:4", torch.float16): 0.6,
        ("onebit", torch.bfloat16): 0.3,
    }
    with ranks.Ranks(1) as process:
        for (spec, dtype), most in cases.items():
            (share,) = process.run(on_encoding, spec, dtype)
            if share is None:
                pytest.skip("this system does not let a process reset its peak memory")
            assert share < most, spec


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_bit_tricks_mean_the_same_to_the_interpreter_and_to_the_compiler(kind):
    values = np.array([0.0, -0.0, 1e-40, 1.5, -1.5, 3e38, -3e38, np.inf, -np.inf], kind)
    for p in values:
        assert jit.magnitude(p) == compiled_magnitude(p)
        assert jit.ordered(p) == compiled_ordered(p)
        assert jit.from_magnitude(jit.magnitude(p), p) == abs(p)
        assert jit.from_ordered(jit.ordered(p), p) == p
    assert [float(p) for p in sorted(values, key=jit.ordered)] == sorted(values.tolist())
    assert jit.magnitude(kind(np.nan)) > jit.magnitude(kind(np.inf))


@jit.jit
def compiled_magnitude(p):
    return jit.magnitude(p)


@jit.jit
def compiled_ordered(p):
    return jit.ordered(p)


@jit.sum_jit(cache=False)
def total_of(x):
    total = 0.0
    for i in range(x.size):
        total += x[i]
    return total


@jit.jit(cache=False)
def caller_of(x):
    return total_of(x)


def test_a_kernel_has_its_own_copy_of_a_sum():
    """Or the order of the sum would depend on whether the kernel is compiled or read from disk."""
    x = np.arange(100.0)
    assert caller_of(x) == 4950
    (code,) = caller_of.inspect_llvm().values()
    assert "fadd reassoc" in code
    assert not [line for line in code.splitlines() if " call " in line and "total_of" in line]


@given(values=st.lists(st.integers(-5, 5) | st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_select_finds_what_sorting_finds(values):
    a = np.array(values, np.int32)
    found = [select(a.copy(), k) for k in range(a.size)]
    assert found == sorted(values)


def test_select_takes_no_longer_for_what_is_sorted_or_alike():
    """Each of these once took time quadratic in its length with some choice of the pivot."""
    n = 1 << 18
    for a in (np.arange(n), np.arange(n)[::-1].copy(), np.zeros(n, int), np.arange(n) % 2):
        assert select(a.copy(), n // 3) == np.sort(a)[n // 3]
