"""The laws of send and recv, and of the pipeline made of them, among real ranks."""

import itertools
import os
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, run
from rows import ROWS, Row, meetings, turns
from tensors import FLOATS, INTEGERS, LAYOUTS, content, lay, normal, real_of, same
from torch import Tensor, nn

import thinwire as tw
from thinwire.collectives import connect
from thinwire.collectives.pairs import GIVEN_UP, PairChannel

SIZES = [2, 3, 4]
NAN, INF = float("nan"), float("inf")
DEADLOCK = 600.0  # seconds: ranks.py ends a pipeline that waits for itself long before

every_size = pytest.mark.parametrize("ranks", SIZES)


def me() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def expect(error: type[Exception], *texts: str, call) -> None:
    with pytest.raises(error) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in {caught.value}"


# Messages


class Case(NamedTuple):
    """A compressor and a type at a world size."""

    row: Row
    dtype: torch.dtype
    size: int
    residual: bool


CASES = [
    Case(row, FLOATS[(i + t) % 4], SIZES[(i + t) % 3], row.residual and bool((t + t // 4) % 2))
    for i, t, row in turns(4)
]


def test_any_two_choices_meet_in_some_case():
    choices = itertools.product(ROWS, FLOATS, SIZES, (False, True))
    product = (Case(*each) for each in choices if each[0].residual or not each[-1])
    assert meetings(CASES) == meetings(product)


def ring() -> None:
    """All send to the right and receive from the left at once."""
    own, size = me(), world()
    right, left = (own + 1) % size, (own - 1) % size
    for row, dtype, here, with_residual in CASES:
        if here != size:
            continue
        c = row.compressor
        xs = [normal(500, rank, dtype) for rank in range(size)]
        rs = [normal(500, rank + 9, real_of(dtype)) / 8 for rank in range(size)]
        x, r, out = xs[own].clone(), rs[own].clone(), torch.full([500], NAN, dtype=dtype)
        coming = tw.irecv(out, src=left)
        going = tw.isend(x, c, dst=right, residual=r if with_residual else None)
        tw.wait_all([coming, going])
        assert (coming.collective, going.collective) == ("recv", "send")
        assert same(x, xs[own])
        case = f"{row}, {dtype}"
        if not row.random:
            theirs = rs[left] if with_residual else None
            assert same(out, c.decode(c.encode(xs[left], residual=theirs))), case
        assert bool(out.isfinite().all()), case
        if with_residual:
            # What all had is what all received and what all keep. Seven roundings in the type of
            # residuals (test_contract.test_conservation), and one in that of the tensor.
            old = normal(500, own + 9, real_of(dtype)) / 8
            had = x.double() + old.double() - r.double() - out.double()
            bound = 3.5 * torch.finfo(r.dtype).eps * (x.abs() + old.abs() + r.abs()).double() * 2
            bound += torch.finfo(dtype).eps / 2 * out.double().abs() + torch.finfo(dtype).tiny
            table = torch.stack([had, bound])
            dist.all_reduce(table)
            assert bool((table[0].abs() <= table[1]).all()), f"{case}: not conserved"
        else:
            assert same(r, normal(500, own + 9, real_of(dtype)) / 8)


@every_size
def test_a_ring_of_sends_delivers_and_conserves(ranks):
    run(ring, ranks=ranks)


def many() -> None:
    """Both directions at once; nobody waits before the last."""
    own = me()
    xs = [torch.full([50], float(i + 1000 * own)) for i in range(100)]
    outs = [torch.zeros(50) for _ in xs]
    going = [tw.isend(x, "lossless" if i % 2 else "none", dst=1 - own) for i, x in enumerate(xs)]
    coming = [tw.irecv(out, src=1 - own) for out in outs]
    tw.wait_all(coming + going)
    for i, out in enumerate(outs):
        assert same(out, torch.full([50], float(i + 1000 * (1 - own))))
    for i in range(20):  # and with waiting
        x = torch.full([3], float(i))
        tw.send(x, "none", dst=1) if own == 0 else tw.recv(xs[i][:3], src=0)
        assert own == 0 or same(xs[i][:3], x)


def test_messages_arrive_in_the_order_they_were_sent():
    run(many, ranks=2)


def tags() -> None:
    own, zero, one = me(), torch.zeros(5), torch.zeros(5)
    if own == 0:  # the receiver waits for tag 0 first, but gets tag 1 first
        tw.send(normal(5, 1), "none", dst=1, tag=1)
        tw.send(normal(5, 0), "none", dst=1, tag=0)
    else:
        waiting = tw.irecv(zero, src=0, tag=0)
        tw.recv(one, src=0, tag=1)
        waiting.wait()
        assert same(zero, normal(5, 0))
        assert same(one, normal(5, 1))
    dist.barrier()
    if own == 0:  # the sender began with tag 0, the receiver takes tag 1 first
        waiting = tw.isend(normal(5, 2), "none", dst=1, tag=0)
        tw.send(normal(5, 3), "none", dst=1, tag=7)
        waiting.wait()
    else:
        tw.recv(one, src=0, tag=7)
        tw.recv(zero, src=0, tag=0)
        assert same(zero, normal(5, 2))
        assert same(one, normal(5, 3))
    # A message that nobody takes yet holds up no collective of the group, nor the other direction.
    waiting = tw.isend(normal(5, 4), "none", dst=1) if own == 0 else tw.irecv(zero, src=0, tag=9)
    places = torch.empty(2, 5)
    tw.all_gather(places, normal(5, own), "none")
    assert same(places[1 - own], normal(5, 1 - own))
    tw.recv(one, src=1) if own == 0 else tw.send(normal(5, 5), "none", dst=0)
    if own == 0:
        tw.send(normal(5, 6), "none", dst=1, tag=9)
    else:
        tw.recv(one, src=0)
        assert same(one, normal(5, 4))
    waiting.wait()
    assert own == 0 or same(zero, normal(5, 6))


def test_tags_and_directions_and_collectives_do_not_wait_for_each_other():
    run(tags, ranks=2)


def memory() -> None:
    """Over 10 sends: all that was to be sent has arrived, or is in the residual."""
    own, turns = me(), 10
    for spec, dtype in itertools.product(["topk:0.05", "onebit", "randomk:0.1", "qsgd:1"], FLOATS):
        xs = [normal(300, turn, dtype) for turn in range(turns)]
        if own == 0:
            r = torch.zeros(300, dtype=real_of(dtype))
            for x in xs:
                tw.send(x, spec, dst=1, residual=r)
            tw.send(r, "none", dst=1)
            continue
        arrived, amount = torch.zeros(300).double(), torch.zeros(300).double()
        bound = torch.zeros(300).double()
        for x in xs:
            out = torch.empty(300, dtype=dtype)
            tw.recv(out, src=0)
            arrived += out.double()
            # Residuals reach 10 |x| at the most; a turn takes seven roundings of such sums in the
            # type of residuals, and what arrives one in its own.
            amount += out.double().abs() + x.double().abs()
            bound += 3.5 * torch.finfo(real_of(dtype)).eps * 2 * amount
            bound += torch.finfo(dtype).eps / 2 * out.double().abs() + torch.finfo(dtype).tiny
        r = torch.empty(300, dtype=real_of(dtype))
        tw.recv(r, src=0)
        error = sum(x.double() for x in xs) - arrived - r.double()
        assert bool((error.abs() <= bound).all()), f"{spec}, {dtype}: not conserved"


def test_what_a_sequence_of_sends_leaves_out_is_in_the_residual():
    run(memory, ranks=2)


def forms() -> None:
    """Strides of tensor, residual and destination; types; and what is not finite."""
    own, c = me(), tw.TopK(0.3)
    for x_layout, r_layout, dtype in itertools.product(LAYOUTS, LAYOUTS[:3], FLOATS):
        x = normal(60, 1, dtype).view(4, 3, 5)
        x, r = lay(x, x_layout), normal(60, 2, real_of(dtype)).view(4, 3, 5)
        kept = r.clone()
        sent = c.decode(c.encode(x, residual=kept))
        if own == 0:
            before, left = x.clone(), lay(r.clone(), r_layout)
            tw.send(x, c, dst=1, residual=left)
            assert same(left.contiguous(), kept), (x_layout, r_layout, dtype)
            assert same(x.contiguous(), before.contiguous())
            tw.send(x, c, dst=1)
        else:
            out = lay(torch.zeros(4, 3, 5, dtype=dtype), r_layout)
            tw.recv(out, src=0)
            assert same(out.contiguous(), sent), (x_layout, r_layout, dtype)
            tw.recv(out, src=0)
            assert same(out.contiguous(), c.decode(c.encode(x)))
    for spec, dtype in itertools.product(["none", "lossless"], INTEGERS):
        x, out = torch.arange(70).to(dtype), torch.zeros(70, dtype=dtype)
        tw.send(x, spec, dst=1) if own == 0 else tw.recv(out, src=0)
        assert own == 0 or same(out, x)
    for spec, value in itertools.product(["none", "topk:0.1", "quantize:4"], [NAN, INF]):
        x, r, out = normal(50), normal(50, 1), torch.zeros(50)
        x[3] = value
        left = r.clone()
        tw.send(x, spec, dst=1, residual=left) if own == 0 else tw.recv(out, src=0)
        assert own == 0 or bool(out.isnan().all())
        assert same(left, r)
    scalar = torch.tensor(3.0 * own)
    tw.recv(scalar, src=1) if own == 0 else tw.send(scalar, "none", dst=0)
    assert scalar.item() == 3.0


def test_sends_take_any_strides_and_lossless_any_type():
    run(forms, ranks=2)


def nothing() -> None:
    for spec, shape in itertools.product(["none", "lossless", "onebit"], [(0,), (3, 0, 2)]):
        x = torch.empty(shape)
        tw.send(x, spec, dst=1, residual=x.clone()) if me() == 0 else tw.recv(x, src=0)
    # What comes after them is not taken for one of them.
    x = normal(5)
    tw.send(x, "none", dst=1) if me() == 0 else tw.recv(x.zero_(), src=0)
    assert same(x, normal(5))


def test_sends_take_tensors_without_elements():
    run(nothing, ranks=2)


def sub_groups() -> None:
    """Peers are named by their global ranks, and the same pair in two groups is two channels."""
    pairs = {0: dist.new_group([0, 2]), 1: dist.new_group([3, 1])}
    own, out, other = me(), torch.zeros(5), torch.zeros(5)
    peer, group = own ^ 2, pairs[own % 2]
    coming = [tw.irecv(out, src=peer, group=group), tw.irecv(other, src=peer)]
    tw.send(normal(5, own), "none", dst=peer, group=group)
    tw.send(normal(5, own + 10), "none", dst=peer)
    tw.wait_all(coming)
    assert same(out, normal(5, peer))
    assert same(other, normal(5, peer + 10))
    outside, theirs = own ^ 1, pairs[1 - own % 2]
    for wrong, text in [(group, "not part of"), (theirs, "not belong")]:
        expect(ValueError, text, call=lambda: tw.recv(out, src=outside, group=wrong))  # noqa: B023
    if own < 2:
        call = lambda: tw.send(out, "none", dst=peer, group=group)  # noqa: E731
    else:
        call = lambda: tw.recv(torch.zeros(6), src=peer, group=group)  # noqa: E731
    low, high = sorted((own, peer))
    expect(tw.MismatchError, f"[5] on rank {low}", f"[6] on rank {high}", call=call)


def test_sends_in_sub_groups_know_global_ranks():
    run(sub_groups, ranks=4)


def resources() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def many_tags(turns: int) -> list[tuple[int, int]]:
    """Sixteen new tags in each turn, received in another order than sent."""
    found = []
    for turn in range(turns):
        tags = range(16 * turn, 16 * turn + 16)
        xs = {tag: torch.full([5], float(tag)) for tag in tags}
        if me() == 0:
            tw.wait_all([tw.isend(x, "none", dst=1, tag=tag) for tag, x in xs.items()])
        else:
            outs = {tag: torch.zeros(5) for tag in reversed(tags)}
            tw.wait_all([tw.irecv(out, src=0, tag=tag) for tag, out in outs.items()])
            assert all(same(outs[tag], x) for tag, x in xs.items())
        found.append(resources())
    return found


def test_tags_take_neither_threads_nor_connections():
    for first, *others in run(many_tags, 4, ranks=2):
        for each in others:
            assert each[0] <= first[0]
            assert each[1] <= first[1]


def given_up_tags() -> None:
    """One side gives a tag up while the other has not come, or comes just then; others go on."""
    own, out = me(), torch.zeros(5)
    tw.send(normal(5), "none", dst=1, tag=9) if own == 0 else tw.recv(out, src=0, tag=9)
    for giving_up, tag in ((0, 0), (1, 1)):
        limit = 0.1 if own == giving_up else DEADLOCK
        call = (
            (lambda: tw.send(normal(5), "none", dst=1, tag=tag, timeout=limit))  # noqa: B023
            if own == 0
            else (lambda: tw.recv(out, src=0, tag=tag, timeout=limit))  # noqa: B023
        )
        if own == giving_up:
            expect(tw.PeerError, f"no answer from rank {1 - own} within 0.1 s", call=call)
        dist.barrier()
        if own != giving_up:
            expect(tw.PeerError, f"rank {giving_up}", "given up", call=call)
        tw.send(normal(5, tag), "none", dst=1, tag=9) if own == 0 else tw.recv(out, src=0, tag=9)
        assert own == 0 or same(out, normal(5, tag))


def test_a_tag_that_one_side_gave_up_has_ended_for_both_and_no_other():
    run(given_up_tags, ranks=2)


def start_of_what_was_given_up() -> str:
    """The sender starts just when the receiver gives up: its notice is still under way."""
    out = torch.zeros(5)
    tw.send(normal(5), "none", dst=1) if me() == 0 else tw.recv(out, src=0)
    with pytest.MonkeyPatch.context() as patch:
        if me() == 1:
            tell = PairChannel._tell
            silent = lambda self, notice: notice.kind == GIVEN_UP or tell(self, notice)  # noqa: E731
            patch.setattr(PairChannel, "_tell", silent)
            call = lambda: tw.recv(out, src=0, tag=1, timeout=0.1)  # noqa: E731
            expect(tw.PeerError, "no answer from rank 0 within 0.1 s", call=call)
        dist.barrier()
        if me() == 0:
            call = lambda: tw.send(normal(5), "none", dst=1, tag=1)  # noqa: E731
            expect(tw.PeerError, "could not go on at rank 1", "no answer", call=call)
    tw.send(normal(5, 7), "none", dst=1) if me() == 0 else tw.recv(out, src=0)
    return "" if me() == 0 or same(out, normal(5, 7)) else "another message"


def test_a_send_that_meets_a_receive_just_given_up_is_told_so():
    assert run(start_of_what_was_given_up, ranks=2) == ["", ""]


def mismatches() -> None:
    own, r, old = me(), normal(12, 2), normal(12, 2)
    sent, out = normal(12), torch.zeros(12)
    cases = [
        (sent.view(3, 4), torch.zeros(12), "float32 [3, 4] on rank 0", "float32 [12] on rank 1"),
        (sent, torch.zeros(13), "float32 [12] on rank 0", "float32 [13] on rank 1"),
        (sent, out.double(), "float32 [12] on rank 0", "float64 [12] on rank 1"),
        (sent, out.int(), "float32 [12] on rank 0", "int32 [12] on rank 1"),
    ]
    for x, place, here, there in cases:
        if own == 0:
            call = lambda: tw.send(x, "onebit", dst=1, residual=r.view_as(x))  # noqa: B023, E731
        else:
            call = lambda: tw.recv(place, src=0)  # noqa: B023, E731
        expect(tw.MismatchError, here, there, call=call)
        assert same(r, old)
        assert not place.any()
    # What the sender cannot do, the receiver learns.
    if own == 0:
        spec = "randomk:0.1,scaled=true"
        expect(ValueError, "residual", call=lambda: tw.send(sent, spec, dst=1, residual=r))
        tw.send(sent, "none", dst=1)  # the channel stays usable
    else:
        expect(tw.PeerError, "rank 0: ValueError", call=lambda: tw.recv(out, src=0))
        assert not out.any()
        tw.recv(out, src=0)
        assert same(out, sent)


def test_sender_and_receiver_must_agree_and_both_get_to_know():
    run(mismatches, ranks=2)


def refusals() -> None:
    x, own = normal(5), me()
    expect(ValueError, "itself", call=lambda: tw.send(x, "none", dst=own))
    expect(ValueError, "itself", call=lambda: tw.irecv(x, src=own))
    for tag in (-1, 1.0, True, None):
        expect(ValueError, "tag", call=lambda: tw.isend(x, "none", dst=1 - own, tag=tag))  # noqa: B023
    expect(TypeError, "tensor", call=lambda: tw.recv([1.0], src=1 - own))
    expect(TypeError, "float32", call=lambda: tw.send(x.int(), "onebit", dst=1 - own))
    expect(TypeError, "spec", call=lambda: tw.send(x, None, dst=1 - own))
    expect(ValueError, "9", call=lambda: tw.send(x, "none", dst=9))
    expect(ValueError, "timeout", call=lambda: tw.recv(x, src=1 - own, timeout=0))
    wrong = torch.zeros(4)
    expect(ValueError, "residual", call=lambda: tw.send(x, "onebit", dst=1 - own, residual=wrong))


def test_sends_refuse_what_they_cannot_do_and_say_why():
    run(refusals, ranks=2)


def bytes_of(spec: str) -> tuple[int, int, int]:
    x = normal(100_000)
    handle = tw.send(x, spec, dst=1) if me() == 0 else tw.recv(x, src=0)
    return handle.bytes_sent, handle.account.bytes_received, tw.parse(spec).encode(x).num_bytes


@pytest.mark.parametrize("spec", ["none", "quantize:4", "topk:0.01"])
def test_a_send_sends_one_frame_and_a_short_record(spec):
    (sent, back, frame), (answer, received, _) = run(bytes_of, spec, ranks=2)
    assert (sent, back) == (received, answer)
    assert answer <= 128  # the record: fourteen numbers of eight bytes
    assert 0 <= sent - answer - frame < 64  # frames are padded


# Time limits and death


def stalled() -> None:
    """The receiver never calls: first before there is a connection, then after there is one."""
    own, r = me(), normal(30, 1)
    for tag in (0, 1):
        if tag == 1:
            tw.send(normal(5), "none", dst=1, tag=1) if own == 0 else tw.recv(r[:5], src=0, tag=1)
        if own == 0:
            r = normal(30, 1)
            sending = tw.isend(normal(30), "onebit", dst=1, tag=tag, residual=r, timeout=0.5)
            expect(TimeoutError, "has not ended within 0.01 s", call=lambda: sending.wait(0.01))  # noqa: B023
            expect(tw.PeerError, "1", "within 0.5 s", call=sending.wait)
            assert same(r, normal(30, 1))
            # The connection is gone: later calls say so at once, on both sides.
            call = lambda: tw.send(r, "none", dst=1, tag=tag)  # noqa: B023, E731
            expect(tw.PeerError, "earlier call", call=call)
        dist.barrier()
    if own == 1:
        expect(tw.PeerError, call=lambda: tw.recv(r, src=0, tag=1))
    # Others of the group are not concerned.
    tw.send(normal(5), "none", dst=1, tag=2) if own == 0 else tw.recv(r[:5], src=0, tag=2)


def test_a_peer_that_never_calls_is_an_error_after_the_time_limit():
    run(stalled, ranks=2)


def mourn(sender_dies: bool, connected: bool) -> None:
    own, r, out = me(), normal(30, 1), torch.zeros(30)
    connect.LEAVING = 0.2  # seconds; this process serves no other test
    if connected:
        tw.send(out, "none", dst=1) if own == 0 else tw.recv(out, src=0)
    dies = own == (0 if sender_dies else 1)
    if dies:
        time.sleep(0.2)  # the other waits by now
        os._exit(1)
    if own == 0:
        call = lambda: tw.send(normal(30), "onebit", dst=1, residual=r)  # noqa: E731
    else:
        call = lambda: tw.recv(out, src=0)  # noqa: E731
    expect(tw.PeerError, f"ranks [{1 - own}]" if connected else f"lost rank {1 - own}", call=call)
    assert same(r, normal(30, 1))
    assert not out.any()


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("sender_dies", [False, True])
def test_a_peer_that_dies_is_an_error_at_once(sender_dies, connected):
    with Ranks(2) as ranks:
        dying = 0 if sender_dies else 1
        ranks.run(mourn, sender_dies, connected, dying=[dying])


# Pipelines


def layers(stages: int, dtype=torch.float32, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(dtype) for _ in range(stages)]


def batches(count: int, dtype=torch.float32) -> list[tuple[Tensor, Tensor]]:
    return [
        (normal(128, 2 * i, dtype).view(8, 16), normal(128, 2 * i + 1, dtype).view(8, 16))
        for i in range(count)
    ]


def alone(stages: int, micro: int, dtype=torch.float32) -> tuple[list[nn.Module], list[float]]:
    """The same model and batches in one process."""
    model, losses = layers(stages, dtype), []
    for x, target in batches(micro, dtype):
        loss = nn.functional.mse_loss(nn.Sequential(*model)(x), target)
        loss.backward()
        losses.append(loss.item())
    return model, losses


class Stage:
    """One rank of a pipeline: forward and backward of a micro-batch, when asked."""

    def __init__(self, spec: str, micro: int, dtype=torch.float32, **options) -> None:
        self.rank, self.last = me(), world() - 1
        self.module = layers(world(), dtype)[self.rank]
        self.spec, self.dtype, self.options = spec, dtype, {"timeout": DEADLOCK, **options}
        self.batches, self.ends, self.losses = batches(micro, dtype), {}, []

    def forward(self, i: int) -> None:
        x, target = self.batches[i]
        if self.rank:
            x = tw.pipeline.recv(
                (8, 16),
                src=self.rank - 1,
                grad_compressor=self.spec,
                dtype=self.dtype,
                **self.options,
            )
            assert x.requires_grad
        y = self.module(x)
        if self.rank == self.last:
            self.ends[i] = nn.functional.mse_loss(y, target)
            self.losses.append(self.ends[i].item())
        else:
            self.ends[i] = tw.pipeline.send(y, self.spec, dst=self.rank + 1, **self.options)
            assert self.ends[i].shape == ()
            assert self.ends[i].item() == 0

    def backward(self, i: int) -> None:
        self.ends.pop(i).backward()

    def compare(self, micro: int, relative: float) -> None:
        """With the model in one process; 0 asks for the same bits."""
        model, losses = alone(world(), micro, self.dtype)
        for mine, theirs in zip(
            self.module.parameters(), model[self.rank].parameters(), strict=True
        ):
            if relative == 0:
                assert same(mine.grad, theirs.grad)
            else:
                off = (mine.grad - theirs.grad).double().norm() / theirs.grad.double().norm()
                assert off <= relative, float(off)
        if self.rank == self.last and relative == 0:
            assert self.losses == losses


def all_forward_then_all_backward(spec: str, dtype, relative: float) -> None:
    stage = Stage(spec, 4, dtype)
    for i in range(4):
        stage.forward(i)
    for i in range(4):
        stage.backward(i)
    stage.compare(4, relative)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_pipeline_without_loss_trains_like_one_process_to_the_bit(ranks, dtype):
    run(all_forward_then_all_backward, "none", dtype, 0.0, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pipeline_with_eight_bits_trains_nearly_like_one_process(ranks, dtype):
    # Eight bits: off by at most 1/254 of the largest of a block, whose 128 values have a norm of
    # more than three times the largest: 128^0.5 / 254 / 3 < 1.5 % of the norm at each of at most
    # four crossings, if all were off by the most; bfloat16 adds half a percent at each operation.
    run(all_forward_then_all_backward, "quantize:8", dtype, 0.08, ranks=ranks)


def one_forward_one_backward(spec: str, relative: float) -> None:
    """The order of PipeDream-flush and Megatron: as many in flight as stages follow, then 1F1B."""
    micro, stage = 6, Stage(spec, 6)
    ahead = stage.last - stage.rank
    for i in range(ahead):
        stage.forward(i)
    for i in range(micro - ahead):
        stage.forward(i + ahead)
        stage.backward(i)
    for i in range(micro - ahead, micro):
        stage.backward(i)
    stage.compare(micro, relative)


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_forward_one_backward_is_an_order_that_works(ranks):
    run(one_forward_one_backward, "none", 0.0, ranks=ranks)


def gradient_memory(reduced: str) -> None:
    """What stage 1 had for stage 0 over ten turns is what arrived and what is left."""
    own, turns = me(), 10
    x = normal(200).view(10, 20).requires_grad_()
    r = torch.zeros(10, 20)
    weights = [normal(200, turn).view(10, 20) for turn in range(turns)]
    for weight in weights:
        if own == 0:
            tw.pipeline.send(x, "none", dst=1, timeout=DEADLOCK).backward()
            continue
        y = tw.pipeline.recv(
            (10, 20), src=0, grad_compressor="topk:0.1", grad_residual=r, timeout=DEADLOCK
        )
        {"product": lambda: (y * weight).sum(), "sum": y.sum}[reduced]().backward()  # noqa: B023
    if own == 1:
        tw.send(r, "none", dst=0)
        return
    tw.recv(r, src=1)
    total = sum(weights) if reduced == "product" else torch.full((10, 20), float(turns))
    # Ten sums of numbers up to 40, seven roundings each, in float32.
    assert bool((total - x.grad - r).abs().max() <= 10 * 7 * 40 * 2**-24)
    assert r.any()


@pytest.mark.parametrize("reduced", ["product", "sum"])
def test_what_gradients_leave_out_is_in_their_residual(reduced):
    run(gradient_memory, reduced, ranks=2)


def activation_memory() -> None:
    """Strided activations with a residual: they are only read, so autograd can still use them."""
    own, w = me(), normal(200, 3).view(20, 10)
    if own == 0:
        x = normal(200).view(10, 20).requires_grad_()
        r = torch.zeros(20, 10)
        y = x.exp().t()  # exp keeps its result for the backward pass
        tw.pipeline.send(y, "topk:0.5", dst=1, residual=r, timeout=DEADLOCK).backward()
        assert same(x.grad, w.t() * x.detach().exp())
        assert r.any()
    else:
        y = tw.pipeline.recv((20, 10), src=0, grad_compressor="none", timeout=DEADLOCK)
        assert int((y == 0).sum()) == 100
        (y * w).sum().backward()


def test_activations_are_only_read():
    run(activation_memory, ranks=2)


def in_place() -> None:
    """Received activations are an ordinary tensor: operations may work in place on them."""
    if me() == 0:
        x = normal(50).requires_grad_()
        tw.pipeline.send(x, "none", dst=1, timeout=DEADLOCK).backward()
        assert same(x.grad, (normal(50) > 0).float())
    else:
        y = tw.pipeline.recv((50,), src=0, grad_compressor="none", timeout=DEADLOCK)
        nn.functional.relu(y, inplace=True).sum().backward()


def test_received_activations_may_be_worked_on_in_place():
    run(in_place, ranks=2)


def no_gradients() -> None:
    """Without gradients it is send and recv."""
    with torch.no_grad():
        if me() == 0:
            token = tw.pipeline.send(normal(50).requires_grad_(), "none", dst=1)
            assert not token.requires_grad
        else:
            y = tw.pipeline.recv((50,), src=0, grad_compressor="none")
            assert same(y, normal(50))
            assert not y.requires_grad


def test_pipelines_infer():
    run(no_gradients, ranks=2)


def frozen() -> None:
    """A first stage that needs no gradient: the same program runs, the second stage trains."""
    x = normal(50)
    if me() == 0:
        tw.pipeline.send(x, "none", dst=1, timeout=DEADLOCK).backward()
        assert x.grad is None
    else:
        weight = normal(50, 1).requires_grad_()
        y = tw.pipeline.recv((50,), src=0, grad_compressor="none", timeout=DEADLOCK)
        (weight * y).sum().backward()
        assert same(weight.grad, x)


def test_a_first_stage_that_needs_no_gradient_lets_the_second_train():
    run(frozen, ranks=2)


def pipe_mismatch() -> None:
    if me() == 0:  # at the latest in the backward pass
        x = normal(50).requires_grad_()
        call = lambda: tw.pipeline.send(x, "none", dst=1).backward()  # noqa: E731
    else:
        call = lambda: tw.pipeline.recv((5, 10), src=0, grad_compressor="none")  # noqa: E731
    expect(tw.MismatchError, "[50] on rank 0", "[5, 10] on rank 1", call=call)


def test_stages_must_agree_on_the_shape():
    run(pipe_mismatch, ranks=2)


def tensors_of_every_kind() -> None:
    """Contents that have gone wrong before, losslessly there and back."""
    for kind in ("zeros", "denormal", "huge", "mixed"):
        x = content(kind, 70, torch.float32, 3)
        if me() == 0:
            leaf = x.clone().requires_grad_()
            tw.pipeline.send(leaf, "lossless", dst=1).backward()
            assert same(leaf.grad, x)
        else:
            y = tw.pipeline.recv((70,), src=0, grad_compressor="none")
            assert same(y.detach(), x)
            y.backward(x)


def test_every_bit_goes_there_and_back():
    run(tensors_of_every_kind, ranks=2)
