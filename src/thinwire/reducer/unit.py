"""Units: tensors that are compressed as one flat tensor, and what is remembered of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire.collectives.handle import Handle
from thinwire.feedback.base import Feedback
from thinwire.feedback.vector import Room, Vector

State = dict[str, Tensor]  # what is remembered of one tensor: a flat vector for each part


class Unit:
    """Some tensors as one.

    Where the tensors lie one behind the other in memory, the flat tensor is a view of them;
    otherwise it is a copy in a room that is filled before an exchange and given back after it.

    Args:
        names: of the tensors.
        pieces: the tensors, of one type and device.
        plain: they travel as they are in an exchange of what all ranks find together.
    """

    def __init__(self, names: Sequence[str], pieces: Sequence[Tensor], plain: bool = False) -> None:
        self.names = tuple(names)
        self.plain = plain
        self.pieces = [piece.detach() for piece in pieces]
        for name, piece in zip(names, self.pieces, strict=True):
            if any(
                n > 1 and step == 0 for n, step in zip(piece.shape, piece.stride(), strict=True)
            ):
                raise ValueError(f"{name}: several elements share one place in memory")
        self._joined = joined(self.pieces)

    @property
    def sizes(self) -> list[int]:
        return [piece.numel() for piece in self.pieces]

    def spans(self) -> list[tuple[str, tuple[int, int]]]:
        """Where each tensor lies in the flat one."""
        ends = list(accumulate(self.sizes))
        return list(zip(self.names, pairwise([0, *ends]), strict=True))

    @property
    def shape(self) -> torch.Size:
        """Of the one tensor, or that of all together, flat; none for what nobody is to see as a
        matrix."""
        if self.plain:
            return torch.Size()
        return self.pieces[0].shape if len(self.pieces) == 1 else torch.Size([sum(self.sizes)])

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def flat(self, room: Room, name: str) -> Tensor:
        """The flat tensor that the exchange works on."""
        if self._joined is not None:
            return self._joined
        first = self.pieces[0]
        return room.take(f"{name} flat", sum(self.sizes), first.dtype, first.device)

    def fill(self, flat: Tensor) -> None:
        """Copy the tensors to the flat one, if that is a copy."""
        if self._joined is None:
            for part, piece in zip(torch.split(flat, self.sizes), self.pieces, strict=True):
                part.view(piece.shape).copy_(piece)

    def give_back(self, flat: Tensor) -> None:
        """Copy the result to the tensors."""
        if self._joined is None:
            for part, piece in zip(torch.split(flat, self.sizes), self.pieces, strict=True):
                piece.copy_(part.view(piece.shape))


def joined(pieces: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors that lie one behind the other in memory, if they do."""
    first = pieces[0]
    total = sum(piece.numel() for piece in pieces)
    end = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for piece in pieces:
        if not piece.is_contiguous() or piece.untyped_storage().data_ptr() != storage:
            return None
        if piece.numel() and piece.data_ptr() != end:
            return None
        end += piece.nbytes
    return first.as_strided((total,), (1,), first.storage_offset())


@dataclass
class Slab:
    """What is remembered of a unit: one vector over all its tensors for each part."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    vectors: dict[str, Vector]
    steps: int = 0
    fresh: bool = True  # nothing remembered yet
    handle: Handle | None = None  # of the last exchange, which may still be under way

    def begun(self, handle: Handle) -> None:
        """An exchange of it is under way; a handle that has ended is let go with its tensors."""
        self.handle = handle
        handle.when_ended(self._release)

    def _release(self, handle: Handle) -> None:
        if self.handle is handle:
            self.handle = None

    def settled(self) -> None:
        """Return when no exchange of it is under way."""
        handle = self.handle
        if handle is not None:
            handle.ended()

    def _span(self, name: str) -> tuple[int, int]:
        return list(pairwise([0, *accumulate(self.sizes)]))[self.names.index(name)]

    def committed(self, feedback: Feedback) -> None:
        """One more step is remembered."""
        self.steps += 1
        self.fresh = feedback.resets(self.steps)
        if self.fresh:
            for vector in self.vectors.values():
                vector.zero()

    def matches(self, unit: Unit) -> bool:
        first = unit.pieces[0]
        return (
            self.sizes == tuple(unit.sizes)
            and self.dtype == first.dtype
            and all(vector.device == first.device for vector in self.vectors.values())
        )

    def state(self, name: str) -> State:
        """A copy of what is remembered of one tensor."""
        self.settled()
        lo, hi = self._span(name)
        if self.fresh:
            return {}
        return {part: vector.read()[lo:hi].clone() for part, vector in self.vectors.items()}


@dataclass
class Slabs:
    """All that a reducer remembers, by the names of the tensors.

    Tensors may come in other units than before (DDP forms its buckets anew after the first step):
    what is remembered of each moves to its new unit.
    """

    feedback: Feedback
    _by_name: dict[str, Slab] = field(default_factory=dict)
    _waiting: dict[str, tuple[State, int]] = field(
        default_factory=dict
    )  # loaded, not yet asked for

    def of(self, unit: Unit) -> Slab:
        """The slab of a unit; made anew if its tensors come together for the first time."""
        found = self._by_name.get(unit.names[0])
        if (
            found is not None
            and found.names == unit.names
            and found.matches(unit)
            and all(self._by_name.get(name) is found for name in unit.names)
        ):
            return found
        known = {name: self.state(name) for name in unit.names}
        first = unit.pieces[0]
        numel = sum(unit.sizes)
        vectors = self.feedback.memory(numel, first.dtype, first.device)
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
        slab = Slab(unit.names, tuple(unit.sizes), first.dtype, vectors, steps, fresh)
        for name in unit.names:
            self._by_name[name] = slab
            self._waiting.pop(name, None)
        return slab

    def names(self) -> list[str]:
        return [*self._by_name, *self._waiting]

    def state(self, name: str) -> tuple[State, int]:
        """A copy of what is remembered of a tensor, and its number of steps."""
        if name in self._by_name:
            slab = self._by_name[name]
            return slab.state(name), slab.steps
        state, steps = self._waiting.get(name, ({}, 0))
        return {part: values.clone() for part, values in state.items()}, steps

    def load(self, states: Mapping[str, tuple[State, int]]) -> None:
        """Forget all, and remember this when the tensors come."""
        self._by_name.clear()
        self._waiting = dict(states)

    def knows(self, unit: Unit) -> bool:
        """Whether something is remembered of any of its tensors."""
        own = [self._by_name[name] for name in unit.names if name in self._by_name]
        for slab in own:
            slab.settled()  # ranks must agree, however fast each of them is
        return any(name in self._waiting for name in unit.names) or not all(s.fresh for s in own)

    def scale(self, factor: float) -> None:
        """Multiply all that is remembered."""
        for slab in {id(slab): slab for slab in self._by_name.values()}.values():
            slab.settled()
            for vector in slab.vectors.values():
                vector.scale(factor)
        for state, _ in self._waiting.values():
            for values in state.values():
                values.mul_(factor)

    def reset(self) -> None:
        """Start from zero."""
        self._by_name.clear()
        self._waiting.clear()


def _check_size(name: str, state: Tensor, place: Tensor) -> None:
    if state.numel() != place.numel():
        raise ValueError(
            f"{name} has {place.numel()} elements, but what was remembered of it {state.numel()}: "
            "the model has changed; call reset() to start anew"
        )
