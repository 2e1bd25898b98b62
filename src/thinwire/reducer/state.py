"""The feedback state of a reducer: by unit while training goes on, by tensor in checkpoints."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.collectives.handle import Handle
from thinwire.feedback.base import Feedback
from thinwire.feedback.state import StateVector
from thinwire.kernels import Key
from thinwire.reducer.unit import Unit

STORAGE = 0x53544F52  # sets the random numbers of storage apart from those of compressors
TensorState = dict[str, Tensor]  # of one tensor: a flat vector for each part


class LastExchange:
    """The last exchange of something, for as long as it is under way.

    A handle that has ended is let go, with its tensors and with its error: the traceback of an
    error may hold a model, and with it whatever the model holds.
    """

    def __init__(self) -> None:
        self._handle: Handle | None = None

    def follow(self, handle: Handle) -> None:
        """An exchange was started."""
        self._handle = handle
        handle.when_ended(self._release)

    def _release(self, handle: Handle) -> None:
        if self._handle is handle:
            self._handle = None

    @property
    def under_way(self) -> bool:
        return self._handle is not None

    def wait_until_ended(self) -> None:
        """Return when none is under way."""
        handle = self._handle
        if handle is not None:
            handle.wait_until_ended()


@dataclass
class UnitState:
    """The state of a unit: one vector over all its tensors for each part."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    vectors: dict[str, StateVector]
    steps: int = 0
    fresh: bool = True  # nothing remembered yet
    exchange: LastExchange = field(default_factory=LastExchange)

    def storage_key(self, seed: int) -> Key:
        """To round what is kept of the next step. It follows from what checkpoints hold."""
        tensor = zlib.crc32("\n".join(self.names).encode())
        return Key(seed, self.steps % (1 << 32), tensor).derive(STORAGE)

    def committed(self, feedback: Feedback, emptied: bool) -> None:
        """One more step is remembered.

        Args:
            emptied: of which nothing was left out, so that nothing waits to be sent any more.
        """
        self.steps += 1
        self.fresh = emptied or feedback.resets(self.steps)
        if self.fresh:
            for vector in self.vectors.values():
                vector.zero()

    def matches(self, unit: Unit) -> bool:
        first = unit.pieces[0]
        return (
            self.names == unit.names
            and self.sizes == tuple(unit.sizes)
            and self.dtype == first.dtype
            and all(vector.device == first.device for vector in self.vectors.values())
        )

    def by_tensor(self, *parts: str) -> dict[str, TensorState]:
        """What is remembered of each tensor, not to be written to; all parts if none is named.

        Each vector is read once, whatever the number of tensors: it may have to be decoded.
        """
        self.exchange.wait_until_ended()
        found: dict[str, TensorState] = {name: {} for name in self.names}
        if not self.fresh:
            for part in parts or self.vectors:
                pieces = torch.split(self.vectors[part].read(), list(self.sizes))
                for state, piece in zip(found.values(), pieces, strict=True):
                    state[part] = piece
        return found


@dataclass
class FeedbackStates:
    """All that a reducer remembers, by the names of the tensors.

    Tensors may come in other units than before (DDP forms its buckets anew after the first step):
    the state of each moves to its new unit.
    """

    feedback: Feedback
    _by_name: dict[str, UnitState] = field(default_factory=dict)
    # Loaded, and not yet asked for: with the number of steps.
    _loaded: dict[str, tuple[TensorState, int]] = field(default_factory=dict)

    def of_unit(self, unit: Unit) -> UnitState:
        """The state of a unit; made anew if its tensors come together for the first time."""
        found = self._by_name.get(unit.names[0])
        if (
            found is not None
            and found.matches(unit)
            and all(self._by_name.get(name) is found for name in unit.names)
        ):
            return found
        known = self.of_tensors(unit.names)
        first = unit.pieces[0]
        numel = sum(unit.sizes)
        vectors = self.feedback.new_state(numel, first.dtype, first.device)
        for part, vector in vectors.items():
            values = torch.zeros(numel, dtype=vector.dtype, device=vector.device)
            for name, place in zip(unit.names, torch.split(values, unit.sizes), strict=True):
                state = known[name][0]
                if part in state:
                    _check_size(name, state[part], place)
                    place.copy_(state[part])
            vector.write(values)
        # A tensor that is new among known ones counts as known, or all would start anew.
        steps = max(count for _, count in known.values())
        fresh = not any(state for state, _ in known.values())
        made = UnitState(unit.names, tuple(unit.sizes), first.dtype, vectors, steps, fresh)
        for name in unit.names:
            self._by_name[name] = made
            self._loaded.pop(name, None)
        return made

    def names(self) -> list[str]:
        return [*self._by_name, *self._loaded]

    def of_tensors(self, names: Iterable[str], *parts: str) -> dict[str, tuple[TensorState, int]]:
        """What is remembered of tensors, not to be written to, and their numbers of steps; all
        parts if none is named."""
        read: dict[int, dict[str, TensorState]] = {}  # by unit
        found = {}
        for name in names:
            unit = self._by_name.get(name)
            if unit is None:
                state, steps = self._loaded.get(name, ({}, 0))
                wanted = {part: state[part] for part in parts or state if part in state}
            else:
                steps = unit.steps
                if id(unit) not in read:
                    read[id(unit)] = unit.by_tensor(*parts)
                wanted = read[id(unit)][name]
            found[name] = wanted, steps
        return found

    def norms(self, part: str) -> dict[str, tuple[float, int]]:
        """The norm of one part of each tensor's state, 0 if nothing is remembered yet, and the
        number of its elements."""
        if part not in self.feedback.parts:
            return {}
        found = {
            name: (0.0, numel)
            for unit in self._by_name.values()
            for name, numel in zip(unit.names, unit.sizes, strict=True)
        }
        for name, (state, _) in self.of_tensors(self.names(), part).items():
            if part in state:
                norm = float(torch.linalg.vector_norm(state[part]))
                found[name] = norm, state[part].numel()
        return found

    def load(self, states: Mapping[str, tuple[TensorState, int]]) -> None:
        """Forget all, and remember this when the tensors come."""
        self._by_name.clear()
        self._loaded = dict(states)

    def knows(self, unit: Unit) -> bool:
        """Whether something is remembered of any of its tensors."""
        own = [self._by_name[name] for name in unit.names if name in self._by_name]
        for state in own:
            state.exchange.wait_until_ended()  # ranks must agree, however fast each of them is
        return any(name in self._loaded for name in unit.names) or not all(s.fresh for s in own)

    def remember(self) -> bool:
        """Whether something is remembered of any tensor."""
        states = {id(state): state for state in self._by_name.values()}.values()
        for state in states:
            state.exchange.wait_until_ended()
        return bool(self._loaded) or not all(state.fresh for state in states)

    def scale(self, factor: float) -> None:
        """Multiply all that is remembered."""
        for unit_state in {id(state): state for state in self._by_name.values()}.values():
            unit_state.exchange.wait_until_ended()
            for vector in unit_state.vectors.values():
                vector.scale(factor)
        for loaded, _ in self._loaded.values():
            for values in loaded.values():
                values.mul_(factor)

    def reset(self) -> None:
        """Start from zero."""
        self._by_name.clear()
        self._loaded.clear()


def _check_size(name: str, state: Tensor, place: Tensor) -> None:
    if state.numel() != place.numel():
        raise ValueError(
            f"{name} has {place.numel()} elements, but what was remembered of it {state.numel()}: "
            "the model has changed; call reset() to start anew"
        )
