"""States as they are saved: that of one rank, or those of all ranks in one.

What ranks remember differs, so each state says whose it is: `rank`, and `world_size`, of the group.
A gathered one holds all of them, `{"world_size": n, "ranks": [...]}`, and can be loaded on any
number of ranks. Whatever is loaded is checked whole before anything changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import check
from thinwire.collectives.options import Group, Options
from thinwire.collectives.states import GatherStates
from thinwire.feedback import Feedback
from thinwire.kernels import Key
from thinwire.reducer.state import TensorState

RANK, SIZE, RANKS = "rank", "world_size", "ranks"
KEYS = ("seed", "feedback", "recalled", "tensors")

RankState = Mapping[str, Any]


def whose(group: Group) -> dict[str, int]:
    """What every saved state says of the rank that it belongs to."""
    return {RANK: dist.get_rank(group), SIZE: dist.get_world_size(group)}


def gather(
    who: str, own: RankState, moment: str, options: Options, everywhere: bool
) -> dict[str, Any]:
    """All ranks' states in one, on the first rank or on all; nothing elsewhere.

    Args:
        who: it is the state of.
        moment: that ranks must agree in: states of different steps do not belong together.
    """
    what = f"states of {who} at {moment}"
    exchange = GatherStates(own, what, options, everywhere=everywhere)
    exchange.start()
    return gathered(exchange.states)


def gathered(states: Sequence[RankState]) -> dict[str, Any]:
    """All ranks' states in one; nothing where there are none."""
    return {SIZE: len(states), RANKS: list(states)} if states else {}


def is_of_one_rank(state: Any) -> bool:
    """Whether this is a state that says whose it is."""
    return isinstance(state, Mapping) and RANK in state and SIZE in state


def states_to_load(
    who: str, given: Any, group: Group, alike: Sequence[str] = ()
) -> list[RankState]:
    """What a rank goes on from: its own state, or those of another number of ranks.

    Args:
        who: is to load it, for errors.
        given: a state of one rank, or a gathered one.
        alike: keys whose values are the same in the states of all ranks.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{who}: expected a state_dict() or a gathered_state_dict(), got a "
            f"{type(given).__name__}"
        )
    if not given:
        raise ValueError(
            f"{who}: the state is empty: gathered_state_dict() gives it to rank 0 alone, unless "
            "all ranks ask for it"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if RANKS in given:
        states = _states_of_all(who, given, alike)
        return [states[rank]] if len(states) == size else states
    if not is_of_one_rank(given):
        raise ValueError(f"{who}: not a state of it, as it does not say of which rank it is")
    if (given[RANK], given[SIZE]) != (rank, size):
        raise ValueError(
            f"{who}: this is the state of rank {given[RANK]} of {given[SIZE]}, given to rank "
            f"{rank} of {size}, and what ranks remember differs. Save one gathered_state_dict(), "
            "which all ranks call and any number of ranks can load, or let every rank save and "
            "load its own state_dict(), as tw.save_checkpoint does"
        )
    return [given]


def _states_of_all(who: str, given: Mapping[str, Any], alike: Sequence[str]) -> list[RankState]:
    states = given[RANKS]
    if not isinstance(states, list | tuple) or not states:
        raise ValueError(f"{who}: a gathered state holds a list of states, got {_short(states)}")
    for i, state in enumerate(states):
        if not is_of_one_rank(state) or (state[RANK], state[SIZE]) != (i, len(states)):
            of = f"rank {state[RANK]} of {state[SIZE]}" if is_of_one_rank(state) else "no rank"
            raise ValueError(
                f"{who}: entry {i} of a gathered state of {len(states)} ranks is a state of {of}"
            )
        required(who, state, alike)
        for key in alike:
            if state[key] != states[0][key]:
                raise ValueError(
                    f"{who}: the states of a gathered state are not of one moment: {key} is "
                    f"{_short(states[0][key])} on rank 0 but {_short(state[key])} on rank {i}"
                )
    return list(states)


def required(who: str, state: Any, keys: Sequence[str]) -> None:
    """Refuse what is no mapping with these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{who}: expected a state, got {_short(state)}")
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(f"{who}: not a state of it, as there is no {missing[0]!r}")


@dataclass(frozen=True)
class ReducerState:
    """What a reducer is to go on with, checked.

    Args:
        seed: as given to the reducer that saved it.
        recalled: what joint compressors find again, by tensor and part.
        tensors: what is remembered of each tensor, and its number of steps.
    """

    seed: int
    recalled: dict[str, dict[str, Tensor]]
    tensors: dict[str, tuple[TensorState, int]]

    @classmethod
    def of(
        cls,
        who: str,
        states: Sequence[RankState],
        feedback: Feedback,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> "ReducerState":
        """Of one rank's state, or the mean of all ranks' states: with it on any number of ranks,
        the average of what is remembered, and so of what will be sent, is what it was.

        Args:
            parameters: that there are, if that is known.
        """
        first = states[0]
        for state in states:
            required(who, state, KEYS)
            _check_feedback(who, state["feedback"], feedback)
            for key in ("recalled", "tensors"):
                _check_names(who, key, state[key], parameters)
            for name, kept in state["tensors"].items():
                _check_tensor(
                    f"{who}: {name}",
                    kept,
                    feedback,
                    None if parameters is None else parameters[name],
                )
        Key(seed=first["seed"]).checked()
        for name, parts in first["recalled"].items():
            _check_recalled(f"{who}: {name}", parts)
        return cls(
            first["seed"],
            {
                name: {p: v.clone() for p, v in kept.items()}
                for name, kept in first["recalled"].items()
            },
            {name: _mean(who, name, states) for name in first["tensors"]},
        )


def _check_feedback(who: str, found: Any, feedback: Feedback) -> None:
    own = str(feedback)
    if not isinstance(found, str) or found.partition(":")[0] != own.partition(":")[0]:
        raise ValueError(f"{who}: the state is that of feedback {_short(found)}, this is {own!r}")


def _check_names(who: str, key: str, entries: Any, parameters: Mapping[str, Tensor] | None) -> None:
    if not isinstance(entries, Mapping) or not all(isinstance(name, str) for name in entries):
        raise ValueError(f"{who}: {key!r} must hold entries by name, got {_short(entries)}")
    for name in entries if parameters is not None else ():
        check_known(who, name, parameters)


def check_known(who: str, name: Any, parameters: Mapping[str, Tensor] | None) -> None:
    """Refuse a parameter that is not there."""
    if parameters is not None and name not in parameters:
        raise ValueError(
            f"{who}: the state has a parameter {name!r} that the model has not, or does not train "
            "any more"
        )


def _check_tensor(who: str, kept: Any, feedback: Feedback, parameter: Tensor | None) -> None:
    """Refuse what cannot be the state of a tensor."""
    required(who, kept, ("steps",))
    steps, parts = kept["steps"], [part for part in kept if part != "steps"]
    if not check.is_whole(steps) or steps < 0:
        raise ValueError(f"{who}: the number of steps is {_short(steps)}")
    if parts and set(parts) != set(feedback.parts):
        raise ValueError(
            f"{who}: {feedback} remembers {', '.join(feedback.parts) or 'nothing'}, not "
            f"{', '.join(map(str, parts))}"
        )
    numel = {check_values(f"{who}: {part}", kept[part], parameter).numel() for part in parts}
    if len(numel) > 1:
        raise ValueError(f"{who}: {', '.join(parts)} must be of one size, got {sorted(numel)}")


def check_values(who: str, values: Any, parameter: Tensor | None) -> Tensor:
    """Finite numbers of the type that is worked with; returns them."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{who}: expected a tensor, got {_short(values)}")
    wide: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    if parameter is not None:
        wide = (torch.float64,) if parameter.dtype == torch.float64 else (torch.float32,)
        if values.numel() != parameter.numel():
            raise ValueError(
                f"{who}: {values.numel()} elements, but the parameter has {parameter.numel()}: "
                "the model has changed"
            )
    if values.dtype not in wide:
        expected = " or ".join(map(str, wide))
        raise ValueError(f"{who}: expected {expected}, got {values.dtype}")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{who}: holds NaN or infinity")
    return values


def _check_recalled(who: str, parts: Any) -> None:
    if not isinstance(parts, Mapping):
        raise ValueError(f"{who}: 'recalled' must hold tensors by name, got {_short(parts)}")
    for part, values in parts.items():
        check_values(f"{who}: {part}", values, None)


def _mean(who: str, name: str, states: Sequence[RankState]) -> tuple[TensorState, int]:
    """What a tensor goes on with, as copies."""
    entries = [state["tensors"].get(name, {}) for state in states]
    first = entries[0]
    if any(entry.keys() != first.keys() for entry in entries):
        raise ValueError(f"{who}: {name}: not all of the states remember the same of it")
    means: TensorState = {}
    for part in first:
        if part == "steps":
            continue
        total = first[part].flatten().clone()
        for entry in entries[1:]:
            if entry[part].numel() != total.numel():
                raise ValueError(f"{who}: {name}: {part} is not of one size in all states")
            total += entry[part].flatten().to(total)
        means[part] = total / len(entries) if len(entries) > 1 else total
    return means, first["steps"]


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
