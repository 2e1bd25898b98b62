"""Averages over senders: each element's mean over the ranks that sent it, against plain NumPy.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from nets import TIMEOUT, wired
from rows import ROWS
from tensors import FLOATS, normal, real_of, same
from torch import Tensor

import thinwire as tw
from thinwire.collectives import memory
from thinwire.collectives.reduction import Part, Reduction

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

KEY = tw.Key(seed=5, step=3, tensor=2)
N = 1003  # no multiple of 2, 3 or 4
SIZES = (2, 3, 4)


# What was sent, worked out without the payload where that goes


def top(p: np.ndarray, ratio: float) -> np.ndarray:
    """Whether each element is one of the largest."""
    k = max(1, int(np.ceil(round(p.size * ratio, 6))))
    order = np.lexsort((np.arange(p.size), -np.abs(p)))
    return np.isin(np.arange(p.size), order[:k])


def top_of_top(p: np.ndarray, payload: tw.Payload) -> np.ndarray:
    first = np.flatnonzero(top(p, 0.5))
    return np.isin(np.arange(p.size), first[top(p[first], 0.5)])


def outliers_and_top(p: np.ndarray, payload: tw.Payload) -> np.ndarray:
    large = top(p, 0.1)
    return large | top(np.where(large, 0, p), 0.3)


def drawn(p: np.ndarray, payload: tw.Payload) -> np.ndarray:
    return np.isin(np.arange(p.size), payload.opened[0].numpy())


def drawn_twice(p: np.ndarray, payload: tw.Payload) -> np.ndarray:
    first, (second, _) = payload.opened
    return np.isin(np.arange(p.size), first.numpy()[second.numpy()])


SENT: dict[str, Callable[[np.ndarray, tw.Payload], np.ndarray]] = {
    "topk:0.3": lambda p, _: top(p, 0.3),
    "topk:1.0": lambda p, _: top(p, 1.0),
    "threshold:0.8": lambda p, _: np.abs(p) >= 0.8,
    "threshold:100": lambda p, _: np.abs(p) >= 100,  # nobody sends anything
    "topk:0.3|quantize:2": lambda p, _: top(p, 0.3),  # many values become zero
    "topk:0.3|onebit|lossless": lambda p, _: top(p, 0.3),
    "topk:0.5|topk:0.5|cast:fp16|lossless": top_of_top,
    "tiered:0.1,small=(topk:0.3)": outliers_and_top,
    "randomk:0.3": drawn,
    "bernoulli:0.3|randomk:0.5": drawn_twice,
    "randomk:0.3,shared=true|quantize:8": drawn,
}


class Case(NamedTuple):
    """One call of all_reduce."""

    spec: str
    size: int
    dtype: torch.dtype
    residual: bool = True


class Done(NamedTuple):
    """The tensor and the residual after a call."""

    x: Tensor
    r: Tensor | None


CASES = [  # Top-K with every type, the others with float32 and one more
    Case(spec, SIZES[(i + j) % 3], dtype, residual=(i + j) % 4 != 3)
    for i, spec in enumerate(SENT)
    for j, dtype in enumerate(FLOATS)
    if i == 0 or j in (0, 1 + i % 3)
]


def tensors_of(rank: int, case: Case) -> tuple[Tensor, Tensor | None]:
    x = normal(N, rank, case.dtype)
    return x, normal(N, 50 + rank, real_of(case.dtype)) / 4 if case.residual else None


def mean_over_senders(sent: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    """The definition: shares are added up in rank order, each rounded once."""
    counts = np.sum(sent, axis=0).astype(values[0].dtype)
    total = np.zeros_like(values[0])
    for there, own in zip(sent, values, strict=True):
        total[there] += own[there] / counts[there]
    return total


def expected(case: Case) -> list[Done]:
    """What every rank should end with."""
    compressor = tw.parse(case.spec)
    sent, values, residuals = [], [], []
    for rank in range(case.size):
        x, r = tensors_of(rank, case)
        p = x.to(real_of(case.dtype)) if r is None else x.to(r.dtype) + r
        key = KEY if compressor.common_key else KEY.derive(rank)
        payload = compressor.encode(x, residual=r, key=key)
        own = torch.zeros(N, dtype=real_of(case.dtype))
        compressor.accumulate(payload, own)
        sent.append(SENT[case.spec](p.numpy(), payload))
        values.append(own.numpy())
        residuals.append(r)
    mean = torch.from_numpy(mean_over_senders(sent, values)).to(case.dtype)
    return [Done(mean, r) for r in residuals]


def on_cases(cases: list[Case]) -> list[Done]:
    done = []
    for case in cases:
        x, r = tensors_of(dist.get_rank(), case)
        handle = tw.all_reduce(x, case.spec, residual=r, op="senders", key=KEY)
        assert handle.collective == "gather"
        done.append(Done(x, r))
    return done


@functools.cache
def sweep(size: int) -> dict[Case, tuple[Done, ...]]:
    here = [case for case in CASES if case.size == size]
    return dict(zip(here, zip(*ranks.run(on_cases, here, ranks=size), strict=True), strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_each_element_is_averaged_over_the_ranks_that_sent_it(size):
    for case, found in sweep(size).items():
        for own, wanted in zip(found, expected(case), strict=True):
            assert same(own.x, wanted.x), case
            # The law of each rank by itself: x + old residual = sent + new residual.
            assert (own.r is None) == (wanted.r is None)
            assert own.r is None or same(own.r, wanted.r), case


def on_examples() -> list[Any]:
    me = dist.get_rank()
    zeros = torch.tensor([[0.0, 0.0, 0.0, 5.0], [4.0, 4.0, 0.0, 0.0]][me])
    tw.all_reduce(zeros, "topk:0.5", op="senders")
    huge = torch.full((3,), 3e38)
    tw.all_reduce(huge, "topk:1.0", op="senders")
    several = [normal(40, me), normal(30, 10 + me).double(), torch.empty(0)]
    tw.all_reduce_coalesced(several, "topk:0.2", op="senders")
    matrix = normal(40, me).view(8, 5).t()
    tw.all_reduce(matrix, "topk:0.2", op="senders")
    return [zeros, huge, *several, matrix.t().contiguous()]


def test_zeros_that_were_sent_count_and_means_fit_where_sums_do_not():
    for zeros, huge, first, second, empty, matrix in ranks.run(on_examples, ranks=2):
        # Of its zeros rank 0 sends the first. The third element is sent by nobody.
        assert zeros.tolist() == [2.0, 4.0, 0.0, 5.0]
        assert same(huge, torch.full((3,), 3e38))
        for found, n, seed in ((first, 40, 0), (second, 30, 10)):
            both = [normal(n, seed + rank).to(found.dtype).numpy() for rank in range(2)]
            wanted = mean_over_senders([top(x, 0.2) for x in both], both)
            assert same(found, torch.from_numpy(wanted))
        assert empty.numel() == 0
        # Positions are those of the matrix as it lies for its user.
        both = [normal(40, rank).view(8, 5).t().flatten().numpy() for rank in range(2)]
        wanted = torch.from_numpy(mean_over_senders([top(x, 0.2) for x in both], both))
        assert same(matrix, wanted.view(5, 8).t().contiguous())


def test_payloads_know_which_elements_they_hold():
    for row in ROWS:
        compressor, x = row.compressor, normal(300)
        payload = tw.unpack(tw.pack(compressor.encode(x, key=KEY)))
        positions, values = payload.held()
        assert (positions.diff() > 0).all(), row
        assert compressor.leaves_out == (
            payload.code.held(payload.opened, payload.extent) is not None
        )
        assert compressor.leaves_out or positions.numel() == 300
        out, decoded = torch.zeros(300), torch.zeros(300)
        out[positions.long()] = values
        compressor.accumulate(payload, decoded)
        assert torch.equal(out, decoded), row


# Where all ranks send the same elements


SAME = ("none", "quantize:4", "onebit", "randomk:0.3,shared=true", "tiered:0.1", "lossless")


def on_same() -> list[str]:
    wrong = []
    for spec in SAME:
        found = []
        for op in ("avg", "senders"):
            x, r = normal(70_000, dist.get_rank()), torch.zeros(70_000)
            handle = tw.all_reduce(x, spec, residual=r, op=op, key=KEY)
            found.append((x, r, handle.collective, handle.bytes_sent))
        (x, r, *avg), (y, s, *senders) = found
        if not (same(x, y) and same(r, s) and avg == senders):
            wrong.append(f"{spec}: {avg}, {senders}")
    return wrong


def test_what_sends_everything_is_averaged_as_usual():
    assert ranks.run(on_same, ranks=4) == [[]] * 4


# Failures


def on_not_finite() -> list[Any]:
    x, r = normal(100, dist.get_rank()), normal(100, 9)
    if dist.get_rank() == 1:
        x[7] = torch.inf
    handle = tw.all_reduce(x, "topk:0.1|quantize:4", residual=r, op="senders")
    return [handle.account.finite, bool(x.isnan().all()), same(r, normal(100, 9))]


def test_what_is_not_finite_reaches_all_ranks_and_no_residual():
    assert ranks.run(on_not_finite, ranks=3) == [[False, True, True]] * 3


def on_mismatch() -> list[Any]:
    me = dist.get_rank()
    x, r = normal(100, me), normal(100, 9)
    with pytest.raises(tw.MismatchError, match="SENDERS") as caught:
        tw.all_reduce(x, "topk:0.1", residual=r, op=["avg", "senders"][me])
    kept = same(x, normal(100, me)) and same(r, normal(100, 9))
    reducer = tw.Reducer("topk:0.1", average=["senders", "world"][me], timeout=TIMEOUT)
    with pytest.raises(tw.MismatchError, match="SENDERS"):
        reducer.average({"a": x})
    remembered = reducer.state_dict()["reducer"]["tensors"]
    kept = kept and same(x, normal(100, me)) and remembered == {"a": {"steps": 0}}
    limit = 1 if me else None
    error = tw.MemoryLimitError if me else tw.PeerError
    with pytest.raises(error):
        tw.all_reduce(x, "topk:0.1", residual=r, op="senders", max_bytes=limit)
    kept = kept and same(x, normal(100, me)) and same(r, normal(100, 9))
    tw.all_reduce(x, "topk:0.1", op="senders")  # the group works
    return [str(caught.value), kept, x]


def test_ranks_must_agree_in_it_and_failures_change_nothing():
    (text, kept, x), (other, kept_too, y) = ranks.run(on_mismatch, ranks=2)
    assert kept
    assert kept_too
    assert text == other
    assert "op" in text
    assert same(x, y)


THROUGH = "a mean over senders goes through 'gather', not "
REFUSED: dict[str, dict[str, Any]] = {
    **{
        f"{THROUGH}'{name}'": {"collective": name}
        for name in ("summable", "twoshot", "sparse", "hierarchical")
    },
    f"{THROUGH}'joint'": {"collective": "joint", "compressor": "powersgd:3"},
    f"{THROUGH}'hierarchical': only there": {"nodes": 2},
    "powersgd:3 has no mean over senders": {"compressor": "powersgd:3"},
    "arc:0.3 has no mean over senders": {"compressor": "arc:0.3"},
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_senders_is_refused(text):
    given = {"compressor": "topk:0.1"} | REFUSED[text]
    with pytest.raises(ValueError, match=text):
        tw.all_reduce(torch.ones(4, 4), op="senders", **given)
    with pytest.raises(ValueError, match=text):
        tw.Reducer(average="senders", **given)


def test_other_things_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="average must be 'world' or 'senders', got 'all'"):
        tw.Reducer("topk:0.1", average="all")
    for feedback in ("ef21", "ef21m:0.2"):
        with pytest.raises(ValueError, match=f"{feedback}.* averages over all ranks"):
            tw.Reducer("topk:0.1", average="senders", feedback=feedback)
    with pytest.raises(ValueError, match="not 'twoshot'"):
        tw.Reducer("signsgd", average="senders")
    with pytest.raises(ValueError, match="powersgd:3 has no mean over senders"):
        tw.Reducer("warmup:2,(powersgd:3)", average="senders")
    with pytest.raises(TypeError, match=r"an average of torch\.int64"):
        tw.all_reduce(torch.ones(4, dtype=torch.int64), "none", op="senders")
    with pytest.raises(ValueError, match="reduce_scatter takes SUM and AVG, got SENDERS"):
        tw.reduce_scatter(torch.ones(2), torch.ones(4), "none", op="senders")


# A group of one rank


def on_alone() -> list[Any]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    x = normal(100)
    tw.all_reduce(x, "topk:0.1", op="senders", group=own)
    y = normal(100)
    tw.Reducer("topk:0.1", average="senders", group=own).average({"y": y})
    return [same(x, normal(100)), same(y, normal(100))]


def test_one_rank_gets_its_own_tensor():
    assert ranks.run(on_alone, ranks=2) == [[True, True]] * 2


# Memory


def reduction(
    n: int, limit: int | None, senders: bool = True, dtype: torch.dtype = torch.float32
) -> Reduction:
    part = Part(torch.zeros(n, dtype=dtype), None, tw.Key(), tw.parse("topk:0.5"))
    return Reduction([part], 1.0, limit, senders=senders)


def test_counts_are_part_of_the_memory_that_is_expected():
    n, half = 1 << 20, torch.bfloat16  # of which adding up takes more than receiving
    plain, counted = (memory.gather_load(reduction(n, None, each, half)) for each in (False, True))
    assert plain.counts == 0
    assert 0 < counted.counts <= 4 * n
    need = memory.estimate("gather", counted, 2)
    assert dict(need.items)["counts"] == counted.counts
    assert need.num_bytes == memory.estimate("gather", plain, 2).num_bytes + counted.counts
    # One byte less than all at once takes.
    assert memory.rounds_for(reduction(n, need.num_bytes, dtype=half), 2) == 1
    assert memory.rounds_for(reduction(n, need.num_bytes - 1, dtype=half), 2) > 1


ROUNDS_N = 40_000
LIMIT = 600_000


def on_rounds() -> Tensor:
    x = normal(ROUNDS_N, dist.get_rank())
    tw.all_reduce(x, "topk:0.5", op="senders", max_bytes=LIMIT)
    return x


def test_rounds_average_over_the_senders_of_each_slice():
    count = memory.rounds_for(reduction(ROUNDS_N, LIMIT), 2)
    assert count > 1
    both = [np.array_split(normal(ROUNDS_N, rank).numpy(), count) for rank in range(2)]
    assert all(len(piece) == ROUNDS_N // count for piece in both[0])
    wanted = [
        mean_over_senders([top(x, 0.5) for x in pair], pair) for pair in zip(*both, strict=True)
    ]
    for found in ranks.run(on_rounds, ranks=2):
        assert same(found, torch.from_numpy(np.concatenate(wanted)))


# Through a Reducer


DECAY, STEPS, RATIO = 0.75, 5, 0.1


def gradient(rank: int, step: int) -> Tensor:
    return normal(600, 10 * step + rank)


def on_feedback() -> list[Any]:
    reducer = tw.Reducer(
        f"topk:{RATIO}",
        feedback=f"ef14:decay={DECAY}",
        average="senders",
        exclude="small",
        timeout=TIMEOUT,
    )
    me, found = dist.get_rank(), []
    for step in range(STEPS):
        tensors = {"a": gradient(me, step).view(20, 30), "small": normal(5, me)}
        reducer.average(tensors)
        found.append(tensors)
    residual = reducer.state_dict()["reducer"]["tensors"]["a"]["residual"]
    return [found, residual, reducer.explain(), reducer.stats()["tensors"]["a"]["collective"]]


@pytest.mark.parametrize("size", [2, 4])
def test_ef14_with_decay_remembers_what_each_rank_left_out(size):
    results = ranks.run(on_feedback, ranks=size)
    left = [np.zeros(600, np.float32) for _ in range(size)]
    for step in range(STEPS):
        p = [gradient(rank, step).numpy() + np.float32(DECAY) * left[rank] for rank in range(size)]
        sent = [top(each, RATIO) for each in p]
        left = [np.where(there, np.float32(0), each) for there, each in zip(sent, p, strict=True)]
        mean = torch.from_numpy(mean_over_senders(sent, p)).view(20, 30)
        for found, *_ in results:
            assert same(found[step]["a"], mean)
            # What is sent uncompressed has all ranks as its senders.
            world = torch.stack([normal(5, rank) for rank in range(size)]).mean(0)
            # A sum of `size` numbers below 4 and a division, in another order.
            assert (found[step]["small"] - world).abs().max() <= 4 * size * 2**-23
    for rank, (_, residual, text, collective) in enumerate(results):
        assert same(residual.flatten(), torch.from_numpy(left[rank]))
        assert "Each element is averaged over the ranks that sent it." in text
        assert collective == "gather"


# Through DDP


def on_join() -> list[Tensor]:
    """Rank 0 has a step more; the gradient is 16, 15, ..., 1."""
    inner = torch.nn.Linear(4, 4, bias=False)
    model, _ = wired("topk:0.25", inner, min_numel=1, feedback="none", average="senders")
    found = []
    with model.join():
        for _ in range(2 - dist.get_rank()):
            model.zero_grad()
            (model(torch.eye(4)) * torch.arange(16.0, 0.0, -1.0).view(4, 4).t()).sum().backward()
            found.append(inner.weight.grad.flatten().clone())
    return found


def test_ranks_that_have_joined_count_as_senders_of_what_they_send():
    first, last = ranks.run(on_join, ranks=2)[0]
    sent = torch.tensor([16.0, 15.0, 14.0, 13.0] + 12 * [0.0])
    assert same(first, sent)
    assert same(last, sent / 2)  # of its zeros the other rank sends the first four
