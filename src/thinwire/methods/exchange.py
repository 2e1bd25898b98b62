"""One exchange of several units, with what is remembered of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.collectives.handle import Account, Handle
from thinwire.feedback import Feedback
from thinwire.feedback.base import Turn
from thinwire.methods.unit import Slab, Unit


class Exchange:
    """An exchange under way.

    Args:
        units: what is averaged.
        feedback: what is remembered of them.
        later: `commit` will be called by somebody else, or not.

    Attributes:
        handle: to wait for.
        idle: tensors that are zero on all ranks.
    """

    def __init__(self, units: Sequence[Unit], feedback: Feedback, later: bool) -> None:
        self.units = units
        self.handle: Handle
        self.idle: set[str] = set()
        self._feedback, self._later = feedback, later
        self._turns: list[tuple[Slab | None, Turn]] = []
        self._flats: list[Tensor] = []
        self._ready = False  # whether there is something to commit
        self._aside: list[tuple[Tensor, Tensor]] = []  # places in residuals, and their content

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
        for unit, flat, turn in zip(self.units, self._flats, self.turns, strict=True):
            unit.fill(flat)
            turn.before()
            self._set_aside(unit, turn)
            if measure is not None:
                measure(unit, turn)

    def _set_aside(self, unit: Unit, turn: Turn) -> None:
        """Take what is remembered of idle tensors out of this exchange."""
        if self.idle and turn.residual is not None:
            parts = torch.split(turn.residual, unit.sizes)
            for name, part in zip(unit.names, parts, strict=True):
                if name in self.idle:
                    self._aside.append((part, part.clone()))
                    part.zero_()

    def finish(self, account: Account) -> None:
        """Write the results to the tensors."""
        for unit, flat, turn in zip(self.units, self._flats, self.turns, strict=True):
            if account.finite:
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
        for turn in self.turns:
            if turn.residual is not None:
                turn.tensor.add_(turn.residual)
                turn.residual.zero_()
            if not bool(torch.isfinite(turn.tensor).all()):
                self.handle.account.finite = False
        self.finish(self.handle.account)

    def commit(self) -> None:
        """Remember what it left out. The reducer does this itself unless told that it comes later;
        an exchange that is never committed leaves what is remembered as it was."""
        if not self._ready:
            return
        self._ready = False
        for place, values in self._aside:
            place.copy_(values)
        for slab, turn in self._turns:
            turn.commit()
            if slab is not None:
                slab.committed(self._feedback)
