"""Large tensors go in slices: the same laws, and the same errors, as in one.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. There small tensors
are cut, too.
"""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import ranks
import torch
import torch.distributed as dist
from rows import ROWS
from tensors import FLOATS, normal, real_of, same
from test_all_reduce import Case, Done, check_conservation
from test_all_reduce_failures import Report, attempt, breaking, check_death, die, works

import thinwire as tw
from thinwire.collectives import stream
from thinwire.collectives.stream import Flow, Preparer

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

N = 20_011
SLICES = 4
KEY = tw.Key(seed=5, step=3, tensor=2)
CUT = [
    row
    for row in ROWS
    if not row.summable and row.compressor.grain and row.compressor.grain < N // SLICES
]

over_cut = pytest.mark.parametrize("row", CUT, ids=[row.spec for row in CUT])


@contextlib.contextmanager
def slicing() -> Iterator[list[int]]:
    """Small tensors are cut too; how many slices each exchange had."""
    counts: list[int] = []
    run = Flow.run

    def counted(flow: Flow) -> None:
        counts.append(len(flow._slices))
        run(flow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "LEAST_BYTES", N // SLICES)
        patch.setattr(stream, "LEAST_SHARE", 1)
        patch.setattr(stream, "LEAST_MESSAGE", 1)
        patch.setattr(stream, "MOST", SLICES)
        patch.setattr(Flow, "run", counted)
        yield counts


def gradient(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal(N, rank, dtype)


def leftover(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal(N, 50 + rank, real_of(dtype)) / 4


# What is cut


@over_cut
def test_pieces_come_to_the_values_of_the_whole(row):
    """Cut at multiples of the grain; random numbers are others."""
    compressor = row.compressor
    if row.random:
        pytest.skip("every piece draws with a key of its own")
    x, grain = normal(N), compressor.grain
    edges = [0, 3 * grain, 7 * grain, N]
    pieces = [x[min(a, N) : min(b, N)] for a, b in itertools.pairwise(edges)]
    decoded = torch.cat([compressor.decode(compressor.encode(piece)) for piece in pieces])
    assert same(decoded, compressor.decode(compressor.encode(x)))


def test_what_looks_at_the_whole_of_a_tensor_is_not_cut():
    for spec in (
        "topk:0.1",
        "terngrad",
        "natural",
        "scaledsign",
        "onebit:block=none",
        "randomk:0.1",
    ):
        assert tw.parse(spec).grain is None, spec
    assert tw.parse("topk:0.1,chunk=64").grain == 64
    assert tw.parse("topk:0.1,chunk=64|quantize:4").grain is None  # blocks of values would shift
    assert tw.parse("quantize:4|lossless").grain == 256


# The laws


def cases() -> list[Case]:
    """Each row with gather and twoshot, sizes and types in turn."""
    found = []
    for i, row in enumerate(CUT):
        for j, name in enumerate(("gather", "twoshot")):
            size, dtype = 2 + (i + j) % 3, FLOATS[(i + 2 * j) % len(FLOATS)]
            op = "avg" if i % 2 else "sum"
            found += [Case(row.spec, name, size, dtype, op, row.residual)]
    return found


def on_cases(cases: list[Case]) -> list[Done]:
    me, done = dist.get_rank(), []
    for spec, collective, _, dtype, op, residual in cases:
        x, r = gradient(me, dtype), leftover(me, dtype) if residual else None
        with slicing() as counts:
            tw.all_reduce(x, spec, residual=r, op=op, collective=collective, key=KEY)
        assert counts == [SLICES], (spec, collective, counts)
        done.append(Done(x, r))
    return done


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_answer_and_nothing_lost(size):
    here = [case for case in cases() if case.size == size]
    assert here
    found = zip(*ranks.run(on_cases, here, ranks=size, seconds=400.0), strict=True)
    for case, done in zip(here, found, strict=True):
        assert all(same(each.x, done[0].x) for each in done), case
        assert done[0].x.isfinite().all(), case
        if case.residual:
            x = [gradient(i, case.dtype) for i in range(size)]
            r = [leftover(i, case.dtype) for i in range(size)]
            check_conservation(case, x, r, done)


def on_both_ways(specs: list[str]) -> None:
    """In slices and in one, to the same bits."""
    me = dist.get_rank()
    for spec in specs:
        found = []
        for way in (slicing(), contextlib.nullcontext()):
            x, r = gradient(me), leftover(me)
            with way:
                tw.all_reduce(x, spec, residual=r, collective="gather", op="avg", key=KEY)
            found.append((x, r))
        assert same(found[0][0], found[1][0]), spec
        assert same(found[0][1], found[1][1]), spec


def test_a_gather_in_slices_is_one_in_one():
    ranks.run(on_both_ways, [row.spec for row in CUT if row.residual and not row.random], ranks=3)


def on_scatter() -> None:
    """One tensor for all, and one for each rank."""
    me, size = dist.get_rank(), dist.get_world_size()
    whole, n = normal(size * 5000, me), 5000
    for given in (whole, list(whole.clone().split(n))):
        found = []
        for way in (slicing(), contextlib.nullcontext()):
            out = torch.empty(n)
            residual = torch.zeros(size * n) if given is whole else None
            with way:
                tw.reduce_scatter(out, given, "quantize:8", residual=residual, op="avg")
            found.append((out, residual))
        exact = sum(normal(size * n, rank) for rank in range(size)) / size
        error = (found[0][0] - exact[me * n : (me + 1) * n]).abs().max()
        # Half a level of 254 of each of the others' largest in its block, below 6 in 5,000.
        assert error <= (size - 1) / size * 6 / 254
        assert same(found[0][0][:256], found[1][0][:256])  # the same blocks
        if residual is not None:
            assert not found[0][1][me * n : (me + 1) * n].any()


def test_reduce_scatter_goes_in_slices_too():
    ranks.run(on_scatter, ranks=3)


def on_spread(specs: list[str]) -> None:
    """Into one tensor, into several, and with the input in its place among them."""
    me, size = dist.get_rank(), dist.get_world_size()
    for i, spec in enumerate(specs):
        found = []
        for way in (slicing(), contextlib.nullcontext([])):
            table, r = torch.full((size, N), torch.nan), None if me and i % 2 else leftover(me)
            table[me] = gradient(me)
            x = table[me] if i % 3 else table[me].clone()
            with way as counts:
                tw.all_gather(list(table) if i % 4 else table, x, spec, residual=r, key=KEY)
            found.append((table, torch.zeros(1) if r is None else r, counts))
        assert same(found[0][0], found[1][0]), spec
        assert same(found[0][1], found[1][1]), spec
        assert found[0][2] == [SLICES], spec


@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_in_slices_is_one_in_one(size):
    specs = [row.spec for row in CUT if row.residual and not row.random]
    ranks.run(on_spread, specs, ranks=size)


def on_spread_in_one() -> list[int]:
    """What differs in length, or would be written over before it is read."""
    me, size = dist.get_rank(), dist.get_world_size()
    with slicing() as counts:
        places = [torch.empty(N + i) for i in range(size)]
        tw.all_gather(places, normal(N + me, me), "none")
        for i, place in enumerate(places):
            assert same(place, normal(N + i, i))
        table = torch.zeros(size * N)
        shifted = table[5 : 5 + N].copy_(normal(N, me))
        tw.all_gather(table, shifted, "none")
        assert same(table, torch.cat([normal(N, i) for i in range(size)]))
        for kind in ("strides", "memory") if me else ("", ""):  # of the second rank alone
            rows, columns = 11, N // 11
            x = normal(rows * columns, me).view(rows, columns)
            places = [torch.empty_like(x) for _ in range(size)]
            if kind == "strides":
                places = [torch.empty(columns, rows).t() for _ in range(size)]
            elif kind == "memory":
                x = places[0].copy_(x)
            tw.all_gather(places, x, "none")
            for i, place in enumerate(places):
                assert same(place, normal(rows * columns, i).view(rows, columns))
    return counts


def test_all_gather_goes_in_one_where_slices_would_not_do():
    assert ranks.run(on_spread_in_one, ranks=2) == [[], []]


def on_spread_of_nan() -> None:
    """A slice of rank 1 is not finite: its place is NaN throughout, its residual as it was."""
    me, size = dist.get_rank(), dist.get_world_size()
    x, r, table = gradient(me), leftover(me), torch.zeros(size, N)
    if me == 1:
        x[-1] = torch.inf
    with slicing() as counts:
        handle = tw.all_gather(table, x, "quantize:4", residual=r)
    assert counts == [SLICES]
    assert not handle.account.finite
    assert table[1].isnan().all()
    assert table[::2].isfinite().all()
    assert same(r, leftover(me)) == (me == 1)


def test_all_gather_in_slices_of_what_is_not_finite_is_nan_everywhere():
    ranks.run(on_spread_of_nan, ranks=3)


def on_broken_spread(at: int) -> tuple[str, bool, bool]:
    """The encoder of rank 1 breaks at its `at`-th slice; then one after the other at a time."""
    me, size = dist.get_rank(), dist.get_world_size()
    r, table, error = leftover(me), torch.zeros(size, N), ""
    with breaking(tw.Quantize(4), at if me == 1 else 0), slicing():
        try:
            tw.all_gather(table, gradient(me), "quantize:4", residual=r)
        except (tw.PeerError, RuntimeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
    with slicing():
        tables = [torch.empty(size, N) for _ in range(4)]
        handles = [tw.all_gather(t, gradient(me), "none", async_op=True) for t in tables]
        for handle in handles:
            handle.wait()
    right = torch.stack([gradient(i) for i in range(size)])
    untouched = same(r, leftover(me)) and not table.any()
    return error, untouched, all(same(t, right) for t in tables)


def test_a_rank_that_cannot_go_on_in_a_slice_of_all_gather_tells_why():
    for at in (1, 2, SLICES):
        for rank, found in enumerate(ranks.run(on_broken_spread, at, ranks=3)):
            own = "RuntimeError: out of paper"
            others = f"PeerError: all_gather: could not go on at rank 1: {own}"
            assert found == (own if rank == 1 else others, True, True), at


def on_nodes() -> list[int]:
    """Two nodes of two: the sums of nodes go in slices between them."""
    me = dist.get_rank()
    x, r = gradient(me), torch.zeros(N)
    with slicing() as counts:
        tw.all_reduce(x, "quantize:8", residual=r, op="avg", nodes=2, key=KEY)
    exact = sum(gradient(rank) for rank in range(4)) / 4
    # What was not sent is in the residuals, one after the other.
    left = [torch.empty(N) for _ in range(4)]
    dist.all_gather(left, r)
    assert torch.allclose(x + sum(left) / 4, exact, atol=1e-5)
    return counts


def test_sums_of_nodes_go_in_slices_between_them():
    assert all(counts == [SLICES] for counts in ranks.run(on_nodes, ranks=4))


def on_failing_node() -> tuple[Report, bool]:
    """The encoder of rank 1 breaks in the second slice of what goes between nodes."""
    whole, uses = tw.Quantize.encode_flat, []

    def broken(self, request):
        uses.append(1)
        if len(uses) == 2:
            raise RuntimeError("out of paper")
        return whole(self, request)

    with pytest.MonkeyPatch.context() as patch, slicing():
        if dist.get_rank() == 1:
            patch.setattr(tw.Quantize, "encode_flat", broken)
        report = attempt(n=N, compressor="quantize:4", nodes=2)
    return report, works()


def test_a_rank_that_cannot_go_on_between_nodes_tells_all():
    for rank, (report, usable) in enumerate(ranks.run(on_failing_node, ranks=4)):
        assert "RuntimeError: out of paper" in report.error, rank
        assert report.untouched, rank
        assert usable, rank


def on_non_finite() -> None:
    """A NaN in the last slice of one rank."""
    me = dist.get_rank()
    for collective in ("gather", "twoshot"):
        x, r = gradient(me), leftover(me)
        if me == 1:
            x[-1] = torch.nan
        with slicing():
            handle = tw.all_reduce(x, "quantize:4", residual=r, collective=collective)
        assert not handle.account.finite
        assert x[-1].isnan()
        assert same(r, leftover(me))


def test_what_is_not_finite_in_one_slice_changes_no_residual():
    ranks.run(on_non_finite, ranks=3)


def on_limited() -> list[int]:
    """Rank 1 has a memory limit: what is counted for it goes in one."""
    me = dist.get_rank()
    with slicing() as counts:
        for collective in ("gather", "twoshot"):
            x = gradient(me)
            limit = "1GB" if me == 1 else None
            tw.all_reduce(x, "quantize:8", collective=collective, max_bytes=limit)
    return counts


def test_with_a_memory_limit_on_one_rank_all_go_in_one():
    assert ranks.run(on_limited, ranks=3) == [[], [], []]


# Failures


def on_failing(collective: str, at: int) -> tuple[Report, bool]:
    """The encoder of rank 1 breaks at its `at`-th use."""
    with breaking(tw.Quantize(4), at if dist.get_rank() == 1 else 0), slicing():
        report = attempt(n=N, compressor="quantize:4", collective=collective)
    return report, works()


@pytest.mark.parametrize(("collective", "uses"), [("gather", SLICES), ("twoshot", 3 * SLICES)])
def test_a_rank_that_cannot_go_on_tells_why_and_the_group_works_on(collective, uses):
    for at in (1, 2, uses - 1, uses):
        for rank, (report, usable) in enumerate(ranks.run(on_failing, collective, at, ranks=3)):
            wanted = "PeerError: all_reduce: could not go on at rank 1: RuntimeError: out of paper"
            assert report.error == (wanted if rank != 1 else "RuntimeError: out of paper"), at
            assert report.untouched, at
            assert usable, at


def on_mismatch() -> Report:
    spec = "quantize:8" if dist.get_rank() == 0 else "quantize:4"
    with slicing():
        return attempt(n=N, compressor=spec, collective="twoshot")


def test_ranks_that_disagree_learn_of_it_before_anything_is_sent():
    for report in ranks.run(on_mismatch, ranks=2):
        assert report.error.startswith("MismatchError: "), report
        assert "compressor: quantize:8 on rank 0 but quantize:4 on rank 1" in report.error
        assert report.untouched


def on_death(collective: str) -> tuple[Report, Report]:
    """Rank 1 dies when its third slice is about to be sent."""
    assert works()
    wait, waits = Preparer.wait, []

    def dying(preparer: Preparer) -> None:
        wait(preparer)
        waits.append(1)
        if len(waits) == 2:
            die()

    with pytest.MonkeyPatch.context() as patch, slicing():
        if dist.get_rank() == 1:
            patch.setattr(Preparer, "wait", dying)
        report = attempt(n=N, compressor="quantize:4", collective=collective)
    return report, attempt()


@pytest.mark.parametrize("collective", ["gather", "twoshot"])
def test_a_death_between_slices_is_an_error_for_the_others(collective):
    with ranks.Ranks(3) as group:
        check_death(group.run(on_death, collective, dying=[1]), 1)


def on_lie() -> Report:
    """Rank 1 announces more than there is room for, in its second letter."""
    letter = Flow._letter

    def lying(flow: Flow, message: torch.Tensor, number: int, finite: bool) -> torch.Tensor:
        honest = letter(flow, message, number, finite)
        if number == 1:
            honest[24:32].view(torch.int64)[0] = 1 << 40
        return honest

    with pytest.MonkeyPatch.context() as patch, slicing():
        if dist.get_rank() == 1:
            patch.setattr(Flow, "_letter", lying)
        return attempt(n=N, compressor="quantize:4", collective="gather")


def test_a_letter_is_not_believed():
    with ranks.Ranks(3) as group:
        honest = group.run(on_lie)[::2]
    assert all(report.untouched for report in honest)
    assert all(report.error.startswith("PeerError: ") for report in honest), honest
    assert any("rank 1 announces" in report.error for report in honest)


def on_mixed() -> None:
    """Large and small, sliced and not, one behind the other and several at a time."""
    me, size = dist.get_rank(), dist.get_world_size()
    handles, tensors = [], []
    with slicing():
        for i in range(12):
            x = torch.full((N if i % 3 else 100,), float(me + i))
            tensors.append(x)
            spec = ("quantize:8", "none", "topk:1.0")[i % 3]
            handles.append(tw.all_reduce(x, spec, op="avg", async_op=True))
        for handle in handles:
            handle.wait()
    for i, x in enumerate(tensors):
        expected = torch.full_like(x, i + (size - 1) / 2)
        # 127 levels of the largest, twice.
        assert torch.allclose(x, expected, rtol=2 / 127, atol=0), i


def test_exchanges_in_slices_keep_their_turn_among_others():
    ranks.run(on_mixed, ranks=4)
