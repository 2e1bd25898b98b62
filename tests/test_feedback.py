"""The laws of feedback and of the reducer, with two, three and four real ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. A sweep records what
each step gave and left behind, and the laws are checked here; what is about the reducer itself is
checked there, law by law.
"""

import functools
import gc
import io
import itertools
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from nets import raised
from tensors import FLOATS, lay, normal, real_of, same
from torch import Tensor

import thinwire as tw
from thinwire.collectives.choose import suits
from thinwire.compressors.base import Compressor, Request
from thinwire.compressors.sparsifiers import Selection, Sparsifier
from thinwire.feedback.registry import feedback_for
from thinwire.feedback.state import STORAGES, StateVector
from thinwire.reducer.exchange import Driver
from thinwire.reducer.unit import Unit

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

N = 301  # no multiple of 2, 3 or 4, and more than one block of 256
STEPS = 6
SIZES = (2, 3, 4)
TIMEOUT = 600.0  # of calls that should not wait for anybody: ranks.py ends them long before
LONG = 400.0  # seconds for hundreds of calls when the machine is busy
HEAD_START = 0.2  # seconds: long enough for the others to have made two calls
TINY = 1e-37  # below it, bfloat16 and scales round more coarsely than their eps says


class Case(NamedTuple):
    """A reducer, and the gradients that it gets."""

    feedback: str
    spec: str
    collective: str
    size: int
    dtype: torch.dtype = torch.float32
    whole: bool = False  # small whole numbers, which make all arithmetic below exact

    def __str__(self) -> str:
        type_name = str(self.dtype).removeprefix("torch.") + "-whole" * self.whole
        return f"{self.feedback}-{self.spec}-{self.collective}-{self.size}-{type_name}"


class Step(NamedTuple):
    """The result of one exchange, and what is remembered after it."""

    x: Tensor
    memory: dict[str, Tensor]


def gradient(case: Case, rank: int, step: int) -> Tensor:
    x = normal(N, 100 * step + rank, case.dtype)
    return torch.round(4 * x) if case.whole else x


def remembered(reducer: tw.Reducer, name: str = "w") -> dict[str, Tensor]:
    """What a reducer remembers of a tensor; nothing after a reset."""
    kept = reducer.state_dict()["reducer"]["tensors"].get(name, {})
    return {part: values for part, values in kept.items() if part != "steps"}


def switch(reducer: tw.Reducer, spec: str) -> None:
    """Have this rank send the tensors that it knows with another compressor."""
    choices = reducer._choices
    choices._choices = dict.fromkeys(choices.tensors, tw.parse(spec))


def on_cases(cases: list[Case]) -> list[list[Step] | str]:
    """The steps of each case, or the error that ended it; all cases are in flight at once."""
    me = dist.get_rank()
    reducers = [
        tw.Reducer(case.spec, feedback=case.feedback, collective=case.collective, timeout=TIMEOUT)
        for case in cases
    ]
    done: list[list[Step] | str] = [[] for _ in cases]
    for step in range(STEPS):
        started = []
        for i, (case, reducer) in enumerate(zip(cases, reducers, strict=True)):
            if not isinstance(done[i], str):
                x = gradient(case, me, step)
                try:
                    started.append((i, x, reducer.average({"w": x}, async_op=True)))
                except ValueError as error:
                    done[i] = f"{type(error).__name__}: {error}"
        for i, x, handle in started:
            handle.wait()
            done[i].append(Step(x, remembered(reducers[i])))
    return done


# What is run. Every collective with compressors that suit it, each at one of the sizes.

CARRIED = [
    *(("gather", spec) for spec in ("topk:0.05", "quantize:4", "onebit")),
    *(("twoshot", spec) for spec in ("topk:0.05", "quantize:2", "scaledsign")),
    *(("sparse", spec) for spec in ("topk:0.05", "threshold:0.5", "topk:0.1|quantize:4")),
    *(("summable", spec) for spec in ("randomk:0.25,shared=true", "cast:bf16")),
]
EF14_CASES = [
    *(Case("ef14", spec, name, SIZES[i % 3]) for i, (name, spec) in enumerate(CARRIED)),
    Case("ef14", "topk:0.05", "gather", 2, torch.float16),
    Case("ef14", "quantize:4", "twoshot", 3, torch.bfloat16),
    Case("ef14", "topk:0.05", "sparse", 4, torch.float64),
    Case("ef14:storage=bf16", "topk:0.05", "gather", 3),
    Case("ef14:storage=int8", "topk:0.05", "twoshot", 2),
    Case("ef14:storage=host", "topk:0.05", "gather", 2),
    Case("ef14:storage=bf16", "randomk:0.25,shared=true", "summable", 2, torch.float64),
    Case("ef14:storage=int8", "randomk:0.25,shared=true", "summable", 2, torch.bfloat16),
]
EF21_SPECS = {
    **{"gather": "topk:0.1", "twoshot": "quantize:2", "sparse": "topk:0.1"},
    "summable": "randomk:0.25,shared=true",
}
EF21_CASES = [
    *(
        Case(("ef21", "ef21m:0.3")[(size + i) % 2], spec, name, size)
        for i, (name, spec) in enumerate(EF21_SPECS.items())
        for size in SIZES
    ),
    Case("ef21m:0.3", "topk:0.1", "twoshot", 2, torch.float16),
    Case("ef21", "topk:0.1", "gather", 3, torch.bfloat16),
    Case("ef21m:0.3,storage=bf16", "topk:0.1", "gather", 4),
    Case("ef21:storage=int8", "topk:0.1", "twoshot", 2),
]
BY_HAND = [
    *(
        Case(feedback, "topk:0.1", "gather", 2 + 2 * (i % 2), whole=True)
        for i, feedback in enumerate(("ef14:0.5,reset=5", "ef14", "ef21:reset=3", "ef21m:0.5"))
    ),
    *(
        Case(feedback, "topk:0.1", "gather", 3, torch.float64)
        for feedback in ("ef14:0.9", "ef21", "ef21m:0.3", "ef21m:0.3,reset=4")
    ),
]
TWINS = [Case(feedback, "onebit", "gather", 3) for feedback in ("ef21", "ef21m:1")]


@functools.cache
def sweep(size: int) -> dict[Case, tuple[list[Step] | str, ...]]:
    """All cases of a size, as they went on each rank."""
    every = dict.fromkeys([*EF14_CASES, *EF21_CASES, *BY_HAND, *TWINS])
    cases = [case for case in every if case.size == size]
    done = ranks.run(on_cases, cases, ranks=size, seconds=LONG)
    return dict(zip(cases, zip(*done, strict=True), strict=True))


def of(case: Case) -> list[list[Step]]:
    """The steps of a case on each rank."""
    done = sweep(case.size)[case]
    assert not any(isinstance(each, str) for each in done), done
    return list(done)


def over(cases: list[Case]) -> Any:
    """A test for each case."""
    return pytest.mark.parametrize("case", cases, ids=map(str, cases))


@over([*EF14_CASES, *EF21_CASES])
def test_all_ranks_end_with_the_same_bits(case):
    for steps in zip(*of(case), strict=True):
        assert all(same(each.x, steps[0].x) for each in steps)
        assert steps[0].x.isfinite().all()


@over([*EF14_CASES, *EF21_CASES])
def test_memory_is_at_least_float32(case):
    for steps in of(case):
        assert {v.dtype for s in steps for v in s.memory.values()} == {real_of(case.dtype)}


# How much rounding there is


def exchanged(case: Case, mass: Tensor, own: torch.dtype, total: Tensor) -> Tensor:
    """By how much one exchange may break conservation, as test_all_reduce derives it.

    Each rank rounds seven times, an owner's sum `size` times and its payload three times more; the
    backend rounds its sums in the type that travels; the result is rounded to the tensor's type.
    """
    eps = torch.finfo(real_of(case.dtype)).eps
    wire = 0.0
    if case.collective == "summable":
        wire = torch.finfo(torch.bfloat16 if case.spec == "cast:bf16" else own).eps
    half = (10 + case.size) / 2 * eps + case.size / 2 * wire
    info = torch.finfo(own)
    # Below the normal numbers a rounding is half of the smallest number.
    least = case.size * info.smallest_normal * info.eps
    return half * mass + info.eps / 2 * total.abs() + least


def kept_within(case: Case, values: Tensor) -> Tensor:
    """How far what is kept may be from what was to be kept."""
    if "bf16" in case.feedback:  # seven bits after the first: a unit is up to 2^-7 of the number
        return 2.0**-7 * values.abs() + TINY
    if "int8" in case.feedback:
        # Levels are a power of two apart. The largest of 256 was more than 63.5 of them, so that at
        # least 63 were kept.
        blocks = torch.nn.functional.pad(values.abs(), (0, -N % 256)).view(-1, 256)
        largest = blocks.amax(1, keepdim=True).expand_as(blocks).reshape(-1)[:N]
        return largest / 63 + TINY
    return torch.zeros_like(values)


# EF14


def within(error: Tensor, bound: Tensor) -> bool:
    return bool((error.abs() <= bound).all())


@over(EF14_CASES)
def test_ef14_loses_nothing_in_the_long_run(case):
    """All gradients of all ranks = ranks * all results + the residuals, after every step."""
    done, size = of(case), case.size
    due = torch.zeros(N, dtype=torch.float64)
    bound = torch.zeros_like(due)
    old = [torch.zeros_like(due)] * size
    for t in range(STEPS):
        g = [gradient(case, i, t).double() for i in range(size)]
        e = [steps[t].memory["residual"].double() for steps in done]
        total = done[0][t].x.double() * size
        due += sum(g) - total
        mass = sum(part.abs() for part in (*g, *old, *e)) + total.abs()
        bound += exchanged(case, mass, case.dtype, total) + sum(kept_within(case, r) for r in e)
        assert within(due - sum(e), bound), (t, float(((due - sum(e)).abs() - bound).max()))
        old = e
    assert sum(r.abs().sum() for r in old) > 0, "nothing was left out: the law was not put to test"


def test_host_memory_changes_nothing():
    here, there = (
        of(Case(feedback, "topk:0.05", "gather", 2)) for feedback in ("ef14", "ef14:storage=host")
    )
    for a, b in zip(itertools.chain(*here), itertools.chain(*there), strict=True):
        assert same(a.x, b.x)
        assert same(a.memory["residual"], b.memory["residual"])


def descent_gradient(x: Tensor, rank: int) -> Tensor:
    """Of ||x - b||^2 / 2; the ranks' b are opposite in two elements and 1 in the others."""
    b = torch.ones_like(x)
    b[:2] = torch.tensor([10.0, -8.0]) * (-1) ** rank
    return x - b


RATE = 2.0**-6


def on_descent(feedback: str, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gradient descent on the compressed average: (gradient, residual, x) after each step."""
    reducer = tw.Reducer("topk:0.2", feedback=feedback, timeout=TIMEOUT)
    x, found = torch.zeros(10), []
    for _ in range(steps):
        g = descent_gradient(x, dist.get_rank())
        average = g.clone()
        reducer.average({"w": average})
        x = x - RATE * average
        found.append((g, remembered(reducer).get("residual", torch.zeros(10)), x))
    return found


def test_ef14_follows_the_uncompressed_trajectory_and_without_it_all_is_lost():
    steps, best = 60, torch.tensor([0.0] * 2 + [1.0] * 8)
    done = ranks.run(on_descent, "ef14", steps, ranks=2, seconds=LONG)
    dense = torch.zeros(10, dtype=torch.float64)
    for t, ((g0, e0, x), (g1, e1, _)) in enumerate(zip(*done, strict=True)):
        dense -= RATE * (g0.double() + g1.double()) / 2
        shifted = x.double() - RATE * (e0.double() + e1.double()) / 2
        # In each step both ranks and the sum round a few times, and x twice: less than 20 roundings
        # of numbers below 64, which is what residuals stay below here, times the rate.
        bound = (t + 1) * 20 * 2.0**-24 * 64 * RATE
        assert max(e0.abs().max(), e1.abs().max()) < 64
        assert (shifted - dense).abs().max() <= bound, t
    assert (done[0][-1][2] - best).norm() < best.norm() / 2
    # The control: each rank's largest two elements cancel out, and no other is ever sent.
    for found in ranks.run(on_descent, "none", steps, ranks=2, seconds=LONG):
        assert all(not x.any() for _, _, x in found)


# EF21 and EF21M


@over(EF21_CASES)
def test_ef21_mean_is_the_mean_of_all_h(case):
    done, size = of(case), case.size
    real = torch.finfo(real_of(case.dtype))
    bound = torch.zeros(N, dtype=torch.float64)
    old, old_mean = [torch.zeros_like(bound)] * size, torch.zeros_like(bound)
    for t in range(STEPS):
        now = [steps[t].memory for steps in done]
        g = [gradient(case, i, t).double() for i in range(size)]
        v = [m["v"].double() if "v" in m else g[i] for i, m in enumerate(now)]
        h, mean = [m["h"].double() for m in now], now[0]["mean"].double()
        assert all(same(m["mean"], now[0]["mean"]) for m in now)
        # v - h goes through the collective, and what it leaves out is v - h of after the step.
        change = sum(p.abs() + q.abs() for p, q in zip(v, old, strict=True))
        left = sum(p.abs() + q.abs() for p, q in zip(v, h, strict=True))
        mass = change + left + size * (mean - old_mean).abs()
        bound += exchanged(case, mass, real_of(case.dtype), mean * 0) / size
        # v - h, v - r and the sum in H are rounded once each; then what is kept is.
        bound += real.eps / 2 * ((change + sum(q.abs() for q in h)) / size + mean.abs())
        bound += kept_within(case, mean) + sum(kept_within(case, q) for q in h) / size
        assert within(mean - sum(h) / size, bound), t
        assert within(done[0][t].x.double() - mean, kept_within(case, mean) + half_of(case, mean))
        old, old_mean = h, mean


def half_of(case: Case, values: Tensor) -> Tensor:
    """A rounding to the tensor's own type; H itself is float32 for all but float64."""
    info = torch.finfo(case.dtype)
    narrow = case.dtype != real_of(case.dtype)
    return narrow * (info.eps / 2 * values.abs() + info.smallest_normal * info.eps)


@over([case for case in [*EF21_CASES, *BY_HAND] if "ef21" in case.feedback])
def test_ef21_begins_with_the_dense_mean(case):
    done, size = of(case), case.size
    g = [gradient(case, i, 0) for i in range(size)]
    mean = sum(own.double() for own in g) / size
    # Each of the terms is multiplied by 1 / size, itself rounded, and added.
    eps = torch.finfo(real_of(case.dtype)).eps
    bound = (size + 2) / 2 * eps * sum(own.double().abs() for own in g) / size
    for steps, own in zip(done, g, strict=True):
        for part in {"v", "h"} & steps[0].memory.keys():
            values = steps[0].memory[part].double()
            assert within(values - own.double(), kept_within(case, values))
    if case.whole:  # and size is a power of two
        assert torch.equal(done[0][0].x.double(), mean)
    assert within(done[0][0].x.double() - mean, bound + half_of(case, mean))


def test_eta_one_is_ef21():
    plain, smooth = (of(case) for case in TWINS)
    for a, b in zip(itertools.chain(*plain), itertools.chain(*smooth), strict=True):
        assert same(a.x, b.x)
        assert all(same(a.memory[part], b.memory[part]) for part in ("h", "mean"))


def top(p: np.ndarray, ratio: float) -> np.ndarray:
    """Top-K in two lines: the largest magnitudes, ties to the lower position."""
    sent = np.zeros_like(p)
    chosen = np.argsort(-np.abs(p), kind="stable")[: int(np.ceil(len(p) * ratio))]
    sent[chosen] = p[chosen]
    return sent


def by_hand(case: Case) -> Iterator[tuple[np.ndarray, list[dict[str, np.ndarray]]]]:
    """The formulas for all ranks at once, in float64: the result and the memories of each step."""
    feedback = tw.feedback.parse(case.feedback)
    ratio = tw.parse(case.spec).ratio
    eta, decay = getattr(feedback, "eta", 1.0), getattr(feedback, "decay", 1.0)
    first = True
    for t in range(STEPS):
        g = np.stack([gradient(case, i, t).double().numpy() for i in range(case.size)])
        if first:
            e, h, v, mean = g * 0, g * 0, g * 0, g[0] * 0
        if feedback.name == "ef14":
            p = g + decay * e
            c = np.stack([top(row, ratio) for row in p])
            e = p - c
            result, memory = c.mean(0), {"residual": e}
        else:
            v = g if first else (1 - eta) * v + eta * g
            c = v - h if first else np.stack([top(row, ratio) for row in v - h])
            h, mean = h + c, mean + c.mean(0)
            parts = {"v": v, "h": h} if feedback.name == "ef21m" else {"h": h}
            result, memory = mean, {**parts, "mean": np.stack([mean] * case.size)}
        first = feedback.reset > 0 and (t + 1) % feedback.reset == 0
        each = [{} if first else {k: m[i] for k, m in memory.items()} for i in range(case.size)]
        yield result, each


@over(BY_HAND)
def test_every_step_is_what_the_formulas_say(case):
    """Whole numbers halved a few times, and sums of them, fit float32: nothing is rounded.

    Otherwise, in float64: fewer than 20 roundings a step and element, of numbers below 64.
    """
    done = of(case)
    for t, (result, memories) in enumerate(by_hand(case)):
        bound = 0.0 if case.whole else (t + 1) * 20 * 2.0**-53 * 64
        assert abs(done[0][t].x.double().numpy() - result).max() <= bound, t
        for steps, memory in zip(done, memories, strict=True):
            assert steps[t].memory.keys() == memory.keys(), t
            for part, values in memory.items():
                assert abs(steps[t].memory[part].double().numpy() - values).max() <= bound, (
                    t,
                    part,
                )


# Ranks that share one support, and gradients that cancel


@dataclass(frozen=True)
class Mean(Sparsifier):
    """Sends the last element only: that of the largest mean, as ARC-Top-K would find here."""

    name: ClassVar[str] = "mean"

    def select(self, request: Request) -> Selection:
        values = request.x[-1:] if request.r is None else request.x[-1:] + request.r[-1:]
        return Selection(torch.tensor([request.numel - 1], dtype=torch.int32), values)


def on_opposed(feedback: str, steps: int) -> tuple[dict[str, Tensor], Tensor]:
    """What is remembered in the end, and the last result; all but the first step in flight."""
    reducer = tw.Reducer(Mean(), feedback=feedback, timeout=TIMEOUT)
    given = torch.tensor([(-1.0) ** dist.get_rank(), 0.125])
    xs = [given.clone() for _ in range(steps)]
    reducer.average({"w": xs[0]})
    tw.wait_all([reducer.average({"w": x}, async_op=True) for x in xs[1:]])
    return remembered(reducer), xs[-1]


def test_where_gradients_cancel_residuals_of_ef14_grow_and_ef21m_stays_bounded():
    steps = 100
    for rank, (memory, x) in enumerate(ranks.run(on_opposed, "ef14", steps, ranks=2, seconds=LONG)):
        assert memory["residual"].tolist() == [(-1) ** rank * steps, 0]
        assert x.tolist() == [0, 0.125]
    for memory, x in ranks.run(on_opposed, "ef21m:0.125", steps, ranks=2, seconds=LONG):
        # v is a mean of gradients and h has been v: neither is ever larger than a gradient. Here
        # all of them are the same, and the weights of the mean are exact.
        assert all(abs(values[0]) <= 1 for values in memory.values())
        assert x.tolist() == [0, 0.125]


# Failures: a step that did not happen leaves nothing behind


BROKEN = [
    *((f"ef14:storage={storage}", "topk:0.1", "gather") for storage in STORAGES),
    ("ef14:0.5", "topk:0.1", "gather"),
    ("ef14", "quantize:4", "twoshot"),
    ("ef14", "topk:0.1", "sparse"),
    ("ef14", "cast:bf16", "summable"),
    ("ef21", "topk:0.1", "gather"),
    ("ef21m:0.3", "onebit", "twoshot"),
    ("ef21m:0.3,storage=int8", "topk:0.1", "gather"),
]


def pair(step: int) -> dict[str, Tensor]:
    me = dist.get_rank()
    return {"a": normal(200, 10 * step + me), "b": normal(300, 10 * step + me + 5)}


def memories(reducer: tw.Reducer) -> dict[str, dict[str, Tensor]]:
    return {name: remembered(reducer, name) for name in ("a", "b")}


def alike(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys()
        and all(same(a[name][part], b[name][part]) for part in a[name])
        for name in a
    )


class Fate(NamedTuple):
    """What came of the broken steps."""

    non_finite: list[bool]  # each tensor, after NaN and after infinity
    told: list[bool]  # by the accounts
    error: str  # when one rank used another compressor
    untouched: bool  # tensors after that error
    kept: list[bool]  # memory as before, after each of the three
    later: bool  # the next good step is as if nothing had been


def on_broken(feedback: str, spec: str, collective: str) -> Fate:
    def fresh() -> tw.Reducer:
        return tw.Reducer(spec, feedback=feedback, collective=collective, timeout=TIMEOUT)

    reducer, twin, me = fresh(), fresh(), dist.get_rank()
    non_finite, told, kept = [], [], []

    def bad(value: float, rank: int) -> None:
        xs = pair(7)
        if me == rank:
            xs["a"][3] = value
        handle = reducer.average(xs)
        non_finite.extend(not bool(x.isfinite().any()) for x in xs.values())
        told.append(not handle.account.finite)

    for step in (0, 1):
        reducer.average(pair(step))
        twin.average(pair(step))
    before = memories(reducer)
    bad(torch.nan, 1)
    kept.append(alike(memories(reducer), before))
    bad(-torch.inf, 2)
    kept.append(alike(memories(reducer), before))
    xs, error = pair(8), ""
    if me == 1:
        switch(reducer, "none" if collective == "summable" else "topk:0.2")
    try:
        reducer.average(xs)
    except tw.MismatchError as caught:
        error = str(caught)
    switch(reducer, spec)
    kept.append(alike(memories(reducer), before))
    untouched = all(same(x, y) for x, y in zip(xs.values(), pair(8).values(), strict=True))
    xs, ys = pair(2), pair(2)
    reducer.average(xs)
    twin.average(ys)
    later = all(same(xs[name], ys[name]) for name in xs)
    later = later and alike(memories(reducer), memories(twin))
    return Fate(non_finite, told, error, untouched, kept, later)


def on_all_broken() -> list[Fate]:
    return [on_broken(*each) for each in BROKEN]


@functools.cache
def broken() -> list[list[Fate]]:
    return ranks.run(on_all_broken, ranks=3, seconds=LONG)


@pytest.mark.parametrize("i", range(len(BROKEN)), ids=["-".join(each) for each in BROKEN])
def test_a_broken_step_reaches_everybody_and_leaves_nothing_behind(i):
    for rank, fates in enumerate(broken()):
        fate = fates[i]
        assert all(fate.non_finite), rank
        assert all(fate.told), rank
        assert re.search("on ranks 0, 2 but (topk:0.2|none) on rank 1", fate.error), rank
        assert fate.untouched, rank
        assert all(fate.kept), rank
        assert fate.later, rank


# The reducer, law by law, on three ranks


def make(spec: str = "topk:0.1", **kwargs: Any) -> tw.Reducer:
    return tw.Reducer(spec, **{"timeout": TIMEOUT, "feedback": "ef14", **kwargs})


LAWS: dict[str, Callable[[], None]] = {}


def law(function: Callable[[], None]) -> Callable[[], None]:
    """Register what holds on three ranks."""
    LAWS[function.__name__.removeprefix("on_")] = function
    return function


def total(x: Tensor) -> Tensor:
    """The sum over ranks, in float64."""
    x = x.double()
    dist.all_reduce(x)
    return x


def mine(n: int, seed: int = 0) -> Tensor:
    return normal(n, 10 * seed + dist.get_rank())


class Books:
    """Conservation of each name, over steps of whatever grouping."""

    def __init__(self, reducer: tw.Reducer) -> None:
        self.reducer, self.due = reducer, {}

    def step(self, xs: dict[str, Tensor], **kwargs: Any) -> tw.Handle:
        given = {name: x.clone() for name, x in xs.items()}
        handle = self.reducer.average(xs, **kwargs)
        handle.wait()
        self.note(given, xs)
        return handle

    def note(self, given: dict[str, Tensor], xs: dict[str, Tensor]) -> None:
        for name, x in xs.items():
            sent = total(given[name]) - dist.get_world_size() * x.double()
            self.due[name] = self.due.get(name, 0) + sent

    def balance(self) -> float:
        """The largest that any name lacks."""
        return max(
            float((due - total(remembered(self.reducer, name)["residual"])).abs().max())
            for name, due in self.due.items()
        )


# A few steps of three ranks with numbers below 16: fewer than 200 roundings of float32.
LITTLE = 200 * 2.0**-24 * 16


@law
def on_several_tensors_are_as_each_by_itself() -> None:
    for feedback in ("ef14", "ef21m:0.5"):
        as_one, apart = make(feedback=feedback), make(feedback=feedback)
        for step in range(3):
            # Whole numbers: the order in which the backend adds depends on what else is sent.
            xs = {n: torch.round(4 * mine(50 + i, step + 10 * i)) for i, n in enumerate("abc")}
            ys = {name: x.clone() for name, x in xs.items()}
            as_one.average(xs)
            for name, y in ys.items():
                apart.average({name: y})
            for name in xs:
                assert same(xs[name], ys[name])
                assert same(
                    *(remembered(r, name)[as_one.feedback.parts[0]] for r in (as_one, apart))
                )
        for reducer, count in ((as_one, 3), (apart, 9)):
            reducer.ledger.fold()
            assert reducer.ledger.exchanges == count


@law
def on_together_is_one_tensor_wherever_it_lies() -> None:
    views, copies, flat = make(), make(), make()
    for step in range(3):
        buffer = mine(60, step)
        whole, parts = buffer.clone(), [p.clone() for p in buffer.split([10, 20, 30])]
        views.average(dict(zip("abc", buffer.split([10, 20, 30]), strict=True)), together=True)
        copies.average(dict(zip("abc", parts, strict=True)), together=True)
        flat.average({"w": whole})
        assert same(buffer, whole)
        assert same(torch.cat(parts), whole)
        residual = torch.cat([remembered(copies, name)["residual"] for name in "abc"])
        assert same(residual, remembered(flat)["residual"])
    assert int((buffer != 0).sum()) <= 3 * 6, "6 of 60 on each rank, not 1, 2 and 3 of each"
    # In one storage, but in another order and with a gap.
    buffer, views, copies = mine(60, 9), make(), make()
    spread = {"b": buffer[30:50], "a": buffer[5:25]}
    parts = {name: x.clone() for name, x in spread.items()}
    untouched = buffer[25:30].clone()
    views.average(spread, together=True)
    copies.average(parts, together=True)
    assert all(same(spread[name], parts[name]) for name in parts)
    assert same(buffer[25:30], untouched)


@law
def on_shapes_and_strides_do_not_matter() -> None:
    for feedback in ("ef14", "ef21"):
        reducer, plain = make("topk:0.3", feedback=feedback), make("topk:0.3", feedback=feedback)
        for step in range(3):
            layouts = {"a": "transposed", "b": "strided", "c": "plain", "d": "plain", "e": "plain"}
            shapes = {"a": (5, 7), "b": (4, 3, 2), "c": (), "d": (0,), "e": (1, 9, 1)}
            xs, ys = {}, {}
            for i, (name, shape) in enumerate(shapes.items()):
                ys[name] = mine(int(np.prod(shape)), step + 20 * i).view(shape)
                xs[name] = lay(ys[name].clone(), layouts[name])
            assert not xs["a"].is_contiguous()
            assert not xs["b"].is_contiguous()
            reducer.average(xs, together=step == 1)
            plain.average(ys, together=step == 1)
            assert all(same(xs[name], ys[name]) for name in xs)


@law
def on_calls_in_flight_are_carried_out_in_order() -> None:
    flying, waiting = make("randomk:0.3,shared=true"), make("randomk:0.3,shared=true")
    steps = [{name: mine(40, 5 * t + i) for i, name in enumerate("abc")} for t in range(3)]
    again = [{name: x.clone() for name, x in xs.items()} for xs in steps]
    handles = [
        flying.average({n: lay(x, "plain") for n, x in xs.items()}, async_op=True) for xs in steps
    ]
    for xs in again:
        waiting.average(xs)
    tw.wait_all(handles)
    assert all(same(xs[n], ys[n]) for xs, ys in zip(steps, again, strict=True) for n in xs)
    for name in "abc":
        assert same(remembered(flying, name)["residual"], remembered(waiting, name)["residual"])


@law
def on_strided_calls_in_flight_share_scratch_memory_safely() -> None:
    """Copies of strided tensors lie in one room for all calls: each uses it in its own time."""
    flying, waiting = make(feedback="ef21m:0.5"), make(feedback="ef21m:0.5")
    xs = [lay(mine(30 * i + 30, i).view(3, -1), "transposed") for i in range(5)]
    ys = [x.clone() for x in xs]
    tw.wait_all([flying.average({f"{i}": x}, async_op=True) for i, x in enumerate(xs)])
    for i, y in enumerate(ys):
        waiting.average({f"{i}": y})
    assert all(same(x, y) for x, y in zip(xs, ys, strict=True))


GROUPINGS = ["ab", "a", "b", "bca", "ca", "b", "abc"]


@law
def on_memory_moves_with_the_names() -> None:
    books = Books(make())
    for step, names in enumerate(GROUPINGS):
        books.step({name: mine(20, 3 * step + ord(name)) for name in names}, together=True)
        assert books.balance() <= LITTLE, names
    reducer = make(feedback="ef21")
    for step, names in enumerate(["ab", "a", "b", "ba"]):
        reducer.average({n: mine(20, 3 * step + ord(n)) for n in names}, together=True)
        for name in names:
            now = remembered(reducer, name)
            assert (total(now["h"]) / 3 - now["mean"]).abs().max() <= LITTLE
        reducer.ledger.fold()
        used = {reducer.ledger.lines[name].compressor for name in names}
        assert used == {"topk:0.1" if step else "none"}, "what is known does not start anew"


@law
def on_a_tensor_of_another_type_keeps_its_memory() -> None:
    books = Books(make())
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float32)):
        # Numbers of few bits, as bfloat16 rounds the results that are sent.
        books.step({"w": torch.round(mine(30, step)).to(dtype)})
        assert remembered(books.reducer)["residual"].dtype == real_of(dtype)
    # One result was rounded to bfloat16, and three times that is missing.
    assert books.balance() <= 3 * 2.0**-8 * 16


@law
def on_a_group_of_some_ranks_is_a_world_of_its_own() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        reducer = make(group=group)
        x, y = mine(40), mine(40)
        reducer.average({"w": x})
        residual = remembered(reducer)["residual"]
        both = torch.stack([y.double(), residual.double()])
        dist.all_reduce(both, group=group)
        assert (both[0] - both[1] - 2 * x.double()).abs().max() <= LITTLE
        states = reducer.gathered_state_dict(everywhere=True)
        states["ranks"][1 - dist.get_rank(group)]["reducer"]["tensors"] = {}
        other = make(group=group)
        other.load_state_dict(states)
        assert same(remembered(other)["residual"], residual)


@law
def on_a_group_that_comes_back_finds_what_its_members_did_meanwhile() -> None:
    books = Books(make())
    for step, names in enumerate(["ab", "b", "ab"]):
        books.step({name: mine(20, 3 * step + ord(name)) for name in names}, together=True)
    assert books.balance() <= LITTLE


@law
def on_names_that_regroup_in_flight_lose_nothing() -> None:
    books = Books(make())
    xs = [{"a": mine(20, 1), "b": mine(20, 2)}, {"a": mine(20, 3)}]
    given = [{name: x.clone() for name, x in each.items()} for each in xs]
    if dist.get_rank() == 0:
        time.sleep(HEAD_START)
    tw.wait_all([books.reducer.average(each, together=True, async_op=True) for each in xs])
    for before, after in zip(given, xs, strict=True):
        books.note(before, after)
    assert books.balance() <= LITTLE


@law
def on_ranks_of_different_speed_agree_when_to_start_dense() -> None:
    reducer = make(feedback="ef21")
    if dist.get_rank() == 0:
        time.sleep(HEAD_START)
    first = reducer.average({"w": mine(50, 1)}, async_op=dist.get_rank() > 0)
    second = reducer.average({"w": mine(50, 2)}, async_op=True)
    tw.wait_all([first, second])


@law
def on_ranks_of_different_speed_agree_whether_something_waits_to_be_sent() -> None:
    reducer = make()
    if dist.get_rank() == 0:
        time.sleep(HEAD_START)
    first = reducer.average({"w": mine(50, 1)}, async_op=dist.get_rank() > 0)
    switch(reducer, "none")
    tw.wait_all([first, reducer.average({"w": mine(50, 2)}, async_op=True)])


@law
def on_random_numbers_are_new_for_each_tensor_and_step() -> None:
    """Of 200 elements 50 are drawn: the same 50 again have a chance of 10^-47."""
    reducer, drawn = make("randomk:0.25,shared=true", collective="summable"), []
    for _ in range(3):
        xs = {"a": torch.ones(200), "b": torch.ones(200)}
        reducer.average(xs)
        drawn += [tuple((x != 0).nonzero().flatten().tolist()) for x in xs.values()]
    assert all(len(positions) == 50 for positions in drawn)
    assert len(set(drawn)) == 6
    other = make("randomk:0.25,shared=true", collective="summable", seed=1)
    other.average({"a": (x := torch.ones(200)), "b": torch.ones(200)})
    assert tuple((x != 0).nonzero().flatten().tolist()) != drawn[0]


@law
def on_a_state_goes_on_as_if_nothing_had_happened() -> None:
    cases = [
        *(("randomk:0.2,shared=true", "ef14"), ("randomk:0.2", "ef21m:0.3"), ("onebit", "ef21")),
        *(("topk:0.1", "ef14:storage=bf16"), ("topk:0.1", "ef14:0.9,reset=4")),
    ]
    for spec, feedback in cases:
        reducer = make(spec, feedback=feedback, seed=11)
        for step in range(3):
            reducer.average({n: mine(40, 3 * step + ord(n)) for n in "ab"}, together=step == 1)
        file = io.BytesIO()
        torch.save(reducer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other = make(spec, feedback=feedback, seed=5)
        other.load_state_dict(state)
        for name in "ab":
            assert remembered(other, name).keys() == remembered(reducer, name).keys()
        for step in range(3, 5):
            xs = {n: mine(40, 3 * step + ord(n)) for n in "ab"}
            ys = {n: x.clone() for n, x in xs.items()}
            reducer.average(xs)
            other.average(ys)
            assert all(same(xs[n], ys[n]) for n in xs), (spec, feedback)
        assert alike(memories(reducer), memories(other))


@law
def on_states_of_another_number_of_ranks_keep_the_mean() -> None:
    size = dist.get_world_size()
    for feedback, count in (("ef14", 2), ("ef21m:0.3", 4), ("ef14", size), ("ef21", size)):
        states = []
        for rank in range(count):
            parts = tw.feedback.parse(feedback).parts
            kept = {p: normal(30, rank + 7 * i * (p != "mean")) for i, p in enumerate(parts)}
            if "mean" in kept:
                kept["mean"] = (
                    sum(normal(30, r + 7 * parts.index("h")) for r in range(count)) / count
                )
            base = make(feedback=feedback).state_dict()
            whose = {"rank": rank, "world_size": count}
            kept = {"tensors": {"w": {"steps": 3, **kept}}}
            states.append({**base, **whose, "reducer": {**base["reducer"], **kept}})
        reducer = make(feedback=feedback)
        reducer.load_state_dict({"world_size": count, "ranks": states})
        now = remembered(reducer)
        for part in parts:
            mean = sum(s["reducer"]["tensors"]["w"][part].double() for s in states) / count
            # Sums of up to four numbers below 4, divided, on each rank; and the mean of those.
            assert (total(now[part]) / size - mean).abs().max() <= 8 * 2.0**-24 * 16
            if count == size:
                own = states[dist.get_rank()]["reducer"]["tensors"]["w"]
                assert same(now[part], own[part])
        if "mean" in now:
            assert (total(now["h"]) / size - now["mean"]).abs().max() <= 8 * 2.0**-24 * 16
        reducer.average({"w": mine(30)})
        reducer.ledger.fold()
        assert reducer.ledger.lines["w"].compressor == "topk:0.1", (
            "what is loaded is not started anew"
        )


@law
def on_a_state_of_another_feedback_is_refused() -> None:
    reducer = make()
    reducer.average({"w": mine(30)})
    state = reducer.state_dict()
    text = raised(lambda: make(feedback="ef21").load_state_dict(state))
    assert text == "ValueError: Reducer: the state is that of feedback 'ef14', this is 'ef21'"
    make(feedback="ef14:storage=int8").load_state_dict(state)  # may be kept otherwise
    make(feedback="auto").load_state_dict(state)


@law
def on_a_state_is_a_copy() -> None:
    reducer = make()
    reducer.average({"w": mine(30)})
    state = reducer.state_dict()
    kept = state["reducer"]["tensors"]["w"]["residual"].clone()
    reducer.average({"w": mine(30, 1)})
    assert same(state["reducer"]["tensors"]["w"]["residual"], kept)
    other = make()
    other.load_state_dict(state)
    state["reducer"]["tensors"]["w"]["residual"].zero_()
    assert same(remembered(other)["residual"], kept)


@law
def on_a_state_just_loaded_and_saved_again_is_a_copy() -> None:
    reducer = make()
    reducer.average({"w": mine(30)})
    other = make()
    other.load_state_dict(reducer.state_dict())
    state = other.state_dict()
    other._reducer.scale(2.0)
    assert same(state["reducer"]["tensors"]["w"]["residual"], remembered(reducer)["residual"])


@law
def on_a_tensor_of_another_size_is_refused() -> None:
    reducer = make()
    reducer.average({"w": mine(30)})
    text = raised(lambda: reducer.average({"w": mine(31)}))
    assert text.startswith("ValueError: w has 31 elements, but what was remembered of it 30"), text
    assert "reset()" in text
    assert remembered(reducer)["residual"].numel() == 30
    reducer.reset()
    reducer.average({"w": mine(31)})


@law
def on_a_loaded_state_survives_a_tensor_of_another_size() -> None:
    reducer, other = make(), make()
    reducer.average({"w": mine(30)})
    other.load_state_dict(reducer.state_dict())
    for _ in range(2):
        assert raised(lambda: other.average({"w": mine(31)})).startswith("ValueError: w has 31")
    assert same(remembered(other)["residual"], remembered(reducer)["residual"])


@law
def on_scale_and_reset_reach_all_that_is_remembered() -> None:
    for feedback in ("ef14", "ef21m:0.5", "ef14:storage=bf16", "ef14:storage=int8"):
        reducer = make(feedback=feedback)
        reducer.average(pair(0), together=True)
        reducer.average({"a": mine(200)})
        before = memories(reducer)
        reducer._reducer.scale(0.5)  # exact in every storage
        after = memories(reducer)
        assert all(after.values()), feedback  # something is remembered of both
        assert all(
            same(after[name][part], before[name][part] / 2)
            for name in after
            for part in after[name]
        ), feedback
        reducer.reset()
        assert reducer.state_dict()["reducer"]["tensors"] == {}


@law
def on_what_loses_nothing_remembers_nothing_and_empties_residuals() -> None:
    reducer = make("none", feedback="auto")
    x = mine(40)
    expected = total(x) / 3
    reducer.average({"w": x})
    assert (x - expected).abs().max() <= LITTLE
    assert reducer.state_dict()["reducer"]["tensors"] == {}
    reducer = make()
    reducer.average({"w": mine(40)})
    expected = (total(mine(40, 1)) + total(remembered(reducer)["residual"])) / 3
    switch(reducer, "none")
    reducer.average({"w": (x := mine(40, 1))})
    assert (x - expected).abs().max() <= LITTLE
    assert remembered(reducer) == {}


class Deferring(Driver):
    defers_commit = True


def units_of(tensors: dict[str, Tensor], compressor: Compressor) -> list[Unit]:
    return [Unit([name], [tensor], compressor) for name, tensor in tensors.items()]


@law
def on_what_is_committed_later_is_remembered_then_or_not_at_all() -> None:
    for feedback in ("ef14", "ef14:storage=int8", "ef21m:0.5"):
        at_once, later = make(feedback=feedback), make(feedback=feedback)
        for step in range(2):
            xs, ys, zs = pair(step), pair(step), pair(step)
            at_once.average(xs)
            before = memories(later)
            dropped = later._reducer.start(units_of(zs, later.compressor), Deferring())
            dropped.handle.wait()
            assert alike(memories(later), before)
            exchange = later._reducer.start(units_of(ys, later.compressor), Deferring())
            exchange.handle.wait()
            exchange.commit()
            exchange.commit()  # once is enough
            assert all(same(xs[n], ys[n]) and same(xs[n], zs[n]) for n in xs)
            assert alike(memories(later), memories(at_once))


@law
def on_the_ledger_books_what_the_accounts_say() -> None:
    reducer = make("threshold:0.5", collective="twoshot")
    ledger = reducer.ledger

    def uneven(*names: str) -> dict[str, Tensor]:
        """Most goes to the owner of the first shard, who sends the least."""
        xs = {name: mine(900 + 300 * i).view(30, -1) for i, name in enumerate(names)}
        for x in xs.values():
            x[10:] = 0
        return xs

    handles = [reducer.average(uneven("a", "b"), async_op=step == 1) for step in range(3)]
    handles += [reducer.average(uneven("c"), together=True)]
    switch(reducer, "topk:0.2" if dist.get_rank() else "topk:0.3")
    assert raised(lambda: reducer.average(uneven("a"))).startswith("MismatchError")
    tw.wait_all(handles)
    ledger.fold()
    accounts = [handle.account for handle in handles]
    for count in ("bytes_sent", "bytes_received", "network_bytes"):
        assert getattr(ledger, count) == sum(getattr(account, count) for account in accounts)
    assert 0 < ledger.bytes_sent != ledger.bytes_received > 0
    assert ledger.exchanges == len(handles)
    for kind in ("encode", "network", "decode"):
        # Sums of the same few numbers in the same order, in another tree: some roundings.
        booked = sum(account.seconds[kind] for account in accounts)
        assert abs(ledger.seconds[kind] - booked) <= 8 * 2.0**-53 * booked
    lines = ledger.lines
    assert {name: line.steps for name, line in lines.items()} == {"a": 3, "b": 3, "c": 1}
    assert {name: line.bytes_in for name, line in lines.items()} == {
        **{"a": 3 * 3600, "b": 3 * 4800},
        "c": 3600,
    }
    # Shares of each exchange add up to it, but for their rounding.
    booked = sum(line.bytes_sent for line in lines.values())
    assert abs(booked - ledger.bytes_sent) <= 8 * 2.0**-53 * booked
    assert {line.compressor for line in lines.values()} == {"threshold:0.5"}
    assert {line.collective for line in lines.values()} == {"twoshot"}


def holdings(root: object) -> dict[int, int]:
    """The memory of all tensors that an object keeps alive: bytes by address."""
    found, seen, ahead = {}, set(), [root]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        else:
            ahead += gc.get_referents(each)
    return found


def held(root: object) -> int:
    return sum(holdings(root).values())


@law
def on_memory_between_steps_is_what_the_storage_says() -> None:
    n, count, bytes_each = 1 << 12, 3, {"fp32": 4, "host": 4, "bf16": 2, "int8": 1 + 4 / 256}
    for storage, size in bytes_each.items():
        kind = "ef21m" if storage in ("fp32", "int8") else "ef14"
        reducer = make(feedback=f"{kind}:storage={storage}")
        for i in range(count):
            for step in range(2):
                reducer.average({f"{i}": mine(n, step)})
        reducer.ledger.fold()
        units = [Unit([f"{i}"], [mine(n)], reducer.compressor) for i in range(count)]
        states = [reducer._reducer.states.of_unit(unit) for unit in units]
        kept = held([state.vectors for state in states])
        vectors = count * len(reducer.feedback.parts)
        assert abs(kept - vectors * size * n) <= vectors * 64, storage
        # One set of buffers serves all tensors; four vectors are the most that an update needs.
        assert held(reducer._reducer._buffers) <= 4 * 4 * n, storage


@law
def on_a_gradient_is_not_kept_alive_when_its_exchange_has_ended() -> None:
    for feedback in ("none", "ef14", "ef21"):
        reducer = make(feedback=feedback)
        x = mine(100)
        reducer.average({"w": x})
        assert x.untyped_storage().data_ptr() not in holdings(reducer), feedback


@law
def on_wrong_arguments_are_refused_with_a_reason() -> None:
    reducer = make()
    assert "at least one tensor" in raised(lambda: reducer.average({}))
    text = raised(lambda: reducer.average({"w": [1.0]}))
    assert text == "TypeError: w: expected a tensor, got list"
    mixed = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}
    text = raised(lambda: reducer.average(mixed, together=True))
    assert text.startswith("ValueError: together: tensors of one type and device")
    assert "torch.float64" in text
    text = raised(lambda: reducer.average({"w": torch.arange(3)}))
    assert text.startswith("TypeError")
    assert "int64" in text
    text = raised(lambda: make(collective="ring").average({"w": torch.ones(3)}))
    assert text.startswith("ValueError: collective must be one of auto, gather")
    text = raised(lambda: make(collective="summable").average({"w": torch.ones(3)}))
    assert text.startswith("ValueError: topk:0.1 cannot go through 'summable'")
    text = raised(lambda: make("randomk:0.5,scaled=true").average({"w": torch.ones(3)}))
    assert "scaled values and a residual do not go together" in text
    reducer.average(mixed)  # and it still works


@law
def on_what_is_no_mapping_of_names_is_refused_with_a_reason() -> None:
    for tensors in ([torch.ones(3)], torch.ones(3), {1: torch.ones(3)}):
        text = raised(lambda tensors=tensors: make().average(tensors))
        assert text.startswith("TypeError"), text
        assert "name" in text, text


@law
def on_what_is_no_state_is_refused_with_a_reason() -> None:
    for state in ({}, [], None, {"version": 1}):
        text = raised(lambda state=state: make().load_state_dict(state))
        assert text.startswith(("TypeError", "ValueError")), text
        assert "state" in text, text


@law
def on_integers_are_refused_by_every_feedback() -> None:
    for feedback in ("ef21", "ef21m:0.5"):
        x = torch.arange(4) + dist.get_rank()
        text = raised(lambda x=x, feedback=feedback: make(feedback=feedback).average({"w": x}))
        assert text.startswith("TypeError"), (feedback, x)


@law
def on_what_cannot_be_written_to_is_refused_before_anything_changes() -> None:
    reducer = make()
    reducer.average({"w": mine(4)})
    before = remembered(reducer)["residual"]
    text = raised(lambda: reducer.average({"w": mine(1).expand(4)}))
    assert text != ""
    assert same(remembered(reducer)["residual"], before)


@law
def on_ranks_that_disagree_in_the_type_learn_so() -> None:
    for feedback in ("ef14", "ef21"):
        x = mine(20).to(torch.float32 if dist.get_rank() else torch.float16)
        text = raised(lambda x=x, feedback=feedback: make(feedback=feedback).average({"w": x}))
        assert text.startswith("MismatchError"), feedback


@law
def on_ranks_that_disagree_in_the_names_learn_so() -> None:
    order = "ab" if dist.get_rank() else "ba"
    text = raised(lambda: make().average({name: mine(20) for name in order}))
    assert text.startswith("MismatchError")


@law
def on_a_call_that_one_rank_got_wrong_does_not_part_the_ranks_for_ever() -> None:
    reducer = make("randomk:0.5,shared=true")
    if dist.get_rank() == 0:
        assert raised(lambda: reducer.average({"w": torch.arange(4)})).startswith("TypeError")
    reducer.average({"w": mine(4)})


@law
def on_a_first_step_that_is_not_finite_leaves_nothing() -> None:
    for feedback in ("ef14", "ef21m:0.3"):
        reducer = make(feedback=feedback)
        x = mine(50) / (dist.get_rank() > 0)
        reducer.average({"w": x})
        assert not x.isfinite().any()
        assert remembered(reducer) == {} or not remembered(reducer)["residual"].any()
        reducer.average({"w": (x := mine(50))})
        make(feedback=feedback).average({"w": (y := mine(50))})
        assert same(x, y)


@law
def on_a_rank_that_cannot_go_on_leaves_all_as_it_was() -> None:
    limit = 100 if dist.get_rank() == 0 else None
    reducer = make("quantize:4", collective="twoshot", max_bytes=limit)
    x = mine(1000)
    text = raised(lambda: reducer.average({"w": x}))
    assert text.startswith("PeerError" if dist.get_rank() else "MemoryLimitError")
    assert same(x, mine(1000))
    assert remembered(reducer) == {}


def on_laws() -> dict[str, str]:
    """What went wrong with each law; empty where nothing did."""
    found = {}
    for name, check in LAWS.items():
        found[name] = ""
        try:
            check()
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


@functools.cache
def laws() -> list[dict[str, str]]:
    return ranks.run(on_laws, ranks=3, seconds=LONG)


@pytest.mark.parametrize("name", LAWS)
def test_reducer(name):
    for rank, found in enumerate(laws()):
        assert not found[name], f"rank {rank}:\n{found[name]}"


def on_alone() -> None:
    for feedback in ("auto", "none", "ef14", "ef21"):
        reducer = make(feedback=feedback)
        for step in range(2):
            x = lay(normal(24, step).view(4, 6), "transposed")
            handle = reducer.average({"w": x}, async_op=True)
            handle.wait()
            assert same(x, normal(24, step).view(4, 6)), "the mean of one is itself, uncompressed"
            assert handle.bytes_sent == 0
        reducer.load_state_dict(reducer.state_dict())
        state = reducer.gathered_state_dict()
        reducer.load_state_dict(state)
        (own,) = state["ranks"]
        three = [{**own, "rank": rank, "world_size": 3} for rank in range(3)]
        reducer.load_state_dict({"world_size": 3, "ranks": three})


def test_a_group_of_one_keeps_its_tensors_as_they_are():
    ranks.run(on_alone, ranks=1)


# Vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_vector_keeps_what_its_storage_can(storage, dtype):
    n = 5000
    vector = StateVector(n, dtype, torch.device("cpu"), storage)
    assert not vector.read().any()
    values = normal(n, 3, dtype)
    vector.write(values)
    back = vector.read(torch.empty(n, dtype=dtype))
    case = Case(f"ef14:storage={storage}", "", "", 1)
    if storage in ("fp32", "host"):
        assert same(back, values)
        size = dtype.itemsize
    else:
        size = {"bf16": 2, "int8": 1 + dtype.itemsize / 256}[storage]
        largest = torch.nn.functional.pad(values.abs(), (0, -n % 256)).view(-1, 256).amax(1)
        each = largest.repeat_interleave(256)[:n]
        # To nearest: half a unit of bfloat16; half a level, of which the largest is more than 63.5.
        bound = 2.0**-8 * values.abs() if storage == "bf16" else each / 127
        assert within(back - values, bound), case
    assert vector.read().dtype == dtype
    assert abs(held(vector) - size * n) <= 64
    vector.scale(0.5)
    assert same(vector.read().clone(), back / 2)
    vector.zero()
    assert not vector.read().any()
    assert held(vector) <= size * n + 64


def test_what_is_finite_is_kept_finite():
    for dtype, large in ((torch.float32, 3.4028234e38), (torch.float64, 1e300)):
        for storage, key in itertools.product(STORAGES, (None, tw.Key(1))):
            vector = StateVector(3, dtype, torch.device("cpu"), storage)
            vector.write(torch.tensor([large, -large, 1.0], dtype=dtype), key)
            assert vector.read().isfinite().all(), (storage, dtype)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_what_each_step_adds_little_to_grows_all_the_same(storage):
    """Constant gradients, 1 % of them sent per step: sooner or later every element is."""
    n, steps, compressor = 5000, 500, tw.TopK(0.01)
    gradient, residual = normal(n), torch.empty(n)
    vector = StateVector(n, torch.float32, torch.device("cpu"), storage)
    total = torch.zeros(n, dtype=torch.float64)
    exact = torch.zeros(n)
    never = {name: torch.ones(n, dtype=torch.bool) for name in ("exact", "kept")}
    for step in range(steps):
        never["exact"] &= compressor.decode(compressor.encode(gradient, residual=exact)) == 0
        sent = compressor.decode(compressor.encode(gradient, residual=vector.read(residual)))
        vector.write(residual, tw.Key(1, step))
        never["kept"] &= sent == 0
        total += sent.double()
    shares = {name: float(found.double().mean()) for name, found in never.items()}
    assert abs(shares["kept"] - shares["exact"]) < 0.01, shares
    # Roundings are independent and less than one level each, so that what is lost is a random walk:
    # its mean square is at most `steps` quarters of a squared level. To nearest it is of one sign.
    lost = steps * gradient.double() - total - vector.read().double()
    largest = float(vector.read().abs().max())
    level = {"bf16": largest / 128, "int8": largest / 63}[storage]
    assert float(lost.square().mean()) <= steps / 4 * level**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_roundings_of_state_are_right_on_average(storage, dtype):
    n, draws = 512, 400
    values = normal(n, 3, dtype)
    vector = StateVector(n, dtype, torch.device("cpu"), storage)
    total = torch.zeros(n, dtype=torch.float64)
    for step in range(draws):
        vector.write(values, tw.Key(2, step))
        total += vector.read().double()
    largest = values.abs().view(-1, 256).amax(1).double().repeat_interleave(256)
    unit = 2.0**-7 * values.abs().double() if storage == "bf16" else largest / 63.5
    # A rounding has a standard deviation of half a unit at most; six of them for 512 elements.
    assert within(total / draws - values.double(), 6 * unit / 2 / draws**0.5)
    # The sum over all elements is much closer: the errors are independent.
    error = float((total / draws - values.double()).sum())
    assert abs(error) <= 6 * float(unit.norm()) / 2 / draws**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("storage", STORAGES)
def test_what_was_read_is_written_again_exactly(storage, dtype):
    """So a run that goes on from a checkpoint is the run that was never stopped."""
    n = 300 * 256
    first, second = (StateVector(n, dtype, torch.device("cpu"), storage) for _ in range(2))
    first.write(normal(n, 4, dtype) * 10 ** normal(n, 5, dtype), tw.Key(3))
    for key in (None, tw.Key(4)):
        second.write(first.read().clone(), key)
        assert same(second.read(), first.read())


def test_vectors_of_a_tensor_draw_numbers_of_their_own():
    values, key = normal(5000), tw.Key(6)
    one, other = (
        StateVector(5000, torch.float32, torch.device("cpu"), "bf16", stream) for stream in (0, 1)
    )
    for vector in (one, other):
        vector.write(values, key)
    assert not same(one.read(), other.read())


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_what_is_not_finite_is_not_hidden(storage):
    vector = StateVector(3, torch.float32, torch.device("cpu"), storage)
    vector.write(torch.tensor([torch.nan, 1.0, -1.0]), tw.Key(1))
    assert vector.read().isnan().any()


# Specs and choices

_remembering = {"storage": st.sampled_from(STORAGES), "reset": st.integers(0, 10**6)}
_shares = st.floats(0, 1) | st.sampled_from([0, 1])
feedbacks = st.one_of(
    st.just(tw.feedback.NoFeedback()),
    st.builds(tw.feedback.EF14, _shares, **_remembering),
    st.builds(tw.feedback.EF21, **_remembering),
    st.builds(tw.feedback.EF21M, _shares.filter(lambda eta: eta > 0), **_remembering),
)


@given(feedbacks)
def test_specs_lead_back_to_their_feedback(feedback):
    assert tw.feedback.parse(str(feedback)) == feedback
    assert hash(tw.feedback.parse(str(feedback))) == hash(feedback)
    assert eval(repr(feedback), vars(tw.feedback)) == feedback
    assert str(tw.feedback.parse(f"  {str(feedback).upper().partition(':')[0]} ")) == feedback.name


def test_every_feedback_has_a_name_and_a_line():
    found = tw.list_feedbacks()
    assert list(found) == ["none", "ef14", "ef21", "ef21m", "dgc", "vote"]
    for name, line in found.items():
        assert tw.feedback.parse(name).name == name
        assert line.endswith("."), f"{name}: the first line of the docstring is a sentence"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "ef15",
            "unknown feedback 'ef15': did you mean 'ef14'? feedbacks: dgc, ef14, ef21, ef21m",
        ),
        ("", "feedbacks: dgc, ef14, ef21, ef21m, none, vote"),
        ("ef14:2", "EF14: decay must be in [0, 1], got 2"),
        ("ef14:nan", "EF14: decay must be in [0, 1]"),
        ("ef14:true", "EF14: decay must be in [0, 1], got True"),
        ("ef21m:0", "EF21M: eta must be in (0, 1], got 0"),
        ("ef21m:eta=x", "EF21M: eta must be in (0, 1], got 'x'"),
        (
            "ef21:storage=fp8",
            "EF21: storage must be one of 'fp32', 'bf16', 'int8', 'host', got 'fp8'",
        ),
        ("ef14:reset=-1", "EF14: reset must be a number of steps, 0 for never, got -1"),
        ("ef14:reset=1.5", "EF14: reset must be a number of steps"),
        ("ef14:momentum=1", "usage: ef14:decay=1.0,storage=fp32,reset=0"),
        ("none:1", "too many arguments"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(spec, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        tw.feedback.parse(spec)


def test_what_is_no_spec_is_refused():
    with pytest.raises(TypeError, match="a spec is a string such as 'ef14', got 3"):
        tw.feedback.parse(3)
    with pytest.raises(TypeError, match="a spec is a string"):
        tw.Reducer("topk:0.1", feedback=3)
    with pytest.raises(TypeError, match="expected a policy, a compressor or a spec"):
        tw.Reducer(3)
    with pytest.raises(ValueError, match="seed must be an integer"):
        tw.Reducer("topk:0.1", seed=-1)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        tw.Reducer("topk:0.1", timeout=0)
    with pytest.raises(ValueError, match="max_bytes"):
        tw.Reducer("topk:0.1", max_bytes="many")


AUTO = {
    "none": {"none", "lossless", "qsgd:7", "natural", "terngrad:none", "qsgd:7|lossless"},
    "ef14": {"topk:0.1", "onebit", "quantize:4", "cast:fp16", "scaledsign", "randomk:0.1"},
}


def test_terngrad_that_clips_is_biased_and_still_remembers_nothing():
    """A residual would grow: here from once to more than three times the gradient in ten steps."""
    for compressor in (tw.TernGrad(), tw.TernGrad() | tw.Lossless()):
        assert not compressor.unbiased
        assert feedback_for(compressor, "auto") == tw.feedback.NoFeedback()
        assert "feedback='none'" in repr(tw.Reducer(compressor))
    assert tw.TernGrad(None).unbiased
    assert feedback_for(tw.TopK(0.1) | tw.TernGrad(), "auto") == tw.feedback.EF14()
    residual, norms = torch.zeros(10_000), []
    for step in range(10):
        x = normal(10_000, step)
        tw.TernGrad().encode(x, residual=residual, key=tw.Key(1, step))
        norms.append(float(residual.norm() / x.norm()))
    assert norms[0] > 0.9
    assert norms[-1] > 3


def test_auto_is_ef14_for_what_is_biased_and_none_for_the_rest():
    for name, specs in AUTO.items():
        for spec in specs:
            compressor = tw.parse(spec)
            assert (compressor.lossless or compressor.unbiased) == (name == "none"), spec
            assert feedback_for(compressor, "auto").name == name, spec
            assert feedback_for(compressor, " Auto ").name == name, spec
            assert f"feedback='{name}'" in repr(tw.Reducer(compressor)), spec
            asked = feedback_for(compressor, "ef14:0.5")
            assert asked == (
                tw.feedback.NoFeedback() if compressor.lossless else tw.feedback.EF14(0.5)
            ), spec
            assert feedback_for(compressor, tw.feedback.EF21()) == tw.feedback.EF21(), spec


@pytest.mark.parametrize("spec", ["randomk:0.1,scaled=true", "bernoulli:0.1,scaled=true"])
def test_auto_can_be_used_with_every_compressor(spec):
    assert feedback_for(tw.parse(spec), "auto") == tw.feedback.NoFeedback()


def test_the_cases_go_where_they_can():
    """Every collective and every type is among the cases above."""
    for cases in (EF14_CASES, EF21_CASES):
        assert {case.collective for case in cases} == {"gather", "twoshot", "sparse", "summable"}
        assert all(suits(case.collective, tw.parse(case.spec)) is None for case in cases)
    assert {case.dtype for case in [*EF14_CASES, *BY_HAND]} == set(FLOATS)
