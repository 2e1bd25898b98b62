"""The laws that every compressor keeps, over the table in rows.py."""

import dataclasses
import functools
import itertools
import math
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import ROWS, Row
from tensors import FLOATS, INTEGERS, Case, bits, cases, content, lay, normal, real_of, same

import thinwire as tw
from thinwire.compressors import JointCompressor, SparseCompressor, cast
from thinwire.frames import longest_frame
from thinwire.frames.header import header_bytes
from thinwire.frames.values import PIECE

KEY = tw.Key(seed=7, step=11, tensor=13)
LONG = 300_007  # elements: enough for three threads to share, and no multiple of anything


def over(*wanted: str):
    """Run a test over all rows that have all these flags ('!flag': that have it not)."""

    def has(row: Row, flag: str) -> bool:
        return not getattr(row, flag[1:]) if flag[0] == "!" else bool(getattr(row, flag))

    rows = [row for row in ROWS if all(has(row, flag) for flag in wanted)]
    return pytest.mark.parametrize("row", rows, ids=[row.spec for row in rows])


def copy(t: torch.Tensor) -> torch.Tensor:
    """The same values in the same strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)


@functools.cache
def long_tensor() -> torch.Tensor:
    return normal(LONG)


def sent_by(c: tw.Compressor, payload: tw.Payload) -> torch.Tensor:
    """What was sent, in the type of residuals."""
    return c.decode(payload, torch.empty(payload.shape, dtype=real_of(payload.dtype)))


def test_every_compressor_has_a_row():
    named = {stage.partition(":")[0] for row in ROWS for stage in re.split(r"[|(]", row.spec)}
    missing = set(tw.list_compressors()) - named - {"powersgd", "arc"}  # those have no payload
    assert not missing, f"give {sorted(missing)} a row in tests/rows.py"


@over()
def test_rows_say_what_compressors_say(row):
    c = row.compressor
    assert (c.lossless, c.random, c.summable) == (row.lossless, row.random, row.summable)
    assert (c.encode(normal(100), key=KEY).picked() is not None) == row.sparse
    # After Lossless positions are bytes, but what is to be sent can be picked all the same.
    begins = c.stages[0] if isinstance(c, tw.compressors.Chain) else c
    assert isinstance(c, SparseCompressor) == isinstance(begins, SparseCompressor)
    assert isinstance(c, SparseCompressor) >= row.sparse
    assert not isinstance(c, JointCompressor)


# Conservation


def conserves(row, case):
    """x + old residual = what was sent + new residual; or nothing happens at all."""
    c, x, r = row.compressor, case.x, copy(case.r)
    payload = c.encode(x, residual=r, key=KEY)
    if payload.non_finite:
        assert not (case.total.abs() <= row.reach * torch.finfo(r.dtype).max).all()
        assert same(r, case.r)
        return
    assert case.total.isfinite().all()
    sent = sent_by(c, payload)
    assert sent.isfinite().all()
    assert r.isfinite().all()
    # Rounded are x + r, that minus the value (twice where one code overlies another), the value
    # itself where it is such a sum, and for float64 the three sums below: seven times eps/2 of a
    # number no larger than all four together. Quarters keep the sums in range. Below the normal
    # numbers each rounding, also of these four divisions, is half of the smallest number.
    quarters = [t.double() / 4 for t in (x, case.r, sent, r)]
    info = torch.finfo(r.dtype)
    error = quarters[0] + quarters[1] - quarters[2] - quarters[3]
    bound = 3.5 * info.eps * sum(q.abs() for q in quarters) + 6 * info.smallest_normal * info.eps
    assert (error.abs() <= bound).all()


def drafts_and_settles(row, case):
    """Encoding is both, and a draft only reads."""
    c, x, r, other = row.compressor, case.x, copy(case.r), copy(case.r)
    before = bits(x).clone()
    payload = c.draft(x, residual=r, key=KEY)
    assert same(r, case.r)
    c.settle(payload, x, r)
    assert same(tw.pack(c.encode(x, residual=other, key=KEY)), tw.pack(payload))
    assert same(r, other)
    assert torch.equal(bits(x), before)


def contracts(row, case):
    """||C(x) - x||^2 <= (1 - alpha) ||x||^2, in units of the largest: squares stay finite."""
    x = (case.x.float().clamp(-3e38, 3e38) * row.reach).double()
    peak = x.abs().max() if x.numel() else 0.0
    if peak < 2.0**-100:  # blocks of tiny numbers are sent as zeros
        return
    got = row.compressor.decode(row.compressor.encode(x.float(), key=KEY)).double()
    lost, whole = ((got - x) / peak).square().sum(), (x / peak).square().sum()
    # Values are float32: each of the lost ones off by a few 2^-24, of the whole at most.
    assert lost <= (1 - row.alpha(x.numel()) + 2.0**-20) * whole


@over()
@given(case=cases)
def test_what_is_sent_and_what_is_kept(row, case):
    """Laws share their examples: drawing one takes longer than checking it."""
    if row.residual:
        conserves(row, case)
        drafts_and_settles(row, case)
    if row.alpha and not row.random:
        contracts(row, case)


# Frames and decoding


def packs(row, case):
    """A payload and its frame are the same thing, of the size that was promised."""
    c, x = row.compressor, case.x
    payload = c.encode(x, key=KEY)
    frame = tw.pack(payload)
    assert payload.num_bytes == frame.numel()
    assert frame.numel() <= c.max_payload_bytes(x.numel(), x.dtype) <= longest_frame(payload.extent)
    decoded = c.decode(payload)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    assert same(tw.decode(frame), decoded)
    again = tw.unpack(frame)
    assert same(tw.pack(again), frame)
    assert same(c.decode(again), decoded)
    if row.lossless:
        assert same(decoded, x.contiguous())


def decodes_into_anything(row, case):
    """Any strides and any floating-point type; what was there before does not show."""
    c = row.compressor
    payload = c.encode(case.x, key=KEY)
    wide, own = sent_by(c, payload), c.decode(payload)
    out = copy(case.out)
    assert c.decode(payload, out) is out
    assert same(out.contiguous(), wide)
    assert same(c.decode(payload, lay(own * 0 + 5, "strided")).contiguous(), own)
    if not row.lossless:  # the one rounding is to the nearest, the largest finite one at most
        top = torch.finfo(own.dtype).max
        assert torch.equal(own, wide.clamp(-top, top).to(own.dtype)) or payload.non_finite


def accumulates(row, case, weight):
    """out + weight * decoded, for the type of arithmetic and for that of the tensor."""
    c = row.compressor
    payload = c.encode(case.x, key=KEY)
    sent = sent_by(c, payload).double()
    if payload.non_finite:
        return
    for before in (case.out, lay(case.out.to(case.x.dtype), "strided")):
        out = copy(before)
        c.accumulate(payload, out, weight)
        wanted = before.double() + weight * sent
        # Rounded are the product and the sum, both twice where one code overlies another; then
        # neither is larger than the largest value. Below the normal numbers: see above.
        info = torch.finfo(out.dtype)
        largest = sent.abs().max() if "tiered" in row.spec and sent.numel() else sent.abs()
        bound = 2 * info.eps * (before.double().abs() + abs(weight) * (sent.abs() + largest))
        bound += 2 * info.smallest_normal * info.eps
        within = (out.double() - wanted).abs() <= bound
        assert (within | (wanted.abs() > info.max)).all()  # float16 overflows like any sum of it


def accumulates_lists(row, case, many):
    """A list of payloads gives the same bits as one after the other."""
    c = row.compressor
    payloads = [c.encode(case.x * (0.9 - i / 4), key=KEY._replace(step=i)) for i in range(many)]
    together, apart = copy(case.out), copy(case.out)
    c.accumulate(payloads, together, 0.7)
    for payload in payloads:
        c.accumulate(payload, apart, 0.7)
    assert same(together, apart)


@over()
@given(case=cases, weight=st.sampled_from([1.0, -0.5, 1 / 3]), many=st.integers(0, 4))
def test_what_is_read(row, case, weight, many):
    packs(row, case)
    decodes_into_anything(row, case)
    accumulates(row, case, weight)
    accumulates_lists(row, case, many)


def enlarged(code, factor: int):
    """A code with all that grows with the tensor so many times as large."""
    grown = {}
    for field in dataclasses.fields(code):
        value = getattr(code, field.name)
        if field.name in ("count", "unary_words", "binary_words"):
            grown[field.name] = value * factor
        elif field.name == "sizes":
            grown[field.name] = tuple(size * factor for size in value)
        elif dataclasses.is_dataclass(value):
            grown[field.name] = enlarged(value, factor)
    return dataclasses.replace(code, **grown)


@over()
def test_header_is_short(row):
    """Mostly 64 bytes or less for the 25.6 million parameters of ResNet-50."""
    key = tw.Key(seed=0x0123456789ABCDEF, step=1_000_000, tensor=1_000)
    payload = row.compressor.encode(normal(25_600), key=key)
    code = enlarged(payload.code, 1000)
    header = header_bytes(code, payload.dtype, torch.Size([25_600_000]), False, 0xFFFFFFFF)
    assert len(header) <= row.header


# Purity


@over()
def test_encode_touches_nothing_else(row):
    x = normal(1000).requires_grad_()
    before = x.detach().clone()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    payload = row.compressor.encode(x, key=KEY)
    tw.decode(tw.pack(payload))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    assert same(x, before)
    assert x.grad is None


@over()
def test_payload_owns_its_memory(row):
    """What happens to the tensor and the residual later does not change what was encoded."""
    x = normal(1000)
    r = normal(1000, 1) if row.residual else None
    payload = row.compressor.draft(x, residual=r, key=KEY)
    frame, decoded = tw.pack(payload), row.compressor.decode(payload)
    x.fill_(9)
    if r is not None:
        r.fill_(9)
    assert same(tw.pack(payload), frame)
    assert same(row.compressor.decode(payload), decoded)


@over()
def test_thread_count_does_not_show(row):
    x, r = long_tensor(), long_tensor().flip(0)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        left = r.clone() if row.residual else None
        payload = row.compressor.encode(x, residual=left, key=KEY)
        frame = tw.pack(payload)
        results.append((frame, tw.decode(frame), r if left is None else left))
    for result in results[1:]:
        assert all(same(a, b) for a, b in zip(result, results[0], strict=True))


# Configuration


@over()
def test_configuration_is_a_value(row):
    c, same_again = row.compressor, row.compressor
    assert c == same_again
    assert hash(c) == hash(same_again)
    assert c.fingerprint == same_again.fingerprint
    assert eval(repr(c), vars(tw.compressors)) == c
    assert tw.parse(str(c)) == c
    for name in [field.name for field in dataclasses.fields(c)] + ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(c, name, 1)


def test_configurations_differ():
    all_of_them = [row.compressor for row in ROWS]
    assert len(set(all_of_them)) == len(all_of_them)
    assert len({c.fingerprint for c in all_of_them}) == len(all_of_them)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tw.TopK(3.0), r"TopK: ratio must be in \(0, 1\], got 3.0"),
        (lambda: tw.TopK(0), "TopK: ratio"),
        (lambda: tw.TopK(0.1, chunk=0), "TopK: chunk must be a whole number from 1, got 0"),
        (lambda: tw.TopK(0.1, chunk=64.0), "TopK: chunk"),
        (lambda: tw.TopK(0.1, chunk=True), "TopK: chunk"),
        (lambda: tw.TwoBit(block=12), "TwoBit: block"),
        (lambda: tw.TopK(True), "TopK: ratio"),
        (lambda: tw.TopK("0.1"), "TopK: ratio"),
        (lambda: tw.TopK(float("nan")), "TopK: ratio"),
        (lambda: tw.RandomK(0.1, scaled=1), "RandomK: scaled"),
        (lambda: tw.RandomK(0.1, shared=None), "RandomK: shared"),
        (lambda: tw.Bernoulli(1e-12), r"Bernoulli: p must be at least 2\^-32"),
        (lambda: tw.Threshold(0.0), "Threshold: value"),
        (lambda: tw.Threshold(float("inf")), "Threshold: value"),
        (lambda: tw.Quantize(3), "Quantize: bits must be one of 8, 4, 2, got 3"),
        (lambda: tw.Quantize(8, block=100), "Quantize: block must be a positive multiple of 8"),
        (lambda: tw.Quantize(8, block=0), "Quantize: block"),
        (lambda: tw.Quantize(8, symmetric=False, entropy=True), "entropy=True needs symmetric"),
        (
            lambda: tw.QSGD(0),
            r"QSGD: levels must be an integer in \[1, 127\], or bits as in '4bit' .*, got 0",
        ),
        (lambda: tw.QSGD(128), "QSGD: levels"),
        (lambda: tw.QSGD(4, norm="l1"), "QSGD: norm must be one of 'l2', 'max'"),
        (lambda: tw.OneBit(block=9), "OneBit: block"),
        (lambda: tw.TernGrad(clip=-1), "TernGrad: clip"),
        (lambda: tw.Cast("fp4"), "Cast: to must be one of 'fp16', 'bf16', 'fp8', got 'fp4'"),
        (lambda: tw.Cast("fp16", block=64), "Cast: block is for fp8"),
        (lambda: tw.Lossless("lzma"), "Lossless: coder must be one of"),
        (lambda: tw.Lossless("zlib", level=10), r"level of zlib must be an integer in \[1, 9\]"),
        (lambda: tw.Tiered(0.1, small=tw.Tiered(0.1)), "Tiered: small"),
        (lambda: tw.Tiered(0.1, small=tw.TopK(0.5) | tw.Tiered(0.1)), "Tiered: small"),
        (lambda: tw.Tiered(0.1, large="none"), "Tiered: large"),
        (lambda: tw.Quantize(4) | tw.TopK(0.1), "sends no plain values"),
        (lambda: tw.Lossless() | tw.TopK(0.1), "Lossless must come last"),
        (lambda: tw.compressors.Chain((tw.TopK(0.1),)), "two to 4 stages"),
        (lambda: tw.parse("topq:0.1"), "unknown compressor 'topq': did you mean 'topk'"),
        (lambda: tw.parse("topq:0.1"), "compressors: arc, bernoulli, cast"),
        (lambda: tw.parse("topk"), "lacks an argument, ratio; usage: topk:RATIO"),
        (lambda: tw.parse("topk:0.1,64,0.2"), "too many arguments"),
        (lambda: tw.parse("topk:0.1,ratio=0.2"), "an argument twice"),
        (lambda: tw.parse("quantize:4,blocks=8"), "no argument 'blocks'; usage: quantize:BITS"),
        (lambda: tw.parse("quantize:block=8,4"), "must come before named arguments"),
        (lambda: tw.parse("tiered:0.1,small=(topk:0.1"), "parentheses do not match"),
        (lambda: tw.parse("topk:0.1)("), "parentheses do not match"),
        (lambda: tw.parse(""), "unknown compressor ''"),
        (lambda: tw.parse("topk:0.1|"), "unknown compressor ''"),
    ],
)
def test_wrong_settings_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# Element types


@over("!lossless")
def test_lossy_ones_refuse_integers(row):
    name = type(row.compressor).__name__
    for dtype in INTEGERS:
        with pytest.raises(TypeError, match=rf"^{name} takes float32.*got {dtype}"):
            row.compressor.encode(torch.ones(4, dtype=dtype))


@over("lossless")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_lossless_ones_take_integers(row, dtype, n):
    c = row.compressor
    raw = torch.from_numpy(np.random.default_rng(n).integers(-(2**63), 2**63 - 1, n))
    x = raw > 0 if dtype == torch.bool else raw.to(dtype)  # the low bits of each
    payload = c.encode(x)
    assert same(c.decode(payload), x)
    assert same(tw.decode(tw.pack(payload)), x)
    assert not payload.non_finite
    out = x.clone()
    c.accumulate(payload, out)
    assert same(out, x + x)


@over("lossless")
def test_lossless_ones_weigh_integers(row):
    c, x = row.compressor, torch.tensor([1, -2, 3], dtype=torch.int32)
    payload = c.encode(x)
    for dtype in (torch.int32, torch.int64):
        out = torch.zeros(3, dtype=dtype)
        c.accumulate(payload, out, 2.0)
        assert out.tolist() == [2, -4, 6]
        with pytest.raises(ValueError, match=r"weight 0\.5 cannot be applied"):
            c.accumulate(payload, out, 0.5)


@over()
def test_other_types_are_refused(row):
    for dtype in (torch.complex64, torch.uint16, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=f"{type(row.compressor).__name__} .*{dtype}"):
            row.compressor.encode(torch.ones(4).to(dtype))


@over("lossless")
def test_integers_have_no_residual(row):
    with pytest.raises(TypeError, match="a residual needs one too"):
        row.compressor.encode(torch.ones(4, dtype=torch.int32), residual=torch.zeros(4))


@over("residual")
def test_a_wrong_residual_is_refused(row):
    c = row.compressor
    for dtype, wrong in [(torch.float32, torch.float64), (torch.float64, torch.float32)] + [
        (half, half) for half in (torch.float16, torch.bfloat16)
    ]:
        with pytest.raises(TypeError, match=f"residual of a {dtype} tensor must be"):
            c.encode(torch.ones(6, dtype=dtype), residual=torch.zeros(6, dtype=wrong), key=KEY)
    for shape in [(5,), (2, 3), ()]:
        with pytest.raises(ValueError, match="the residual must match the tensor"):
            c.encode(torch.ones(6), residual=torch.zeros(shape), key=KEY)


@over("!residual")
def test_scaled_values_and_a_residual_are_refused(row):
    with pytest.raises(ValueError, match="use scaled=False with a residual"):
        row.compressor.encode(torch.ones(6), residual=torch.zeros(6), key=KEY)


@over()
def test_a_foreign_payload_is_refused(row):
    foreign = tw.TopK(0.123).encode(torch.ones(6))
    with pytest.raises(ValueError, match=r"cannot read this payload.*tw\.decode\(frame\)"):
        row.compressor.decode(foreign)
    with pytest.raises(ValueError, match="cannot read this payload"):
        row.compressor.accumulate([foreign], torch.zeros(6))


@over()
def test_a_wrong_out_is_refused(row):
    c = row.compressor
    payload = c.encode(torch.ones(6), key=KEY)
    for use in (lambda out: c.decode(payload, out), lambda out: c.accumulate(payload, out)):
        with pytest.raises(ValueError, match="out has 5 elements"):
            use(torch.zeros(5))
        with pytest.raises(TypeError, match=r"torch.float32 cannot go into torch.int32"):
            use(torch.zeros(6, dtype=torch.int32))


# Values that are not finite


BAD = (float("nan"), float("inf"), -float("inf"))


def check_non_finite(row, payload):
    """Everybody who reads it sees it."""
    assert payload.non_finite
    frame = tw.pack(payload)
    assert payload.num_bytes == frame.numel()
    for decoded in (row.compressor.decode(payload), tw.decode(frame)):
        assert decoded.shape == payload.shape
        assert decoded.isnan().all()
    assert tw.unpack(frame).non_finite
    out = torch.zeros(payload.shape)
    row.compressor.accumulate([payload, payload], out)
    assert out.isnan().all()


@over()
def test_non_finite_tensors(row):
    places = [(1, 0, 0), (64, 63, 1), (1000, 0, 2), (5300, 500, 0), (5300, 5299, 1)]
    for dtype, (n, at, bad) in itertools.product(FLOATS, places):
        x = normal(n, dtype=dtype)
        x[at] = BAD[bad]
        payload = row.compressor.encode(x, key=KEY)
        if row.lossless:
            assert payload.non_finite
            assert tw.unpack(tw.pack(payload)).non_finite
            assert same(tw.decode(tw.pack(payload)), x)
        else:
            check_non_finite(row, payload)
        if row.residual:
            r = normal(n, 1, real_of(dtype))
            before = r.clone()
            check_non_finite(row, row.compressor.encode(x, residual=r, key=KEY))
            assert same(r, before)


@over()
def test_non_finite_anywhere(row):
    for at in range(67):
        x = normal(67)
        x[at] = BAD[at % 3]
        assert row.compressor.draft(x, key=KEY).non_finite
    torch.set_num_threads(3)
    for at in (5, LONG // 2, LONG - 1):
        x = long_tensor().clone()
        x[at] = BAD[0]
        assert row.compressor.draft(x, key=KEY).non_finite


@over("residual")
def test_overflow_of_the_sum(row):
    """x and the residual are finite, their sum is not: as if x were not."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):  # float16 ends at 65504
        x, r = normal(1000, dtype=dtype), normal(1000, 1, real_of(dtype))
        x[77], r[77] = torch.finfo(dtype).max, torch.finfo(r.dtype).max
        before = r.clone()
        check_non_finite(row, row.compressor.encode(x, residual=r, key=KEY))
        assert same(r, before)


@over("residual")
def test_non_finite_residual(row):
    x, r = normal(1000), normal(1000, 1)
    r[3] = BAD[1]
    before = r.clone()
    check_non_finite(row, row.compressor.encode(x, residual=r, key=KEY))
    assert same(r, before)


# Randomness


@over("random")
def test_the_key_decides(row):
    x = normal(1000)
    frame = tw.pack(row.compressor.encode(x, key=KEY))
    assert same(tw.pack(row.compressor.encode(x, key=KEY)), frame)
    for other in (KEY._replace(seed=8), KEY._replace(step=12), KEY._replace(tensor=14)):
        assert not same(tw.decode(tw.pack(row.compressor.encode(x, key=other))), tw.decode(frame))


@over("!random")
def test_the_key_does_not_matter(row):
    x = normal(1000)
    assert same(tw.pack(row.compressor.encode(x, key=KEY)), tw.pack(row.compressor.encode(x)))


@over("random", "residual")
def test_a_residual_without_a_key_is_warned_of(row):
    with pytest.warns(tw.errors.ThinwireWarning, match=r"Pass key=tw\.Key"):
        row.compressor.encode(normal(10), residual=torch.zeros(10))


@over("random")
def test_a_wrong_key_is_refused(row):
    for key in (tw.Key(-1), tw.Key(1 << 64), tw.Key(step=1 << 32), tw.Key(1.5)):
        with pytest.raises(ValueError, match=r"Key: (seed|step) must be an integer in"):
            row.compressor.encode(normal(10), key=key)


def test_cases_are_what_they_claim():
    """The strategy's own laws: finite content, and layouts that are not contiguous."""
    for dtype in FLOATS:
        assert content("huge", 100, dtype, 0).isfinite().all()
        assert content("mixed", 1000, dtype, 0).isfinite().all()
        assert (content("denormal", 100, dtype, 0) != 0).any()
    t = normal(12).view(3, 4)
    assert all(same(lay(t, layout).contiguous(), t) for layout in ("transposed", "strided"))
    assert not any(lay(t, layout).is_contiguous() for layout in ("transposed", "strided"))
    assert isinstance(Case(t, t, t).total, torch.Tensor)


@pytest.mark.parametrize("spec", ["cast:fp16", "cast:bf16", "cast:fp8"])
@pytest.mark.parametrize("special", [1.0, 1e30, -1e30, math.nan])
def test_a_cast_comes_to_the_same_at_once_as_in_pieces(monkeypatch, spec, special):
    x = normal(3 * PIECE + 7)
    x[-1] = special  # 1e30 is too large for half precision
    payloads = []
    for large in (1, 1 << 40):
        monkeypatch.setattr(cast, "LARGE", large)
        payloads.append(tw.parse(spec).encode(x))
    assert payloads[0].non_finite == payloads[1].non_finite == math.isnan(special)
    assert same(tw.pack(payloads[0]), tw.pack(payloads[1]))
