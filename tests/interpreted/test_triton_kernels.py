"""Triton kernels against the PyTorch reference, bit for bit, over the rows of the CPU kernels."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from launches import recorded
from rows import ROWS
from tensors import content, normal, same

import thinwire as tw
from thinwire import kernels
from thinwire.kernels import contract, reference
from thinwire.kernels import triton as own
from thinwire.kernels.triton.checking import Checked

KEY = tw.Key(seed=0xFEDCBA9876543210, step=5, tensor=7)
CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float64)
# NumPy, which computes in the interpreter, tells of every NaN that comes up.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

every = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.spec)


@pytest.fixture(autouse=True)
def no_fallback():
    """A kernel that the reference takes the place of would pass every test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.errors.ThinwireWarning)
        yield


def encode(row, x, r):
    """(frame, new residual) of a tensor."""
    left = r.clone() if row.residual else None
    payload = row.compressor.encode(x, residual=left, key=KEY)
    return tw.pack(payload), r if left is None else left


def both(row, x, r):
    """The frame, the residual and what is decoded, by both kernels."""
    found = []
    for name in ("reference", "triton"):
        with kernels.use(name):
            frame, left = encode(row, x, r)
            found.append((frame, left, tw.decode(frame)))
    return zip(*found, strict=True)


# Whole compressors


@every
def test_float32_frames_are_identical(row):
    for n in (1, 7, 1000, 5121):
        for wanted, found in both(row, normal(n), normal(n, 1)):
            assert same(found, wanted), n


@pytest.mark.slow
@every
def test_float32_frames_of_longer_tensors_are_identical(row):
    """Beyond what one program takes, and beyond where Top-K takes samples."""
    for wanted, found in both(row, normal(9_001), normal(9_001, 1)):
        assert same(found, wanted)


@pytest.mark.slow
@every
def test_float64_frames_are_identical(row):
    for n in (65, 5121):
        x, r = normal(n, dtype=torch.float64), normal(n, 1, torch.float64)
        results = both(row, x, r)
        if not row.sums:
            for wanted, found in results:
                assert same(found, wanted), n
            continue
        # Sums of n numbers in another order differ by n eps at most; elements are below 10.
        bound = 10 * n * torch.finfo(torch.float64).eps
        _, residuals, decoded = results
        for wanted, found in (residuals, decoded):
            assert ((found - wanted).abs() <= bound).all(), n


@pytest.mark.slow
@every
def test_strange_tensors_give_identical_frames(row):
    """Zeros of both signs, denormals, the largest numbers, ties, infinities."""
    for kind in ("zeros", "denormal", "huge", "mixed", "ties"):
        x = content(kind, 1000, torch.float32, 3)
        with kernels.use("reference"):
            wanted = tw.pack(row.compressor.encode(x, key=KEY))
        with kernels.use("triton"):
            found = tw.pack(row.compressor.encode(x, key=KEY))
        if kind == "zeros" and "symmetric=false" in row.spec:
            continue  # the least of zeros of both signs is either
        if not (row.sums and kind in ("huge", "mixed")):  # where the order of sums shows
            assert same(found, wanted), kind
    x = normal(1000)
    x[777] = torch.inf
    with kernels.use("triton"):
        assert not tw.decode(tw.pack(row.compressor.encode(x, key=KEY))).isfinite().all()


@every
def test_accumulate_is_identical(row):
    c, x = row.compressor, normal(3001)
    payloads = [tw.unpack(tw.pack(c.encode(x * w, key=KEY))) for w in (1.0, -0.3)]
    found = []
    for name in ("reference", "triton"):
        with kernels.use(name):
            out = normal(3001, 3)
            c.accumulate(payloads, out, 0.3)
            found.append(out)
    assert same(*found)


# Each kernel


NAMES = sorted(set(reference.__all__) - contract.KERNELS_WITHOUT_A_CONTRACT)


@pytest.fixture(scope="module")
def launches():
    """The launches of all that this module tests."""
    with recorded() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_contract(name, dtype, launches):
    cases = list(contract.every_call(dtype, CPU, name))
    assert cases or dtype == torch.float64
    for label, call in cases:
        assert contract.difference(call, getattr(own, name).kernel) is None, label


@pytest.mark.slow
def test_launches_can_be_compiled(launches):
    """Written down here, compiled by tests/test_triton.py: there is no compiler in this process."""
    assert len(launches) > 200
    if path := os.environ.get("THINWIRE_TEST_LAUNCHES"):
        Path(path).write_text("\n".join(sorted(launches)))


def test_all_kernels_are_there():
    assert own.__all__ == reference.__all__
    assert {name for name in own.__all__ if isinstance(getattr(own, name), Checked)} == set(NAMES)
    assert contract._SMALL.keys() == set(NAMES)


def test_the_contract_finds_what_is_wrong():
    """A number that differs in its last bit, a result that is missing, an argument written to."""
    call = contract.KernelCall("extent", (normal(10), None), {})
    low, high = reference.extent(normal(10), None)

    def writes(x, r):
        found = reference.extent(x, r)
        x[4] = 0
        return found

    wrong = [lambda x, r: (low, high * (1 + 2**-52)), lambda x, r: None, lambda x, r: low, writes]
    assert all(contract.difference(call, kernel) for kernel in wrong)
    assert contract.difference(call, reference.extent) is None
    words = contract.difference(call, writes)
    assert words.startswith("1 of 10 elements differ, the first at 4: 0.0 instead of ")


def test_top_k_when_the_sample_misleads():
    """All alike, mostly zero, all large values in one place, and a period samples might see."""
    n = 20_000
    one_place = normal(n) * 1e-3
    one_place[5000:5200] = 7.0
    period = torch.zeros(n)
    period[::19] = normal(n)[::19]
    few = torch.zeros(n)
    few[::3000] = 1.0
    for x in (torch.ones(n), torch.zeros(n), one_place, period, few):
        for k in (1, 200, 6000, n):
            wanted = reference.top_k(x, None, k)
            found = own.top_k(x, None, k)
            assert all(same(*pair) for pair in zip(found, wanted, strict=True)), k


def test_rice_codes_of_any_parameter():
    """Up to where remainders and quotients are as long as they can be."""
    n = 1 << 40
    positions = torch.tensor([0, 1, 5, 64, 1 << 20, (1 << 33) + 7, n - 1])
    for parameter in (27, 31, 32, 33, 40, 48):
        _, words = contract._rice_words(positions, parameter)
        coded = own.rice_encode(positions, parameter, words)
        assert same(coded, reference.rice_encode(positions, parameter, words))
        assert same(own.rice_decode(coded, 7, parameter, words, n), positions)


def test_damaged_codes_are_refused_alike():
    """Whatever the bits say, both decoders give the same, and nothing is written elsewhere."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 62), 1 << 62, (12,), generator=generator)
    for count in (0, 1, 60, 63, 64, 190):
        for unary in (0, 1, 6, 12):
            for parameter in (0, 1, 5, 48):
                args = words, count, parameter, unary, 1 << 30
                if (words.numel() - unary) * 64 < count * parameter:
                    continue  # refused by the code, from the lengths of sections
                one, other = own.rice_decode(*args), reference.rice_decode(*args)
                assert (one is None) == (other is None)
                assert one is None or same(one, other)
            one, other = (m.elias_decode(words, unary, count, 7) for m in (own, reference))
            assert (one is None) == (other is None)
            assert one is None or same(one, other)
        one, other = (m.bitmap_decode(words, count, 700) for m in (own, reference))
        assert (one is None) == (other is None)


# What happens when a kernel is wrong


def extent(x, r):
    return 0.0, 0.0


def test_a_wrong_kernel_is_replaced_with_one_warning():
    kernel = Checked(extent)
    x = normal(100)
    with pytest.warns(tw.errors.ThinwireWarning, match="'extent' is not used on cpu: it differs"):
        assert kernel(x, None) == reference.extent(x, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel(x, None) == reference.extent(x, None)
        assert kernel(x.double(), x.double()) == reference.extent(x.double(), x.double())


def test_a_kernel_that_cannot_be_run_is_replaced_with_one_warning():
    def extent(x, r):
        raise RuntimeError("PTX was compiled with an unsupported toolchain")

    kernel = Checked(extent)
    words = "cannot be run, RuntimeError: PTX was compiled .*thinwire selftest --device cuda"
    with pytest.warns(tw.errors.ThinwireWarning, match=words):
        assert kernel(normal(9), None) == reference.extent(normal(9), None)


def test_a_kernel_is_checked_once_for_each_type_and_setting():
    seen = []

    def encode_uniform(*arguments, **settings):
        seen.append(arguments[0].numel())
        return reference.encode_uniform(*arguments, **settings)

    kernel, x = Checked(encode_uniform), normal(77)
    settings = {"limit": 7, "width": 4, "block": 256, "rule": "max"}

    def checks(*arguments, **settings):
        before = len(seen)
        kernel(*arguments, **settings)
        return len(seen) - before - 1

    assert checks(x, None, **settings) > 0
    assert checks(x, None, **{**settings, "limit": 5}) == 0
    assert checks(x, None, **{**settings, "block": 248}) == 0
    assert checks(x, x, **settings) > 0
    assert checks(x.double(), None, **settings) > 0
    assert checks(x, None, **{**settings, "width": 8}) > 0
    assert checks(x, None, **{**settings, "key": KEY}) > 0
    assert checks(x, None, **{**settings, "key": tw.Key(1)}) == 0
    assert checks(x, None, **{**settings, "block": 64}) > 0


def test_memory_that_is_short_is_no_fault_of_a_kernel():
    def extent(x, r):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    kernel = Checked(extent)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        kernel(normal(9), None)
