"""States of wires, reducers and optimizers: whose they are, of which step, and what is refused.

Functions with a leading `on_` run on every rank, in the processes of ranks.py.
"""

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import TIMEOUT, backward, train, wired
from tensors import same
from torch import Tensor, nn

import thinwire as tw
from thinwire.collectives import states
from thinwire.collectives.options import Options

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels


class Trained(NamedTuple):
    """Something with a state."""

    holder: Any
    step: Callable[[int], None]


def new_wire() -> Trained:
    model, wire = wired()
    return Trained(wire, lambda step: train(model, range(step, step + 1)) and None)


def new_reducer() -> Trained:
    reducer = tw.Reducer("topk:0.1", feedback="ef21m:0.5")
    return Trained(reducer, lambda step: reducer.average({"w": noise(40, step)}) and None)


def new_optimizer(kind: str = "OneBitAdam") -> Trained:
    torch.manual_seed(0)
    net = nn.Linear(6, 5)
    more = {"var_freeze_step": 2} if kind == "ZeroOneAdam" else {"freeze_step": 2}
    optimizer = getattr(tw.optim, kind)(net.named_parameters(), lr=0.01, **more)

    def step(number: int) -> None:
        optimizer.zero_grad()
        net(noise(24, number).view(4, 6)).square().mean().backward()
        optimizer.step()

    return Trained(optimizer, step)


NEW: dict[str, Callable[[], Trained]] = {
    "wire": new_wire,
    "reducer": new_reducer,
    "optimizer": new_optimizer,
}
over_kinds = pytest.mark.parametrize("kind", NEW)


def noise(numel: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(numel, generator=generator)


def alike(a: Any, b: Any) -> bool:
    """The same values in the same places, bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def from_rank_0(state: Any) -> Any:
    """As frameworks do it: rank 0 saves, all load."""
    box = [through_a_file(state) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


# Whose it is


def on_rank_0_saves_for_all(kind: str) -> tuple[str, bool]:
    first = NEW[kind]()
    for step in range(4):
        first.step(step)
    other = NEW[kind]()
    other.step(0)
    before = copy.deepcopy(other.holder.state_dict())
    error = error_of(lambda: other.holder.load_state_dict(from_rank_0(first.holder.state_dict())))
    return error, alike(other.holder.state_dict(), before)


@over_kinds
def test_the_state_of_another_rank_is_refused(kind):
    first, second = ranks.run(on_rank_0_saves_for_all, kind, ranks=2)
    assert first == ("", False)
    error, untouched = second
    assert untouched, "what is refused has changed something"
    assert error.startswith("ValueError: ")
    assert "state of rank 0 of 2, given to rank 1 of 2" in error
    assert "gathered_state_dict()" in error
    assert "tw.save_checkpoint" in error


def on_gathered(kind: str, given: Any) -> dict[str, Any]:
    """Saved by rank 0 for all; with a state given, that of another number of ranks is loaded."""
    first = NEW[kind]()
    for step in range(4):
        first.step(step)
    own = copy.deepcopy(first.holder.state_dict())
    held = first.holder.gathered_state_dict()
    other = NEW[kind]()
    other.holder.load_state_dict(from_rank_0(held))
    third = NEW[kind]()
    third.holder.load_state_dict(own)
    found = {"held": held, "own": alike(other.holder.state_dict(), third.holder.state_dict())}
    found["everywhere"] = alike(
        first.holder.gathered_state_dict(everywhere=True), from_rank_0(held)
    )
    if given is not None:
        other.holder.load_state_dict(through_a_file(given))
        found["mean"] = copy.deepcopy(other.holder.state_dict())
        alone = given["ranks"][0]
        found["single"] = error_of(lambda: other.holder.load_state_dict(alone))
        other.step(4)  # they agree in the step
    return found


def spread(state: dict[str, Any]) -> dict[str, Tensor]:
    """What differs between ranks."""
    if "param_groups" in state:
        return {f"{key}": kept["error"] for key, kept in state["state"].items()}
    tensors = state.get("reducer", state)["tensors"]
    return {
        f"{name} {part}": value
        for name, kept in tensors.items()
        for part, value in kept.items()
        if part != "steps"
    }


@over_kinds
def test_gathered_states_go_to_rank_0_and_load_on_any_number_of_ranks(kind):
    found = ranks.run(on_gathered, kind, None, ranks=3)
    gathered = found[0]["held"]
    assert [each["held"] for each in found[1:]] == [{}, {}]
    assert all(each["own"] for each in found), "not its own state, bit for bit"
    assert all(each["everywhere"] for each in found)
    parts = [spread(state) for state in gathered["ranks"]]
    assert len(parts) == 3
    for each in ranks.run(on_gathered, kind, gathered, ranks=2):
        means = spread(each["mean"])
        assert means.keys() == parts[0].keys()
        for name, mean in means.items():
            wanted = sum(part[name].double() for part in parts) / 3
            # Three sums and a division in float32.
            assert (mean - wanted).abs().max() <= 4 * 2.0**-24 * max(1.0, float(wanted.abs().max()))
        assert "state of rank 0 of 3" in each["single"]


def odd_state(rank: int) -> dict[Any, Any]:
    """All that a state may hold, and not as much on one rank as on another."""
    generator = torch.Generator().manual_seed(rank)
    many = torch.randn(3 + rank, 7, generator=generator)
    return {
        "plain": [1, -2.5, True, None, "ä\n=", float("inf"), -0.0, 10**30, (1, [2])],
        3: {"many": many, "turned": many.T, "half": many.to(torch.bfloat16), "none": many[:0]},
        "bools": many > 0,
        "one": torch.tensor(rank),
        "wide": many.double(),
        "more": list(many) if rank else [],
    }


def on_odd_states(length: int) -> tuple[bool, str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "ROUND", 0)
        patch.setattr(states, "LEAST", length)
        options = Options.of(timeout=TIMEOUT)
        gathering = states.GatherStates(odd_state(rank), "odd", options)
        gathering.start()
    wanted = [odd_state(each) for each in range(size)] if rank == 0 else []
    wrong = {"deep": [{"set": {1}}]} if rank else odd_state(0)
    error = error_of(lambda: states.GatherStates(wrong, "odd", options).start())
    return alike(gathering.states, wanted), error


@pytest.mark.parametrize("length", [17, 300, 1 << 20])
def test_whatever_a_state_holds_is_gathered_in_pieces_of_any_length(length):
    found = ranks.run(on_odd_states, length, ranks=3)
    assert all(right for right, _ in found)
    assert found[1][1] == "TypeError: deep.0.set: tensors and plain values can be gathered, not set"
    assert "rank 1: TypeError: deep.0.set" in found[0][1]


def on_unsynced() -> str:
    optimizer = new_optimizer("ZeroOneAdam")
    optimizer.holder.param_groups[0]["local_step_scaler"] = 1
    for step in range(5):
        optimizer.step(step)
    assert not optimizer.holder.synced
    return error_of(optimizer.holder.gathered_state_dict)


def test_models_that_differ_have_no_state_in_common():
    for error in ranks.run(on_unsynced, ranks=2):
        assert error.startswith("ValueError: ZeroOneAdam")
        assert "sync()" in error


# Of which step it is


def on_steps(kind: str) -> tuple[str, str, str]:
    first, saved = NEW[kind](), []
    for step in range(6):
        saved.append(copy.deepcopy(first.holder.state_dict()))
        first.step(step)
    other = NEW[kind]()
    other.holder.load_state_dict(saved[5 - dist.get_rank()])
    error = error_of(lambda: other.step(5))
    gathering = error_of(other.holder.gathered_state_dict)
    other.holder.load_state_dict(saved[5])
    return error, gathering, error_of(lambda: other.step(5))


@over_kinds
def test_states_of_different_steps_are_noticed_at_the_first_exchange(kind):
    for error, gathering, after in ranks.run(on_steps, kind, ranks=2):
        assert error.startswith("MismatchError: ranks disagree in one call")
        assert "step: 6 on rank 0 but 5 on rank 1" in error
        assert gathering.startswith("MismatchError: "), "states of different steps in one"
        assert after == "", "the right state does not help"


def on_names_that_differ() -> tuple[str, str]:
    """A mismatch leaves ranks in agreement, whatever each of them had begun."""
    reducer = tw.Reducer("randomk:0.1,shared=true", feedback="ef14")
    name = "ab"[dist.get_rank()]
    first = error_of(lambda: reducer.average({name: noise(40, 0)}))
    return first, error_of(lambda: reducer.average({"a": noise(40, 1)}))


def test_ranks_that_disagreed_agree_again():
    for first, second in ranks.run(on_names_that_differ, ranks=2):
        assert first.startswith("MismatchError")
        assert second == ""


class Late:
    """A scaler that raises once on rank 1."""

    def __init__(self) -> None:
        self.calls = 0

    def get_scale(self) -> float:
        self.calls += 1
        if self.calls == 2 and dist.get_rank() == 1:
            raise ArithmeticError("no scale")
        return 1.0


def on_a_scaler_that_fails() -> list[str]:
    model, _ = wired("randomk:0.1,shared=true", scaler=Late())
    return [error_of(lambda step=step: backward(model, step)) for step in range(3)]


def test_ranks_agree_in_the_step_after_one_has_failed():
    first, second = ranks.run(on_a_scaler_that_fails, ranks=2)
    assert first[1].startswith("PeerError: ")
    assert second == ["", "ArithmeticError: no scale", ""]
    assert first[0] == first[2] == ""


# What is refused

Change = Callable[[dict[str, Any]], Any]


def reducer_of(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state.get("reducer", state)
    return found


def some_tensor(state: dict[str, Any]) -> dict[str, Any]:
    tensors = reducer_of(state)["tensors"]
    return tensors[next(name for name, kept in tensors.items() if len(kept) > 1)]


def set_part(change: Callable[[Tensor], Any]) -> Change:
    def changed(state: dict[str, Any]) -> None:
        kept = some_tensor(state)
        part = next(part for part in kept if part != "steps")
        kept[part] = change(kept[part])

    return changed


def set_kept(**values: Any) -> Change:
    """Of an optimizer's second parameter."""

    def changed(state: dict[str, Any]) -> None:
        state["state"][1].update(values)

    return changed


REMEMBERED: dict[str, Change] = {
    "nan": set_part(lambda x: x * torch.nan),
    "type": set_part(lambda x: x.half()),
    "integers": set_part(lambda x: x.long()),
    "no tensor": set_part(lambda x: x.tolist()),
    "steps": lambda s: some_tensor(s).update(steps=-1),
    "steps that are none": lambda s: some_tensor(s).update(steps=None),
    "part": lambda s: some_tensor(s).update(other=torch.zeros(3)),
    "seed": lambda s: reducer_of(s).update(seed=-1),
    "feedback": lambda s: reducer_of(s).update(feedback="dgc:0.9"),
    "recalled": lambda s: reducer_of(s).update(recalled={"0.weight": {"q": "x"}}),
    "no tensors": lambda s: reducer_of(s).pop("tensors"),
    "tensors": lambda s: reducer_of(s).update(tensors=[1, 2]),
    "rank": lambda s: s.update(rank=1 - s["rank"]),
    "size": lambda s: s.update(world_size=3),
    "no rank": lambda s: s.pop("rank"),
}
CHANGES: dict[str, dict[str, Change]] = {
    "wire": {
        **REMEMBERED,
        "last size": set_part(lambda x: x[1:]),
        "wide": set_part(lambda x: x.double()),
        "unknown": lambda s: s["reducer"]["tensors"].update({"9.weight": {"steps": 0}}),
        "unknown recalled": lambda s: s["reducer"].update(recalled={"9.weight": {}}),
        "version": lambda s: s.update(version=1),
        "step": lambda s: s.update(step=-1),
        "step of another kind": lambda s: s.update(step="3"),
        "scale": lambda s: s.update(scale=float("nan")),
        "no scale": lambda s: s.pop("scale"),
        "layout": lambda s: s["layout"].append(["9.weight"]),
        "twice": lambda s: s["layout"].append(list(s["layout"][0])),
        "no layout": lambda s: s.update(layout=3),
        "policy": lambda s: s["policy"].append(1.0),
        "policy of words": lambda s: s.update(policy=["a"]),
        "no reducer": lambda s: s.update(reducer=None),
    },
    "reducer": {**REMEMBERED, "sizes": set_part(lambda x: x[1:])},
    "optimizer": {
        "nan": set_kept(error=torch.full((5,), torch.nan)),
        "size": set_kept(exp_avg=torch.zeros(4)),
        "shape": set_kept(exp_avg=torch.zeros(5, 1)),
        "type": set_kept(exp_avg_sq=torch.zeros(5, dtype=torch.float64)),
        "step": set_kept(step=-1),
        "step nan": set_kept(step=float("nan")),
        "unknown": set_kept(other=torch.zeros(5)),
        "setting": lambda s: s["param_groups"][0].update(eps=-1.0),
        "group": lambda s: s["param_groups"].append({"params": [7]}),
        "groups": lambda s: s.update(param_groups=None),
        "parameter": lambda s: s["state"].update({7: {"step": 1}}),
        "state": lambda s: s.update(state=[]),
        "kept": lambda s: s["state"].update({0: 3}),
        "rank": lambda s: s.update(rank=1 - s["rank"]),
        "no rank": lambda s: s.pop("rank"),
    },
}


def on_refusals(kind: str) -> dict[str, tuple[str, bool]]:
    found = {}
    first, other = NEW[kind](), NEW[kind]()
    for step in range(4):
        first.step(step)
    for step in range(5):
        other.step(10 + step)
    before = copy.deepcopy(other.holder.state_dict())
    for name, change in CHANGES[kind].items():
        state = copy.deepcopy(first.holder.state_dict())
        change(state)
        error = error_of(lambda state=state: other.holder.load_state_dict(state))
        found[name] = (error, alike(other.holder.state_dict(), before))
    gathered = first.holder.gathered_state_dict(everywhere=True)
    mixed = {**gathered, "ranks": gathered["ranks"][::-1]}
    for name, state in {
        "mixed": mixed,
        "none": {"world_size": 0, "ranks": []},
        "words": {"world_size": 2, "ranks": ["a", "b"]},
        "list": gathered["ranks"],
        "empty": {},
    }.items():
        error = error_of(lambda state=state: other.holder.load_state_dict(state))
        found[f"gathered: {name}"] = (error, alike(other.holder.state_dict(), before))
    other.step(20)
    return found


@over_kinds
def test_what_is_refused_changes_nothing(kind):
    for found in ranks.run(on_refusals, kind, ranks=2):
        accepted = [name for name, (error, _) in found.items() if not error]
        assert not accepted
        for name, (error, untouched) in found.items():
            assert error.startswith(("ValueError: ", "TypeError: ")), (name, error)
            assert untouched, (name, error)


class Fussy(tw.policies.Policy):
    """A policy of a user's that cannot go on from every state."""

    name = "fussy"

    def begin(self, context: tw.policies.PolicyContext) -> tw.policies.Chooser:
        return FussyChooser()

    @property
    def main(self) -> tw.Compressor:
        return tw.TopK(0.1)


class FussyChooser(tw.policies.Chooser):
    def __init__(self) -> None:
        self._numbers = [1.0, 2.0]

    def choose(self, tensor: tw.policies.TensorInfo, step: int) -> tw.policies.Choice:
        return tw.TopK(0.1)

    def state(self) -> list[float]:
        return list(self._numbers)

    def load(self, state: Any) -> None:
        self._numbers[0] = state[0]
        if state[1] < 0:
            raise ValueError("negative")
        self._numbers[1] = state[1]


def on_a_policy_that_refuses() -> tuple[str, bool]:
    model, wire = wired(Fussy())
    train(model, range(2))
    before = copy.deepcopy(wire.state_dict())
    state = copy.deepcopy(before) | {"step": 7, "policy": [5.0, -1.0]}
    state["reducer"]["tensors"].clear()
    return error_of(lambda: wire.load_state_dict(state)), alike(wire.state_dict(), before)


def test_a_policy_that_refuses_its_state_keeps_all_as_it_was():
    assert ranks.run(on_a_policy_that_refuses, ranks=2) == [("ValueError: negative", True)] * 2
