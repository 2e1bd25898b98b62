"""The laws of the optimizers that talk by themselves, on two and three real ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. What they give is
compared with `Fleet`, which plays all ranks in one process, in plain NumPy: written from the
formulas in the docstrings, it shares no code with the library.
"""

import contextlib
import dataclasses
import functools
import io
import math
import warnings
from collections.abc import Callable
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
from thinwire.optim.zero_one_adam import interval_at, variance_at

pytestmark = pytest.mark.timeout(300)  # the first test of a new checkout compiles kernels

SHAPES = ((7, 13), (41,), (3, 5, 2), (1,))
FREEZE, STEPS = 5, 24
TIMEOUT = 600.0  # of steps that should not wait for anybody: ranks.py ends them long before
LR, B1, B2, EPS = 1e-2, 0.9, 0.99, 1e-8
KINDS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": FREEZE},
    "OneBitLamb": {"freeze_step": FREEZE, "weight_decay": 0.01},
    "ZeroOneAdam": {
        "var_freeze_step": 9,
        "var_update_scaler": 2,
        "local_step_scaler": 4,
        "local_step_clipper": 4,
    },
}
over_kinds = pytest.mark.parametrize("kind", KINDS)


GIVEN = Given(SHAPES, 0.05)
parameters, gradient, give = GIVEN.parameters, GIVEN.gradient, GIVEN.give


def make(kind: str, params: Any, **settings: Any) -> Any:
    given = {"lr": LR, "betas": (B1, B2), "eps": EPS, "timeout": TIMEOUT, **KINDS[kind], **settings}
    return getattr(tw.optim, kind)(params, **given)


def kept(optimizer: Any, key: str) -> list[Tensor]:
    return [optimizer.state[p][key].clone() for g in optimizer.param_groups for p in g["params"]]


def on_run(kind: str, settings: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Parameters after each step, whether ranks were in step then, and the state at the end."""
    params = parameters()
    optimizer = make(kind, params, **settings)
    history, synced = [], []
    for step in range(1, steps + 1):
        give(params, dist.get_rank(), step)
        optimizer.step()
        history.append(copies(params))
        synced.append(getattr(optimizer, "synced", True))
    return {
        "history": history,
        "synced": synced,
        "state": {k: kept(optimizer, k) for k in ("exp_avg", "exp_avg_sq", "error")},
        "stats": optimizer.stats(),
    }


@functools.cache
def outcome(kind: str, size: int, **settings: Any) -> list[dict[str, Any]]:
    return ranks.run(on_run, kind, settings, ranks=size)


# Plain NumPy, all ranks in one process.


def sign_of(x: np.ndarray) -> np.ndarray:
    """(||x||_2 / sqrt(d)) sign(x), with sign(0) = +1."""
    if not x.size:
        return x
    scale = np.float32(np.sqrt(np.mean(x.astype(np.float64) ** 2)))
    return np.where(x >= 0, scale, -scale).astype(np.float32)


def two_shot(xs: list[np.ndarray], errors: list[np.ndarray]) -> np.ndarray:
    """The mean, compressed by the ranks and again by the owner of each shard; errors in place."""
    size, n = len(xs), xs[0].size
    ps = [(x + e).astype(np.float32) for x, e in zip(xs, errors, strict=True)]
    result = np.empty(n, np.float32)
    for owner in range(size):
        part = slice(n * owner // size, n * (owner + 1) // size)
        total = ps[owner][part].copy()
        for i in range(size):
            if i != owner:
                sent = sign_of(ps[i][part])
                errors[i][part] = ps[i][part] - sent
                total += sent
        result[part] = sign_of(total / np.float32(size))
        errors[owner][part] = total - size * result[part]
    return result


class Fleet:
    """All ranks' view of one tensor."""

    def __init__(self, i: int, size: int, decay: float = 0.0) -> None:
        self.i, self.size, self.decay = i, size, decay
        self.p = normal(math.prod(SHAPES[i]), i).numpy().copy()
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)
        self.errors = [np.zeros_like(self.p) for _ in range(size)]
        self.t = 0

    def gradients(self) -> list[np.ndarray]:
        self.t += 1
        return [gradient(self.i, rank, self.t).numpy().ravel() for rank in range(self.size)]

    def mean(self, grads: list[np.ndarray]) -> np.ndarray:
        return (sum(grads) / self.size).astype(np.float32)

    def divisor(self, v: np.ndarray, n: int) -> np.ndarray:
        return np.sqrt(v / (1 - B2**n)) + EPS

    def adam(self, n: int) -> None:
        self.p = self.p - LR * self.m / (1 - B1**self.t) / self.divisor(self.v, n)

    def track(self, g: np.ndarray) -> None:
        self.m = B1 * self.m + (1 - B1) * g
        self.v = B2 * self.v + (1 - B2) * g * g

    def exchange(self, grads: list[np.ndarray]) -> np.ndarray:
        return two_shot([B1 * self.m + (1 - B1) * g for g in grads], self.errors)


def onebit_adam(fleet: Fleet) -> None:
    grads = fleet.gradients()
    if fleet.t <= FREEZE:
        fleet.track(fleet.mean(grads))
        fleet.adam(fleet.t)
    else:
        fleet.m = fleet.exchange(grads)
        fleet.adam(FREEZE)


class Lamb(Fleet):
    coeff: float | None = None
    factor = 1.0
    fresh: np.ndarray

    def go(self) -> None:
        grads = self.gradients()
        if self.t <= FREEZE:
            self.track(self.mean(grads))
            self.fresh = self.v.copy()
            _, update = self.update(self.divisor(self.v, self.t))
            found = np.clip(np.linalg.norm(self.p) / np.linalg.norm(update), 0.01, 10)
            self.coeff = found if self.coeff is None else 0.9 * self.coeff + 0.1 * found
            self.p = self.p - LR * found * update
            return
        before, self.m = self.m, self.exchange(grads)
        rebuilt = (self.m - B1 * before) / (1 - B1)
        self.fresh = B2 * self.fresh + (1 - B2) * rebuilt**2
        divisor = self.divisor(self.v, FREEZE)
        plain, update = self.update(divisor)
        factor = np.max(divisor / self.divisor(self.fresh, self.t))
        share = min(1.0, np.linalg.norm(plain) / np.linalg.norm(update))
        factor = np.clip(factor * share + 1 - share, 0.5, 4.0)
        self.factor = np.clip(factor, 0.9 * self.factor, 1.1 * self.factor)
        self.p = self.p - LR * self.coeff * self.factor * update

    def update(self, divisor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        plain = self.m / divisor / (1 - B1**self.t)
        return plain, plain + self.decay * self.p


class ZeroOne(Fleet):
    """With KINDS' schedule: variance at 1 2 | 4 6 | 8, frozen after 9; meetings every 1, 2, 4."""

    def go(self) -> None:
        grads = self.gradients()
        if self.t <= 9:
            if self.t in (1, 2, 4, 6, 8):
                self.track(self.mean(grads))
            else:
                self.m = self.exchange(grads)
            self.adam(sum(s <= self.t for s in (1, 2, 4, 6, 8)))
            if self.t == 9:
                self.ms = [self.m] * self.size
                self.errors = [e * np.float32(LR / (1 - B1**9)) for e in self.errors]
                self.us = [np.zeros_like(self.p) for _ in range(self.size)]
                self.w, self.k = 0.0, 1.0
                self.ps = [self.p] * self.size
            return
        divisor, a = self.divisor(self.v, 5), LR / (1 - B1**self.t)
        keep = 1 - LR * self.decay
        self.w, self.k = self.w * keep + a, self.k * keep
        for i, g in enumerate(grads):
            self.ms[i] = B1 * self.ms[i] + (1 - B1) * g
            self.us[i] = self.us[i] * keep + a * self.ms[i]
            self.ps[i] = self.ps[i] * keep - a * self.ms[i] / divisor
        interval = {0: 1, 1: 2}.get((self.t - 10) // 4, 4)
        if self.t % interval == 0:
            u = two_shot(self.us, self.errors)
            self.p = self.k * self.p - u / divisor
            self.ps = [self.p] * self.size
            self.ms = [u / self.w] * self.size
            self.us = [np.zeros_like(self.p) for _ in range(self.size)]
            self.w, self.k = 0.0, 1.0


def test_adam_matches_plain_numpy() -> None:
    results = outcome("OneBitAdam", 3)
    for i in range(len(SHAPES)):
        fleet = Fleet(i, 3)
        for step in range(STEPS):
            onebit_adam(fleet)
            for got in results:
                compare(got["history"][step][i], fleet.p, step)
        for rank, got in enumerate(results):
            compare(got["state"]["error"][i], fleet.errors[rank], STEPS)


def test_lamb_matches_plain_numpy() -> None:
    results = outcome("OneBitLamb", 3)
    for i in range(len(SHAPES)):
        fleet = Lamb(i, 3, decay=0.01)
        for step in range(STEPS):
            fleet.go()
            for got in results:
                compare(got["history"][step][i], fleet.p, step)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_zero_one_adam_matches_plain_numpy(decay: float) -> None:
    results = outcome("ZeroOneAdam", 3, weight_decay=decay, decoupled=bool(decay))
    for i in range(len(SHAPES)):
        fleet = ZeroOne(i, 3, decay)
        if decay:
            fleet.adam = functools.partial(decayed_adam, fleet)  # type: ignore[method-assign]
        for step in range(STEPS):
            fleet.go()
            for rank, got in enumerate(results):
                wanted = fleet.ps[rank] if step >= 9 else fleet.p
                compare(got["history"][step][i], wanted, step)


def decayed_adam(fleet: Fleet, n: int) -> None:
    fleet.p = fleet.p * (1 - LR * fleet.decay)
    Fleet.adam(fleet, n)


def compare(got: Tensor, wanted: np.ndarray, step: int) -> None:
    """Each step makes some ten roundings of 2^-24 on values of about 1, and moves by at most LR
    times the update, of which sign and scale are the same: they add up linearly."""
    assert np.abs(got.numpy().ravel() - wanted).max() <= 10 * (step + 2) * 2**-23, f"step {step}"


# What holds for all of them.


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_first_stage_is_adam(decoupled: bool) -> None:
    results = ranks.run(on_adam, decoupled, ranks=2)
    for ours, theirs in results:
        for a, b in zip(ours, theirs, strict=True):
            # 8 steps of some ten roundings, on values of up to 4.
            torch.testing.assert_close(a, b, rtol=0, atol=80 * 4 * 2**-24)


def on_adam(decoupled: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Two groups with settings of their own and a scheduler, against torch on the mean."""
    found = []
    for ours in (True, False):
        params = parameters()
        groups = [
            {"params": params[:2], "weight_decay": 0.1},
            {"params": params[2:], "lr": 3e-2, "betas": (0.8, 0.9)},
        ]
        if ours:
            optimizer = make("OneBitAdam", groups, freeze_step=8, decoupled=decoupled)
        else:
            torchs = torch.optim.AdamW if decoupled else torch.optim.Adam
            optimizer = torchs(groups, lr=LR, betas=(B1, B2), eps=EPS, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(1, 9):
            if ours:
                give(params, dist.get_rank(), step)
            else:
                for i, p in enumerate(params):
                    p.grad = (gradient(i, 0, step) + gradient(i, 1, step)) / 2
            assert optimizer.step(lambda: 3.0) == 3.0
            schedule.step()
        found.append(copies(params))
    return found[0], found[1]


@over_kinds
def test_replicas_stay_identical(kind: str) -> None:
    first, *others = outcome(kind, 3)
    assert first["synced"][-1], "the last step is one where ranks meet, or this test says nothing"
    for other in others:
        for step, synced in enumerate(first["synced"]):
            same = [
                torch.equal(a, b)
                for a, b in zip(first["history"][step], other["history"][step], strict=True)
            ]
            assert all(same) if synced else not all(same)
        for key in ("exp_avg", "exp_avg_sq"):
            for a, b in zip(first["state"][key], other["state"][key], strict=True):
                assert torch.equal(a, b)


def test_errors_on_both_sides_conserve() -> None:
    """Summed over ranks, momenta + old errors = P result + new errors."""
    results = ranks.run(on_conservation, ranks=3)
    for i in range(len(SHAPES)):
        for step in range(len(results[0])):
            given = sum(r[step]["given"][i].double() + r[step]["old"][i].double() for r in results)
            left = sum(r[step]["new"][i].double() for r in results)
            result = results[0][step]["result"][i].double()
            # Values are below 4; each is rounded a few times.
            assert (given - 3 * result - left).abs().max() <= 20 * 4 * 2**-24


def on_conservation() -> list[dict[str, list[Tensor]]]:
    params, me = parameters(), dist.get_rank()
    optimizer = make("OneBitAdam", params)
    found = []
    for step in range(1, 20):
        give(params, me, step)
        if step <= FREEZE:
            optimizer.step()
            continue
        grads, momenta = copies(p.grad for p in params), kept(optimizer, "exp_avg")
        old = kept(optimizer, "error")
        optimizer.step()
        given = [B1 * m + (1 - B1) * g for m, g in zip(momenta, grads, strict=True)]
        found.append(
            {
                "given": given,
                "old": old,
                "new": kept(optimizer, "error"),
                "result": kept(optimizer, "exp_avg"),
            }
        )
    return found


@over_kinds
def test_a_checkpoint_goes_on_bit_for_bit(kind: str) -> None:
    assert all(ranks.run(on_checkpoint, kind, ranks=2))


def on_checkpoint(
    kind: str, dtype: torch.dtype = torch.float32, starts: tuple[int, ...] = (3, 11, 19)
) -> bool:
    """Saved after steps of both stages, for ZeroOneAdam between two meetings as well."""
    me = dist.get_rank()
    params = parameters(dtype)
    optimizer = make(kind, params)
    saved = {}
    for step in range(1, STEPS + 1):
        give(params, me, step)
        optimizer.step()
        if step in starts:
            file = io.BytesIO()
            torch.save({"model": copies(params), "optimizer": optimizer.state_dict()}, file)
            saved[step] = file
    for start, file in saved.items():
        file.seek(0)
        state = torch.load(file, weights_only=True)
        again = [nn.Parameter(value) for value in state["model"]]
        resumed = make(kind, again)
        resumed.load_state_dict(state["optimizer"])
        for step in range(start + 1, STEPS + 1):
            give(again, me, step)
            resumed.step()
        assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True)), start
        for p, q in zip(params, again, strict=True):
            assert optimizer.state[p].keys() == resumed.state[q].keys()
            for key, value in optimizer.state[p].items():
                other = resumed.state[q][key]
                same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
                assert same, key
    return True


def test_another_number_of_ranks_goes_on_with_the_mean_of_errors() -> None:
    found = ranks.run(on_state, "OneBitAdam", ranks=3)
    assert found[1:] == [{}, {}], "only rank 0 has to hold all of it"
    states = found[0]["ranks"]
    loaded = ranks.run(on_load, "OneBitAdam", found[0], ranks=2)
    for i in range(len(SHAPES)):
        mean = sum(state["state"][i]["error"] for state in states) / 3
        for errors, _ in loaded:
            torch.testing.assert_close(errors[i], mean)
    assert all(torch.equal(a, b) for a, b in zip(loaded[0][1], loaded[1][1], strict=True))


def on_state(kind: str, steps: int = 10) -> dict[str, Any]:
    params = parameters()
    optimizer = make(kind, params)
    for step in range(1, steps + 1):
        give(params, dist.get_rank(), step)
        optimizer.step()
    return optimizer.gathered_state_dict()


def on_load(kind: str, states: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    params = parameters()
    optimizer = make(kind, params)
    optimizer.load_state_dict(states)
    errors = kept(optimizer, "error")
    give(params, dist.get_rank(), 11)
    optimizer.step()
    return errors, copies(params)


@over_kinds
def test_half_precision(kind: str) -> None:
    assert all(ranks.run(on_half, kind, ranks=2))


def on_half(kind: str) -> bool:
    params = parameters(torch.bfloat16)
    optimizer = make(kind, params)
    full = parameters(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in full]
    other = make(kind, wide)
    for step in range(1, STEPS + 1):
        give(params, dist.get_rank(), step)
        for p, q in zip(params, wide, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        optimizer.step()
        other.step()
    for p, q in zip(params, wide, strict=True):
        state = optimizer.state[p]
        kinds = {v.dtype for v in state.values() if isinstance(v, Tensor)}
        assert kinds == {torch.float32}
        # All arithmetic is that of a float32 parameter, and the parameter its rounded copy.
        assert torch.equal(state["master"], q.detach())
        assert torch.equal(p.detach(), q.detach().bfloat16())
    return on_checkpoint(kind, torch.bfloat16, (11,))


@over_kinds
def test_elements_without_gradient_stay(kind: str) -> None:
    assert all(ranks.run(on_masks, kind, ranks=2))


def on_masks(kind: str) -> bool:
    """Rows 3 and later never get a gradient; element 0 of the vector is masked by hand."""
    params = parameters()
    mask = torch.ones(41, dtype=torch.bool)
    mask[0] = False
    settings: dict[str, Any] = {"weight_decay": 0.0} if kind == "OneBitLamb" else {}
    optimizer = make(kind, params, masks={params[1]: mask}, **settings)
    begin = copies(params)
    frozen = 0.0
    for step in range(1, STEPS + 1):
        give(params, dist.get_rank(), step)
        assert params[0].grad is not None
        params[0].grad[3:] = 0
        optimizer.step()
        assert torch.equal(params[0][3:], begin[0][3:])
        assert (params[0][:3] != begin[0][:3]).all()
        moved = params[1].detach() - begin[1]
        if step == (9 if kind == "ZeroOneAdam" else FREEZE):
            frozen = moved[0].item()
        if frozen:
            assert moved[0].item() == frozen
            assert not optimizer.state[params[0]]["error"][3:].any()
        assert (moved[1:] != 0).all()
        # 1-bit noise over a variance of zero would be steps of LR / eps.
        assert max(float(p.detach().abs().max()) for p in params) < 10
    return True


@over_kinds
def test_no_gradient_counts_as_zero(kind: str) -> None:
    assert all(ranks.run(on_none, kind, ranks=2))


def on_none(kind: str) -> bool:
    me = dist.get_rank()
    found = []
    for absent in (True, False):
        params = parameters()
        optimizer = make(kind, params)
        for step in range(1, 15):
            give(params, me, step)
            if step % 3 == me:
                params[step % 2].grad = None if absent else torch.zeros(SHAPES[step % 2])
            optimizer.step()
        found.append(copies(params))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_compressed_step_sends_twenty_times_less() -> None:
    for dense, compressed in ranks.run(on_bytes, ranks=2):
        assert dense["exchanges"] == 2
        assert compressed["exchanges"] == 2
        assert dense["bytes_sent"] >= 20 * compressed["bytes_sent"] > 0
        assert compressed["bytes_received"] > 0
        assert set(compressed["seconds"]) >= {"encode", "network", "decode"}


def on_bytes() -> tuple[dict[str, Any], dict[str, Any]]:
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 50))
    optimizer = tw.optim.OneBitAdam(model.parameters(), freeze_step=2, timeout=TIMEOUT)
    found = []
    for step in range(4):
        model(normal(800, step).view(8, 100)).square().mean().backward()
        optimizer.step()
        found.append(optimizer.stats())
    after = {k: found[3][k] - found[1][k] for k in ("exchanges", "bytes_sent", "bytes_received")}
    return found[1], {**found[3], **after}


@over_kinds
def test_a_step_that_fails_changes_nothing(kind: str) -> None:
    assert all(ranks.run(on_failure, kind, ranks=2))


def on_failure(kind: str) -> bool:
    """Ranks with different learning rates, in each stage; then the step is taken rightly."""
    me = dist.get_rank()
    params = parameters()
    optimizer = make(kind, params)
    for step in range(1, 21):
        give(params, me, step)
        if step in (2, 12, 20):
            before, state = copies(params), optimizer.state_dict()
            frozen = {k: {n: clone(v) for n, v in s.items()} for k, s in state["state"].items()}
            optimizer.param_groups[0]["lr"] = LR * (1 + me)
            with pytest.raises(tw.MismatchError, match="settings"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = LR
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
            for k, s in optimizer.state_dict()["state"].items():
                assert s.keys() == frozen[k].keys()
                for n, v in s.items():
                    assert (
                        torch.equal(v, frozen[k][n]) if isinstance(v, Tensor) else v == frozen[k][n]
                    )
        optimizer.step()
    return True


@over_kinds
def test_errors_of_exchanges_come_through(kind: str) -> None:
    assert ranks.run(on_peer_error, kind, ranks=2) == ["PeerError", "MemoryLimitError"]


def on_peer_error(kind: str) -> str:
    """Rank 1 has no memory for a compressed exchange; the other is told."""
    params = parameters()
    optimizer = make(kind, params)
    for step in range(1, 13):
        give(params, dist.get_rank(), step)
        if step == 12:
            before, errors = copies(params), kept(optimizer, "error")
            limit = 10 if dist.get_rank() == 1 else None
            options = optimizer._options
            optimizer._options = dataclasses.replace(options, max_bytes=limit)
            with pytest.raises((tw.PeerError, tw.MemoryLimitError)) as caught:
                optimizer.step()
            after = kept(optimizer, "error")
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(errors, after, strict=True))
            assert optimizer.stats()["steps"] == 11
            optimizer._options = options
        optimizer.step()
    return caught.type.__name__


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
def test_a_step_that_is_not_finite_is_left_out_by_all(kind: str) -> None:
    assert all(ranks.run(on_infinity, kind, ranks=2))


def on_infinity(kind: str) -> bool:
    params = parameters()
    optimizer = make(kind, params)
    for step in range(1, 12):
        give(params, dist.get_rank(), step)
        optimizer.step()
        if step in (2, 9):
            before, errors = copies(params), step > FREEZE and kept(optimizer, "error")
            give(params, dist.get_rank(), step)
            if dist.get_rank() == 1:
                assert params[0].grad is not None
                params[0].grad[0, 0] = torch.inf
            with pytest.warns(tw.errors.ThinwireWarning, match="NaN or infinity"):
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
            if errors:
                now = kept(optimizer, "error")
                assert all(torch.equal(a, b) for a, b in zip(errors, now, strict=True))
    assert optimizer.stats()["skipped"] == 2
    assert optimizer.stats()["steps"] == 11
    return True


def test_a_rank_leaves_out_what_is_not_finite_between_meetings() -> None:
    for params, skipped in ranks.run(on_local_infinity, ranks=2):
        assert all(torch.isfinite(p).all() for p in params)
        assert skipped in (0, 1)


def on_local_infinity() -> tuple[list[Tensor], int]:
    params = parameters()
    optimizer = make("ZeroOneAdam", params)
    for step in range(1, 21):
        give(params, dist.get_rank(), step)
        if step == 17 and dist.get_rank() == 1:
            params[0].grad = torch.full(SHAPES[0], torch.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tw.errors.ThinwireWarning)
            optimizer.step()
    return copies(params), optimizer.stats()["skipped"]


def test_sync_brings_replicas_together() -> None:
    assert all(ranks.run(on_sync, ranks=3))


def on_sync() -> bool:
    params = parameters()
    model = nn.ParameterList(params)
    optimizer = make("ZeroOneAdam", params)
    for step in range(1, 20):
        give(params, dist.get_rank(), step)
        optimizer.step()
    assert not optimizer.synced
    with pytest.raises(tw.errors.ReplicaError):
        tw.check_replicas(model, timeout=TIMEOUT)
    optimizer.sync()
    assert optimizer.synced
    tw.check_replicas(model, timeout=TIMEOUT)
    exchanges = optimizer.stats()["exchanges"]
    optimizer.sync()  # nothing to do
    assert optimizer.stats()["exchanges"] == exchanges
    optimizer.param_groups[0]["lr"] = 0.0  # nothing moves, so there is nothing to meet for
    for step in range(20, 29):
        give(params, dist.get_rank(), step)
        optimizer.step()
    assert optimizer.stats()["exchanges"] == exchanges
    tw.check_replicas(model, timeout=TIMEOUT)
    optimizer.param_groups[0]["lr"] = LR
    params[0].data.fill_(100.0)  # parameters may be set where all ranks have the same
    for step in range(29, 33):
        give(params, dist.get_rank(), step)
        optimizer.step()
    assert optimizer.synced
    assert ((params[0] - 100).abs() < 1).all()
    return True


def test_gradscaler() -> None:
    assert all(ranks.run(on_scaler, ranks=2))


def on_scaler() -> bool:
    """Scaled gradients give the same steps, and an overflow on one rank stops none of them."""
    params, plain = parameters(), parameters()
    optimizer, other = make("OneBitAdam", params), make("OneBitAdam", plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 15):
        give(plain, dist.get_rank(), step)
        for p, q in zip(params, plain, strict=True):
            assert q.grad is not None
            p.grad = q.grad * scaler.get_scale()
        if step in (3, 9) and dist.get_rank() == 0:
            assert params[0].grad is not None
            params[0].grad[0] = torch.inf
        scaler.scale(torch.ones(()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tw.errors.ThinwireWarning)
            scaler.step(optimizer)
        scaler.update()
        if step not in (3, 9):
            other.step()
    assert scaler.get_scale() == (256.0 if dist.get_rank() == 0 else 1024.0)
    return all(torch.equal(p, q) for p, q in zip(params, plain, strict=True))


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_the_state_of_torchs_adam_is_taken_over(kind: str) -> None:
    assert all(ranks.run(on_takeover, kind, ranks=2))


def on_takeover(kind: str) -> bool:
    params, again = parameters(), parameters()
    theirs = torch.optim.Adam(params, lr=LR, betas=(B1, B2), eps=EPS)
    more = {"var_update_scaler": 100} if kind == "ZeroOneAdam" else {}
    ours = make(kind, again, lr=1.0, **more)
    for step in range(1, 4):
        give(params, 0, step)
        theirs.step()
    for p, q in zip(again, params, strict=True):
        p.data.copy_(q.data)
    ours.load_state_dict(theirs.state_dict())
    for step in (4, 5):
        give(params, 0, step)
        give(again, 0, step)
        theirs.step()
        ours.step()
    for p, q in zip(params, again, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=80 * 2**-24)
    for step in range(6, 11):
        give(params, 0, step)
        theirs.step()
    with pytest.raises(ValueError, match="after 10 steps"):
        make(kind, again).load_state_dict(theirs.state_dict())
    return True


def test_ddp_inside_no_sync_is_the_plain_module() -> None:
    assert all(ranks.run(on_ddp, ranks=2))


def on_ddp() -> bool:
    found = []
    for wrapped in (True, False):
        model = nn.Linear(5, 3)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(normal(p.numel(), i).view(p.shape))
        outer = nn.parallel.DistributedDataParallel(model) if wrapped else model
        optimizer = make("OneBitAdam", model.parameters(), freeze_step=2)
        for step in range(4):
            optimizer.zero_grad()
            x = normal(20, 10 * step + dist.get_rank()).view(4, 5)
            with outer.no_sync() if wrapped else contextlib.nullcontext():
                outer(x).square().mean().backward()
            optimizer.step()
        found.append(copies(model.parameters()))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def on_averaged(kind: str) -> dict[str, list[str]]:
    return warnings_of_averaged(lambda parameters: make(kind, parameters))


@over_kinds
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_were_averaged_already_are_noticed(kind: str, size: int) -> None:
    for found in ranks.run(on_averaged, kind, ranks=size):
        for case, warned in AVERAGED.items():
            assert len(found[case]) == warned, (case, found[case])
        assert found["DDP"][0].startswith(f"{kind}: all ranks came with the same gradients")
        assert "model.no_sync()" in found["DDP"][0]


# Settings.


def single() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


WRONG: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("lr", lambda: make("OneBitAdam", single(), lr=-1.0), ValueError, "lr must be"),
    ("betas", lambda: make("OneBitAdam", single(), betas=(0.9, 1.0)), ValueError, r"betas\[1\]"),
    ("beta", lambda: make("OneBitAdam", single(), betas=0.9), ValueError, "two numbers"),
    ("eps", lambda: make("OneBitAdam", single(), eps=0.0), ValueError, "eps must be positive"),
    ("decay", lambda: make("OneBitLamb", single(), weight_decay=-1), ValueError, "weight_decay"),
    ("freeze", lambda: make("OneBitAdam", single(), freeze_step=0), ValueError, "steps from 1"),
    ("float", lambda: make("OneBitAdam", single(), freeze_step=1.5), ValueError, "number of steps"),
    ("flag", lambda: make("OneBitAdam", single(), decoupled=1), ValueError, "True or False"),
    ("local", lambda: make("ZeroOneAdam", single(), local_step_clipper=0), ValueError, "clipper"),
    ("factor", lambda: make("OneBitLamb", single(), factor_min=2.0), ValueError, "contain"),
    ("coeff", lambda: make("OneBitLamb", single(), min_coeff=20.0), ValueError, "max_coeff"),
    ("masks", lambda: make("OneBitAdam", single(), masks=[1]), TypeError, "by parameter"),
    ("joint", lambda: make("OneBitAdam", single(), compressor="powersgd"), ValueError, "twoshot"),
    ("spec", lambda: make("OneBitAdam", single(), compressor=3), TypeError, "spec"),
    ("empty", lambda: make("OneBitAdam", []), ValueError, "empty"),
    (
        "mask shape",
        lambda: (p := single()) and make("OneBitAdam", p, masks={p[0]: torch.ones(2).bool()}),
        ValueError,
        "shape",
    ),
    (
        "mask of another",
        lambda: make("OneBitAdam", single(), masks={torch.ones(3): torch.ones(3).bool()}),
        ValueError,
        "none of the parameters",
    ),
    (
        "complex",
        lambda: make("OneBitAdam", [nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
        TypeError,
        "complex64",
    ),
    (
        "two freeze steps",
        lambda: make("OneBitAdam", [{"params": single()}, {"params": single(), "freeze_step": 7}]),
        ValueError,
        "one for all",
    ),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[0])
def test_wrong_settings_are_refused(case: tuple[str, Callable[[], Any], Any, str]) -> None:
    _, call, error, words = case
    with pytest.raises(error, match=words):
        call()


def test_parameters_that_come_too_late_are_refused() -> None:
    assert all(ranks.run(on_late, ranks=2))


def on_late() -> bool:
    params = parameters()
    optimizer = make("OneBitAdam", params[:2])
    params[1].requires_grad_(False)
    optimizer.add_param_group({"params": params[2:]})
    for step in range(1, FREEZE + 1):
        give(params, 0, step)
        optimizer.step()
    with pytest.raises(ValueError, match="frozen"):
        optimizer.add_param_group({"params": single()})
    params[1].requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.1 took no part"):
        optimizer.step()
    params[1].requires_grad_(False)
    optimizer.step()
    return True


RESTS = {  # of a parameter, as steps: before it rests, of rest; and when its variance is frozen
    "some compressed steps": (8, 2, FREEZE),
    "as many as were dense": (8, FREEZE, FREEZE),
    "more": (8, FREEZE + 2, FREEZE),
    "over the end of the dense ones": (3, 4, 3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", RESTS)
def test_a_parameter_that_was_not_trained_for_some_steps_goes_on(kind: str, case: str) -> None:
    before, rest, frozen = RESTS[case]
    if kind == "ZeroOneAdam" and frozen == FREEZE:
        before = FREEZE  # its meetings go by the number of the step
    assert all(ranks.run(on_rest, kind, before, rest, frozen, ranks=2))


def on_rest(kind: str, before: int, rest: int, frozen: int) -> bool:
    """Tensors are compressed one by one: the first one must move as if it were trained alone, in
    the steps that it takes part in, with a variance that has seen as many gradients."""
    settings, alone_settings = {"freeze_step": FREEZE}, {"freeze_step": frozen}
    if kind == "ZeroOneAdam":
        every = {"local_step_clipper": 1, "var_update_scaler": 100}
        settings = {"var_freeze_step": FREEZE, **every}
        alone_settings = {"var_freeze_step": frozen, **every}
    params, (alone, *_) = parameters(), parameters()
    optimizer, other = make(kind, params, **settings), make(kind, [alone], **alone_settings)
    for step in range(1, before + rest + 7):
        params[0].requires_grad_(not before < step <= before + rest)
        give(params, dist.get_rank(), step)
        optimizer.step()
        if params[0].requires_grad:
            alone.grad = params[0].grad
            other.step()
        assert torch.equal(params[0], alone), step
    again = make(kind, params, **settings)
    again.load_state_dict(optimizer.state_dict())
    assert optimizer.state[params[0]]["variance_steps"] == frozen
    assert again.state[params[0]]["variance_steps"] == frozen
    return True


def test_replicas_meet_in_parameters_that_were_frozen_between_two_meetings() -> None:
    assert all(ranks.run(on_frozen_apart, ranks=2))


def on_frozen_apart() -> bool:
    params, me = parameters(), dist.get_rank()
    model = nn.ParameterList(params)
    settings = {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
    optimizer = make("ZeroOneAdam", params, **settings)
    for step in range(1, 15):
        params[0].requires_grad_(step not in (11, 12))
        params[1].requires_grad_(step < 14)
        give(params, me, step)
        optimizer.step()
        assert optimizer.synced == (step in (1, 2, 3, 4, 8, 12)), step  # meetings 1, 2, 4, 4 apart
        if optimizer.synced:
            tw.check_replicas(model, timeout=TIMEOUT)
    optimizer.sync()
    assert optimizer.synced
    tw.check_replicas(model, timeout=TIMEOUT)
    return True


def test_zero_one_adam_takes_parameters_that_were_trained_without_the_others() -> None:
    assert all(ranks.run(on_trained_apart, ranks=2))


def on_trained_apart() -> bool:
    params, me = parameters(), dist.get_rank()
    settings = {"var_freeze_step": 4, "var_update_scaler": 100, "local_step_clipper": 1}
    optimizer = make("ZeroOneAdam", params, **settings)
    for step in range(1, 14):
        params[0].requires_grad_(step > 7)
        for p in params[1:]:
            p.requires_grad_(step <= 7 or step > 9)
        give(params, me, step)
        optimizer.step()
    tw.check_replicas(nn.ParameterList(params), timeout=TIMEOUT)
    return optimizer.state[params[0]]["weight"] == 0.0


def test_zero_one_adam_refuses_parameters_without_a_variance() -> None:
    """Thawed after the last update of the variance, though before it was frozen."""
    assert all(ranks.run(on_no_variance, ranks=1))


def on_no_variance() -> bool:
    params = parameters()
    optimizer = make("ZeroOneAdam", params)  # the variance is updated in step 8, frozen after 9
    for step in range(1, 10):
        params[0].requires_grad_(step == 9)
        give(params, 0, step)
        optimizer.step()
    give(params, 0, 10)
    before = copies(params)
    with pytest.raises(ValueError, match=r"0\.0 took no part in the updates of the variance"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    params[0].requires_grad_(False)
    optimizer.step()
    assert torch.equal(params[0], before[0])
    return True


def test_states_of_earlier_versions_are_taken_over() -> None:
    assert all(ranks.run(on_earlier_state, ranks=2))


def on_earlier_state() -> bool:
    """They do not say how many updates the variance has seen."""
    params, again = parameters(), parameters()
    optimizer, other = make("OneBitAdam", params), make("OneBitAdam", again)
    for step in range(1, 12):
        params[0].requires_grad_(step > 2)
        give(params, dist.get_rank(), step)
        optimizer.step()
    state = optimizer.state_dict()
    for kept in state["state"].values():
        assert kept.pop("variance_steps") == FREEZE - 2 * (kept is state["state"][0])
    other.load_state_dict(state)
    found = [other.state[p]["variance_steps"] for p in again]
    return found == [FREEZE - 2] + [FREEZE] * (len(SHAPES) - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_l2_scale_keeps_the_length(dtype: torch.dtype) -> None:
    """||C(x)|| = ||x||, and ||C(x) - x||^2 = 2 (1 - ||x||_1 / (sqrt(d) ||x||)) ||x||^2."""
    compressor = tw.ScaledSign("l2")
    assert str(compressor) == "scaledsign:l2"
    for x in (
        normal(1001, 5, dtype),
        normal(1001, 5, dtype) ** 5,
        torch.full((3,), -0.3, dtype=dtype),
    ):
        sent = compressor.decode(compressor.encode(x)).double()
        x = x.double()
        # The mean and its product with the ratio are rounded: twice 2^-24 of the scale.
        assert float(sent.norm()) == pytest.approx(float(x.norm()), rel=2**-22)
        share = x.abs().sum() / (x.numel() ** 0.5 * x.norm())
        wanted = 2 * (1 - share) * x.square().sum()
        assert float((sent - x).square().sum()) == pytest.approx(float(wanted), rel=1e-5, abs=1e-9)
    with pytest.raises(ValueError, match="norm must be"):
        tw.ScaledSign("l3")


def test_variance_schedule() -> None:
    """16 updates one apart, 16 two apart, and so on, as in the paper with kappa = 16."""
    due = [step for step in range(1, 200) if variance_at(step, 16).due]
    gaps = np.diff(due)
    assert due[:16] == list(range(1, 17))
    assert set(gaps[:15]) == {1}
    assert set(gaps[15:31]) == {2}
    assert set(gaps[31:46]) == {4}
    for step in range(1, 200):
        assert variance_at(step, 16).updates == sum(each <= step for each in due)


def test_meetings_are_never_further_apart_than_allowed() -> None:
    for scaler, longest in ((5, 16), (3, 12), (1, 7), (1000, 4)):
        met = [s for s in range(10, 400) if s % interval_at(s, 9, scaler, longest) == 0]
        assert max(np.diff(met)) <= longest


def test_comparisons_put_them_in_the_place_of_adam():
    from thinwire.compare.method import OPTIMIZERS, read
    from thinwire.compare.training import optimizer_of, stats_of
    from thinwire.optim.base import ExchangingOptimizer

    layer = torch.nn.Linear(3, 2)
    given = torch.optim.AdamW(layer.parameters(), lr=0.25, betas=(0.5, 0.75), weight_decay=0.125)
    for name, (kind, title) in OPTIMIZERS.items():
        method = read(name)
        assert (method.title, method.kind) == (title, "optimizer")
        made = optimizer_of(method, given, 100)
        assert isinstance(made, ExchangingOptimizer)
        assert type(made) is getattr(tw.optim, kind)
        (group,) = made.param_groups
        assert group["lr"] == 0.25
        assert group["weight_decay"] == 0.125
        if name != "demo":
            assert tuple(group["betas"]) == (0.5, 0.75)
            assert 20 in (group.get("freeze_step"), group.get("var_freeze_step"))
        assert stats_of(None, made)["total"]["network_bytes"] == 0
        with pytest.raises(ValueError, match="takes the place of Adam, and this workload trains"):
            optimizer_of(method, torch.optim.SGD(layer.parameters(), 0.1), 100)
    assert optimizer_of(read("ddp"), given, 100) is given
    assert stats_of(None, given) is None
