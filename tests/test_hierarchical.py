"""The laws of the hierarchical all-reduce, over even and uneven nodes.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here.
"""

import itertools
import os
import signal
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from nets import MIN, TIMEOUT, backward, digest, gradients, memory, plain, train
from tensors import normal, real_of, same
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.collectives.link import Link
from thinwire.collectives.nodes import NodeLayout
from thinwire.compressors.sparsifiers import kept

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

N = 1003
KEY = tw.Key(seed=5, step=3, tensor=2)
GROUPS = {  # nodes, by the number of ranks
    3: [[0], [1, 2]],
    4: [[0, 1], [2, 3]],
    5: [[0, 1], [2, 3, 4]],
}


@pytest.fixture(scope="module")
def five():
    """Five processes, of which each task takes as many as it needs."""
    with ranks.Ranks(5) as group:
        yield group


def layers(nodes: list[list[int]], inner: str = "none") -> NodeLayout:
    """Of the whole world."""
    places = tuple(map(tuple, nodes))
    return NodeLayout(places, places, tw.Nodes(inner=inner).inner, True)


class Case(NamedTuple):
    """One call."""

    spec: str
    inner: str = "none"
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    residual: bool = True


class Done(NamedTuple):
    """What a call left on one rank."""

    x: torch.Tensor
    r: torch.Tensor | None
    finite: bool = True


SPECS = [
    *("none", "lossless", "cast:fp16", "cast:fp8", "topk:0.1", "randomk:0.1,scaled=false"),
    *("randomk:0.25,shared=true", "threshold:0.5", "quantize:4", "qsgd:4", "onebit", "natural"),
    *("terngrad", "tiered:0.05", "topk:0.1|quantize:4"),
]
INNERS = ["none", "cast:bf16", "quantize:8"]
TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
CASES = [
    Case(spec, INNERS[(i + k) % 3], TYPES[(i + k) % 4 if k else 0], ("sum", "avg")[k], bool(k < 2))
    for i, spec in enumerate(SPECS)
    for k in range(2)
] + [Case(spec, residual=False) for spec in ("none", "topk:0.1", "cast:bf16", "quantize:4")]


def gradient(rank: int, dtype: torch.dtype, step: int = 0) -> torch.Tensor:
    return normal(N, 100 * step + rank, dtype)


def leftover(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return normal(N, 50 + rank, real_of(dtype)) / 4


def cases_of(size: int) -> list[Case]:
    """Each compressor in two of the groups, where all else goes round."""
    return CASES[list(GROUPS).index(size) :: len(GROUPS)]


def on_cases(nodes: list[list[int]]) -> list[Done]:
    me, done = dist.get_rank(), []
    for spec, inner, dtype, op, residual in cases_of(dist.get_world_size()):
        x, r = gradient(me, dtype), leftover(me, dtype) if residual else None
        said = tw.Nodes(nodes, inner=inner)
        handle = tw.all_reduce(x, spec, residual=r, op=op, nodes=said, key=KEY)
        assert handle.collective == "hierarchical"
        assert 0 <= handle.account.between_bytes <= handle.bytes_sent
        done.append(Done(x, r))
    return done


@pytest.fixture(scope="module")
def sweep(five) -> dict[tuple[int, Case], list[Done]]:
    """All cases, as they ended on each rank."""
    found = {}
    for size, nodes in GROUPS.items():
        done = five.run(on_cases, nodes, ranks=size)
        cases = zip(cases_of(size), *done, strict=True)
        found |= {(size, case): list(each) for case, *each in cases}
    return found


def test_all_ranks_end_with_the_same_bits(sweep):
    for case, done in sweep.items():
        assert all(same(each.x, done[0].x) for each in done), case
        assert done[0].x.isfinite().all(), case


def test_conservation_summed_over_ranks(sweep):
    """Sum of x + sum of old residuals = result + sum of new residuals."""
    for (size, case), done in sweep.items():
        if not case.residual:
            continue
        times = size if case.op == "avg" else 1
        x = [gradient(i, case.dtype).double() for i in range(size)]
        r = [leftover(i, case.dtype).double() for i in range(size)]
        total, left = done[0].x.double() * times, [each.r.double() for each in done]
        error = sum(x) + sum(r) - total - sum(left)
        # As for the flat collectives (see test_all_reduce), with one more payload, the node's sum
        # and a division on the way: half as many roundings again are more than enough. The backend
        # sums in the type that travels, once for each node but the first.
        mass = sum(t.abs() for t in (*x, *r, *left)) + total.abs()
        real, own = torch.finfo(real_of(case.dtype)), torch.finfo(case.dtype)
        travels = {"cast:fp16": torch.float16, "none": case.dtype}.get(case.spec)
        travels = case.dtype if "shared" in case.spec else travels
        wire = 0.0 if travels is None else torch.finfo(travels).eps
        bound = (15 + size) * real.eps * mass + own.eps / 2 * total.abs() + wire * mass
        bound += size * own.smallest_normal * own.eps + (wire == 2.0**-10) * size * 2.0**-24
        assert (error.abs() <= bound).all(), (size, case, float((error.abs() / bound).max()))


def test_a_residual_holds_the_own_shard_of_the_nodes_sum_and_nothing_else(sweep):
    """Where nothing is rounded off inside."""
    for (size, case), done in sweep.items():
        if case.inner == "none" and case.residual and case.dtype == torch.float32:
            places = layers(GROUPS[size])
            for rank, each in enumerate(done):
                index = places.places[places.node_of(rank)].index(rank)
                left = each.r.clone()
                if index < places.num_shards:
                    lo, hi = (N * (index + k) // places.num_shards for k in (0, 1))
                    left[lo:hi] = 0
                assert not left.any(), (size, case, rank)


# Nothing left out: a dense sum


def whole(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: sums are exact in every type, in any order."""
    x = torch.round(8 * gradient(rank, dtype))
    x[x == 0] = 1
    return x


def on_whole(nodes: list[list[int]]) -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    ways = itertools.product(("none", "lossless", "topk:1.0"), TYPES)
    for i, (spec, dtype) in enumerate(ways):  # with and without a residual in turn
        x = whole(me, dtype)
        r = torch.zeros(N, dtype=real_of(dtype)) if (i // 4 + i + size) % 2 else None
        tw.all_reduce(x, spec, residual=r, nodes=nodes)
        assert torch.equal(x, sum(whole(i, dtype) for i in range(size))), (spec, dtype)
        assert r is None or not r.any()
    tensors = [torch.arange(10), torch.full((3, 4), me), torch.arange(1)]
    tw.all_reduce_coalesced(tensors, "none", nodes=nodes)
    assert tensors[0].tolist() == [size * i for i in range(10)]
    assert tensors[1].eq(sum(range(size))).all()
    mixed = [whole(me, torch.bfloat16)[:700], whole(me, torch.float32)[700:]]
    tw.all_reduce_coalesced(mixed, "topk:1.0", nodes=nodes)
    for i, slot in enumerate((slice(0, 700), slice(700, N))):
        wanted = sum(whole(rank, mixed[i].dtype)[slot] for rank in range(size))
        assert torch.equal(mixed[i], wanted)
    short = torch.ones(1)  # fewer elements than shards
    tw.all_reduce(short, "topk:0.5", residual=torch.zeros(1), nodes=nodes)
    assert short.item() == size
    half = torch.full(
        (8,), 30000.0, dtype=torch.float16
    )  # a node's sum does not fit, the mean does
    tw.all_reduce(half, "none", nodes=nodes, op="avg")
    assert half.eq(30000).all()


@pytest.mark.parametrize("size", GROUPS)
def test_when_nothing_is_left_out_it_is_a_dense_all_reduce(five, size):
    five.run(on_whole, GROUPS[size], ranks=size)


# Against the algorithm done by hand


STEPS, RATIO = 20, 0.05


def on_steps(nodes: list[list[int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    me, r, found = dist.get_rank(), torch.zeros(N, dtype=torch.float64), []
    for step in range(STEPS):
        x = gradient(me, torch.float64, step)
        tw.all_reduce(x, f"topk:{RATIO}", residual=r, op="avg", nodes=nodes)
        found.append(x)
    return found, r


def by_hand(nodes: list[list[int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Top-K of each node's sum, shard by shard, with what it leaves out in the owner's residual."""
    size, count = sum(map(len, nodes)), min(map(len, nodes))
    residuals, results = [np.zeros(N) for _ in range(size)], []
    for step in range(STEPS):
        xs = [gradient(rank, torch.float64, step).numpy() for rank in range(size)]
        result = np.zeros(N)
        for shard in range(count):
            at = slice(N * shard // count, N * (shard + 1) // count)
            for node in nodes:
                total = sum(xs[rank][at] + residuals[rank][at] for rank in node)
                largest = np.argsort(-np.abs(total), kind="stable")
                chosen = np.zeros_like(total)
                k = kept(total.size, RATIO)
                chosen[largest[:k]] = total[largest[:k]]
                result[at] += chosen
                for rank in node:
                    residuals[rank][at] = total - chosen if rank == node[shard] else 0
        results.append(result / size)
    return results, residuals


@pytest.mark.parametrize("size", GROUPS)
def test_twenty_steps_of_top_k_are_those_done_by_hand(five, size):
    results, residuals = by_hand(GROUPS[size])
    for rank, (found, r) in enumerate(five.run(on_steps, GROUPS[size], ranks=size)):
        for step, x in enumerate(found):
            # Sums of five numbers in another order, in float64; each step adds its own rounding.
            assert np.allclose(x.numpy(), results[step], rtol=0, atol=1e-13 * (step + 1)), step
        assert np.allclose(r.numpy(), residuals[rank], rtol=0, atol=1e-12)


# Values that are not finite


def on_bad(nodes: list[list[int]]) -> list[tuple[bool, bool, bool]]:
    """For each rank that holds one: all of the result is NaN, no residual has changed, and the
    account says so."""
    me, found = dist.get_rank(), []
    for bad, (spec, inner) in itertools.product(
        range(dist.get_world_size()), [("topk:0.1", "none"), ("none", "cast:bf16")]
    ):
        x, r = gradient(me, torch.float32), leftover(me, torch.float32)
        before = r.clone()
        if me == bad:
            x[bad * 100] = (torch.inf, torch.nan)[bad % 2]
        handle = tw.all_reduce(x, spec, residual=r, nodes=tw.Nodes(nodes, inner=inner))
        found.append((bool(x.isnan().all()), same(r, before), not handle.account.finite))
    # Finite everywhere, but the sum of one node is not.
    x, r = torch.full((N,), 3e38 if me in nodes[-1] else 1.0), torch.zeros(N)
    handle = tw.all_reduce(x, "quantize:4", residual=r, nodes=nodes)
    found.append((bool(x.isnan().all()), not r.any(), not handle.account.finite))
    return found


@pytest.mark.parametrize("size", GROUPS)
def test_what_is_not_finite_reaches_every_rank_and_no_residual(five, size):
    for found in five.run(on_bad, GROUPS[size], ranks=size):
        assert all(all(each) for each in found), found


# Ranks that disagree, fail or die


class Report(NamedTuple):
    """What a rank saw of a call that failed."""

    error: str
    untouched: bool


def attempt(nodes: Any, n: int = N, spec: str = "topk:0.5", **given: Any) -> Report:
    me = dist.get_rank()
    x, r = normal(n, me), normal(n, 50 + me)
    before, error = (x.clone(), r.clone()), ""
    try:
        tw.all_reduce(x, spec, residual=r, **{"nodes": nodes, "timeout": TIMEOUT} | given)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    untouched = same(x, before[0]) and same(r, before[1])
    return Report(error, untouched)


def works(nodes: Any) -> bool:
    return not attempt(nodes).error


def on_mismatches() -> list[Report]:
    me, nodes = dist.get_rank(), [[0, 1], [2, 3]]
    odd = me == 3
    return [
        attempt([[0, 2], [1, 3]] if odd else nodes),
        attempt(tw.Nodes(nodes, inner="cast:bf16" if odd else "none")),
        attempt(None if odd else nodes),
        attempt(tw.Nodes(nodes, inner="cast:bf16", feedback="none" if odd else "ef14")),
        attempt(nodes, max_bytes=1000 if odd else None),
        Report("", works(nodes)),
    ]


def test_ranks_that_disagree_all_learn_who_differs_in_what(five):
    for rank, found in enumerate(five.run(on_mismatches, ranks=4)):
        nodes, inner, flat, feedback, limit, after = found
        where = "on ranks 0, 1, 2 but {} on rank 3"
        assert f"nodes: 0, 1 | 2, 3 {where.format('0, 2 | 1, 3')}" in nodes.error
        assert (
            f"inner: none with feedback ef14 {where.format('cast:bf16 with')[:-14]}" in inner.error
        )
        assert "collective: hierarchical on ranks 0, 1, 2 but auto on rank 3" in flat.error
        assert "feedback ef14 on ranks 0, 1, 2 but cast:bf16 with feedback none" in feedback.error
        assert limit.error.startswith(
            "MemoryLimitError: hierarchical"
            if rank == 3
            else "PeerError: all_reduce: could not go on at rank 3: MemoryLimitError"
        )
        for report in (nodes, inner, flat, feedback):
            assert report.error.startswith("MismatchError: ranks disagree in one call"), report
        for report in found:
            assert report.untouched
        assert after.untouched


def on_failing(nodes: list[list[int]]) -> list[tuple[Report, bool]]:
    """Rank 1 breaks at different points of the exchange."""
    from thinwire.collectives import gather, hierarchical

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of paper")

    places = [
        (tw.Cast, "encode_flat"),
        (hierarchical, "sum_shards"),
        (tw.TopK, "select"),
        (gather, "add_all"),
        (hierarchical.Reduction, "bundle"),
        (hierarchical, "unbundle"),
    ]
    found = []
    for owner, name in places:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(owner, name, broken)
            report = attempt(tw.Nodes(nodes, inner="cast:bf16"))
        found.append((report, works(nodes)))
    return found


@pytest.mark.parametrize("size", [4, 5])
def test_a_rank_that_cannot_go_on_gets_its_error_and_all_others_its_reason(five, size):
    for rank, found in enumerate(five.run(on_failing, GROUPS[size], ranks=size)):
        for i, (report, usable) in enumerate(found):
            wanted = "PeerError: all_reduce: could not go on at rank 1: RuntimeError: out of paper"
            assert report.error == (wanted if rank != 1 else "RuntimeError: out of paper"), i
            assert report.untouched, i
            assert usable, i


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_death(nodes: list[list[int]], victim: int, when: str | int) -> tuple[Report, Report]:
    """The victim dies before the call, when connections are made, or 2 ms after its n-th transfer
    inside or between nodes has begun; or it stalls."""
    if when != "connecting":
        assert works(nodes)
    if dist.get_rank() == victim:
        count, seen = Link._count, []

        def counted(self, sent: int, received: int, messages: int) -> None:
            count(self, sent, received, messages)
            if self._whole is not None:
                seen.append(1)
                if len(seen) == when:
                    threading.Timer(0.002, die).start()

        Link._count = counted
        if when == "connecting":
            Link.subgroup = lambda *_: die()
        if when == "before":
            die()
        if when == "stalled":
            time.sleep(1000)
    timeout = 1.0 if when == "stalled" else TIMEOUT
    n = 1_500_000 if isinstance(when, int) else N  # of which the victim has sent some
    return attempt(nodes, n, "quantize:8", timeout=timeout), attempt(nodes)


@pytest.mark.parametrize(
    ("size", "victim", "when"),
    [
        *((4, 3, "before"), (4, 1, "connecting"), (5, 0, "stalled")),
        *((4, 2, 1), (5, 4, 1), (5, 3, 2), (5, 1, 3)),
    ],
)
def test_a_death_ends_all_others_at_once_and_loses_nothing(size, victim, when):
    with ranks.Ranks(size) as group:
        found = group.run(on_death, GROUPS[size], victim, when, dying=[victim])
    for report, later in (each for rank, each in enumerate(found) if rank != victim):
        assert report.error.startswith("PeerError: "), report
        assert report.untouched
        assert later.error.startswith("PeerError: "), later
        assert "in an earlier call" in later.error


# Which nodes


def on_ways() -> list[tuple[str, int]]:
    """The collective used and bytes sent to other nodes, for several ways to say it."""
    me, found = dist.get_rank(), []
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    for nodes in (2, [[0, 1], [2, 3]], mesh, None, [[0], [1], [2], [3]], [[0, 1, 2, 3]], 4, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            x, r = normal(N, me), torch.zeros(N)
            given = {"collective": "hierarchical"} if nodes is None else {"nodes": nodes}
            handle = tw.all_reduce(x, "topk:0.1", residual=r, **given)
            found.append((handle.collective, handle.account.between_bytes))
    # A group of some ranks: those of one node still belong together.
    group = dist.new_group([0, 2, 3])
    if me != 1:
        x = torch.ones(N)
        handle = tw.all_reduce(x, "topk:1.0", nodes=2, group=group)
        assert x.eq(3).all()
        found.append((handle.collective, handle.account.between_bytes > 0))
    dist.barrier()
    return found


def test_nodes_can_be_said_in_several_ways(five):
    for rank, found in enumerate(five.run(on_ways, ranks=4)):
        *ways, single, one, whole, each = found[:8]
        assert {name for name, _ in ways} == {"hierarchical"}
        assert len({count for _, count in ways}) == 1
        assert ways[0][1] > 0
        assert single[0] == each[0] == "gather"
        assert one[0] == whole[0] == "summable"  # nothing is compressed inside a node
        if rank in (0, 2):  # who owns the one shard
            assert found[8] == ("hierarchical", True)


def on_bad_arguments() -> None:
    x = torch.ones(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        for error, words, given in (
            (ValueError, "LOCAL_WORLD_SIZE is not set", {"collective": "hierarchical"}),
            (ValueError, "cannot be divided into nodes of 3", {"nodes": 3}),
            (ValueError, "must be a number of ranks per node, got 0", {"nodes": 0}),
            (ValueError, "must be in one node", {"nodes": [[0, 1], [2]]}),
            (ValueError, "must be in one node", {"nodes": [[0, 1], [1, 2, 3]]}),
            (TypeError, "lists of ranks", {"nodes": ["ab", "cd"]}),
            (TypeError, "lists of ranks", {"nodes": 1.5}),
            (ValueError, "not 'gather'", {"nodes": 2, "collective": "gather"}),
            (ValueError, "'summable' only", {"nodes": 2, "op": "max"}),
        ):
            spec = "none" if "op" in given else "topk:0.5"
            with pytest.raises(error, match=words):
                tw.all_reduce(x, spec, **given)
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE: 4 ranks cannot be divided"):
            tw.all_reduce(x, "topk:0.5", collective="hierarchical")
    for words, given in (
        ("leave elements out", {"inner": "topk:0.5"}),
        ("no random numbers may be drawn", {"inner": "natural"}),
        ("has no payload", {"inner": "powersgd:2"}),
        ("feedback must be 'ef14' or 'none', got 'ef21'", {"feedback": "ef21"}),
    ):
        with pytest.raises(ValueError, match=words):
            tw.Nodes(2, **given)
    with pytest.raises(ValueError, match="cannot go through 'hierarchical'"):
        tw.all_reduce(x, "powersgd:2", nodes=2)
    mesh = DeviceMesh("cpu", torch.arange(4))
    with pytest.raises(ValueError, match="two dimensions"):
        tw.all_reduce(x, "topk:0.5", nodes=mesh)
    for feedback, words in (("dgc", "momentum"), ("vote", "majority")):
        with pytest.raises(ValueError, match=words):
            tw.Reducer("topk:0.1", feedback=feedback, nodes=2)
    nodes = tw.Nodes(2, inner="cast:bf16", feedback="none")
    with pytest.raises(ValueError, match=r"needs Nodes\(feedback='ef14'\)"):
        tw.Reducer("topk:0.1", feedback="ef21", nodes=nodes)


def test_what_makes_no_sense_is_refused_with_a_reason(five):
    five.run(on_bad_arguments, ranks=4)


# Training


def wired(spec: str, **given: Any) -> tuple[DistributedDataParallel, tw.Wire]:
    model = plain()
    return model, tw.attach(model, spec, **{"min_numel": MIN, "timeout": TIMEOUT} | given)


def on_training(place: str) -> dict[str, Any]:
    """Training that is stopped and goes on, against training that is not."""
    found: dict[str, Any] = {}
    for feedback in ("ef14", "ef21m:0.5"):
        given = {"feedback": feedback, "nodes": tw.Nodes(2, inner="cast:bf16")}
        model, wire = wired("topk:0.1", **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, range(4), optimizer)
        state = {name: value.clone() for name, value in model.module.state_dict().items()}
        torch.save(wire.state_dict(), f"{place}/{feedback}{dist.get_rank()}.pt")
        losses = train(model, range(4, 8), optimizer)
        again, other = wired("topk:0.1", **given)
        again.module.load_state_dict(state)
        saved = torch.load(f"{place}/{feedback}{dist.get_rank()}.pt", weights_only=True)
        other.load_state_dict(saved)
        same_losses = losses == train(
            again, range(4, 8), torch.optim.SGD(again.parameters(), lr=0.1)
        )
        found[feedback] = digest(model.parameters())
        found[f"{feedback} again"] = same_losses and found[feedback] == digest(again.parameters())
        kept = [memory(each) for each in (wire, other)]
        found[f"{feedback} memory"] = all(same(kept[0][name], kept[1][name]) for name in kept[0])
        stats = wire.stats()
        found[f"{feedback} collectives"] = {
            name: row["collective"] for name, row in stats["tensors"].items()
        }
        found[f"{feedback} between"] = stats["total"]["between_bytes"]
    return found


def test_training_goes_on_from_a_checkpoint_bit_for_bit(five, tmp_path):
    done = five.run(on_training, str(tmp_path), ranks=4)
    for feedback in ("ef14", "ef21m:0.5"):
        assert len({found[feedback] for found in done}) == 1
        for found in done:
            assert found[f"{feedback} again"]
            assert found[f"{feedback} memory"]
            assert found[f"{feedback} between"] > 0
            ways = found[f"{feedback} collectives"]
            assert {w for name, w in ways.items() if "weight" in name} == {"hierarchical"}
            assert {w for name, w in ways.items() if "bias" in name} == {"summable"}


def on_lossless() -> float:
    """The largest difference between DDP's own averages and those over nodes."""
    model, own = wired("none", nodes=[[0], [1, 2]])[0], plain()
    backward(model, 0)
    backward(own, 0)
    wanted = gradients(own)
    return max(float((g - wanted[name]).abs().max()) for name, g in gradients(model).items())


def test_without_compression_it_is_ddp(five):
    # Gradients below 1, three of them added in float32 in another order.
    assert max(five.run(on_lossless, ranks=3)) <= 4 * 2.0**-24


# Memory


def on_limits() -> list[str]:
    """Errors at a limit of half of what is expected, and of all of it."""
    found = []
    for spec, inner in (("topk:0.1", "none"), ("quantize:8", "cast:bf16")):
        nodes = tw.Nodes([[0, 1], [2]], inner=inner)
        need = attempt(nodes, 400_000, spec, max_bytes=1).error
        number, unit = need.partition("would take ")[2].split()[:2]
        limit = int(1.01 * float(number) * {"kB": 1e3, "MB": 1e6}[unit])
        for share in (0.5, 1.0):
            report = attempt(nodes, 400_000, spec, max_bytes=int(share * limit))
            found.append(report.error.partition(":")[0])
    return found


def test_a_memory_limit_is_kept(five):
    for half, enough, other_half, other_enough in five.run(on_limits, ranks=3):
        assert enough == other_enough == ""
        assert {half, other_half} <= {"MemoryLimitError", "PeerError"}
