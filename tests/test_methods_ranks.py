"""The methods of the papers with two, three and four real ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. Where a paper has a
formula, all ranks are computed again in one loop of NumPy, and every step must agree.
"""

import copy
import functools
import io
import itertools
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from nets import (
    all_same,
    backward,
    digest,
    gradients,
    loss_of,
    named,
    net,
    plain,
    raised,
    train,
    wired,
)
from tensors import FLOATS, lay, normal, real_of, same
from torch import Tensor, nn

import thinwire as tw
from thinwire.compressors.joint import normal as drawn
from thinwire.methods import LOCAL, LocalRecipe, list_methods, method_of, usages
from thinwire.reducer.exchange import Driver
from thinwire.reducer.unit import Unit

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

TIMEOUT = 600.0  # of calls that should not wait for anybody: ranks.py ends them long before
LONG = 300.0  # seconds for hundreds of calls when the machine is busy
STEPS = 12
EPS = 2.0**-52  # of float64


def make(spec: str, **options: Any) -> tw.Reducer:
    return tw.Reducer(spec, **{"timeout": TIMEOUT, **options})


def remembered(reducer: tw.Reducer, name: str = "w") -> dict[str, Tensor]:
    kept = reducer.state_dict()["reducer"]["tensors"].get(name, {})
    return {part: values for part, values in kept.items() if part != "steps"}


# Every step by hand


class Case(NamedTuple):
    """A reducer, and the shape of the gradients that it gets, in float64."""

    spec: str
    feedback: str
    collective: str
    size: int
    shape: tuple[int, ...] = (301,)

    def __str__(self) -> str:
        return f"{self.spec}-{self.feedback}-{self.collective}-{self.size}"


class Step(NamedTuple):
    """The result of one exchange, and what is remembered after it."""

    x: Tensor
    memory: dict[str, Tensor]


def gradient(case: Case, rank: int, step: int) -> Tensor:
    """Noise, and what all ranks have in common; some zeros."""
    n = int(np.prod(case.shape))
    x = normal(n, 100 * step + rank, torch.float64) + normal(n, 7777, torch.float64)
    x[:: 50 + rank] = 0
    return x.view(case.shape)


CASES = [
    Case("topk:0.1", "dgc:0.9", "gather", 2),
    Case("topk:0.1", "dgc:0.5,nesterov=true", "gather", 3),
    Case("topk:0.1", "dgc:0.75,clip=8", "gather", 3),
    Case("topk:0.1", "dgc:0.9,nesterov=true,clip=8", "gather", 2),
    Case("topk:1.0", "dgc:0.9", "gather", 3),
    Case("scaledsign", "vote:0.9", "gather", 2),
    Case("scaledsign", "vote:0.9", "twoshot", 3),
    Case("scaledsign", "ef14", "gather", 3),
    Case("onebit", "ef14", "gather", 3, (1500,)),
    Case("onebit:64", "ef14", "gather", 2),
    Case("onebit", "ef14", "twoshot", 3),
    Case("powersgd:2", "ef14", "auto", 3, (24, 18)),
    Case("powersgd:3,iterations=2", "ef14", "auto", 2, (18, 40)),
    Case("arc:0.2,least=0,row=0", "ef21m:0.3", "joint", 3, (30, 12)),
    Case("arc:0.2,exact=true,least=0,row=0", "ef21m:0.3", "joint", 2, (30, 12)),
    Case("arc:0.3,2,least=0,row=0", "ef21m:0.3", "joint", 2, (7, 5, 3)),  # 6 rows of 18
    Case("arc:0.3,least=0,row=11", "ef21m:0.3", "joint", 3, (13, 9)),
]


def on_cases(cases: list[Case]) -> list[list[Step]]:
    me = dist.get_rank()
    reducers = [
        make(case.spec, feedback=case.feedback, collective=case.collective) for case in cases
    ]
    done: list[list[Step]] = [[] for _ in cases]
    for step in range(STEPS):
        xs = [gradient(case, me, step) for case in cases]
        tw.wait_all(
            [
                reducer.average({"w": x}, async_op=True)
                for reducer, x in zip(reducers, xs, strict=True)
            ]
        )
        for i, reducer in enumerate(reducers):
            done[i].append(Step(xs[i], remembered(reducer)))
    return done


@functools.cache
def sweep(size: int) -> dict[Case, tuple[list[Step], ...]]:
    cases = [case for case in CASES if case.size == size]
    done = ranks.run(on_cases, cases, ranks=size, seconds=LONG)
    return dict(zip(cases, zip(*done, strict=True), strict=True))


Memory = dict[str, np.ndarray]
Solution = Iterator[tuple[np.ndarray, list[Memory], float]]


def top(p: np.ndarray, ratio: float) -> np.ndarray:
    """Where the largest magnitudes are, ties to the lower position."""
    mask = np.zeros(p.shape, bool)
    mask[np.argsort(-np.abs(p), kind="stable")[: int(np.ceil(len(p) * ratio - 1e-9))]] = True
    return mask


def scaled_sign(p: np.ndarray) -> np.ndarray:
    return np.abs(p).mean() * np.where(p >= 0, 1.0, -1.0)


def one_bit(p: np.ndarray, block: int) -> np.ndarray:
    found = np.zeros_like(p)
    for i in range(0, len(p), block):
        b = p[i : i + block]
        for half in (b >= 0, b < 0):
            if half.any():
                found[i : i + block][half] = b[half].mean()
    return found


def dgc_by_hand(case: Case, settings: tw.feedback.DGC) -> Solution:
    m, ratio = settings.momentum, tw.parse(case.spec).ratio
    u = v = np.zeros((case.size, *case.shape))
    for step in range(STEPS):
        g = np.stack([gradient(case, i, step).numpy() for i in range(case.size)])
        if settings.clip:
            norms = np.linalg.norm(g, axis=1, keepdims=True)
            g = g * np.minimum(1, settings.clip / np.sqrt(case.size) / norms)
        if settings.nesterov:
            u = m * (u + g)
            v = v + u + g
        else:
            u = m * u + g
            v = v + u
        mask = np.stack([top(row, ratio) for row in v])
        sent = np.where(mask, v, 0)
        v = np.where(mask, 0, v)
        if ratio < 1:
            u = np.where(mask, 0, u)
        memories = [{"u": u[i], "residual": v[i]} for i in range(case.size)]
        yield sent.mean(0), memories, np.abs(sent).max()


def vote_by_hand(case: Case, settings: tw.feedback.Vote) -> Solution:
    m, b = np.zeros((case.size, *case.shape)), settings.momentum
    for step in range(STEPS):
        g = np.stack([gradient(case, i, step).numpy() for i in range(case.size)])
        m = b * m + (1 - b) * g
        votes = np.where(m >= 0, 1, -1).sum(0)
        yield (
            np.where(votes >= 0, 1.0, -1.0),
            [{"m": m[i]} if b else {} for i in range(case.size)],
            1,
        )


def ef14_by_hand(case: Case, settings: tw.feedback.EF14) -> Solution:
    size, e = case.size, np.zeros((case.size, *case.shape))
    kind = tw.parse(case.spec)
    block = getattr(kind, "block", None)
    compress = scaled_sign if block is None else functools.partial(one_bit, block=block)
    shards = [slice(301 * i // size, 301 * (i + 1) // size) for i in range(size)]
    for step in range(STEPS):
        p = np.stack([gradient(case, i, step).numpy() for i in range(size)]) + e
        if case.collective == "gather":
            sent = np.stack([compress(row) for row in p])
            e, result = p - sent, sent.mean(0)
        else:
            # Each rank adds up one shard, its own part as it is, and compresses the sum again.
            e, result = p.copy(), np.zeros(case.shape)
            for owner, shard in enumerate(shards):
                total = p[owner, shard].copy()
                for rank in set(range(size)) - {owner}:
                    c = compress(p[rank, shard])
                    total += c
                    e[rank, shard] -= c
                result[shard] = compress(total / size)
                e[owner, shard] = total - size * result[shard]
        yield result, [{"residual": e[i]} for i in range(size)], np.abs(p).max()


def key_of(step: int) -> tw.Key:
    return tw.Key(0, step + 1, zlib.crc32(b"w"))


def powersgd_by_hand(case: Case, settings: tw.feedback.EF14) -> Solution:
    """With Gram-Schmidt: the result depends on the space that P spans, not on its basis."""
    kind = tw.parse(case.spec)
    q = drawn(case.shape[1], kind.rank, key_of(0), torch.float64).numpy()
    e = np.zeros((case.size, *case.shape))
    for step in range(STEPS):
        m = np.stack([gradient(case, i, step).numpy() for i in range(case.size)]) + e
        for _ in range(kind.iterations):
            p = sum(each @ q for each in m)
            condition = np.linalg.cond(p)
            for j in range(kind.rank):
                for _ in range(2):  # once more: for what rounding left
                    p[:, j] -= p[:, :j] @ (p[:, :j].T @ p[:, j])
                p[:, j] /= np.linalg.norm(p[:, j])
            q = sum(each.T @ p for each in m) / case.size
        result = p @ q.T
        e = m - result
        flat = [{"residual": e[i].ravel()} for i in range(case.size)]
        yield result, flat, 100 * condition * np.abs(m).max()


def arc_by_hand(case: Case, settings: tw.feedback.EF21M) -> Solution:
    kind, eta = tw.parse(case.spec), settings.eta
    n = int(np.prod(case.shape))
    length = kind.row or (case.shape[1] if len(case.shape) == 2 else 2 * case.shape[-1] ** 2)
    rows = -(-n // length)
    v = h = np.zeros((case.size, n))
    mean = np.zeros(n)
    for step in range(STEPS):
        g = np.stack([gradient(case, i, step).numpy().ravel() for i in range(case.size)])
        v = g if step == 0 else (1 - eta) * v + eta * g
        change = v - h
        if step:
            padded = np.pad(change, ((0, 0), (0, rows * length - n)))
            matrix = padded.reshape(case.size, rows, length)
            sketch = matrix.mean(0)
            if not kind.exact:
                sketch = sketch @ drawn(length, kind.width, key_of(step), torch.float64).numpy()
            scores = np.square(sketch).sum(1)
            chosen = np.argsort(-scores, kind="stable")[: int(np.ceil(kind.ratio * rows - 1e-9))]
            mask = np.zeros((rows, length), bool)
            mask[chosen] = True
            change = np.where(mask.ravel()[:n], change, 0)
        h, mean = h + change, mean + change.mean(0)
        parts = [{"v": v[i], "h": h[i], "mean": mean} for i in range(case.size)]
        yield mean.reshape(case.shape), parts, np.abs(v).max() + np.abs(h).max()


SOLUTIONS: dict[str, Callable[..., Solution]] = {
    **{"dgc": dgc_by_hand, "vote": vote_by_hand, "ef14": ef14_by_hand, "ef21m": arc_by_hand}
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_is_what_the_formulas_say(case):
    """In float64: fewer than 20 + 4 n roundings a step and element (sums of n of them among them),
    of numbers no larger than the solution says."""
    done = sweep(case.size)[case]
    settings = tw.feedback.parse(case.feedback)
    solve = powersgd_by_hand if "powersgd" in case.spec else SOLUTIONS[settings.name]
    roundings, largest = 20 + 4 * int(np.prod(case.shape)), 0.0
    for t, (result, memories, size) in enumerate(solve(case, settings)):
        assert all(same(steps[t].x, done[0][t].x) for steps in done), "other bits on other ranks"
        largest = max(largest, size)
        bound = (t + 1) * roundings * EPS / 2 * largest
        if settings.name == "vote":
            assert np.array_equal(done[0][t].x.numpy(), result), t
        assert np.abs(done[0][t].x.numpy() - result).max() <= bound, t
        for steps, memory in zip(done, memories, strict=True):
            for part, values in memory.items():
                assert np.abs(steps[t].memory[part].numpy() - values).max() <= bound, (t, part)
            if settings.name == "dgc":
                sent = memory["residual"] == 0
                assert not steps[t].memory["residual"][sent].any(), "exactly zero where it is sent"
                if case.spec != "topk:1.0":
                    assert not steps[t].memory["u"][sent].any()
                    assert steps[t].memory["u"][~sent].all()
                    assert 31 <= int(sent.sum()) <= 31 + 301 // 50 + 1  # and zeros that never came


# Law by law


LAWS: dict[int, dict[str, Callable[[], None]]] = {2: {}, 3: {}, 4: {}}


def law(*sizes: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register what holds on so many ranks."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        name = function.__name__.removeprefix("on_")
        for size in sizes:
            LAWS[size][name] = function
        return function

    return register


def on_laws(size: int) -> dict[str, str]:
    """What went wrong with each law; empty where nothing did."""
    found = {}
    for name, check in LAWS[size].items():
        found[name] = ""
        try:
            check()
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


@functools.cache
def laws(size: int) -> list[dict[str, str]]:
    return ranks.run(on_laws, size, ranks=size, seconds=LONG)


def mine(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(n, 10 * seed + dist.get_rank(), dtype)


def total(x: Tensor) -> Tensor:
    """The sum over ranks, in float64."""
    x = x.double().clone()
    dist.all_reduce(x)
    return x


def agree(*tensors: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest(tensors))
    return len(set(found)) == 1


SHAPES = {
    "tall": ((40, 30), torch.float32, "plain"),
    "transposed": ((40, 50), torch.float32, "transposed"),
    "strided": ((16, 3, 5), torch.float32, "strided"),
    "conv": ((32, 8, 3, 3), torch.float16, "plain"),
    "brain": ((20, 30), torch.bfloat16, "transposed"),
    "double": ((30, 20), torch.float64, "plain"),
    "vector": ((50,), torch.float32, "plain"),
    "small": ((4, 4), torch.float32, "plain"),
    "scalar": ((), torch.float32, "plain"),
    "empty": ((0, 5), torch.float32, "plain"),
    "half vector": ((33,), torch.bfloat16, "plain"),
}


def several(seed: int) -> dict[str, Tensor]:
    return {
        name: lay(mine(int(np.prod(shape)), seed + 5 * i, dtype).view(shape), layout)
        for i, (name, (shape, dtype, layout)) in enumerate(SHAPES.items())
    }


SPECS = [
    *("powersgd:2", "powersgd:2,iterations=2"),
    *("arc:0.3,least=100,row=0", "arc:0.3,exact=true,row=7"),
]


def bound_of(x: Tensor, mass: Tensor, result: Tensor) -> Tensor:
    """What rounding explains: sums of up to 300 products, of numbers as large as all ranks have
    together, in the type of residuals; the result is rounded once to the tensor's own."""
    size, real = dist.get_world_size(), torch.finfo(real_of(x.dtype))
    largest = mass.max() if mass.numel() else 0.0
    own = torch.finfo(x.dtype).eps if x.dtype != real_of(x.dtype) else 0.0
    return 300 * real.eps * largest + size * own * result.double().abs()


@law(2, 3)
def on_nothing_is_lost_and_all_ranks_have_the_same() -> None:
    size = dist.get_world_size()
    for spec in SPECS:
        compressor = tw.parse(spec)
        residuals = {n: mine(x.numel(), 9, real_of(x.dtype)).view(x.shape)
                     for n, x in several(0).items()}  # fmt: skip
        for step in range(2):
            xs, given = several(step), several(step)
            before = {name: r.clone() for name, r in residuals.items()}
            handle = tw.all_reduce_coalesced(
                list(xs.values()), spec, residuals=list(residuals.values()), op="avg",
                key=tw.Key(3, step), timeout=TIMEOUT,
            )  # fmt: skip
            assert handle.collective == "joint"
            assert agree(*xs.values()), spec
            for name, x in xs.items():
                own = given[name].double() + before[name].double()
                due, left = total(own), total(residuals[name])
                mass = total(own.abs())
                bound = bound_of(x, mass, x)
                assert bool(((due - left - size * x.double()).abs() <= size * bound).all()), name
                assert x.isfinite().all()
                if compressor.matrix(x.shape) is None:
                    assert not residuals[name].any(), name
                    assert bool(((x.double() - due / size).abs() <= bound).all()), name
                elif compressor.name == "powersgd":
                    assert left.any()
                    rest = own - residuals[name].double() - x.double()
                    assert bool((rest.abs() <= bound).all()), f"{name}: not average + residual"


@law(3)
def on_a_sum_is_so_many_averages() -> None:
    for spec in SPECS:
        sums, means = several(4), several(4)
        for xs, op in ((sums, "sum"), (means, "avg")):
            tw.all_reduce_coalesced(list(xs.values()), spec, op=op, key=tw.Key(1, 2, 3))
        for name, x in sums.items():
            mean = means[name].double()
            # Each is rounded once to its own type, and the sum once more on the way.
            bound = 3 * (torch.finfo(x.dtype).eps * mean.abs() * 2 + torch.finfo(x.dtype).tiny)
            assert bool(((x.double() - 3 * mean).abs() <= bound).all()), (spec, name)


@law(2, 3)
def on_powersgd_is_exact_where_the_mean_has_its_rank() -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    mean = normal(40, 1).view(40, 1) @ normal(30, 2).view(1, 30)
    mean += normal(40, 3).view(40, 1) @ normal(30, 4).view(1, 30)
    for seed in range(3):  # of splits of the same sum
        others = [normal(1200, 50 * seed + i).view(40, 30) for i in range(size - 1)]
        given = [*others, size * mean - sum(others)]
        x = given[me].clone()
        tw.all_reduce(x, "powersgd:2", op="avg", timeout=TIMEOUT)
        # 300 roundings, as in bound_of, of what is cancelled: numbers below 32.
        assert (x - mean).abs().max() <= 300 * 2.0**-23 * 32
        assert agree(x)


@law(3)
def on_a_warm_start_is_kept_in_the_state() -> None:
    for spec, feedback in (("powersgd:2", "auto"), ("powersgd:2", "ef21"), ("arc:0.2", "auto")):
        shapes = {"a": (40, 30), "b": (32, 40), "c": (9,)}

        def step_of(reducer: tw.Reducer, step: int) -> dict[str, Tensor]:
            xs = {
                n: mine(int(np.prod(shape)), 3 * step + i).view(shape)
                for i, (n, shape) in enumerate(shapes.items())  # noqa: B023
            }
            reducer.average(xs)
            return xs

        reducer = make(spec, feedback=feedback, seed=11)
        for step in range(3):
            step_of(reducer, step)
        file = io.BytesIO()
        torch.save(reducer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        kept = state["reducer"]
        assert ("q" in kept["recalled"].get("a", {})) == ("powersgd" in spec)
        assert agree(*(q for found in kept["recalled"].values() for q in found.values()))
        other, cold = make(spec, feedback=feedback), make(spec, feedback=feedback)
        other.load_state_dict(state)
        cold.load_state_dict({**state, "reducer": {**kept, "recalled": {}}})
        for step in range(3, 6):
            xs, ys, zs = (step_of(each, step) for each in (reducer, other, cold))
            assert all_same(xs, ys), (spec, feedback)
            assert all_same(xs, zs) == ("arc" in spec), "the warm start makes no difference"
        for values in kept["recalled"].get("a", {}).values():
            values.zero_()
        assert all_same(step_of(reducer, 7), step_of(other, 7)), "the state is no copy"
        reducer.reset()
        assert reducer.state_dict()["reducer"]["recalled"] == {}


@law(2)
def on_a_warm_start_makes_later_calls_better() -> None:
    size, x = dist.get_world_size(), mine(1200).view(40, 30)
    mean = total(x) / size
    reducer, errors = make("powersgd:2", feedback="none"), []
    for _ in range(15):
        reducer.average({"w": (y := x.clone())})
        errors.append(float((y.double() - mean).norm()))
    # Norms of about 30 with an error of some roundings of float32.
    assert all(b <= a + 100 * 2.0**-24 * 30 for a, b in itertools.pairwise(errors))
    assert errors[-1] < errors[0] - 0.1


@law(3)
def on_not_a_number_reaches_all_and_changes_nothing() -> None:
    for spec, feedback in (("powersgd:2", "ef14"), ("arc:0.2", "ef21m:0.5"), ("arc:0.2", "ef14")):
        reducer, twin = make(spec, feedback=feedback), make(spec, feedback=feedback)
        for step in range(2):
            for each in (reducer, twin):
                each.average({"a": mine(1200, step).view(40, 30), "b": mine(9, step)})
        before = copy.deepcopy(reducer.state_dict())
        for bad, (rank, name) in itertools.product((torch.nan, -torch.inf), ((1, "a"), (2, "b"))):
            xs = {"a": mine(1200, 5).view(40, 30), "b": mine(9, 5)}
            if dist.get_rank() == rank:
                xs[name].view(-1)[3] = bad
            handle = reducer.average(xs)
            assert all(x.isnan().all() for x in xs.values())
            assert not handle.account.finite
        after = reducer.state_dict()
        for key in ("tensors", "recalled"):
            for name, kept in before["reducer"][key].items():
                found = after["reducer"][key][name]
                assert all(torch.equal(torch.as_tensor(found[p]), torch.as_tensor(kept[p]))
                           for p in kept)  # fmt: skip
        # Twins have drawn differently since: their key is the number of the step.
        reducer.load_state_dict({**after, "step": twin.step})
        xs, ys = ({"a": mine(1200, 7).view(40, 30), "b": mine(9, 7)} for _ in range(2))
        reducer.average(xs)
        twin.average(ys)
        assert all_same(xs, ys), spec


@law(2)
def on_zeros_and_deficient_matrices_stay_finite() -> None:
    one = torch.ones(40, 30)
    row = mine(30, 1) * torch.arange(40.0)[:, None]
    for given in (one * 0, one, row, torch.cat([row[:, :1], one[:, 1:] * 0], 1)):
        reducer = make("powersgd:3", feedback="ef14")
        for _ in range(3):
            reducer.average({"w": (x := given.clone())})
            mean = total(given) / 2
            # Rank 2 at most on two ranks; 300 roundings of numbers below 256.
            assert (x - mean).abs().max() <= 300 * 2.0**-23 * 256
            assert remembered(reducer)["residual"].isfinite().all()
    # And what was zero at first is found when it comes.
    reducer = make("powersgd:2", feedback="ef14")
    reducer.average({"w": one * 0})
    reducer.average({"w": (x := one.clone())})
    assert (x - one).abs().max() <= 300 * 2.0**-23


@law(2)
def on_powersgd_works_at_any_scale() -> None:
    """A mean of its rank comes out in every call, also where the last one's Q has that scale."""
    low = normal(40, 1).view(40, 1) @ normal(30, 2).view(1, 30)
    for scale in (1e-30, 1e-20, 1e10, 1e20, 1e30):
        reducer = make("powersgd:2", feedback="none")
        for call in range(3):
            x = low * scale
            reducer.average({"w": x})
            assert x.isfinite().all(), (scale, call)
            error = float((x / scale - low).abs().max())
            assert error <= 300 * 2.0**-23 * 32, (scale, call, error)


@law(2)
def on_what_is_finite_never_makes_a_residual_that_is_not() -> None:
    for spec in ("powersgd:2", "arc:0.2,least=0,row=0"):
        for top in (3e38, 1e38):
            x, residual = torch.full((40, 30), top), torch.zeros(40, 30)
            tw.all_reduce(x, spec, residual=residual, op="avg", timeout=TIMEOUT)
            assert residual.isfinite().all(), (spec, top)
            assert agree(x)


@law(2)
def on_a_state_taken_in_flight_is_of_one_step() -> None:
    reducer = make("powersgd:2", feedback="ef14")
    for step in range(5):
        x = mine(120_000, step).view(400, 300)
        handle = reducer.average({"w": x}, async_op=True)
        early = reducer.state_dict()["reducer"]
        handle.wait()
        late = reducer.state_dict()["reducer"]
        assert same(early["tensors"]["w"]["residual"], late["tensors"]["w"]["residual"])
        assert early["recalled"]["w"].keys() == late["recalled"]["w"].keys(), step
        assert same(early["recalled"]["w"]["q"], late["recalled"]["w"]["q"]), step


@law(3)
def on_ranks_that_disagree_are_told() -> None:
    me = dist.get_rank()
    x = mine(1200).view(40, 30)
    text = raised(lambda: tw.all_reduce(x, f"powersgd:{2 + (me == 1)}", timeout=TIMEOUT))
    assert text.startswith("MismatchError"), text
    assert "powersgd on ranks 0, 2 but powersgd:3 on rank 1" in text
    assert same(x, mine(1200).view(40, 30))
    text = raised(lambda: tw.all_reduce(x, "arc" if me else "powersgd", timeout=TIMEOUT))
    assert text.startswith("MismatchError"), text
    other = mine(1200).view((30, 40) if me == 2 else (40, 30))
    text = raised(lambda: tw.all_reduce(other, "powersgd", timeout=TIMEOUT))
    assert text.startswith("MismatchError"), text
    tw.all_reduce(x, "powersgd", timeout=TIMEOUT)  # the group stays usable
    assert agree(x)


@law(3)
def on_memory_is_limited() -> None:
    me, given = dist.get_rank(), mine(1200).view(40, 30)
    for limits, texts in (
        ((100, 100, 100), ("MemoryLimitError",) * 3),
        ((None, "1KiB", None), ("PeerError", "MemoryLimitError", "PeerError")),
    ):
        for spec in ("powersgd", "arc"):
            x, residual = given.clone(), torch.ones(40, 30)
            text = raised(
                lambda: tw.all_reduce(
                    x, spec, residual=residual, max_bytes=limits[me], timeout=TIMEOUT  # noqa: B023
                )
            )  # fmt: skip
            assert text.startswith(texts[me]), text
            assert same(x, given)
            assert same(residual, torch.ones(40, 30))
    tw.all_reduce(given, "powersgd", max_bytes="1MiB", timeout=TIMEOUT)


@law(2)
def on_calls_that_cannot_be_are_refused() -> None:
    x = mine(1200).view(40, 30)
    reducer = make("powersgd")
    text = raised(lambda: reducer.average({"a": x, "b": x.clone()}, together=True))
    assert text.startswith("ValueError: powersgd sees each tensor by itself"), text
    for call in (
        lambda: tw.broadcast(x, "powersgd", timeout=TIMEOUT),
        lambda: tw.all_gather(x.new_empty(80, 30), x, "arc", timeout=TIMEOUT),
        lambda: tw.reduce_scatter(x.new_empty(20, 30), x, "powersgd", timeout=TIMEOUT),
    ):
        text = raised(call)
        assert "found by all ranks together" in text, text
    for op in ("max", "product"):
        assert raised(lambda: tw.all_reduce(x, "powersgd", op=op))  # noqa: B023
    assert raised(lambda: tw.all_reduce(x.long(), "powersgd")).startswith("TypeError")
    assert same(x, mine(1200).view(40, 30))


# ARC


@law(2, 3, 4)
def on_arc_keeps_its_share_of_the_mean() -> None:
    size = dist.get_world_size()
    for seed, ratio in enumerate((0.05, 0.2, 0.5, 1.0)):
        x = mine(1200, seed, torch.float64).view(60, 20)
        mean = total(x) / size
        tw.all_reduce(x, f"arc:{ratio},exact=true,row=20", op="avg", timeout=TIMEOUT)
        error, energy = (x - mean).square().sum(), mean.square().sum()
        assert error <= (1 - ratio) * energy + 1e-12 * energy
        assert int(x.any(1).sum()) == round(60 * ratio)
        assert agree(x)


@law(2)
def on_arc_finds_what_topk_cannot() -> None:
    """Proposition 1 of the paper."""
    sign = (-1.0) ** (dist.get_rank() + 1)
    x, y, z = (torch.tensor([sign, 0.1]) for _ in range(3))
    tw.all_reduce(x, "topk:0.5", op="avg", timeout=TIMEOUT)
    assert not x.any()
    tw.all_reduce(y, "arc:0.5,row=1,least=0", op="avg", timeout=TIMEOUT)
    tw.all_reduce(z, "arc:0.5,exact=true,row=1,least=0", op="avg", timeout=TIMEOUT)
    assert y.tolist() == z.tolist() == [0, torch.tensor(0.1).item()]


@law(2, 3)
def on_ef21m_with_arc_keeps_the_mean_of_all_h() -> None:
    size = dist.get_world_size()
    model, wire = wired("arc:0.2,least=100,row=0", feedback="ef21m", measure_every=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        train(model, range(step, step + 1), optimizer)
        tensors = wire.state_dict()["reducer"]["tensors"]
        assert tensors.keys() == named(model).keys()
        for name, kept in tensors.items():
            h = total(kept["h"]) / size
            # v - h, v - r, the exchange and H: 20 roundings a step of gradients below 1.
            assert (h - kept["mean"]).abs().max() <= (step + 1) * 20 * 2.0**-24, name
            assert agree(kept["mean"])
            grad = named(model)[name].grad.flatten()
            assert same(grad, kept["mean"]), "the step is taken with H"


# DDP


def bare(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 30, bias=False), nn.Tanh(), nn.Linear(30, 40, bias=False), nn.Tanh(),
        nn.Linear(40, 10, bias=False),
    )  # fmt: skip


@law(2)
def on_joint_compressors_take_one_exchange_a_step() -> None:
    for spec in ("powersgd:2", "arc:0.2,least=0,row=0"):
        for cap in (0.001, 25):
            for inner in (bare(), net()):  # vectors travel with them
                model, wire = wired(spec, inner=inner, ddp={"bucket_cap_mb": cap})
                for step in range(4):
                    backward(model, step)
                    done = wire.stats()["total"]["exchanges"]
                    assert done == step + 1, (spec, cap, step)
                used = {wire._reducer.ledger.lines[n].compressor for n, p in named(model).items()
                        if p.dim() > 1}  # fmt: skip
                assert used == {str(tw.parse(spec))}
                tw.check_replicas(model)


def spec_of(usage: str) -> str:
    name = usage.partition(":")[0]
    return {"topk": "topk:0.1", "qsgd": "qsgd:4bit", "dgc": "dgc:0.1,warmup=1"}.get(name, name)


@law(2)
def on_every_method_trains_with_equal_replicas() -> None:
    found = set()
    for usage, _, _ in usages().values():
        spec = spec_of(usage)
        torch.manual_seed(0)
        model = plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5)
        method = method_of(spec)
        if method is not None and isinstance(method.recipe(), LocalRecipe):
            continue  # see test_local.py
        wire = tw.attach(model, spec, min_numel=10, timeout=TIMEOUT, optimizer=optimizer)
        train(model, range(3), optimizer)
        tw.check_replicas(model)
        assert all(p.isfinite().all() for p in model.parameters())
        assert agree(*gradients(model).values())
        if method is not None:
            wire._reducer.ledger.fold()
            line = wire._reducer.ledger.lines["2.weight"]
            assert line.collective == method.recipe().collective
        if spec.startswith("sig"):
            assert all(set(g.unique().tolist()) <= {-1, 1} for g in gradients(model).values())
        found.add(digest(model.parameters()))
        assert str(wire._reducer.compressor) in repr(wire)
        assert wire.summary()
    assert len(found) == len(list_methods()) - len(LOCAL), "two methods did the same"


# DGC


class Doubles(nn.Module):
    """A net in float64, for which batches are made wider."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.double())


def groups(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """Matrices with weight decay and a learning rate of their own."""
    decay = options.pop("weight_decay", 0.0)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.SGD(
        [{"params": matrices, "lr": 0.02, "weight_decay": decay}, {"params": vectors}],
        lr=0.05,
        **options,
    )


@law(2)
def on_dgc_that_sends_all_is_momentum_sgd() -> None:
    for options in (
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.7, "nesterov": True, "weight_decay": 0.1},
    ):
        model, other = (plain(Doubles()) for _ in range(2))
        mine_, theirs = groups(model, **options), groups(other, **options)
        tw.attach(model, "dgc:1.0", optimizer=mine_, min_numel=10, timeout=TIMEOUT)
        for step in range(STEPS):
            train(model, range(step, step + 1), mine_)
            train(other, range(step, step + 1), theirs)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                # A step rounds some 50 times, numbers below 8; training spreads differences by
                # no more than the momentum's 1 / (1 - 0.9).
                assert (a - b).abs().max() <= 10 * (step + 1) * 50 * EPS * 8, (options, step)
        assert not any("momentum_buffer" in state for state in mine_.state.values())


@law(2)
def on_weight_decay_may_change_while_dgc_has_the_momentum() -> None:
    """By hand or by a scheduler, up and down to nothing; groups may be added."""
    for nesterov in (False, True):
        model, other = (plain(Doubles()) for _ in range(2))
        both = [
            groups(m, momentum=0.9, nesterov=nesterov, weight_decay=0.1) for m in (model, other)
        ]
        tw.attach(model, "dgc:1.0", optimizer=both[0], min_numel=10, timeout=TIMEOUT)
        for step, decay in enumerate((0.1, 0.3, 0.0, 0.0, 0.2, 0.0)):
            for optimizer in both:
                optimizer.param_groups[0]["weight_decay"] = decay
                optimizer.param_groups[1]["weight_decay"] = decay / 2
            train(model, range(step, step + 1), both[0])
            train(other, range(step, step + 1), both[1])
            assert both[0].param_groups[0]["weight_decay"] == decay
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                # As in the test before this one.
                assert (a - b).abs().max() <= 10 * (step + 1) * 50 * EPS * 8, (nesterov, step)


@law(2)
def on_momentum_ends_where_all_that_was_not_zero_was_sent() -> None:
    """5 elements of 100 are not zero, and 50 could be sent."""
    reducer = make("topk:0.5", feedback="dgc:0.9", collective="gather")
    x = torch.zeros(100)
    x[::20] = mine(5)
    reducer.average({"w": x})
    assert not remembered(reducer)["residual"].any()
    assert not remembered(reducer)["u"].any()
    nothing = torch.zeros(100)
    reducer.average({"w": nothing})
    assert not nothing.any(), "what was sent goes on with old momentum"


EARLY = tw.Reducer("topk:1.0", feedback="dgc:0.5,clip=3", collective="gather", timeout=TIMEOUT)


@law(2, 3)
def on_a_reducer_that_was_made_before_the_group_clips_by_its_size() -> None:
    x, size = torch.ones(9), dist.get_world_size()
    EARLY.reset()
    EARLY.step = 0  # other ranks may have taken other steps with theirs
    EARLY.average({"w": x})
    assert torch.allclose(x, torch.ones(9) / size**0.5)


@law(2)
def on_attach_takes_momentum_and_detach_gives_it_back() -> None:
    model = plain()
    optimizer = groups(model, momentum=0.9, nesterov=True, weight_decay=0.1)
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    wire = tw.attach(model, "dgc:0.1", optimizer=optimizer, min_numel=10, timeout=TIMEOUT)
    assert wire._reducer.feedback == tw.feedback.DGC(0.9, nesterov=True)
    assert [g["momentum"] for g in optimizer.param_groups] == [0, 0]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0]
    train(model, range(2), optimizer)
    wire.detach()
    wire.detach()  # twice is once
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert after == before
    train(model, range(2, 4), optimizer)
    assert "momentum_buffer" in optimizer.state[next(model.parameters())]
    tw.check_replicas(model)
    again = tw.attach(model, "dgc:0.1", optimizer=optimizer, min_numel=10, timeout=TIMEOUT)
    assert again._reducer.feedback == tw.feedback.DGC(0.9, nesterov=True)


@law(2)
def on_dgc_refuses_what_it_cannot_take_over() -> None:
    model = plain()

    def attach(optimizer: Any = None, spec: str = "dgc:0.1", **options: Any) -> str:
        return raised(lambda: tw.attach(model, spec, optimizer=optimizer, **options))

    text = attach()
    assert (
        text
        == "ValueError: dgc:0.1 takes over the optimizer's momentum: pass it, optimizer=optimizer"
    ), text
    assert "such as SGD" in attach(torch.optim.Adam(model.parameters()))
    assert "without dampening" in attach(
        torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.1)
    )
    optimizer = groups(model, momentum=0.9)
    text = attach(optimizer, feedback="ef14")
    assert text == "ValueError: dgc:0.1 has a feedback of its own, got 'ef14'", text
    assert all(g["momentum"] == 0.9 for g in optimizer.param_groups)
    assert "dgc: ratio must be in (0, 1]" in attach(optimizer, "dgc:2")


@law(2)
def on_an_attach_that_fails_leaves_the_optimizer_as_it_was() -> None:
    for options in ({"exclude": "nope*"}, {"collective": "summable"}, {"granularity": "letter"}):
        model = plain()
        optimizer = groups(model, momentum=0.9, weight_decay=0.1)
        text = raised(lambda: tw.attach(model, "dgc", optimizer=optimizer, **options))  # noqa: B023
        assert text.startswith("ValueError"), text
        assert all(g["momentum"] == 0.9 for g in optimizer.param_groups), options
        assert not optimizer._optimizer_step_pre_hooks


@law(2)
def on_dgc_warms_up_by_steps() -> None:
    model = plain()
    optimizer = groups(model, momentum=0.9)
    wire = tw.attach(
        model, "dgc:0.01,warmup=2", optimizer=optimizer, min_numel=10, timeout=TIMEOUT
    )  # fmt: skip
    used = []
    for step in range(9):
        train(model, range(step, step + 1), optimizer)
        wire._reducer.ledger.fold()
        used.append(wire._reducer.ledger.lines["2.weight"].compressor)
    ramp = ["topk:0.25", "topk:0.0625", "topk:0.015625", "topk:0.01"]
    assert used == [spec for spec in ramp for _ in range(2)] + ["topk:0.01"]


def session(spec: str) -> tuple[Any, Any, Any]:
    model = plain()
    optimizer = groups(model, momentum=0.9, weight_decay=0.1)
    wire = tw.attach(model, spec, optimizer=optimizer, min_numel=10, timeout=TIMEOUT, seed=3)
    return model, optimizer, wire


@law(2)
def on_training_goes_on_as_if_it_had_never_stopped() -> None:
    joint = ("powersgd:2", "arc:0.2,least=100,row=0")
    for spec in ("dgc:0.05,warmup=2", *joint, "signum", "1bit-sgd"):
        model, optimizer, wire = session(spec)
        train(model, range(4), optimizer)
        file = io.BytesIO()
        states = {"model": model, "optimizer": optimizer, "wire": wire}
        torch.save({name: each.state_dict() for name, each in states.items()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other, second, again = session(spec)
        other.load_state_dict(saved["model"])
        second.load_state_dict(saved["optimizer"])
        again.load_state_dict(saved["wire"])
        losses = train(model, range(4, 9), optimizer)
        assert train(other, range(4, 9), second) == losses, spec
        assert all_same(named(model), named(other)), spec


@law(2)
def on_what_depends_on_the_size_of_gradients_takes_no_scaler() -> None:
    for spec in ("dgc:1.0,clip=0.02", "signsgd", "signum"):
        model = plain(bare())
        options = {"optimizer": groups(model, momentum=0.5), "min_numel": 10}
        with pytest.raises(ValueError, match="depends on the size of gradients"):
            tw.attach(model, spec, scaler=torch.amp.GradScaler("cpu"), **options)


class Overflow:
    """Makes one element of a parameter's gradient infinite, on the last rank, when told so."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.due = False
        parameter.register_hook(self)

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.due and dist.get_rank() == dist.get_world_size() - 1:
            gradient = gradient.clone()
            gradient.view(-1)[0] = torch.inf
        return gradient


def skips(spec: str, skipped: int = 3) -> bool:
    """Whether training with a loss scale, and a step that the scaler skips for an infinity in what
    travels as it is, has the bits of training without a scale and without that step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found = []
    for each in (scaler, None):
        model = plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
        options = {"optimizer": optimizer, "scaler": each, "min_numel": 10, "timeout": TIMEOUT}
        tw.attach(model, spec, **options)
        if each is None:
            train(model, [step for step in range(6) if step != skipped], optimizer)
        else:
            overflow = Overflow(named(model)["0.bias"])
            for step in range(6):
                overflow.due = step == skipped
                optimizer.zero_grad()
                scaler.scale(loss_of(model, step)).backward()
                scaler.step(optimizer)
                scaler.update()
        found.append(digest(model.parameters()))
    return found[0] == found[1]


@law(2)
def on_a_skipped_step_leaves_no_trace() -> None:
    for spec in ("dgc:0.1", "1bit-sgd", "ef-signsgd"):
        assert skips(spec), spec


@law(2)
def on_a_skipped_step_leaves_no_trace_in_a_warm_start() -> None:
    assert skips("powersgd:2")


class SkippingUnused(Driver):
    skips_unused = True


def left_waiting(feedback: str) -> bool:
    """Whether what is remembered of a tensor that no rank has used stays as it was."""
    reducer = make("topk:0.1", feedback=feedback, collective="gather")
    for step in range(2):
        reducer.average({"w": mine(100, step)})
    before = remembered(reducer)["residual"]
    unit = Unit(["w"], [torch.zeros(100)], reducer.compressor)
    reducer._reducer.start([unit], SkippingUnused()).handle.wait()
    return same(remembered(reducer)["residual"], before)


@law(2)
def on_what_waits_of_unused_parameters_goes_on_waiting() -> None:
    assert left_waiting("ef14")
    assert left_waiting("dgc")


# Votes


@law(2, 3, 4)
def on_the_majority_decides_and_ties_are_plus_one() -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    for collective in ("gather", "twoshot"):
        reducer = make("scaledsign", feedback="vote", collective=collective)
        for step in range(2):
            votes = [
                {
                    f"{n} {dtype}": torch.round(normal(n, 10 * n + 7 * step + rank, dtype)).clamp(
                        -1, 1
                    )
                    for n in (1, 2, 3, 257, 1000)
                    for dtype in FLOATS
                }
                for rank in range(size)
            ]
            votes = [{**each, "zero": torch.tensor([0.0, -0.0, -0.0])} for each in votes]
            xs = {name: x.clone() for name, x in votes[me].items()}
            reducer.average(xs)
            for name, x in xs.items():
                count = sum(torch.where(each[name] >= 0, 1, -1) for each in votes)
                wanted = torch.where(count >= 0, 1, -1).to(x.dtype)
                assert same(x, wanted), (name, collective)


@law(3)
def on_a_vote_that_is_not_a_number_reaches_all() -> None:
    for collective in ("gather", "twoshot"):
        reducer = make("scaledsign", feedback="vote:0.5", collective=collective)
        reducer.average({"w": mine(40)})
        before = remembered(reducer)["m"]
        for bad in (torch.nan, torch.inf):
            x = mine(40, 1)
            if dist.get_rank() == 2:
                x[7] = bad
            assert not reducer.average({"w": x}).account.finite
            assert x.isnan().all()
            assert same(remembered(reducer)["m"], before)


@law(3)
def on_votes_of_what_travels_as_it_is_hear_of_nan_too() -> None:
    model, wire = wired("signum", measure_every=0)
    backward(model, 0)
    kept = wire.state_dict()["reducer"]["tensors"]["0.bias"]["m"]
    model.zero_grad()
    loss = model(torch.ones(2, 20)).sum()
    if dist.get_rank() == 1:
        named(model)["0.bias"].register_hook(lambda g: g * torch.nan)
    loss.backward()
    assert named(model)["0.bias"].grad.isnan().all()
    assert same(wire.state_dict()["reducer"]["tensors"]["0.bias"]["m"], kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name"),
    [pytest.param(size, name, id=f"{name}-{size}") for size, each in LAWS.items() for name in each],
)
def test_law(size, name):
    for rank, found in enumerate(laws(size)):
        assert not found[name], f"rank {rank}:\n{found[name]}"


# What would spoil a group for the others


def on_other_shapes() -> str:
    reducer = tw.Reducer("powersgd:2", timeout=5)
    x = torch.ones((64, 32) if dist.get_rank() else (32, 64))
    return raised(lambda: reducer.average({"w": x}))


def test_reducers_that_see_other_matrices_are_told():
    with ranks.Ranks(2) as own:
        for text in own.run(on_other_shapes):
            assert text.startswith("MismatchError"), text


def on_checkpoint(spec: str, path: str) -> tuple[bool, bool]:
    import torch.distributed.checkpoint as dcp

    model, optimizer, wire = session(spec)
    train(model, range(4), optimizer)
    dcp.save({"wire": wire.stateful()}, checkpoint_id=path)
    other, second, again = session(spec)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    dcp.load({"wire": again.stateful(path)}, checkpoint_id=path)
    losses = train(model, range(4, 8), optimizer)
    return losses == train(other, range(4, 8), second), all_same(named(model), named(other))


@pytest.mark.parametrize(
    "spec",
    [
        *("dgc:0.05", "arc:0.2,least=100,row=0", "signum"),
        "powersgd:2",
    ],
)
def test_distributed_checkpoints_go_on_as_if_nothing_had_happened(spec, tmp_path):
    found = ranks.run(on_checkpoint, spec, str(tmp_path / "saved"), ranks=2)
    assert found == [(True, True)] * 2
