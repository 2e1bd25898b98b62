"""What each method promises beyond the common laws: exact sets, error bounds, means and variances.

Statistical tests draw from fixed keys. Their bounds are six standard errors, which chance passes in
one of 5e8 draws; where thousands of elements are compared at once, that is still one in 1e5.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from rows import ROWS
from tensors import FLOATS, bits, content, normal, real_of, same

import thinwire as tw
from thinwire import kernels
from thinwire.compressors.sparsifiers import kept
from thinwire.kernels.cpu import sparse
from thinwire.kernels.reference.levels import unpack as unpack_levels

CPU = torch.device("cpu")


def through(c: tw.Compressor, x: torch.Tensor, step: int = 0) -> torch.Tensor:
    return c.decode(c.encode(x, key=tw.Key(1, step)))


def draws(c: tw.Compressor, x: torch.Tensor, count: int) -> torch.Tensor:
    """Decoded tensors of so many keys, one a row, in float64."""
    return torch.stack([through(c, x, step) for step in range(count)]).double()


def check_mean(c: tw.Compressor, x: torch.Tensor, sigma, count: int = 1500, wanted=None) -> None:
    """The mean over keys is x, for elements of at most this standard deviation."""
    wanted = (x if wanted is None else wanted).double()
    off = (draws(c, x, count).mean(0) - wanted).abs()
    # Random words are compared in 24 bits, and values are float32: 2^-22 covers their rounding.
    assert (off <= 6 * sigma / count**0.5 + 2.0**-22 * wanted.abs().max()).all()


def mean_and_error(samples: torch.Tensor) -> tuple[float, float]:
    """The mean of samples and six times its standard error."""
    return samples.mean().item(), 6 * samples.std().item() / len(samples) ** 0.5


def half_of(scale, limit: int):
    """scale/2, and the roundings of x * (limit / peak) and of level * (peak / limit): four, each
    eps/2 of at most `limit` levels."""
    return scale * (0.5 + 4 * limit * torch.finfo(scale.dtype).eps)


# Sparsifiers


def test_kept_counts_in_decimals():
    """k = max(1, ceil(d * ratio)) for the ratio as written, not for its nearest float."""
    assert kept(100, 0.07) == 7  # 100 * 0.07 = 7.000000000000001 in floats
    assert [kept(10, ratio) for ratio in (0.1, 0.11, 1e-9, 1.0)] == [1, 2, 1, 10]
    assert kept(25_600_000, 0.001) == 25_600


def largest(p: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k largest magnitudes, ties to the lower index, by definition."""
    size = np.abs(p)
    bound = np.partition(size, len(p) - k)[len(p) - k]
    above, ties = size > bound, size == bound
    return np.flatnonzero(above | (ties & (np.cumsum(ties) <= k - above.sum())))


def sampled(n: int) -> np.ndarray:
    """Where Top-K looks to guess its bound."""
    x = torch.arange(1, n + 1, dtype=torch.float64)
    seen = np.empty(min(sparse.SAMPLE, n // 2), np.int64)
    sparse._sample(x.numpy(), np.empty(0), 0, n // seen.size, seen)
    return seen.view(np.float64).astype(np.int64) - 1


def adversary(kind: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n)
    match kind:
        case "equal":
            x = np.full(n, -2.5)
        case "ascending":
            x = np.sort(x)
        case "descending":
            x = -np.sort(np.abs(x))
        case "mostly zeros":
            x[rng.random(n) < 0.999] = 0
        case "few values":
            x = rng.integers(-3, 4, n).astype(float)
        case "periodic":
            x[:: max(1, n // sparse.SAMPLE)] *= 100
        case "one block of outliers":
            x[n // 3 :][: n // 50] *= 1e6
        case "small where sampled":
            x[sampled(n)] = 1e-6
        case "large where sampled":
            seen = sampled(n)
            x = x * 1e-3
            x[seen] = rng.standard_normal(len(seen))
    return x


ADVERSARIES = [
    *("normal", "equal", "ascending", "descending", "mostly zeros", "few values", "periodic"),
    *("one block of outliers", "small where sampled", "large where sampled"),
]


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("n", [10, 4095, 4096, 4097, 65_537, 300_007])
def test_topk_is_exact(kind, n):
    x = torch.from_numpy(adversary(kind, n)).float()
    types = [torch.float32] if n > 100_000 else [torch.float32, torch.float64]
    for dtype in types:
        p = x.to(dtype)
        for ratio in (1e-9, 0.01, 0.3, 1.0):
            found, values = tw.TopK(ratio).encode(p).picked()
            wanted = largest(p.numpy(), kept(n, ratio))
            assert np.array_equal(found.numpy(), wanted)
            assert torch.equal(values, p[torch.from_numpy(wanted)])


@pytest.mark.parametrize("kind", ADVERSARIES)
def test_topk_of_a_sum_is_exact(kind):
    total = torch.from_numpy(adversary(kind, 70_001)).float()
    r = normal(70_001, 1)
    x = total - r
    found, _ = tw.TopK(0.02).draft(x, residual=r).picked()
    assert np.array_equal(found.numpy(), largest((x + r).numpy(), kept(70_001, 0.02)))


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.5])
def test_topk_contracts(ratio):
    for kind in ADVERSARIES:
        x = torch.from_numpy(adversary(kind, 5000))
        lost = (through(tw.TopK(ratio), x) - x).square().sum()
        assert lost <= (1 - ratio) * x.square().sum() * (1 + 1e-12)


def largest_of_chunks(p: np.ndarray, ratio: float, chunk: int) -> np.ndarray:
    """The positions that Top-K with chunks should find."""
    ends = [(lo, min(lo + chunk, p.size)) for lo in range(0, p.size, chunk)]
    return np.concatenate([lo + largest(p[lo:hi], kept(hi - lo, ratio)) for lo, hi in ends])


CHUNKED = [
    *((10, 3), (200, 1), (5000, 7), (9000, 512), (70_001, 4096), (70_001, 1025), (150_001, 70_000))
]


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize(("n", "chunk"), CHUNKED)
def test_topk_of_chunks_is_exact(kind, n, chunk):
    x = torch.from_numpy(adversary(kind, n)).float()
    for dtype in [torch.float32] if n > 10_000 else [torch.float32, torch.float64]:
        p = x.to(dtype)
        for ratio in (1e-9, 0.03, 0.3, 1.0):
            c = tw.TopK(ratio, chunk=chunk)
            found, values = c.encode(p).picked()
            wanted = largest_of_chunks(p.numpy(), ratio, chunk)
            assert np.array_equal(found.numpy(), wanted)
            assert torch.equal(values, p[torch.from_numpy(wanted)])
            assert found.numel() == c.max_chosen(n)
            assert c.sends_all(n) == (found.numel() == n)


def test_topk_of_chunks_whose_scales_jump():
    """What one chunk says of the next is wrong every time, up and down by powers of ten."""
    n, chunk = 40_960, 512
    jumps = 10.0 ** (torch.arange(n // chunk) * 7919 % 61 - 30)
    jumps[::5] = 0
    x = (normal(n).view(-1, chunk) * jumps.unsqueeze(1)).flatten()
    for p in (x, x.flip(0)):
        found, _ = tw.TopK(0.03, chunk=chunk).encode(p).picked()
        assert np.array_equal(found.numpy(), largest_of_chunks(p.numpy(), 0.03, chunk))


def test_topk_of_chunks_of_a_sum():
    total = torch.from_numpy(adversary("normal", 70_001)).float()
    r = normal(70_001, 1)
    x = total - r
    for chunk in (100, 4096, 66_000):
        found, values = tw.TopK(0.02, chunk=chunk).draft(x, residual=r).picked()
        assert np.array_equal(found.numpy(), largest_of_chunks((x + r).numpy(), 0.02, chunk))
        assert torch.equal(values, (x + r)[found.long()])


@pytest.mark.parametrize("n", [1, 100, 5000, 70_001])
def test_one_chunk_is_topk(n):
    """Not a bit of the payload differs, but for the fingerprint."""
    x, plain = normal(n), tw.TopK(0.03)
    for chunk in (n, n + 1, 1 << 40):
        frame = tw.pack(tw.TopK(0.03, chunk=chunk).encode(x))
        wanted = tw.pack(plain.encode(x))
        assert same(frame[20:], wanted[20:])
    longer = plain.encode(x.repeat(3)).picked()[0]
    assert longer.numel() == kept(3 * n, 0.03)


@pytest.mark.parametrize("chunk", [64, 4096, 70_000])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_topk_of_chunks_sees_what_is_not_finite(odd, chunk):
    for at in (0, 63, 64, 100_000, 150_000):
        x = normal(150_001)
        x[at] = odd
        assert tw.TopK(0.01, chunk=chunk).encode(x).non_finite
        assert tw.TopK(0.01, chunk=chunk).draft(normal(150_001), residual=x).non_finite


def positions_of(n: int, k: int, key: tw.Key) -> np.ndarray:
    return kernels.on(CPU).random_positions(n, k, key, CPU).numpy()


def check_uniform(counts: np.ndarray, variance: float) -> None:
    """Pearson's statistic of equally likely cells with a given variance each, against its tail.

    P(X >= D + 2 sqrt(D t) + 2 t) <= exp(-t) for chi-square with D degrees of freedom (Laurent and
    Massart 2000, Lemma 1); t = 16 is one in 1e7.
    """
    freedom, t = len(counts) - 1, 16
    statistic = ((counts - counts.mean()) ** 2).sum() / variance * freedom / len(counts)
    assert statistic <= freedom + 2 * math.sqrt(freedom * t) + 2 * t


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (2, 1), (7, 3), (256, 256), (257, 100), (100_003, 1000), (70_000, 70_000)]
)
def test_randomk_positions_are_distinct(n, k):
    for step in range(5):
        at = positions_of(n, k, tw.Key(3, step))
        assert len(at) == k
        assert at[0] >= 0
        assert at[-1] < n
        assert (np.diff(at) > 0).all()


@pytest.mark.parametrize(
    ("n", "k", "field"),
    [
        *((d, 1, "step") for d in range(2, 11)),
        *((10, 4, field) for field in ("seed", "step", "tensor")),
        *((64, 8, "step"), (300, 3, "step"), (1000, 10, "step")),
    ],
)
def test_randomk_positions_are_uniform(n, k, field):
    trials = 2000
    counts = np.zeros(n)
    for i in range(trials):
        counts[positions_of(n, k, tw.Key(**{field: i}))] += 1
    share = k / n
    check_uniform(counts, trials * share * (1 - share))


def test_randomk_subsets_are_uniform():
    """Not only each position but each of the ten pairs out of five is equally likely."""
    trials = 5000
    pairs = [tuple(positions_of(5, 2, tw.Key(step=i))) for i in range(trials)]
    cells = [pairs.count((a, b)) for a in range(5) for b in range(a + 1, 5)]
    assert sum(cells) == trials
    check_uniform(np.array(cells), trials / 10 * (1 - 1 / 10))


def test_randomk_scaled_is_unbiased():
    x = normal(60)
    share = 0.2
    check_mean(tw.RandomK(share), x, x.double().abs() * (1 / share - 1) ** 0.5, count=3000)
    check_mean(tw.Bernoulli(share), x, x.double().abs() * (1 / share - 1) ** 0.5, count=3000)


@pytest.mark.parametrize("make", [tw.RandomK, tw.Bernoulli])
def test_random_sparsifiers_have_their_variance(make):
    x, share = normal(200).double(), 0.1
    whole = x.square().sum().item()
    for c, wanted in ((make(share), 1 / share - 1), (make(share, scaled=False), 1 - share)):
        mean, error = mean_and_error((draws(c, x, 1500) - x).square().sum(1))
        assert abs(mean - wanted * whole) <= error


def test_randomk_of_a_constant_has_exactly_its_error():
    x = torch.full((200,), 3.0)
    assert (through(tw.RandomK(0.1, scaled=False), x) - x).square().sum() == 180 * 9
    assert (through(tw.RandomK(0.1), x) - x).square().sum() == 180 * 9 + 20 * 27**2


@pytest.mark.parametrize("make", [tw.RandomK, tw.Bernoulli])
def test_drawn_positions_depend_on_the_key_alone(make):
    c, key = make(0.1), tw.Key(5, 6, 7)
    wanted, _ = c.encode(normal(3000), key=key).picked()
    for x in (torch.zeros(3000), content("huge", 3000, torch.float32, 1)):
        for r in (None, normal(3000, 2)):
            found, _ = c.encode(x, residual=r, key=key).picked()
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("make", [tw.RandomK, tw.Bernoulli])
def test_values_are_not_scaled_beside_a_residual(make):
    x, r = normal(3000), normal(3000, 1)
    at, values = make(0.1).draft(x, residual=r, key=tw.Key(2)).picked()
    assert torch.equal(values, (x + r)[at.long()])


@pytest.mark.parametrize("spec", ["randomk:0.1", "randomk:0.1,shared=true", "bernoulli:0.1"])
def test_a_constant_gradient_is_sent_in_the_end(spec):
    """An element is left out for 200 steps with probability 0.9^200 = 7e-10."""
    c, x, r = tw.parse(spec), torch.ones(1000), torch.zeros(1000)
    sent = torch.zeros(1000)
    for step in range(200):
        c.accumulate(c.encode(x, residual=r, key=tw.Key(1, step)), sent)
    assert (sent > 0).all()
    assert torch.equal(sent + r, torch.full((1000,), 200.0))  # integers: nothing is rounded


@pytest.mark.parametrize("name", ["randomk", "bernoulli"])
def test_shared_positions_do_not_travel(name):
    x = normal(5000)
    shared, own = (tw.parse(f"{name}:0.1{more}") for more in (",shared=true", ""))
    short, long = (c.encode(x, key=tw.Key(4)) for c in (shared, own))
    assert [section.numel() for section in short.sections] == [len(short.picked()[0])]
    assert same(tw.decode(tw.pack(short)), tw.decode(tw.pack(long)))


@pytest.mark.parametrize("row", [row for row in ROWS if row.summable], ids=lambda row: row.spec)
def test_sections_add_up(row):
    c = row.compressor
    one, two = (c.encode(normal(1000, seed), key=tw.Key(4)) for seed in (1, 2))
    both = zip(one.sections, two.sections, strict=True)
    total = dataclasses.replace(one, sections=tuple(a + b for a, b in both), known=None)
    wanted = c.decode(one) + c.decode(two)
    # One rounding of the sum in the sections' own type, and none but float32's in the other.
    eps = max(torch.finfo(section.dtype).eps for section in one.sections)
    assert ((c.decode(total) - wanted).abs() <= eps * wanted.abs()).all()


def test_bernoulli_counts():
    n = 100_003
    for p in (1e-3, 0.1, 0.5, 0.999):
        count = len(tw.Bernoulli(p).encode(torch.ones(n), key=tw.Key(9)).picked()[0])
        assert abs(count - n * p) <= 6 * (n * p * (1 - p)) ** 0.5
    assert torch.equal(through(tw.Bernoulli(1.0), normal(n)), normal(n))


def test_threshold_is_exact():
    x = normal(5000)
    x[:4] = torch.tensor([0.5, -0.5, 0.49999997, 0.0])
    for dtype in FLOATS:
        p = x.to(dtype)
        found, values = tw.Threshold(0.5).encode(p).picked()
        assert torch.equal(found.long(), torch.nonzero(p.abs() >= 0.5).squeeze(1))
        assert torch.equal(values.to(dtype), p[found.long()])
    assert tw.Threshold(1e30).encode(x).picked()[0].numel() == 0
    assert torch.equal(through(tw.Threshold(1e30), x), torch.zeros(5000))


def test_topk_then_quantize_keeps_the_positions():
    x = normal(5000)
    wanted, exact = tw.TopK(0.1).encode(x).picked()
    payload = (tw.TopK(0.1) | tw.Quantize(8, block=None)).encode(x)
    found, values = payload.picked()
    assert torch.equal(found, wanted)
    assert ((values - exact).abs() <= half_of(exact.abs().max() / 127, 127)).all()


# Quantisers


@pytest.mark.parametrize("bits_", [8, 4, 2])
@pytest.mark.parametrize("block", [8, 256, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_quantize_error(bits_, block, dtype, stochastic):
    x = normal(3000, dtype=dtype) * 10.0 ** torch.linspace(-20, 20, 3000).to(dtype)
    limit = (1 << (bits_ - 1)) - 1
    payload = tw.Quantize(bits_, block=block, stochastic=stochastic).encode(x, key=tw.Key(2))
    scales, packed = payload.sections
    assert packed.numel() == 3000 * bits_ // 8
    rows = torch.nn.functional.pad(x, (0, -3000 % (block or 3000))).view(len(scales), -1)
    assert torch.allclose(scales, rows.abs().amax(1) / limit, rtol=1e-6, atol=0)
    bound = half_of(scales, limit) * (2 if stochastic else 1)
    error = (payload.restore() - x).abs()
    assert (error <= bound.repeat_interleave(block or 3000)[:3000]).all()


def test_quantize_stochastic_is_unbiased():
    x = normal(300)
    for bits_, block in ((8, 64), (4, None), (2, 64)):
        # Between two levels the standard deviation is at most half their distance.
        sigma = x.double().abs().max() / ((1 << (bits_ - 1)) - 1) / 2
        check_mean(tw.Quantize(bits_, block=block, stochastic=True), x, sigma)
    affine = tw.Quantize(4, block=None, symmetric=False, stochastic=True)
    check_mean(affine, x, (x.max() - x.min()).item() / 15 / 2)


@pytest.mark.parametrize("bits_", [8, 4, 2])
@pytest.mark.parametrize("block", [64, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_affine_uses_every_level(bits_, block, dtype):
    x = normal(3000, dtype=dtype) + 5
    top = (1 << bits_) - 1
    payload = tw.Quantize(bits_, block=block, symmetric=False).encode(x)
    lows, scales, packed = payload.sections
    levels = unpack_levels(packed, bits_, 3000)
    assert (levels.min(), levels.max()) == (0, top)
    rows = torch.nn.functional.pad(x, (0, -3000 % (block or 3000)), value=x[-1].item())
    low, high = torch.aminmax(rows.view(len(lows), -1), dim=1)
    assert torch.equal(lows, low)
    assert torch.allclose(scales, (high - low) / top, rtol=1e-5, atol=0)
    # scale/2, the rounding of the scale (eps/2 for each of up to `top` levels), that of the value.
    eps = torch.finfo(dtype).eps
    bound = scales * (0.5 + top * eps) + eps * high.abs()
    assert ((payload.restore() - x).abs() <= bound.repeat_interleave(block or 3000)[:3000]).all()


@pytest.mark.parametrize("bits_", [8, 4])
@pytest.mark.parametrize("block", [64, None])
def test_affine_keeps_a_small_range_far_from_zero(bits_, block):
    """1000 +- 0.001: some 33 steps of float32, so that 8 bits (steps of 8e-6) lose nothing."""
    x = 1000 + torch.linspace(-1e-3, 1e-3, 640)
    got = through(tw.Quantize(bits_, block=block, symmetric=False), x)
    step = 2e-3 / ((1 << bits_) - 1)
    ulp = 2.0**-14  # of float32 between 512 and 1024
    assert ((got - x).abs() <= step / 2 + ulp / 2).all()
    if bits_ == 8:
        assert torch.equal(got, x)


@pytest.mark.parametrize("bits_", [8, 4, 2])
@pytest.mark.parametrize("block", [64, None])
def test_affine_of_a_huge_range_does_not_overflow(bits_, block):
    x = torch.linspace(-3e38, 3e38, 640, dtype=torch.float64).float()
    got = through(tw.Quantize(bits_, block=block, symmetric=False), x)
    step = 6e38 / ((1 << bits_) - 1)
    assert ((got.double() - x.double()).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.spec)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_the_largest_numbers_stay_finite(row, dtype):
    """Scales are rounded; at the top of the range, the next number is an infinity."""
    c, top = row.compressor, torch.finfo(dtype).max
    for n in (1, 7, 300):
        for seed in range(4):
            x = content("huge", n, dtype, seed) if seed else torch.full((n,), top, dtype=dtype)
            r = torch.zeros(n, dtype=real_of(dtype)) if row.residual else None
            payload = c.encode(x, residual=r, key=tw.Key(seed))
            if payload.non_finite:
                assert row.reach < 1
                continue
            assert tw.decode(tw.pack(payload)).isfinite().all()
            assert r is None or r.isfinite().all()


def heavy(n: int, seed: int = 0) -> torch.Tensor:
    """Student's t with two degrees of freedom: the tails of real gradients."""
    return torch.from_numpy(np.random.default_rng(seed).standard_t(2, n)).float()


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize(("levels", "bucket"), [(1, 64), (4, 64), (7, None), (127, 64)])
def test_qsgd_is_unbiased(levels, bucket, norm):
    x = normal(256)
    rows = x.double().view(-1, bucket or 256)
    size = rows.norm(dim=1) if norm == "l2" else rows.abs().amax(1)
    sigma = (size / levels / 2).repeat_interleave(bucket or 256)
    check_mean(tw.QSGD(levels, bucket=bucket, norm=norm), x, sigma)


@pytest.mark.parametrize("levels", [1, 4, 16, 127])
@pytest.mark.parametrize("n", [64, 512])
@pytest.mark.parametrize("data", [normal, heavy, lambda n: torch.ones(n)])
def test_qsgd_variance(levels, n, data):
    x = data(n)
    whole = x.double().square().sum().item()
    errors = (draws(tw.QSGD(levels, bucket=n), x, 300) - x).square().sum(1)
    mean, error = mean_and_error(errors)
    assert mean <= min(n / levels**2, n**0.5 / levels) * whole + error


@pytest.mark.parametrize("s", [16, 32, 64, 120])
@pytest.mark.parametrize("data", [normal, heavy])
def test_qsgd_entropy_coded_length(s, data):
    """At most 2.8 n + 32 bits for s = sqrt(n) levels; each of two streams fills its last word."""
    n = s * s
    payload = tw.QSGD(s, bucket=n, entropy=True).encode(data(n), key=tw.Key(3))
    scales, words = payload.sections
    assert scales.numel() == 1
    assert words.numel() * 64 <= 2.8 * n + 32 + 2 * 63


@pytest.mark.parametrize("block", [8, 24, 1024, None])
@pytest.mark.parametrize("n", [1, 100, 5000])
def test_onebit_sends_the_means(block, n):
    x = heavy(n)
    x[0] = -0.0  # belongs to the upper half
    got = through(tw.OneBit(block), x)
    for lo in range(0, n, block or n):
        p, q = (t[lo : lo + (block or n)].numpy() for t in (x, got))
        for half in (p >= 0, p < 0):
            if half.any():
                assert (q[half] == np.float32(math.fsum(p[half].tolist()) / half.sum())).all()


def two_bits(p: np.ndarray) -> np.ndarray:
    """One block through TwoBit, with exact sums."""
    size = np.abs(p)
    large = size > np.float32(math.fsum(size.tolist()) / size.size)
    out = np.zeros_like(p)
    for kind in (large, ~large):
        if kind.any():
            out[kind] = np.float32(math.fsum(size[kind].tolist()) / kind.sum())
    return np.where(p < 0, -out, out)


@pytest.mark.parametrize("block", [8, 24, 4096, None])
@pytest.mark.parametrize("n", [1, 100, 5000])
def test_twobit_sends_signs_and_the_means_of_both_kinds(block, n):
    for x in (heavy(n), normal(n), torch.ones(n), torch.arange(n) % 3 - 1.0):
        got = through(tw.TwoBit(block), x)
        for lo in range(0, n, block or n):
            p, q = (t[lo : lo + (block or n)].numpy() for t in (x, got))
            assert np.array_equal(q, two_bits(p))


def test_twobit_turns_no_sign_and_keeps_the_mean_magnitude():
    x = heavy(10_000)
    wide = x.double()
    for c in (tw.TwoBit(), tw.TwoBit(None), tw.TwoBit(64)):
        got = through(c, x)
        assert torch.equal(got.sign(), x.sign())
        assert same(through(c, -x), -got)
        # Both means are rounded to float32.
        mean = wide.abs().mean().item()
        assert got.double().abs().mean().item() == pytest.approx(mean, rel=2**-23)
        kept_energy = got.double().square().sum().item()
        lost = (got.double() - wide).square().sum().item()
        assert lost == pytest.approx(wide.square().sum().item() - kept_energy, rel=1e-5)


def test_twobit_of_few_large_ones_keeps_the_small_mean():
    """Sums of both kinds are apart: the difference of two sums would have lost it."""
    x = torch.full((1000,), 1e-3)
    x[7] = -1e30
    for name in ("cpu", "reference"):
        with kernels.use(name):
            got = through(tw.TwoBit(None), x)
        assert torch.equal(got, x)


def test_twobit_packs_two_bits():
    pairs, packed = tw.TwoBit().encode(normal(10_000)).sections
    assert (packed.numel(), pairs.numel()) == (2500, 2 * 3)
    payload = tw.parse("topk:0.03125,chunk=4096|twobit").encode(normal(1 << 20))
    # Gaps of 1/32 take 6.4 bits at best; two bits each, and the pairs.
    assert payload.num_bytes * 8 < (1 << 15) * (6.6 + 2) + 8 * 64 + 64 * 8


def test_onebit_packs_bits():
    pairs, packed = tw.OneBit(1024).encode(normal(10_000)).sections
    assert (packed.numel(), pairs.numel()) == (1250, 2 * 10)


@pytest.mark.parametrize("n", [1, 7, 1000, 100_003])
def test_scaledsign_error(n):
    """||C(x) - x||^2 = (1 - ||x||_1^2 / (d ||x||_2^2)) ||x||_2^2."""
    x = heavy(n)
    wide = x.double()
    whole = wide.square().sum()
    wanted = whole - wide.abs().sum() ** 2 / n
    # The mean is rounded to float32: relatively 2^-24, which moves the error by 2^-23 of the whole.
    assert (
        abs((through(tw.ScaledSign(), x).double() - wide).square().sum() - wanted) <= whole * 2e-7
    )
    assert torch.equal(
        through(tw.ScaledSign(), torch.tensor([0.0, -2.0])), torch.tensor([1.0, -1.0])
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize(
    "spec", ["onebit:none", "onebit:8", "scaledsign", "twobit:none", "twobit:8"]
)
def test_means_of_the_largest_numbers_are_the_largest(spec, name):
    """Sums are rounded: some means lie beyond, where the largest number is meant."""
    top = torch.finfo(torch.float64).max
    with kernels.use(name):
        for seed in range(40):
            signs = 1 - 2 * (normal(4 + seed, seed) < 0).double()
            found = through(tw.parse(spec), top * signs)
            assert torch.allclose(found, top * signs, rtol=1e-14, atol=0)


def test_terngrad_has_three_values():
    x = heavy(10_000)
    payload = tw.TernGrad().encode(x, key=tw.Key(1))
    scale, packed = payload.sections
    assert packed.numel() == 2000  # 1.6 bits an element
    rms = x.double().square().mean().sqrt().item()
    assert scale.item() == pytest.approx(min(x.abs().max().item(), 2.5 * rms), rel=1e-6)
    got = payload.restore()
    assert set(got.unique().tolist()) == {-scale.item(), 0.0, scale.item()}
    assert ((got == 0) | (got.sign() == x.sign())).all()


@pytest.mark.parametrize("clip", [2.5, 1.0, None])
def test_terngrad_is_unbiased_after_clipping(clip):
    x = normal(300)
    x[0] = 30
    top = x.double().abs().max()
    if clip is not None:
        top = min(top, clip * x.double().square().mean().sqrt())
    check_mean(tw.TernGrad(clip), x, top / 2, wanted=x.double().clamp(-top, top))


def test_natural_sends_powers_of_two():
    x = content("mixed", 5000, torch.float32, 1)
    got = through(tw.Natural(), x)
    sent = got[got != 0]
    assert (torch.frexp(sent).mantissa.abs() == 0.5).all()
    assert (got.sign() * x.sign() >= 0).all()
    powers = 2.0 ** torch.arange(-60.0, 60)
    assert torch.equal(through(tw.Natural(), powers), powers)


def test_natural_is_unbiased_with_its_variance():
    x = heavy(300)
    # Between a and 2a the variance is (v - a)(2a - v) <= v^2 / 8.
    check_mean(tw.Natural(), x, x.double().abs() / 8**0.5)
    mean, error = mean_and_error(draws(tw.Natural(), x, 1500).square().sum(1))
    assert mean <= 9 / 8 * x.double().square().sum().item() + error


def test_natural_is_unbiased_below_its_window():
    """126 powers below the largest, elements become the lowest power of the window or zero."""
    low = 2.0**-125
    x = torch.tensor([1.0, 0.25 * low, 0.75 * low])
    assert set(draws(tw.Natural(), x, 50)[:, 1:].unique().tolist()) == {0.0, low}
    check_mean(tw.Natural(), x / low, torch.tensor([2**126.0, 0.5, 0.5]).double())


# Casts, lossless, tiers


@pytest.mark.parametrize(("to", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_cast_rounds_like_torch(to, dtype):
    x = torch.cat([normal(5000), content("mixed", 5000, torch.float32, 1)])
    x = torch.cat([x, content("huge", 50, torch.float32, 1), content("denormal", 50, dtype, 1)])
    top = torch.finfo(dtype).max
    assert torch.equal(through(tw.Cast(to), x), x.clamp(-top, top).to(dtype).float())


@pytest.mark.parametrize("block", [8, 256])
def test_fp8_relative_error(block):
    """Three bits after the leading one: half a step is 2^-4, down to the smallest normal number."""
    x = heavy(5000)
    got = through(tw.Cast("fp8", block=block), x)
    rows = torch.nn.functional.pad(x, (0, -5000 % block)).view(-1, block)
    peak = rows.abs().amax(1).repeat_interleave(block)[:5000]
    smallest = peak / 448 * 2.0**-6
    # Scaling up and down rounds three times, 2^-24 of the number each.
    bound = (2.0**-4 + 2.0**-21) * torch.maximum(x.abs(), smallest)
    assert ((got - x).abs() <= bound).all()


@pytest.mark.parametrize("spec", ["none", "lossless", "lossless:zlib,1", "lossless:zstd,22"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lossless_keeps_every_bit(spec, dtype):
    """Random bits: NaN with all payloads, both zeros, denormals, infinities."""
    raw = torch.from_numpy(np.random.default_rng(5).integers(0, 256, 8000, np.uint8))
    x = raw.view(dtype)
    x[:3] = torch.tensor([-0.0, float("-inf"), float("nan")], dtype=dtype)
    got = tw.decode(tw.pack(tw.parse(spec).encode(x)))
    assert torch.equal(bits(got), bits(x))


def test_lossless_shrinks_what_repeats():
    assert tw.Lossless().encode(torch.zeros(100_000)).num_bytes < 200
    x = normal(100_000)
    assert tw.Lossless().encode(x).num_bytes < 0.95 * 4 * 100_000
    small = (tw.Quantize(4) | tw.Lossless()).encode(torch.zeros(100_000)).num_bytes
    assert small < tw.Quantize(4).encode(torch.zeros(100_000)).num_bytes / 100


@pytest.mark.parametrize("small", ["quantize:2", "quantize:4", "qsgd:3", "terngrad:none"])
def test_tiered_beats_its_small_part_on_heavy_tails(small):
    x = heavy(20_000)
    parts = tw.Tiered(0.01, small=tw.parse(small)), tw.parse(small)
    with_tiers, alone = ((through(c, x) - x).square().sum() for c in parts)
    assert with_tiers < 0.6 * alone


def test_tiered_sends_large_values_exactly():
    x = heavy(5000)
    got = through(tw.Tiered(0.05, large=tw.NoCompression()), x)
    at = torch.from_numpy(largest(x.numpy(), 250))
    assert torch.equal(got[at], x[at])


# Flags of the rows


def test_only_what_is_tested_to_be_unbiased_says_so():
    """Others may be so without saying it: Random-K is where it has no residual."""
    said = {row.spec for row in ROWS if row.compressor.unbiased and not row.compressor.lossless}
    assert said <= {row.spec for row in ROWS if row.unbiased}


@pytest.mark.parametrize("row", [row for row in ROWS if row.unbiased], ids=lambda row: row.spec)
def test_unbiased_rows(row):
    """The mean of C(x) - x vanishes, in the direction of x and in three at random."""
    x = heavy(64)
    directions = torch.stack([x.double() / x.double().norm(), *normal(192).double().view(3, 64)])
    off = draws(row.compressor, x, 400) - x
    for direction in directions:
        mean, error = mean_and_error(off @ direction)
        assert abs(mean) <= error + 1e-5  # float32


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.alpha and row.random], ids=lambda row: row.spec
)
def test_contractive_random_rows(row):
    """E ||C(x) - x||^2 <= (1 - alpha) ||x||^2."""
    for x in (normal(64), heavy(64), torch.ones(64)):
        mean, error = mean_and_error((draws(row.compressor, x, 400) - x).square().sum(1))
        assert mean <= (1 - row.alpha(64)) * x.double().square().sum().item() + error + 1e-5


# Sizes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.spec)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_do_not_inflate(row, dtype):
    """No frame is larger than the dense tensor and a header; but see `most` in rows.py."""
    for x in (normal(10_000), torch.zeros(10_000), torch.ones(10_000), heavy(10_000)):
        assert row.compressor.encode(x.to(dtype), key=tw.Key(1)).num_bytes <= 20_000 * row.most + 80
