"""One exchange of several units, with what is remembered of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.collectives.handle import Account, Handle
from thinwire.feedback import Feedback
from thinwire.feedback.base import Turn
from thinwire.reducer.unit import Slab, Unit


class Exchange:
    """An exchange under way.

    Args:
        units: what is averaged.
        feedback: what is remembered of them.
        later: `commit` will be called by somebody else, or not.
        store: what a joint compressor finds again, by the name of a tensor.

    Attributes:
        handle: to wait for.
        idle: tensors that are zero on all ranks.
        recall: what the compressor finds again of each unit, filled by `prepare`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        feedback: Feedback,
        later: bool,
        store: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        self.units = units
        self.recall: list[dict[str, Tensor]] | None = None if store is None else [{} for _ in units]
        self._store = store
        self.handle: Handle
        self.idle: set[str] = set()
        self._feedback, self._later = feedback, later
        self._turns: list[tuple[Slab | None, Turn]] = []
        self._flats: list[Tensor] = []
        self._ready = False  # whether there is something to commit

    def add(self, slab: Slab | None, flat: Tensor, turn: Turn) -> None:
        """The next unit: where it is worked on, and what is done with it."""
        self._flats.append(flat)
        self._turns.append((slab, turn))

    @property
    def turns(self) -> list[Turn]:
        return [turn for _, turn in self._turns]

    @property
    def slabs(self) -> list[Slab]:
        return [slab for slab, _ in self._turns if slab is not None]

    def prepare(self, measure: Callable[[Unit, Turn], None] | None) -> None:
        """Fill what the collective gets."""
        for unit, kept in zip(self.units, self.recall or (), strict=False):
            assert self._store is not None
            kept.update(self._store.get(unit.names[0], {}))
        for unit, flat, turn in zip(self.units, self._flats, self.turns, strict=True):
            unit.fill(flat)
            turn.before()
            for name, (lo, hi) in unit.spans():
                if name in self.idle:
                    turn.rest(lo, hi)
            if measure is not None:
                measure(unit, turn)

    def finish(self, account: Account, alone: bool = False) -> None:
        """Write the results to the tensors."""
        for unit, flat, turn in zip(self.units, self._flats, self.turns, strict=True):
            if account.finite and alone:
                turn.alone()
            elif account.finite:
                turn.after()
            else:
                flat.fill_(torch.nan)
            unit.give_back(flat)
        self._ready = account.finite
        if not self._later:
            self.commit()

    def alone(self) -> None:
        """In a group of one, all that could be sent is the result."""
        self.prepare(None)
        account = self.handle.account
        account.finite = all(bool(torch.isfinite(turn.tensor).all()) for turn in self.turns)
        self.finish(account, alone=True)

    def commit(self) -> None:
        """Remember what it left out. The reducer does this itself unless told that it comes later;
        an exchange that is never committed leaves what is remembered as it was."""
        if not self._ready:
            return
        self._ready = False
        for unit, kept in zip(self.units, self.recall or (), strict=False):
            assert self._store is not None
            self._store[unit.names[0]] = kept
        for slab, turn in self._turns:
            turn.wake()
            turn.commit()
            if slab is not None:
                slab.committed(self._feedback)
