"""DeMo and its cosine transform: the laws of each, and plain NumPy that plays all ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py.
"""

import functools
import io
import math
import os
import signal
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from stepping import AVERAGED, Given, copies, warnings_of_averaged
from tensors import normal
from torch import Tensor, nn

import thinwire as tw
from thinwire.optim.dct import BlockDCT

pytestmark = pytest.mark.timeout(300)  # the first test of a new checkout compiles kernels

SHAPES = ((8, 12), (41,), (3, 5, 2), (2, 3, 4, 5), (), (7, 3))
CHUNK, RATIO, LR, DECAY, WEIGHT_DECAY = 16, 0.2, 1e-2, 0.9, 0.1
TIMEOUT = 600.0  # of steps that should not wait for anybody: ranks.py ends them long before
both = pytest.mark.parametrize("dct", [False, True])


GIVEN = Given(SHAPES, 0.01)
parameters, gradient, give = GIVEN.parameters, GIVEN.gradient, GIVEN.give


def make(params: Any, **settings: Any) -> tw.optim.DeMo:
    given = {"lr": LR, "decay": DECAY, "ratio": RATIO, "chunk": CHUNK, "timeout": TIMEOUT}
    return tw.optim.DeMo(params, **{**given, **settings})


def errors(optimizer: Any) -> list[Tensor]:
    return [optimizer.state[p]["error"].clone() for p in optimizer.param_groups[0]["params"]]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# The transform


@functools.cache
def cosines(n: int) -> np.ndarray:
    """By definition: c_k = a_k sum x_i cos(pi (2 i + 1) k / (2 n))."""
    found = np.zeros((n, n))
    for k in range(n):
        for i in range(n):
            scale = math.sqrt((1 if k == 0 else 2) / n)
            found[k, i] = scale * math.cos(math.pi * (2 * i + 1) * k / (2 * n))
    return found


TENSORS = [(8, 12), (64, 128), (7, 3), (41,), (3,), (1,), (), (2, 3, 4, 5), (3, 16), (0,), (4, 0)]


@pytest.mark.parametrize("shape", TENSORS, ids=str)
@pytest.mark.parametrize("side", [1, 4, 64])
def test_the_transform_is_orthonormal(shape, side):
    x = normal(math.prod(shape), 3, torch.float64).view(shape)
    transform = BlockDCT(x.shape, side)
    there = transform.forward(x)
    assert there.shape == (transform.num_coefficients,)
    assert x.numel() <= there.numel() < x.numel() + side
    # Some hundred roundings of numbers below 10.
    assert torch.allclose(transform.inverse(there), x, rtol=0, atol=1e-12)
    assert float(there.square().sum()) == pytest.approx(float(x.square().sum()), rel=1e-12)
    y = normal(math.prod(shape), 4, torch.float64).view(shape)
    both_ways = transform.forward(x + 2 * y) - there - 2 * transform.forward(y)
    assert both_ways.abs().sum() <= 1e-11 * (1 + there.numel())


def test_coefficients_are_those_of_the_blocks():
    x = normal(96, 3, torch.float64)
    basis = cosines(4)
    found = BlockDCT(torch.Size([8, 12]), 4).forward(x.view(8, 12)).numpy().reshape(6, 4, 4)
    tiles = x.view(8, 12).numpy().reshape(2, 4, 3, 4).transpose(0, 2, 1, 3).reshape(6, 4, 4)
    assert np.allclose(found, (basis @ tiles @ basis.T).transpose(0, 2, 1), atol=1e-12)
    flat = BlockDCT(torch.Size([91]), 4).forward(x[:91]).numpy()
    rows = x[:80].numpy().reshape(5, 4, 4)
    assert np.allclose(
        flat[:80].reshape(5, 4, 4), (basis @ rows @ basis.T).transpose(0, 2, 1), atol=1e-12
    )
    tail = np.append(x[80:91].numpy(), 0.0).reshape(3, 4)
    assert np.allclose(flat[80:].reshape(4, 3), (cosines(3) @ tail @ basis.T).T, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coefficients_that_cancel_leave_zeros(dtype):
    """Two of equal magnitude cancel in half of a block: no element may have a sign there."""
    for side in (2, 8, 64):
        there = torch.zeros(3, side, side, dtype=dtype)
        there[0, 0, 0], there[0, 0, side // 2] = 0.3, -0.3  # + + - - ... against a constant
        there[1, 1, 1] = 1e-20
        transform = BlockDCT(torch.Size([3 * side * side]), side)
        rough, clear = (transform.inverse(there.flatten(), clear=c) for c in (False, True))
        zeros = clear == 0
        assert torch.equal(rough[~zeros], clear[~zeros])
        assert rough[zeros].abs().max() <= 1e-5 * 0.3
        clear = clear.view(3, -1)
        assert (clear[1] != 0).all(), "a block of small numbers is not noise"
        assert not clear[2].any()


# Plain NumPy, all ranks in one process


class Blocks:
    """The transform of a tensor by its definition; none at all without `dct`."""

    def __init__(self, shape: tuple[int, ...], dct: bool) -> None:
        self.shape, self.dct, self.side = shape, dct, math.isqrt(CHUNK)
        n, side = math.prod(shape), self.side
        whole = np.arange(n)
        if len(shape) == 2 and all(size % side == 0 for size in shape):
            rows, columns = shape
            tiles = whole.reshape(rows // side, side, columns // side, side).transpose(0, 2, 1, 3)
            self.places = list(tiles.reshape(-1, side, side))
        else:
            self.places = list(whole[: n - n % CHUNK].reshape(-1, side, side))
            rest = whole[n - n % CHUNK :]
            if rest.size:
                width = min(side, rest.size)
                filled = np.append(rest, np.full(-rest.size % width, -1))
                self.places.append(filled.reshape(-1, width))

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        if not self.dct:
            return [x[lo : lo + CHUNK] for lo in range(0, x.size, CHUNK)]
        blocks = [np.where(at >= 0, x[at], 0.0) for at in self.places]
        return [(cosines(len(b)) @ b @ cosines(b.shape[1]).T).T.ravel() for b in blocks]

    def inverse(self, pieces: list[np.ndarray]) -> np.ndarray:
        if not self.dct:
            return np.concatenate(pieces)
        out = np.zeros(math.prod(self.shape))
        for at, piece in zip(self.places, pieces, strict=True):
            there = piece.reshape(at.shape[1], at.shape[0]).T
            back = cosines(at.shape[0]).T @ there @ cosines(at.shape[1])
            out[at[at >= 0]] = back[at >= 0]
        return out


def largest(piece: np.ndarray) -> np.ndarray:
    """The k largest of a chunk, the others zero."""
    k = max(1, math.ceil(piece.size * RATIO - 1e-9))
    chosen = np.argsort(-np.abs(piece), kind="stable")[:k]
    out = np.zeros_like(piece)
    out[chosen] = piece[chosen]
    return out


def two_bits(pieces: list[np.ndarray]) -> list[np.ndarray]:
    """The values of all chunks of a tensor as one block."""
    flat = np.concatenate(pieces)
    size = np.abs(flat[flat != 0])
    limit = size.mean()
    means = {kind: size[(size > limit) == kind].mean() for kind in set((size > limit).tolist())}
    packed = [np.sign(v) * means[bool(abs(v) > limit)] if v else 0.0 for v in flat]
    return np.split(np.array(packed), np.cumsum([piece.size for piece in pieces])[:-1])


def play(i: int, steps: int, size: int, dct: bool, packed: bool) -> tuple[np.ndarray, Any]:
    """The parameter after so many steps, and all ranks' momenta."""
    blocks, n = Blocks(SHAPES[i], dct), math.prod(SHAPES[i])
    p = normal(n, i).numpy().astype(np.float64)
    momenta = [np.zeros(n) for _ in range(size)]
    for step in range(1, steps + 1):
        total = None
        for rank in range(size):
            grad = gradient(i, rank, step).numpy().ravel().astype(np.float64)
            there = blocks.forward(DECAY * momenta[rank] + LR * grad)
            sent = [largest(piece) for piece in there]
            sent = two_bits(sent) if packed else sent
            left = [a - b for a, b in zip(there, sent, strict=True)]
            momenta[rank] = blocks.inverse(left)
            total = sent if total is None else [a + b for a, b in zip(total, sent, strict=True)]
        mean = blocks.inverse(total)
        mean[np.abs(mean) < 1e-12] = 0  # where coefficients cancel
        p = p * (1 - LR * WEIGHT_DECAY) - LR * np.sign(mean)
    return p, momenta


def on_run(settings: dict[str, Any], steps: int) -> tuple[list[Tensor], list[Tensor]]:
    params = parameters()
    optimizer = make(params, weight_decay=WEIGHT_DECAY, **settings)
    for step in range(1, steps + 1):
        give(params, dist.get_rank(), step)
        optimizer.step()
    return copies(params), errors(optimizer)


@both
@pytest.mark.parametrize("compressor", ["none", "twobit"])
def test_demo_matches_plain_numpy(dct, compressor):
    steps = 20
    found = ranks.run(on_run, {"dct": dct, "compressor": compressor}, steps, ranks=2)
    assert equal(found[0][0], found[1][0])
    for i in range(len(SHAPES)):
        p, momenta = play(i, steps, 2, dct, compressor == "twobit")
        # Three roundings of numbers up to 4 at each step; of the momentum, some hundred of 0.01.
        assert np.abs(found[0][0][i].numpy().ravel() - p).max() <= steps * 3 * 4 * 2**-24
        for (_, own), wanted in zip(found, momenta, strict=True):
            assert np.abs(own[i].numpy().ravel() - wanted).max() <= 1e-6


# What holds whatever the compressor


def on_laws(dct: bool, compressor: str) -> list[Tensor]:
    params, me = parameters(), dist.get_rank()
    optimizer = make(params, dct=dct, compressor=compressor)
    chain = tw.TopK(RATIO, chunk=CHUNK) | tw.parse(compressor)
    for step in range(1, 6):
        give(params, me, step)
        before = copies(params)
        old = errors(optimizer) if step > 1 else [torch.zeros(s) for s in SHAPES]
        optimizer.step()
        for i, (p, d, now) in enumerate(zip(params, old, errors(optimizer), strict=True)):
            total = gradient(i, me, step).mul(LR).add_(d, alpha=DECAY)
            # Conservation, to the bit: what was not sent is all that stays.
            there = BlockDCT(p.shape, 4).forward(total) if dct else total
            left = torch.zeros_like(there)
            sent = chain.decode(chain.encode(there, residual=left))
            if dct:
                left = BlockDCT(p.shape, 4).inverse(left)
            assert torch.equal(now, left)
            moved = p.detach() - before[i]
            steps = (moved.abs() - LR).abs() <= 4 * 2**-23
            assert (steps | (moved == 0)).all()
            if not dct:
                # Of what ranks send at most so much moves, and what nobody sent does not.
                most = dist.get_world_size() * (sent != 0).sum()
                assert 0 < (moved != 0).sum() <= most
    return copies(params)


@both
@pytest.mark.parametrize("compressor", ["quantize:4", "scaledsign", "none"])
def test_what_is_not_sent_stays_and_replicas_are_equal(dct, compressor):
    first, *others = ranks.run(on_laws, dct, compressor, ranks=3)
    assert all(equal(first, other) for other in others)


def on_everything(dct: bool) -> bool:
    """With all elements sent and nothing remembered: the sign of the mean gradient."""
    params = parameters()
    optimizer = make(params, ratio=1.0, decay=0.0, dct=dct, compressor="none")
    for step in range(1, 4):
        before = copies(params)
        give(params, dist.get_rank(), step)
        optimizer.step()
        for i, p in enumerate(params):
            mean = gradient(i, 0, step) + gradient(i, 1, step)
            # Sums near zero are rounded differently.
            clear = mean.abs() > 1e-5
            assert clear.sum() >= 0.99 * mean.numel()
            wanted = before[i].add(mean.sign(), alpha=-LR)
            assert torch.equal(p.detach()[clear], wanted[clear])
            assert optimizer.state[p]["error"].abs().max() <= 1e-8
    return True


@both
def test_sending_everything_is_sign_descent(dct):
    assert all(ranks.run(on_everything, dct, ranks=2))


def on_alone(dct: bool) -> tuple[list[Tensor], list[Tensor]]:
    return on_run({"dct": dct, "compressor": "none"}, 5)


@both
def test_one_rank_takes_the_largest_too(dct):
    ((params, momenta),) = ranks.run(on_alone, dct, ranks=1)
    for i in range(len(SHAPES)):
        p, (wanted,) = play(i, 5, 1, dct, False)
        assert np.abs(params[i].numpy().ravel() - p).max() <= 1e-5
        assert np.abs(momenta[i].numpy().ravel() - wanted).max() <= 1e-6


def on_none() -> bool:
    found = []
    for absent in (True, False):
        params, me = parameters(), dist.get_rank()
        optimizer = make(params)
        for step in range(1, 7):
            give(params, me, step)
            if step % 3 == me:
                params[step % 2].grad = None if absent else torch.zeros(SHAPES[step % 2])
            optimizer.step()
        found.append(copies(params))
    return equal(*found)


def test_no_gradient_counts_as_zero():
    assert all(ranks.run(on_none, ranks=2))


def on_half() -> bool:
    params = parameters(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    optimizer, other = make(params, weight_decay=0.1), make(wide, weight_decay=0.1)
    for step in range(1, 9):
        give(params, dist.get_rank(), step)
        for p, q in zip(params, wide, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        optimizer.step()
        other.step()
    for p, q in zip(params, wide, strict=True):
        assert optimizer.state[p]["error"].dtype == torch.float32
        assert torch.equal(optimizer.state[p]["master"], q.detach())
        assert torch.equal(p.detach(), q.detach().bfloat16())
    return True


def test_half_precision_has_a_master_copy():
    assert all(ranks.run(on_half, ranks=2))


def on_bytes(compressor: str) -> float:
    """Bytes for each element that a rank sends of a matrix of a million."""
    p = nn.Parameter(torch.zeros(1024, 1024))
    optimizer = tw.optim.DeMo([p], compressor=compressor, timeout=TIMEOUT)
    p.grad = normal(1 << 20, dist.get_rank()).view(1024, 1024)
    optimizer.step()
    return optimizer.stats()["bytes_sent"] / (1 << 13)


def test_an_entry_takes_little_more_than_a_byte():
    """Its position 8.5 bits (the entropy of 1 in 128 is 8.4), its value what the compressor takes;
    meetings and header are some bytes more."""
    for compressor, most in (("quantize:4", 1.62), ("twobit", 1.35), ("scaledsign", 1.22)):
        for found in ranks.run(on_bytes, compressor, ranks=2):
            assert 1.0 < found < most, compressor


# Checkpoints


def on_checkpoint(dct: bool) -> bool:
    me, steps = dist.get_rank(), 9
    params = parameters()
    optimizer = make(params, dct=dct, weight_decay=0.1)
    for step in range(1, steps + 1):
        give(params, me, step)
        optimizer.step()
        if step == 4:
            file = io.BytesIO()
            torch.save({"model": copies(params), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = [nn.Parameter(value) for value in state["model"]]
    resumed = make(again)  # settings of groups come with the state
    resumed.load_state_dict(state["optimizer"])
    for step in range(5, steps + 1):
        give(again, me, step)
        resumed.step()
    assert resumed.stats()["steps"] == steps
    return equal(copies(params), copies(again)) and equal(errors(optimizer), errors(resumed))


@both
def test_a_checkpoint_goes_on_bit_for_bit(dct):
    assert all(ranks.run(on_checkpoint, dct, ranks=2))


def on_gather() -> dict[str, Any]:
    params = parameters()
    optimizer = make(params)
    for step in range(1, 4):
        give(params, dist.get_rank(), step)
        optimizer.step()
    return optimizer.gathered_state_dict()


def on_load(states: dict[str, Any]) -> list[Tensor]:
    params = parameters()
    optimizer = make(params)
    optimizer.load_state_dict(states)
    found = errors(optimizer)
    with pytest.raises(ValueError, match="state of rank 0 of 3"):
        optimizer.load_state_dict(states["ranks"][0])
    theirs = torch.optim.Adam(params)
    give(params, 0, 1)
    theirs.step()
    with pytest.raises(ValueError, match="DeMo: this is the state of another optimizer"):
        optimizer.load_state_dict(theirs.state_dict())
    assert equal(found, errors(optimizer))
    return found


def test_another_number_of_ranks_goes_on_with_the_mean_of_momenta():
    states, *others = ranks.run(on_gather, ranks=3)
    assert others == [{}, {}]
    loaded = ranks.run(on_load, states, ranks=2)
    for i in range(len(SHAPES)):
        mean = sum(state["state"][i]["error"] for state in states["ranks"]) / 3
        for found in loaded:
            torch.testing.assert_close(found[i], mean)


# What goes wrong


def on_failure() -> bool:
    """Settings that differ, and a gradient that is not finite; each step is then taken rightly."""
    params, me = parameters(), dist.get_rank()
    optimizer = make(params)
    for step in range(1, 5):
        give(params, me, step)
        before, state = copies(params), {p: dict(optimizer.state[p]) for p in params}
        if step in (1, 3):
            optimizer.param_groups[0]["lr"] = LR * (1 + me)
            with pytest.raises(tw.MismatchError, match="settings"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = LR
        else:
            params[0].grad = torch.full(SHAPES[0], torch.nan) if me else params[0].grad
            with pytest.warns(tw.errors.ThinwireWarning, match="NaN or infinity"):
                optimizer.step()
            give(params, me, step)
        assert equal(before, copies(params))
        for p in params:
            assert optimizer.state[p].keys() == state[p].keys()
            assert all(optimizer.state[p][key] is value for key, value in state[p].items())
        optimizer.step()
    assert optimizer.stats()["skipped"] == 2
    return optimizer.stats()["steps"] == 4


def test_a_step_that_fails_changes_nothing():
    assert all(ranks.run(on_failure, ranks=2))


def on_killed() -> tuple[str, bool]:
    params, me = parameters(), dist.get_rank()
    optimizer = make(params, timeout=60.0)
    for step in range(1, 3):
        give(params, me, step)
        optimizer.step()
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before, kept = copies(params), errors(optimizer)
    give(params, me, 3)
    try:
        optimizer.step()
    except tw.PeerError as error:
        same = equal(before, copies(params)) and equal(kept, errors(optimizer))
        return str(error), same and optimizer.stats()["steps"] == 2
    return "", False


def test_a_killed_rank_is_a_peer_error_and_changes_nothing():
    with ranks.Ranks(2) as processes:
        (message, same), _ = processes.run(on_killed, dying=[1])
    assert "ranks [1]" in message
    assert same


def on_averaged() -> dict[str, list[str]]:
    return warnings_of_averaged(lambda parameters: make(parameters, compressor="quantize:4"))


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_were_averaged_already_are_noticed(size):
    for found in ranks.run(on_averaged, ranks=size):
        for case, warned in AVERAGED.items():
            assert len(found[case]) == warned, (case, found[case])
        assert found["DDP"][0].startswith("DeMo: all ranks came with the same gradients")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "DeMo: lr must be"),
        ({"decay": 1.0}, ValueError, r"DeMo: decay must be in \[0, 1\)"),
        ({"weight_decay": -0.1}, ValueError, "DeMo: weight_decay"),
        ({"ratio": 0.0}, ValueError, r"DeMo: ratio must be in \(0, 1\]"),
        ({"chunk": 0}, ValueError, "DeMo: chunk must be a whole number from 1"),
        ({"dct": 1}, ValueError, "DeMo: dct must be True or False"),
        ({"dct": True, "chunk": 32}, ValueError, "chunk must be a square number"),
        ({"compressor": "powersgd"}, TypeError, "found by all ranks together"),
        ({"compressor": 3}, TypeError, "spec such as"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_settings_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        make([nn.Parameter(torch.ones(3))], **settings)
