"""The laws of exchanges in which every tensor has a compressor of its own, among real ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here.
"""

from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import MIN, backward, gradients, raised, wired
from tensors import normal, real_of, same
from torch import Tensor

import thinwire as tw
from thinwire.collectives.memory import Load, estimate
from thinwire.collectives.message import aligned
from thinwire.collectives.reduction import Part

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

KEY = tw.Key(seed=5, step=3, tensor=2)
SHAPES = [(40, 30), (17,), (600,), (25, 20), ()]
RECORD = 8 * 13  # bytes of what a rank says in a meeting, and 8 more for each member


class Mix(NamedTuple):
    """A compressor for each of some tensors, and what carries them."""

    specs: tuple[str, ...]
    collective: str
    size: int
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * len(SHAPES)
    nodes: tuple[tuple[int, ...], ...] | None = None


SOME = ("topk:0.1", "none", "quantize:4", "topk:0.05|quantize:4", "none")
SUMMED = ("none", "cast:bf16", "cast:fp16", "randomk:0.25,shared=true", "none")
SPARSE = ("topk:0.1", "topk:0.5", "threshold:0.5", "randomk:0.5,scaled=false", "topk:1")
JOINT = ("powersgd:2", "none", "powersgd:1", "arc:0.1", "none")
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
MIXES = [
    Mix(SOME, "gather", 2),
    Mix(SOME, "gather", 3, TYPES),
    Mix(SOME, "twoshot", 3),
    Mix(SOME, "twoshot", 2, TYPES),
    Mix(SUMMED, "summable", 3),
    Mix(SUMMED, "summable", 2, TYPES),
    Mix(SUMMED, "gather", 2),
    Mix(SPARSE, "sparse", 3),
    Mix(JOINT, "joint", 3),
    Mix(JOINT, "joint", 2, TYPES),
    Mix(SOME, "hierarchical", 3, nodes=((0, 1), (2,))),
]  # fmt: skip


def tensors_of(mix: Mix, rank: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Gradients, and residuals of those that are not sent uncompressed; a 'none' has one too."""
    xs, rs = [], []
    for i, (shape, dtype, spec) in enumerate(zip(SHAPES, mix.dtypes, mix.specs, strict=True)):
        n = torch.Size(shape).numel()
        xs.append(normal(n, 10 * rank + i, dtype).view(shape))
        left = normal(n, 500 + 10 * rank + i, real_of(dtype)).view(shape) / 4
        rs.append(None if spec == "none" and i == 1 else left)
    return xs, rs


def reduced(mix: Mix, xs: list[Tensor], rs: list[Tensor | None], **options: Any) -> tw.Handle:
    options = {"collective": mix.collective, "nodes": mix.nodes, "key": KEY, **options}
    return tw.all_reduce_coalesced(xs, list(mix.specs), residuals=rs, op="avg", **options)


def on_mixes(size: int) -> list[tuple]:
    me, found = dist.get_rank(), []
    for mix in (mix for mix in MIXES if mix.size == size):
        xs, rs = tensors_of(mix, me)
        handle = reduced(mix, xs, rs)
        assert handle.collective == mix.collective
        auto = tensors_of(mix, me)
        asked = reduced(mix, *auto, collective="auto").collective
        found.append((mix, xs, rs, handle.account, asked))
    return found


@pytest.fixture(scope="module")
def done() -> dict[Mix, list[tuple]]:
    """What each mix came to on all ranks."""
    by_mix: dict[Mix, list[tuple]] = {}
    for size in (2, 3):
        for found in ranks.run(on_mixes, size, ranks=size):
            for mix, *rest in found:
                by_mix.setdefault(mix, []).append(rest)
    assert list(by_mix) == sorted(MIXES, key=lambda mix: mix.size)
    return by_mix


def test_all_ranks_end_with_the_same_bits(done):
    for mix, found in done.items():
        for xs, *_ in found:
            assert all(same(a, b) for a, b in zip(xs, found[0][0], strict=True)), mix
            assert all(x.isfinite().all() for x in xs), mix


def test_conservation_holds_for_each_part(done):
    for mix, found in done.items():
        before = [tensors_of(mix, rank) for rank in range(mix.size)]
        for i, spec in enumerate(mix.specs):
            error = -mix.size * found[0][0][i].double()
            for (xs, rs), (_, left, *_) in zip(before, found, strict=True):
                error += xs[i].double()
                if rs[i] is not None:
                    error += rs[i].double() - left[i].double()
            # Numbers below 8 of up to three ranks. The average has the tensor's type, what travels
            # may be cast to half of that; each is rounded a few times (see test_all_reduce).
            eps = max(torch.finfo(mix.dtypes[i]).eps, 2.0**-20)
            if mix.collective == "summable" and spec.startswith("cast"):
                eps = max(eps, 2.0**-8 if spec == "cast:bf16" else 2.0**-11)
            if spec == "none" or mix.collective != "joint":
                eps = max(eps, 2.0**-20)
            assert (error.abs() <= 8 * mix.size * 4 * eps).all(), (mix, i, error.abs().max())


def on_one_by_one(size: int) -> list[list[tuple[Tensor, Tensor | None]]]:
    me, found = dist.get_rank(), []
    for mix in (mix for mix in MIXES if mix.size == size):
        pairs = []
        for x, r, spec in zip(*tensors_of(mix, me), mix.specs, strict=True):
            if mix.collective not in ("sparse", "joint") and not tw.parse(spec).random:
                tw.all_reduce(
                    x, spec, residual=r, op="avg", collective=mix.collective, nodes=mix.nodes,
                    key=KEY,
                )  # fmt: skip
                pairs.append((x, r))
            else:
                pairs.append((None, None))
        found.append(pairs)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_each_part_is_what_an_exchange_of_its_own_would_make_of_it(done, size):
    """Where a tensor does not see the others: not in shared regions, nor with keys of their own."""
    mixes = [mix for mix in MIXES if mix.size == size]
    alone = ranks.run(on_one_by_one, size, ranks=size)
    for rank, found in enumerate(alone):
        for mix, pairs in zip(mixes, found, strict=True):
            together = zip(*done[mix][rank][:2], strict=True)
            for i, ((x, r), (y, s)) in enumerate(zip(pairs, together, strict=True)):
                if x is None:
                    continue
                # gloo adds in another order when three ranks sum a longer piece, in the type that
                # travels; sums go so between nodes too, if nothing but uncompressed tensors does.
                summed = mix.collective == "summable" or (mix.nodes and mix.specs[i] == "none")
                exact = not summed or mix.size == 2
                eps = 2.0**-8 if "bf16" in mix.specs[i] else 2.0**-10
                near = (x.double() - y.double()).abs().max() <= 8 * eps
                assert same(x, y) if exact else near, (mix, i)
                assert r is None or summed or same(r, s), (mix, i)


def test_auto_takes_what_carries_all_of_them(done):
    for mix, found in done.items():
        wanted = {"twoshot": "gather", "sparse": "gather"}.get(mix.collective, mix.collective)
        if mix.specs == SUMMED:
            wanted = "summable"
        assert {asked for *_, asked in found} == {wanted}, mix


def test_bytes_are_told_apart_by_tensor(done):
    for mix, found in done.items():
        for rank, (*_, account, _) in enumerate(found):
            told, size = account.tensor_bytes, mix.size
            assert len(told) == len(mix.specs)
            if mix.collective == "hierarchical":
                continue
            assert all(told), mix
            if mix.collective == "gather":
                frames = []
                for i, (x, r) in enumerate(zip(*tensors_of(mix, rank), strict=True)):
                    c = tw.parse(mix.specs[i])
                    key = KEY if c.common_key else KEY.derive(rank)
                    key = key.derive(i) if i else key
                    frames.append(c.encode(x, residual=r, key=key).num_bytes)
                assert told == frames, mix
                message = sum(map(aligned, [8 * len(frames), *frames]))
                record = aligned(RECORD + 8 * size)
                assert account.bytes_sent == (size - 1) * (record + message), mix


# Auto, with more bytes


def on_large() -> list[tuple[str, bool]]:
    """Messages for which four ranks do better than with gather."""
    n, found = 400_000, []
    for specs in (("topk:0.1", "none"), ("topk:0.1", "topk:0.3"), ("quantize:8", "quantize:4")):
        xs = [normal(n, dist.get_rank()), normal(1000, dist.get_rank())]
        rs = [torch.zeros(n), None if specs[1] == "none" else torch.zeros(1000)]
        handle = tw.all_reduce_coalesced(xs, specs, residuals=rs)
        told, total = handle.account.tensor_bytes, handle.account.bytes_sent
        # Records, tables and what brings frames to 64 bytes are the rest.
        found.append((handle.collective, sum(told) <= 2.2 * total and told[0] > 20 * told[1]))
    return found


def test_what_is_not_alike_goes_through_twoshot_what_is_through_sparse():
    for found in ranks.run(on_large, ranks=4):
        assert [name for name, _ in found] == ["twoshot", "sparse", "twoshot"]
        assert all(honest for _, honest in found)


# Averages over senders


def on_senders() -> tuple[Tensor, Tensor]:
    me = dist.get_rank()
    x, y = torch.zeros(4), torch.full((3,), float(me))
    x[me] = 1.0 + me
    tw.all_reduce_coalesced(
        [x, y], ["topk:0.25", "none"], residuals=[torch.zeros(4), None], op="senders"
    )
    return x, y


def test_over_senders_uncompressed_parts_are_plain_means():
    for x, y in ranks.run(on_senders, ranks=3):
        assert x.tolist() == [1, 2, 3, 0]
        assert y.tolist() == [1, 1, 1]


# What is not finite


def on_non_finite() -> list[tuple[Mix, bool, bool, bool]]:
    me, found = dist.get_rank(), []
    for mix in (mix for mix in MIXES if mix.size == 2):
        for bad in (0, 1):  # a compressed one, and one that is not
            xs, rs = tensors_of(mix, me)
            if me == 1:
                xs[bad].view(-1)[0] = torch.nan
            handle = reduced(mix, xs, rs)
            kept = tensors_of(mix, me)[1]
            unchanged = all(a is None or same(a, b) for a, b in zip(kept, rs, strict=True))
            spread = bool(xs[bad].view(-1)[0].isnan())
            found.append((mix, handle.account.finite, unchanged, spread))
    return found


def test_a_nan_in_one_part_changes_no_residual_of_any():
    first, second = ranks.run(on_non_finite, ranks=2)
    assert first == second
    for mix, finite, unchanged, spread in first:
        assert not finite, mix
        assert unchanged, mix
        assert spread, mix


# Memory


def on_limited() -> list[tuple]:
    """In rounds, since the limit allows for no more."""
    mix, me = MIXES[1], dist.get_rank()
    xs, rs = tensors_of(mix, me)
    parts = [
        Part(x.flatten(), None if r is None else r.flatten(), KEY, tw.parse(spec))
        for x, r, spec in zip(xs, rs, mix.specs, strict=True)
    ]
    load = Load.of(parts)
    need = estimate("gather", load, 3, 4).num_bytes
    assert need < estimate("gather", load, 3).num_bytes
    reduced(mix, xs, rs, max_bytes=need + 2000)
    refused = raised(lambda: reduced(mix, *tensors_of(mix, me), max_bytes=100))
    return xs, rs, refused


def test_a_limit_holds_for_all_parts_together():
    mix = MIXES[1]
    found = ranks.run(on_limited, ranks=3)
    before = [tensors_of(mix, rank) for rank in range(3)]
    for xs, _, refused in found:
        assert all(same(a, b) for a, b in zip(xs, found[0][0], strict=True))
        assert "MemoryLimitError: gather over 3 ranks would take" in refused
    for i, dtype in enumerate(mix.dtypes):
        error = -3 * found[0][0][i].double()
        for (xs, rs), (_, left, _) in zip(before, found, strict=True):
            error += xs[i].double()
            if rs[i] is not None:
                error += rs[i].double() - left[i].double()
        eps = max(torch.finfo(dtype).eps, 2.0**-20)
        assert (error.abs() <= 8 * 3 * 4 * eps).all(), i


# Failures


def on_disagreement() -> list[str]:
    me, found = dist.get_rank(), []
    mix = MIXES[0]

    def attempt(specs: list[str]) -> str:
        xs, rs = tensors_of(mix, me)
        error = raised(lambda: tw.all_reduce_coalesced(xs, specs, residuals=rs))
        for a, b in zip(tensors_of(mix, me), (xs, rs), strict=True):
            assert all(x is None or same(x, y) for x, y in zip(a, b, strict=True))
        return error

    other = ["topk:0.1", "none", "quantize:8", "topk:0.05|quantize:4", "none"]
    found.append(attempt(other if me == 2 else list(mix.specs)))
    found.append(attempt(["topk:0.1"] * 5 if me == 2 else list(mix.specs)))
    whole = tw.Quantize.encode_flat
    with pytest.MonkeyPatch.context() as patch:
        if me == 1:
            patch.setattr(tw.Quantize, "encode_flat", lambda *_: 1 / 0)
        found.append(attempt(list(mix.specs)))
    assert tw.Quantize.encode_flat is whole
    xs, rs = tensors_of(mix, me)
    reduced(mix, xs, rs)  # and it still works
    return found


def test_ranks_that_differ_in_one_part_are_told_in_which():
    for rank, (one, all_of_them, failed) in enumerate(ranks.run(on_disagreement, ranks=3)):
        assert one == (
            "MismatchError: ranks disagree in one call, compressor: quantize:4 for tensor 2 on "
            "ranks 0, 1 but quantize:8 for tensor 2 on rank 2"
        )
        assert "none for tensor 4 on ranks 0, 1 but topk:0.1 on rank 2" in all_of_them
        own = "ZeroDivisionError: division by zero"
        wanted = f"PeerError: all_reduce_coalesced: could not go on at rank 1: {own}"
        assert failed == (own if rank == 1 else wanted)


def on_refused() -> list[str]:
    xs = [torch.ones(8), torch.ones(8)]

    def refused(*specs: str, **options: Any) -> str:
        return raised(lambda: tw.all_reduce_coalesced(xs, specs, **options))

    return [
        refused("topk:0.1"),
        refused("powersgd:2", "quantize:4"),
        refused("topk:0.5", "topk:0.5|quantize:4", collective="sparse"),
        refused("none", "quantize:4", op="max"),
        refused("none", "quantize:4", collective="summable"),
    ]


def test_what_cannot_share_an_exchange_is_refused():
    for found in ranks.run(on_refused, ranks=2):
        for error, words in zip(
            found,
            [
                "ValueError: 1 compressors for 2 tensors",
                "ValueError: powersgd and quantize:4 cannot share an exchange",
                "cannot share an exchange through 'sparse'",
                "ValueError: quantize:4 takes SUM and AVG, not MAX",
                "ValueError: quantize:4 cannot go through 'summable'",
            ],
            strict=True,
        ):
            assert words in error


# Settings per layer


POLICY = tw.policies.parse("layerwise:(0.*=topk:0.1;2.*=quantize:4;*=topk:0.3|quantize:8)")


def on_layers(granularity: str) -> dict[str, Any]:
    model, wire = wired(POLICY, granularity=granularity, ddp={"bucket_cap_mb": 25}, min_numel=MIN)
    handles, start = [], wire._reducer.start

    def noted(units: Any, driver: Any, **options: Any) -> Any:
        exchange = start(units, driver, **options)
        handles.append((exchange.handle, [str(unit.compressor) for unit in units]))
        return exchange

    wire._reducer.start = noted
    for step in range(3):
        backward(model, step)
    return {
        "exchanges": [(compressors, handle.collective) for handle, compressors in handles],
        "gradients": gradients(model),
        "stats": wire.stats(),
    }


@pytest.mark.parametrize("granularity", ["bucket", "tensor"])
def test_a_policy_with_settings_per_layer_takes_one_exchange_per_bucket(granularity):
    found = ranks.run(on_layers, granularity, ranks=2)
    for each in found:
        assert len(each["exchanges"]) == 3, "one bucket, three steps"
        for compressors, collective in each["exchanges"]:
            assert set(compressors) == {"topk:0.1", "quantize:4", "topk:0.3|quantize:8", "none"}
            assert collective == "gather"
        assert all(same(g, found[0]["gradients"][n]) for n, g in each["gradients"].items())
        rows, total = each["stats"]["tensors"], each["stats"]["total"]
        sent = sum(row["bytes_sent"] for row in rows.values())
        assert abs(sent - total["bytes_sent"]) <= len(rows)  # each row is rounded
        # Each tensor's share is that of its own frames: a ratio that fits its compressor, less
        # what headers, records and tables of small tensors take.
        assert 2 < rows["0.weight"]["ratio"] < 7
        assert 4 < rows["2.weight"]["ratio"] < 8
        assert 0.3 < rows["0.bias"]["ratio"] < 1
        assert {name: row["compressor"] for name, row in rows.items() if "bias" not in name} == {
            "0.weight": "topk:0.1", "2.weight": "quantize:4", "4.weight": "topk:0.3|quantize:8",
        }  # fmt: skip
