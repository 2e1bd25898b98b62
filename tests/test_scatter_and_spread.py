"""The laws of reduce_scatter, all_gather and broadcast, among real ranks.

A task runs on every rank and asserts there; what must be the same everywhere it returns.
"""

import functools
import itertools
import zlib
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run
from rows import ROWS, Row, meetings, turns
from tensors import FLOATS, INTEGERS, LAYOUTS, bits, lay, normal, real_of, same
from torch import Tensor

import thinwire as tw

SIZES = [2, 3, 4]
UNEVEN = [257, 1, 31, 1000]  # elements of the shards of a list, for up to four ranks
EVEN = 300  # of each shard of a single tensor
NAN, INF = float("nan"), float("inf")
LOSSY = ["topk:0.3", "quantize:4", "onebit", "topk:0.1|quantize:4", "cast:bf16"]

every_size = pytest.mark.parametrize("ranks", SIZES)


def me() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def digest(*tensors: Tensor) -> int:
    """Equal for equal bits."""
    return zlib.crc32(b"".join(bits(t).numpy().tobytes() for t in tensors))


def agree(answers) -> None:
    """Every rank returned the same."""
    for rank, answer in enumerate(answers):
        assert answer == answers[0], f"ranks 0 and {rank} differ"


@functools.cache
def inputs_of(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """What a rank has for each of the others; every rank can form it for every rank."""
    return [normal(n, 100 * rank + j, dtype) for j, n in enumerate(sizes)]


@functools.cache
def residuals_of(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [normal(n, 100 * rank + j + 50, real_of(dtype)) / 8 for j, n in enumerate(sizes)]


def close(error: Tensor, magnitude: Tensor, roundings: float, dtype: torch.dtype) -> None:
    """So many roundings of half an eps, of numbers up to `magnitude` each."""
    bound = roundings * torch.finfo(dtype).eps / 2 * magnitude
    assert bool((error.abs() <= bound).all()), (error.abs() - bound).max()


def expect(error: type[Exception], *texts: str, call) -> None:
    with pytest.raises(error) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in {caught.value}"


def refused(error: type[Exception], message: str, function, *args, **options) -> None:
    with pytest.raises(error, match=message):
        function(*args, **options)


# Every compressor and type


class Case(NamedTuple):
    """A compressor and a type at a world size, in a form."""

    row: Row
    dtype: torch.dtype
    size: int
    listed: bool
    average: bool
    residual: bool


def choose() -> list[Case]:
    """Each row once, each kind of compressor with each type; sizes and forms go round."""
    found = []
    for i, t, row in turns(4):
        listed, average = divmod(t % 4, 2)
        residual = row.residual and bool((listed + average + i) % 2)
        dtype, size = FLOATS[(i + t) % 4], SIZES[(i + t) % 3]
        found.append(Case(row, dtype, size, bool(listed), bool(average), residual))
    return found


CASES = choose()


def test_any_two_choices_meet_in_some_case():
    both = (False, True)
    choices = itertools.product(ROWS, FLOATS, SIZES, both, both, both)
    product = (Case(*each) for each in choices if each[0].residual or not each[-1])
    assert meetings(CASES) == meetings(product)


def laws() -> list[int]:
    size, digests = world(), []
    for i, (row, dtype, here, listed, average, with_residual) in enumerate(CASES):
        if here != size:
            continue
        sizes = tuple(UNEVEN[:size]) if listed else (EVEN,) * size
        xs = [inputs_of(rank, sizes, dtype) for rank in range(size)]
        rs = [residuals_of(rank, sizes, dtype) for rank in range(size)] if with_residual else None
        one_scatter(row, dtype, xs, rs, listed, average)
        digests.append(one_gather(row, dtype, xs[0], rs and rs[0], listed))
        digests.append(one_broadcast(row, dtype, i, rs))
    return digests


@every_size
def test_laws(ranks):
    """Conservation, the sum of what was sent, the same bits on all ranks; inputs are only read."""
    agree(run(laws, ranks=ranks))


def one_scatter(row, dtype, xs, rs, listed, average) -> None:
    c, size, real = row.compressor, world(), real_of(dtype)
    own = me()
    x, r = xs[own], None if rs is None else rs[own]
    given = [t.clone() for t in x] if listed else torch.cat(x)
    left = r and ([t.clone() for t in r] if listed else torch.cat(r))
    output = torch.full(x[own].shape, NAN, dtype=dtype)
    op = dist.ReduceOp.AVG if average else "sum"
    handle = tw.reduce_scatter(output, given, c, residual=left, op=op)
    assert handle.is_completed()
    assert handle.collective == "reduce_scatter"
    assert same(torch.cat(list(given)) if listed else given, torch.cat(x))
    weight = 1 / size if average else 1.0
    after = None
    if r:
        after = list(left) if listed else list(left.split([t.numel() for t in x]))
        assert not after[own].any()
        # Summed over ranks, in float64: what all had less what all keep is what the owner got.
        a, b, z = (torch.cat(t).double() for t in (x, r, after))
        table = torch.stack([a + b - z, a.abs() + b.abs() + z.abs()])
        dist.all_reduce(table)
        had, amount = table.split([t.numel() for t in x], dim=1)[own].unbind()
        # On each rank seven roundings (test_contract.test_conservation) of numbers up to twice
        # |x| + |r| + |r'|, as what was sent is x + r - r'; then `size` additions of the sums.
        got = output.double() / weight
        bound = (14 + size) * torch.finfo(real).eps / 2 * amount
        bound += torch.finfo(dtype).eps / 2 * got.abs() + 2 * torch.finfo(dtype).tiny  # the output
        assert bool(((had - got).abs() <= bound).all()), f"{row}, {dtype}: not conserved"
    if row.random:
        return
    # What a rank gets is its own shard as it is, plus what the others' frames decode to, in order.
    total = x[own].to(real)
    total = total.clone() if r is None else total + r[own]
    for rank in range(size):
        if rank != own:
            theirs = None if rs is None else rs[rank][own].clone()
            c.accumulate(c.encode(xs[rank][own], residual=theirs), total)
        elif r:
            for j in set(range(size)) - {own}:
                expected = r[j].clone()
                c.encode(x[j], residual=expected)
                assert same(after[j], expected), f"{row}, {dtype}: residual of shard {j}"
    assert same(output, (total * weight).to(dtype)), f"{row}, {dtype}: wrong sum"


def one_gather(row, dtype, xs, rs, listed) -> int:
    c, own = row.compressor, me()
    x, left = xs[own].clone(), rs and rs[own].clone()
    places = [torch.full_like(t, NAN) for t in xs] if listed else torch.cat(xs) * NAN
    handle = tw.all_gather(places, x, c, residual=left)
    assert handle.collective == "all_gather"
    assert same(x, xs[own])
    slots = places if listed else places.split(EVEN)
    case = f"all_gather, {row}, {dtype}"
    assert all(bool(slot.isfinite().all()) for slot in slots), case
    if rs:
        conserved(x, rs[own], slots[own], left, case)
    for j, slot in enumerate(slots):
        if not row.random:
            frame = c.encode(xs[j], residual=rs and rs[j].clone())
            assert same(slot, c.decode(frame)), case
    return digest(*slots)


def one_broadcast(row, dtype, i, rs) -> int:
    c, own, src = row.compressor, me(), i % world()
    x = normal(500, i, dtype)
    r = normal(500, i + 1, real_of(dtype)) / 8 if rs else None
    tensor = x.clone() if own == src else torch.full_like(x, NAN)
    left = None if r is None else r.clone()
    handle = tw.broadcast(tensor, c, src=src, residual=left)
    assert handle.collective == "broadcast"
    case = f"broadcast, {row}, {dtype}"
    assert bool(tensor.isfinite().all()), case
    if rs and own == src:
        conserved(x, r, tensor, left, case)
    elif rs:  # only the source has something to remember
        assert same(left, r), case
    if not row.random:
        assert same(tensor, c.decode(c.encode(x, residual=r))), case
    return digest(tensor)


def conserved(x, old, sent, new, case) -> None:
    """x + old residual = what all can decode + new residual."""
    error = x.double() + old.double() - sent.double() - new.double()
    amount = sum(t.double().abs() for t in (x, old, sent, new))
    # Seven roundings in the residual's type; one of what was sent, in that of the tensor.
    bound = 3.5 * torch.finfo(new.dtype).eps * amount + torch.finfo(x.dtype).tiny
    bound += torch.finfo(x.dtype).eps / 2 * sent.double().abs()
    assert bool((error.abs() <= bound).all()), f"{case}: not conserved"


# reduce_scatter


def scatter_dense() -> None:
    """Where nothing is lost the sum is that of a dense reduction, in the same order."""
    size, own = world(), me()
    for spec, dtype in itertools.product(["none", "lossless", "topk:1.0"], FLOATS):
        xs = [torch.cat(inputs_of(rank, (EVEN,) * size, dtype)) for rank in range(size)]
        output = torch.empty(EVEN, dtype=dtype)
        tw.reduce_scatter(output, xs[own], spec)
        dense = sum(x.double() for x in xs)[own * EVEN :][:EVEN]
        amount = sum(x.double().abs() for x in xs)[own * EVEN :][:EVEN]
        # Sums of `size` numbers take size - 1 roundings; the output takes one of its own.
        narrow = torch.finfo(dtype).eps / torch.finfo(real_of(dtype)).eps
        close(output - dense, amount, size - 1 + narrow, real_of(dtype))
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        for spec in ("none", "lossless"):
            xs = torch.arange(size * size * 5, dtype=dtype).view(size, size * 5)
            output = torch.empty(5, dtype=dtype)
            tw.reduce_scatter(output, xs[own], spec)
            assert same(output, xs.sum(0, dtype=dtype)[own * 5 :][:5])


@every_size
def test_reduce_scatter_without_loss_is_the_dense_one(ranks):
    run(scatter_dense, ranks=ranks)


def layouts() -> list[tuple[str, str, torch.dtype]]:
    """Of two tensors, and a type; each three at one of the sizes, each two at all."""
    found = itertools.product(enumerate(LAYOUTS), enumerate(LAYOUTS[:3]), enumerate(FLOATS[::3]))
    return [(a, b, c) for (i, a), (j, b), (k, c) in found if (i + j + k + world()) % 3 == 0]


def scatter_layouts() -> None:
    size, own = world(), me()
    for layout, other, dtype in layouts():
        x = lay(normal(size * 6 * 10, own, dtype).view(size * 2, 3, 10), layout)
        r = lay(normal(size * 6 * 10, own + 9, real_of(dtype)).view(size * 2, 3, 10), other)
        flat, kept = x.contiguous().view(-1), r.contiguous().view(-1).clone()
        expected = torch.empty(60, dtype=dtype)
        tw.reduce_scatter(expected, flat, "topk:0.3", residual=kept)
        before = x.clone()
        output = lay(torch.empty(5, 12, dtype=dtype), other)
        tw.reduce_scatter(output, x, "topk:0.3", residual=r)
        assert same(output.reshape(-1), expected), (layout, other, dtype)
        assert same(r.reshape(-1), kept), (layout, other, dtype)
        assert same(x.contiguous(), before.contiguous())


@every_size
def test_reduce_scatter_takes_any_strides(ranks):
    run(scatter_layouts, ranks=ranks)


def scatter_in_place(layout: str) -> None:
    size, own = world(), me()
    for spec in ["none", *LOSSY]:
        x = normal(size * 40, own)
        r, kept = torch.ones(size * 40) / 8, torch.ones(size * 40) / 8
        expected = torch.empty(40)
        tw.reduce_scatter(expected, x, spec, residual=r)
        room = lay(x, layout)
        room = room.clone() if layout == "plain" else room
        shard = room[own * 40 :][:40]
        tw.reduce_scatter(shard, room, spec, residual=kept)
        whole = x.clone()
        whole[own * 40 :][:40] = expected
        assert same(room.contiguous(), whole), spec
        assert same(r, kept)


@pytest.mark.parametrize("layout", ["plain", "strided"])
def test_reduce_scatter_into_a_view_of_its_input(layout):
    run(scatter_in_place, layout, ranks=3)


def scatter_not_finite() -> None:
    """A NaN or infinity in turn of any rank, for any rank; each with every other compressor."""
    size, own = world(), me()
    for i, spec in enumerate(["none", "cast:fp16", "topk:0.3", "quantize:4"]):
        for culprit, owner in itertools.product(range(i % 2, size, 2), range(size)):
            turn = i + culprit + owner
            value, with_residual = [(NAN, True), (INF, turn % 4 == 1)][turn % 2]
            x, r = normal(size * 40, own), normal(size * 40, own + 7)
            if own == culprit:
                x[owner * 40 + 3] = value
            kept, output = r.clone(), torch.zeros(40)
            tw.reduce_scatter(output, x, spec, residual=kept if with_residual else None)
            case = f"{spec}: {value} of rank {culprit} for rank {owner}"
            assert bool(output.isfinite().all()) == (own != owner), case
            assert same(kept, r), f"{case}: the residual of rank {own} changed"


@every_size
def test_reduce_scatter_of_what_is_not_finite_reaches_the_owner_and_no_residual(ranks):
    run(scatter_not_finite, ranks=ranks)


def scatter_refusals() -> None:
    x, out = normal(8), torch.empty(4)
    rs = tw.reduce_scatter
    for op in ("max", dist.ReduceOp.MIN, "product"):
        refused(ValueError, "SUM and AVG", rs, out, x, "none", op=op)
    refused(ValueError, "op must be one of sum, avg", rs, out, x, "none", op="total")
    refused(ValueError, "must have 4 elements .* got 5", rs, torch.empty(5), x, "none")
    refused(ValueError, "must have 3.5 elements", rs, out, x[:7], "none")
    refused(ValueError, "elements of torch.float32", rs, out.double(), x, "none")
    refused(ValueError, "must be 2 tensors, one for each rank, got 3", rs, out, [out] * 3, "none")
    refused(ValueError, "1 residuals for 2 inputs", rs, out, [out] * 2, "none", residual=[out])
    refused(ValueError, "residual must match", rs, out, x, "onebit", residual=out)
    refused(TypeError, "must be torch.float32", rs, out, x, "onebit", residual=x.double())
    refused(TypeError, "float32, float64", rs, out.int(), x.int(), "topk:0.1")
    refused(TypeError, "use SUM", rs, out.int(), x.int(), "none", op="avg")
    refused(TypeError, "compressor or a spec", rs, out, x, 3)
    refused(TypeError, "expected a tensor, got float", rs, out, [out, 3.0], "none")
    refused(ValueError, "timeout must be", rs, out, x, "none", timeout=-1)
    refused(TypeError, "a meta one", rs, out, x.to("meta"), "none")
    refused(tw.MemoryLimitError, "limit is 100 B", rs, out, x, "none", max_bytes=100)
    # The compressor itself refuses when it drafts; all ranks do, and the group stays usable.
    refused(ValueError, "residual", rs, out, x, "randomk:0.1,scaled=true", residual=x.clone())
    rs(out, x, "none")
    assert same(out, 2 * normal(8)[4 * me() :][:4])
    residuals = [None, torch.zeros(4)]  # some may have none
    rs(out, list(x.split(4)), "topk:0.5", residual=residuals)
    assert residuals[1].any() == (me() == 0)


def test_reduce_scatter_refuses_what_it_cannot_do_and_says_why():
    run(scatter_refusals, ranks=2)


def scatter_bytes() -> int:
    n = 40_000 * world()
    x = normal(n, me())
    sent = 0
    for spec in ["none", "quantize:8", "quantize:4", "topk:0.01", "onebit"]:
        handle = tw.reduce_scatter(torch.empty(n // world()), x, spec)
        whole = tw.parse(spec).encode(x).num_bytes * (world() - 1) / world()
        # A frame for each other rank: a header and padding of at most 64 bytes each, and blocks of
        # scales that shards cut; the meeting's record is 8 * (12 + ranks) bytes for each.
        others = world() - 1
        assert abs(handle.bytes_sent - whole) <= 0.02 * whole + others * (128 + 8 * (12 + world()))
        assert handle.account.bytes_received > 0
        sent += handle.bytes_sent - handle.account.bytes_received
    return sent


@every_size
def test_reduce_scatter_sends_all_but_the_own_share_of_a_payload(ranks):
    assert sum(run(scatter_bytes, ranks=ranks)) == 0  # what one sent, another received


# all_gather


def gather_forms() -> None:
    """Strides, shapes, a view of the output as input, integers."""
    size, own = world(), me()
    for layout, other, dtype in layouts():
        xs = [lay(normal(60, i, dtype).view(4, 3, 5), layout) for i in range(size)]
        left = lay(normal(60, own + 9, real_of(dtype)).view(4, 3, 5), other)
        kept, expected = left.contiguous().clone(), torch.empty(size * 60, dtype=dtype)
        tw.all_gather(expected, xs[own].contiguous(), "topk:0.3", residual=kept)
        places = [lay(torch.zeros(3, 20, dtype=dtype), other) for _ in range(size)]
        tw.all_gather(places, xs[own], "topk:0.3", residual=left)
        assert same(torch.cat([p.reshape(-1) for p in places]), expected), (layout, other)
        assert same(left.contiguous(), kept)
        assert same(xs[own].contiguous(), lay(normal(60, own, dtype).view(4, 3, 5), layout) + 0)
    for spec in ["none", *LOSSY]:
        table = torch.stack([normal(100, i) for i in range(size)])
        expected = torch.stack([tw.parse(spec).decode(tw.parse(spec).encode(x)) for x in table])
        tw.all_gather(table, table[own], spec)
        assert same(table, expected)
    for spec, dtype in itertools.product(["none", "lossless"], INTEGERS):
        xs = [torch.arange(own_length, dtype=torch.int64).to(dtype) for own_length in UNEVEN[:size]]
        places = [torch.zeros_like(x) for x in xs]
        tw.all_gather(places, xs[own], spec)
        assert all(same(a, b) for a, b in zip(places, xs, strict=True))
    scalar = torch.empty(size)
    tw.all_gather(scalar, torch.tensor(float(own)), "none")
    assert scalar.tolist() == list(range(size))


@every_size
def test_all_gather_takes_any_strides_and_lengths_and_lossless_any_type(ranks):
    run(gather_forms, ranks=ranks)


def gather_refusals() -> None:
    x, own = normal(5), me()
    ag = tw.all_gather
    refused(ValueError, "2 x 5 elements, got float32 .9", ag, torch.empty(9), x, "none")
    refused(ValueError, "contiguous", ag, torch.empty(5, 2).t(), x, "none")
    refused(ValueError, "2 tensors, one for each rank, got 1", ag, [torch.empty(5)], x, "none")
    places = [torch.empty(5 + (i == own)) for i in range(2)]
    refused(ValueError, "like the input, float32 .5., got float32 .6.", ag, places, x, "none")
    for odd in range(2):
        places = [torch.empty(5, dtype=FLOATS[i == odd]) for i in range(2)]
        refused(ValueError, f"output.{odd}. must .* got float64", ag, places, x, "none")
    refused(TypeError, "float32, float64", ag, torch.empty(10).int(), x.int(), "onebit")
    refused(ValueError, "residual must match", ag, torch.empty(10), x, "none", residual=x[:4])
    refused(ValueError, "rank 9|rank=9|src", tw.broadcast, x, "none", src=9)
    refused(ValueError, "rank -1|rank=-1|src", tw.broadcast, x, "none", src=-1)
    refused(TypeError, "float32, float64", tw.broadcast, x.int(), "onebit")
    refused(TypeError, "must be torch.float32", tw.broadcast, x, "none", residual=x.double())


def test_all_gather_and_broadcast_refuse_what_they_cannot_do_and_say_why():
    run(gather_refusals, ranks=2)


def gather_not_finite() -> None:
    size, own = world(), me()
    specs = ["none", "cast:fp16", "topk:0.3", "quantize:4"]
    for (i, spec), culprit in itertools.product(enumerate(specs), range(size)):
        value = (NAN, INF)[(i // 2 + culprit) % 2]
        x, r = normal(60, own), normal(60, own + 9)
        if own == culprit:
            x[3] = value
        left, places = r.clone(), torch.zeros(size, 60)
        tw.all_gather(places, x, spec, residual=left)
        for i in range(size):
            right = places[i].isnan().all() if i == culprit else places[i].isfinite().all()
            assert bool(right), f"{spec}: {value} of rank {culprit}, place {i} of rank {own}"
        assert bool(left.isfinite().all())
        assert same(left, r) == (own == culprit)


@every_size
def test_all_gather_of_what_is_not_finite_is_nan_everywhere_and_in_no_residual(ranks):
    run(gather_not_finite, ranks=ranks)


# broadcast


def broadcast_forms() -> None:
    size, own = world(), me()
    for src, (i, layout) in itertools.product(range(size), enumerate(LAYOUTS[:3])):
        other = LAYOUTS[(i + src + size) % 3]  # each two at one of the sizes
        x, r = normal(60, src).view(4, 3, 5), normal(60, 9).view(4, 3, 5)
        tensor = lay(x.clone() if own == src else torch.zeros_like(x), layout)
        left = lay(r.clone(), other)
        tw.broadcast(tensor, "topk:0.3", src=src, residual=left)
        kept = r.clone()
        c = tw.TopK(0.3)
        assert same(tensor.contiguous(), c.decode(c.encode(x, residual=kept)))
        assert same(left.contiguous(), kept if own == src else r)
    for src, (i, dtype) in itertools.product(range(size), enumerate(INTEGERS)):
        spec = ("none", "lossless")[(src + i) % 2]
        tensor = (torch.arange(50) * (own == src)).to(dtype)
        tw.broadcast(tensor, spec, src=src)
        assert same(tensor, torch.arange(50).to(dtype))
    for src, (i, spec) in itertools.product(range(size), enumerate(["none", *LOSSY[:2]])):
        value = (NAN, INF)[(src + i) % 2]
        tensor, r = normal(60), normal(60, own)
        left = r.clone()
        if own == src:
            tensor[7] = value
        tw.broadcast(tensor, spec, src=src, residual=left)
        assert bool(tensor.isnan().all()), f"{spec}: {value} of rank {src}"
        assert same(left, r)
    parameter = torch.nn.Parameter(torch.full((5, 3), float(own)))
    tw.broadcast(parameter, "none", src=size - 1)
    assert same(parameter.detach(), torch.full((5, 3), size - 1.0))


@every_size
def test_broadcast_takes_any_source_strides_and_lossless_any_type(ranks):
    run(broadcast_forms, ranks=ranks)


# All of them


def nothing() -> None:
    """Tensors and shards without elements, of any shape."""
    size, own = world(), me()
    for i, spec in enumerate(["none", "lossless", *LOSSY]):
        x = torch.empty((0,) if (i + size) % 2 else (3, 0, 2))
        lengths = [40 * (j % 2) for j in range(size)]
        tw.broadcast(x, spec, src=1, residual=x.clone())
        tw.all_gather(torch.empty(0), x, spec, residual=x.clone())
        tw.reduce_scatter(torch.empty(0), x, spec, residual=x.clone())
        xs = [normal(n, j) for j, n in enumerate(lengths)]
        places = [torch.full([n], NAN) for n in lengths]
        tw.all_gather(places, xs[own], spec)
        assert all(bool(place.isfinite().all()) for place in places)
        output = torch.full([lengths[own]], NAN)
        tw.reduce_scatter(output, xs, spec, residual=[x.clone() for x in xs])
        assert bool(output.isfinite().all())


@every_size
def test_what_has_no_elements_is_no_special_case(ranks):
    run(nothing, ranks=ranks)


def sub_groups() -> None:
    """Two groups at once, addressed by global ranks; a rank outside is refused."""
    pairs = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    members = [[0, 2], [1, 3]]
    own, c = me(), tw.TopK(0.3)
    mine, (low, high) = pairs[own % 2], members[own % 2]
    for src in (low, high):
        tensor = normal(50, own)
        tw.broadcast(tensor, c, src=src, group=mine)
        assert same(tensor, c.decode(c.encode(normal(50, src))))
    places = torch.empty(2, 50)
    tw.all_gather(places, normal(50, own), c, group=mine)
    for place, rank in zip(places, (low, high), strict=True):
        assert same(place, c.decode(c.encode(normal(50, rank))))
    output = torch.empty(25)
    tw.reduce_scatter(output, normal(50, own), "none", group=mine)
    half = slice(0, 25) if own == low else slice(25, 50)
    assert same(output, normal(50, own)[half] + normal(50, low + high - own)[half])
    other, (low, _) = pairs[1 - own % 2], members[1 - own % 2]
    refused(ValueError, "does not belong", tw.all_gather, places, tensor, c, group=other)
    refused(ValueError, "not part of|does not", tw.broadcast, tensor, c, src=low, group=mine)
    spec, src = "none" if own < 2 else c, own % 2
    call = lambda: tw.broadcast(tensor, spec, src=src, group=mine)  # noqa: E731
    expect(tw.MismatchError, f"none on rank {own % 2}", f"0.3 on rank {own % 2 + 2}", call=call)


def test_sub_groups_know_global_ranks():
    run(sub_groups, ranks=4)


def alone() -> None:
    """A group of one has nobody to talk to: everything stays as it is."""
    groups = [dist.new_group([rank]) for rank in range(world())]
    group = groups[me()]
    for layout, dtype in itertools.product(LAYOUTS[:3], FLOATS[::3]):
        x = lay(normal(60, 1, dtype).view(4, 3, 5), layout)
        for form in (lambda t: t, lambda t: [t]):
            output = torch.empty(60, dtype=dtype)
            r = torch.ones(x.shape, dtype=real_of(dtype))
            handle = tw.reduce_scatter(output, form(x), "topk:0.1", residual=form(r), group=group)
            assert handle.bytes_sent == 0
            # Nothing travels: x and r are in the output and the residual, in whichever way.
            total = output.double().view_as(r) + r.double()
            close(total - (x.double() + 1), x.double().abs() + 1, 2, dtype)
            output = torch.empty(60, dtype=dtype)
            tw.all_gather(form(output), x, "topk:0.1", group=group)
            assert same(output, x.reshape(-1))
        tensor = lay(normal(60, 1, dtype).view(4, 3, 5), layout)
        assert tw.broadcast(tensor, "topk:0.1", src=me(), group=group).is_completed()
        assert same(tensor, x)


def test_a_group_of_one_changes_nothing():
    run(alone, ranks=2)


def disagreements() -> None:
    size, own = world(), me()
    odd = size - 1  # the rank that does something else
    others = f"{'rank' if size == 2 else 'ranks'} {', '.join(map(str, range(odd)))}"
    x, r, old = (normal(12 * size, seed) for seed in (0, 1, 1))
    places, shard = torch.zeros(12 * size * size), torch.zeros(12)

    def gather(tensor=x, spec="topk:0.1", out=None):
        out = torch.zeros(size * tensor.numel(), dtype=tensor.dtype) if out is None else out
        return lambda: tw.all_gather(out, tensor, spec, residual=r)

    def spread(src=0, spec="topk:0.1", tensor=x):
        return lambda: tw.broadcast(tensor, spec, src=src, residual=r)

    def scatter(op="sum", spec="topk:0.1", tensor=x):
        return lambda: tw.reduce_scatter(shard, tensor, spec, op=op, residual=r)

    cases = [
        (gather(), spread(), "call: ", "all_gather", "broadcast"),
        (gather(), scatter(), "call: ", "all_gather", "reduce_scatter"),
        (spread(), gather(), "call: ", "broadcast", "all_gather"),
        (gather(), gather(spec="topk:0.2"), "compressor: ", "topk:0.1", "topk:0.2"),
        (spread(), spread(spec="none"), "compressor: ", "topk:0.1", "none"),
        (spread(), spread(src=1), "src: ", "0", "1"),
        (scatter(), scatter(op="avg"), "op: ", "SUM", "AVG"),
        (scatter(), scatter(spec="onebit"), "compressor: ", "topk:0.1", "onebit"),
    ]
    for usual, other, field, a, b in cases:
        parts = [f"{a} on {others}", f"{b} on rank {odd}"]
        expect(tw.MismatchError, field, *parts, call=other if own == odd else usual)
    short = normal(12)
    wrong = lambda: tw.all_gather(torch.zeros(12 * size), short, "none")  # noqa: E731
    expect(tw.MismatchError, "output: ", call=wrong if own == odd else gather(spec="none"))
    wrong = lambda: tw.broadcast(short, "none", src=0)  # noqa: E731
    expect(tw.MismatchError, "float32 [12] on", call=wrong if own == odd else spread(spec="none"))
    wrong = lambda: tw.broadcast(x.half(), "none", src=0)  # noqa: E731
    expect(tw.MismatchError, "float16", call=wrong if own == odd else spread(spec="none"))
    # What one rank cannot do, the others learn; nobody's tensors change.
    few = [
        lambda **o: tw.all_gather(places, x, "topk:0.1", residual=r, **o),
        lambda **o: tw.broadcast(x, "topk:0.1", src=0, residual=r, **o),
        lambda **o: tw.reduce_scatter(shard, x, "topk:0.1", residual=r, **o),
    ]
    for call in few:
        if own == odd:
            refused(tw.MemoryLimitError, "limit is 10 B", call, max_bytes=10)
        else:
            expect(tw.PeerError, f"rank {odd}: MemoryLimitError", call=call)
    assert same(r, old)
    assert same(x, normal(12 * size))
    assert not places.any()
    assert not shard.any()
    gather(spec="none", out=places)()  # the group stays usable
    assert places.any()


@every_size
def test_disagreement_is_an_error_that_names_ranks_on_all_and_changes_nothing(ranks):
    run(disagreements, ranks=ranks)


def program(async_op: bool) -> list[int]:
    """All of the family in one program, in the background or one by one, with dense ones between.

    Point-to-point messages have channels of their own: each rank places them where it likes.
    """
    size, own = world(), me()
    right, left = (own + 1) % size, (own - 1) % size
    handles, results, residuals = [], [], []

    def point() -> None:
        received = torch.empty(64)
        coming = tw.irecv(received, src=left)
        handles.extend([coming, tw.isend(normal(64, own), "onebit", dst=right)])
        results.append(received)

    if own % 2:
        point()
    for turn, spec in enumerate(["topk:0.3", "randomk:0.5", "quantize:4,stochastic=true", "none"]):
        options = {"async_op": async_op, "residual": None}

        def memory() -> dict:
            residuals.append(torch.zeros(size * 30))
            return {**options, "residual": residuals[-1]}  # noqa: B023

        x = normal(size * 30, 10 * own + turn)
        spread, shard, table = x.clone(), torch.empty(30), torch.empty(size, size * 30)
        reduced = x.clone()
        handles.append(tw.broadcast(spread, spec, src=turn % size, **memory()))
        handles.append(tw.reduce_scatter(shard, x, spec, op="avg", **memory()))
        dense = torch.ones(1)
        dist.all_reduce(dense)
        assert dense.item() == size
        handles.append(tw.all_gather(table, x, spec, **memory()))
        handles.append(tw.all_reduce(reduced, spec, **memory()))
        results += [spread, shard, table, reduced]
    if not own % 2:
        point()
    tw.wait_all(handles)
    assert all(handle.is_completed() and handle.exception() is None for handle in handles)
    point_first = results if own % 2 else [*results[-1:], *results[:-1]]
    return [digest(t) for t in [*point_first, *residuals]]


@every_size
def test_in_the_background_and_interleaved_the_results_are_the_same(ranks):
    plain, background = (run(program, async_op, ranks=ranks) for async_op in (False, True))
    assert plain == background


def background_errors() -> None:
    """Errors wait in the handle; wait_all waits for everything and raises the first."""
    x, places = normal(10, me()), torch.zeros(world(), 10)
    good = tw.all_gather(places, x, "none", async_op=True)
    bad = tw.broadcast(x, "none" if me() else "onebit", src=0, async_op=True)
    worse = tw.broadcast(x, "none", src=1 if me() else 0, async_op=True)
    last = tw.broadcast(x.clone(), "none", src=0, async_op=True)
    expect(tw.MismatchError, "compressor: ", call=lambda: tw.wait_all([good, bad, worse, last]))
    assert last.is_completed()
    assert isinstance(bad.exception(), tw.MismatchError)
    expect(tw.MismatchError, "src: ", call=worse.wait)
    assert good.get_future().wait() is places
    assert same(x, normal(10, me()))
    assert all(same(place, normal(10, i)) for i, place in enumerate(places))


@every_size
def test_background_errors_are_raised_by_waiting(ranks):
    run(background_errors, ranks=ranks)


def keys() -> list[int]:
    """Counted keys differ from call to call, given ones always draw the same."""
    x, answers = normal(400, 3), []
    for spec in ["randomk:0.1", "qsgd:1", "randomk:0.1,shared=true"]:
        for key in (None, tw.Key(seed=5, step=6)):
            found = []
            for _ in range(2):
                tensor, places, shard = x.clone(), torch.empty(world(), 400), torch.empty(40)
                tw.broadcast(tensor, spec, src=0, key=key)
                tw.all_gather(places, x, spec, key=key)
                tw.reduce_scatter(shard, x[: 40 * world()], spec, key=key)
                found.append((tensor, places, shard))
            equal = [same(a, b) for a, b in zip(*found, strict=True)]
            assert equal == [key is not None] * 3, (spec, key)
            answers += [digest(*pair[:2]) for pair in found]
            # Ranks draw differently unless they share: their errors then do not add up.
            assert same(found[0][1][0], found[0][1][1]) == ("shared" in spec)
    return answers


@every_size
def test_the_same_key_draws_the_same_and_every_call_and_rank_another(ranks):
    agree(run(keys, ranks=ranks))
