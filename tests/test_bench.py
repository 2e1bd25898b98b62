"""What the benchmark is made of: its tensors, what it compares with, and how it measures."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from thinwire import Key, list_compressors, parse
from thinwire.bench import memory
from thinwire.bench import run as running
from thinwire.bench.eager import eager_for
from thinwire.bench.measure import FAMILIES, family_of, fidelity
from thinwire.bench.memory import extra_bytes
from thinwire.bench.picture import place_labels
from thinwire.bench.run import prepare, run
from thinwire.bench.settings import (
    COMPRESSORS,
    DATA,
    SIZE,
    BenchSettingError,
    BenchSettings,
    read_size,
)
from thinwire.bench.tensors import TensorSource, generate, load
from thinwire.errors import MissingExtraError
from thinwire.formatting import show_count
from thinwire.report.figure import new_figure, settle

MEMORY = pytest.mark.skipif(memory.why_not() is not None, reason=str(memory.why_not()))


@given(st.integers(1, 4000), st.sampled_from(["", "k", "M"]))
def test_sizes_round_trip(count: int, unit: str) -> None:
    size = read_size(f"{count}{unit}")
    assert read_size(show_count(size)) == size


def test_sizes() -> None:
    assert [read_size(text) for text in ("10k", "25.6M", "1G", "7", " 2m ")] == [
        *(10_000, 25_600_000, 1_000_000_000, 7, 2_000_000)
    ]
    for text in ("", "M", "-1", "1.5", "0", "0k", "1e6", "8G", "\u0661"):
        with pytest.raises(BenchSettingError, match="size"):
            read_size(text)
    assert BenchSettings().sizes == (read_size(SIZE),)


@pytest.mark.parametrize("kind", DATA)
def test_data_is_the_same_every_time(kind: str) -> None:
    state = torch.get_rng_state()
    x = generate(kind, 10_000)
    assert torch.equal(x, generate(kind, 10_000))
    assert torch.equal(torch.get_rng_state(), state)
    assert bool(torch.isfinite(x).all())


def test_heavy_is_heavier_than_normal() -> None:
    # Of a million normal numbers the largest is near 5 standard deviations; Student's t with 3
    # degrees passes 10 with a probability of 0.002, so some two thousand times.
    tails = {kind: int((generate(kind, 1_000_000).abs() > 10).sum()) for kind in DATA}
    assert tails["normal"] == 0
    assert 1500 < tails["heavy"] < 2800


def test_numpy_file(tmp_path: Path) -> None:
    for dtype in ("<f4", ">f4", "f8", "f2"):
        values = np.arange(6, dtype=dtype).reshape(2, 3)
        np.save(tmp_path / "a.npy", values)
        assert load(tmp_path / "a.npy").tolist() == [0, 1, 2, 3, 4, 5]


def test_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {
        "b": torch.tensor([[3.0], [4.0]]),
        "a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "steps": torch.arange(5),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    x = load(tmp_path / "a.safetensors")
    assert x.dtype == torch.float32
    assert x.tolist() == [1, 2, 3, 4]

    save_file({"steps": torch.arange(5)}, tmp_path / "b.safetensors")
    with pytest.raises(BenchSettingError, match="int64"):
        load(tmp_path / "b.safetensors")


def test_missing_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"thinwire\[io\]"):
        load(tmp_path / "a.safetensors")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_fidelity(dtype: torch.dtype) -> None:
    x = torch.tensor([3.0, 4.0], dtype=dtype)
    assert fidelity(x, x) == (0, 1)
    assert fidelity(x, torch.zeros_like(x)) == (1, None)
    assert fidelity(torch.zeros_like(x), torch.zeros_like(x)) == (0, None)
    assert fidelity(torch.zeros_like(x), x) == (None, None)
    assert fidelity(x, x / 0) == (None, None)
    error, cosine = fidelity(x, -x)
    # A handful of float64 operations, each with a relative error of 2^-53.
    assert error == pytest.approx(2, rel=1e-15)
    assert cosine == pytest.approx(-1, rel=1e-15)
    huge = x * (torch.finfo(dtype).max / 8)
    assert fidelity(huge, huge * 0.5)[0] == pytest.approx(0.5, rel=1e-15)


# The exact ones agree to rounding, the others in their error: at 200 k elements the relative error
# of a random compressor varies by well under 1 %.
EAGER = (
    *(spec for spec in COMPRESSORS if eager_for(parse(spec))),
    *("cast:fp16", "bernoulli:0.05", "threshold:1.5", "quantize:4,stochastic=true"),
    *("quantize:8,block=none", "qsgd:1,norm=max", "onebit:none", "terngrad:none"),
    *("topk:0.03,chunk=4096", "topk:0.01,chunk=200003", "twobit", "twobit:none"),
)


@pytest.mark.parametrize("spec", EAGER)
def test_eager_means_the_same(spec: str) -> None:
    compressor, eager = parse(spec), eager_for(parse(spec))
    assert eager is not None
    x = generate("normal", 200_003)
    old = 0.3 * x.flip(0)
    r, s = old.clone(), old.clone()
    ours = compressor.decode(compressor.encode(x, residual=r, key=Key(1)))
    theirs = eager.decode(eager.encode(x, s), x.numel())
    # One rounding of the sum and one of the difference, on numbers up to |x + r|.
    assert torch.allclose(theirs + s, x + old, rtol=2**-22, atol=2**-22 * float(x.abs().max()))
    if compressor.name in ("topk", "threshold", "none", "cast"):
        assert torch.equal(ours, theirs)
    else:
        mine, other = (fidelity(x + old, y).relative_error for y in (ours, theirs))
        assert mine is not None
        assert other == pytest.approx(mine, rel=0.03)


@pytest.mark.parametrize(
    "spec",
    ["lossless", "tiered:0.01", "topk:0.1|quantize:4", "cast:fp8", "quantize:4,symmetric=false"],
)
def test_no_eager_version_of_what_has_none(spec: str) -> None:
    assert eager_for(parse(spec)) is None


def test_eager_versions_are_for_float32() -> None:
    assert eager_for(parse("topk:0.1"), torch.bfloat16) is None


def test_every_compressor_has_a_family() -> None:
    assert {family_of(parse(spec)) for spec in COMPRESSORS} == set(FAMILIES)


def test_default_compressors_know_all_that_need_no_tuning() -> None:
    known = set(list_compressors())
    named = {name for spec in COMPRESSORS for name in known if name in spec}
    # What is found by all ranks together cannot be measured on one.
    assert known - named == {"bernoulli", "threshold", "powersgd", "arc"}


# NumPy alone, so that the process starts quickly; 64 MB live at once, freed and reused in between.
ALLOCATE = """
import importlib.util, sys
import numpy as np
spec = importlib.util.spec_from_file_location("memory", sys.argv[1])
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)

def work():
    for _ in range(3):
        first = np.ones(8_000_000, np.float32)
        del first
    held = [np.ones(4_000_000, np.float32) for _ in range(4)]
    return held[0]

kept = np.ones(20_000_000, np.float32)
del kept
print(memory.peak_extra_bytes(work), memory.peak_extra_bytes(lambda: None))
"""


@MEMORY
def test_memory_of_a_known_size() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE, memory.__file__],
        env={**os.environ, **memory.ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    peak, nothing = map(int, done.stdout.split())
    # Pages that the interpreter itself takes meanwhile, and counters that lag behind: under 2 MB.
    assert peak == pytest.approx(64e6, abs=2e6)
    assert nothing < 2e6


@pytest.mark.slow
@MEMORY
def test_memory_of_encoding() -> None:
    numel = 2_000_000
    source, specs = TensorSource("normal", numel), ["none", "quantize:4", "tiered:0.01"]
    found = list(extra_bytes([source], specs, threads=1))
    assert len(found) == len(specs)
    x = source.make()
    for spec, extra in zip(specs, found, strict=True):
        # The payload is part of it, and nothing needs more than four tensors beside it.
        payload = parse(spec).encode(x, key=Key())
        assert 0.9 * payload.num_bytes < extra < payload.num_bytes + 4 * 4 * numel, spec


def small(**changes: object) -> BenchSettings:
    defaults = {"compressors": ("topk:0.1", "none"), "sizes": (1000,), "rounds": 2}
    return BenchSettings(**{**defaults, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("eager", [True, False])
def test_a_run_takes_the_steps_it_announces(eager: bool) -> None:
    planned = prepare(small(eager=eager, compressors=("topk:0.1", "none", "topk:0.10")))
    assert [str(compressor) for compressor in planned.compressors] == ["topk:0.1", "none"]
    steps: list[str] = []
    report = run(planned, lambda stage, detail: steps.append(stage))
    unmeasured = len(planned.sources) * len(planned.compressors)  # memory, of tensors this small
    assert len(steps) == planned.num_steps - unmeasured
    assert [group.data for group in report.groups] == list(DATA)
    assert not report.interrupted


# Steps done before Ctrl-C, of two warm-ups, size and error of both, two rounds of both; and how
# many rounds each row of the report then has.
DONE = {0: [], 1: [], 3: [0], 4: [0, 0], 5: [1, 0], 7: [2, 1], 8: [2, 2]}


@pytest.mark.parametrize("steps", DONE)
def test_an_interrupted_run_keeps_what_it_has(steps: int) -> None:
    left = itertools.count(steps, -1)

    def tick(stage: str, detail: str) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt

    report = run(prepare(small(eager=False, data=("normal",))), tick)
    rows = [row for group in report.groups for row in group.rows]
    assert [row.decode.rounds if row.decode else 0 for row in rows] == DONE[steps]
    assert report.interrupted == (steps < 8)


def test_a_run_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "available_bytes", lambda: 10**6)
    with pytest.raises(BenchSettingError, match="smaller"):
        prepare(small(sizes=(100_000,)))


def test_labels_do_not_cover_each_other() -> None:
    from matplotlib.text import Text

    figure = new_figure(5.4, 4.9)
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    generator = torch.Generator().manual_seed(3)
    near = 5 + torch.randn(len(COMPRESSORS), 2, generator=generator)
    axes.plot(near[:, 0], near[:, 1], "o")
    settle(figure, [])
    place_labels(axes, [(float(x), float(y)) for x, y in near], list(COMPRESSORS), "black")
    renderer = figure.canvas.get_renderer()
    figure.draw_without_rendering()
    # Of the text alone: the box of an annotation includes the line to its point.
    boxes = [Text.get_window_extent(label, renderer) for label in axes.texts]
    assert len(boxes) == len(COMPRESSORS)
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)
    frame = axes.get_window_extent(renderer)
    assert all(frame.contains(*box.min) and frame.contains(*box.max) for box in boxes)
