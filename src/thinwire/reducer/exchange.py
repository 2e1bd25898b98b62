"""One exchange of several units, with their feedback state."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.collectives.allreduce import AllReduce
from thinwire.collectives.exchange import Details
from thinwire.collectives.footprint import Footprint
from thinwire.collectives.options import Options
from thinwire.collectives.transport import LISTED, Transport
from thinwire.compressors import Compressor
from thinwire.feedback import EF14, Feedback
from thinwire.feedback.base import Remembering, Update
from thinwire.feedback.state import storage_uses
from thinwire.frames.code import wide_type
from thinwire.kernels import Key
from thinwire.kernels.compiling import KernelUse
from thinwire.reducer.state import UnitState
from thinwire.reducer.unit import Unit

SHOWN = 300  # letters of names in an error
Recalled = dict[str, dict[str, Tensor]]  # what joint compressors find again, by tensor and part


class Driver:
    """Who drives a reducer, asked at fixed points of each exchange. This one is a plain loop.

    Attributes:
        step: its number, in which ranks must agree.
        defers_commit: `commit` is called later, or never, when more is known.
        skips_unused: leave out what is remembered of tensors that are zero on all ranks. DDP throws
            away the averages of parameters that nobody has used.
        details: more that ranks must agree in.
        looks_back: `admit` asks for results of exchanges before it.
    """

    looks_back = False
    step = 0
    defers_commit = False
    skips_unused = False
    details: Details = ()

    @property
    def batch(self) -> object:
        """What exchanges that one failure ends have in common; None where each is for itself."""
        return self

    def admit(self) -> None:
        """Whether an exchange takes part, or what came of it counts; what it raises ends it on this
        rank, and nobody is told: it must be the same on all."""
        return None

    def inspect(self, unit: Unit, update: Update, compressor: Compressor, key: Key) -> None:
        """What a unit is about to send, seen by the thread that prepares it."""
        return None

    def confirm(self) -> None:
        """Called at the turn of an exchange that was prepared before; what it raises is told to the
        other ranks."""
        return None


class _Loop(Driver):
    @property
    def batch(self) -> object:
        return None


LOOP = _Loop()


@dataclass
class UnitUpdate:
    """A unit in an exchange.

    Args:
        flat: the flat tensor that is worked on.
        update: what its feedback does with it.
        feedback: that of its compressor.
        state: that it has, if any.
    """

    unit: Unit
    flat: Tensor
    update: Update
    feedback: Feedback
    state: UnitState | None


class UnitExchange(AllReduce):
    """Averages units, and brings their state up to date.

    Args:
        updates: what is averaged.
        compressors: of each; where a feedback starts uncompressed, not those of the units.
        key: its step is something that ranks must agree in, whatever the compressor.
        recalled: where a joint compressor finds again what it wants to; None for others.
        op: AVG, or SENDERS.

    Attributes:
        unused: tensors that are zero on all ranks, if the driver wants these left out.
    """

    def __init__(
        self,
        updates: Sequence[UnitUpdate],
        compressors: Sequence[Compressor],
        options: Options,
        key: Key,
        driver: Driver,
        recalled: Recalled | None,
        op: str,
    ) -> None:
        self.updates, self._driver = updates, driver
        self.names = ["+".join(unit.names) for unit in self.units]
        self._seed_key = key
        self._kept_recalled = recalled
        self._uncommitted = False
        self.looks_back, self.batch = driver.looks_back, driver.batch
        self.unused: set[str] = set()
        super().__init__(
            "average",
            [each.update.tensor for each in updates],
            [each.update.residual for each in updates],
            compressors,
            options,
            op=op,
            key=key,
            details=(("step", f"{key.step}"), *_described(self.units), *driver.details),
        )
        self.shapes = [unit.shape for unit in self.units]
        self.recalled = None if recalled is None else [{} for _ in updates]

    @property
    def units(self) -> list[Unit]:
        return [each.unit for each in self.updates]

    def kernel_uses(self) -> list[KernelUse]:
        uses = super().kernel_uses()
        for each in self.updates:
            if isinstance(each.feedback, Remembering):
                uses += storage_uses([each.feedback.storage], [each.flat.dtype], self.device)
        return uses

    # The stages.

    def footprint(self) -> Footprint | None:
        found = super().footprint()
        if found is None or self._asks_for_unused:
            return None  # what is prepared depends on the other ranks
        pieces = (piece for unit in self.units for piece in unit.pieces)
        states: list[object] = [each.state for each in self.updates if each.state is not None]
        return found | Footprint(pieces, states + self._kept())

    def _kept(self) -> "list[dict[str, Tensor]]":
        """What a joint compressor finds again of each unit; those of a name are one object."""
        if self._kept_recalled is None:
            return []
        return [self._kept_recalled.setdefault(unit.names[0], {}) for unit in self.units]

    @property
    def _asks_for_unused(self) -> bool:
        return self._driver.skips_unused and any(
            "residual" in each.feedback.parts for each in self.updates
        )

    def admit(self) -> None:
        self._driver.admit()

    def enter(self, transport: Transport) -> None:
        if self._asks_for_unused:
            self.unused = _unused_everywhere(transport, self.units)

    def confirm(self) -> None:
        self._driver.confirm()

    def prepare(self) -> None:
        self._fill()
        for each, compressor in zip(self.updates, self.compressors, strict=True):
            for name, (lo, hi) in each.unit.spans():
                if name in self.unused:
                    each.update.hold_back(lo, hi)
            self._driver.inspect(each.unit, each.update, compressor, self._seed_key)
        super().prepare()

    def _fill(self) -> None:
        for own, kept in zip(self.recalled or (), self._kept(), strict=True):
            own.update(kept)
        for each in self.updates:
            each.unit.fill(each.flat)
            each.update.prepare()

    def finish(self) -> None:
        super().finish()
        for each in self.updates:
            if self.handle.account.finite:
                each.update.finish()
            else:
                each.flat.fill_(torch.nan)
        self._give_back()

    def alone(self) -> None:
        self._fill()
        tensors = [each.update.tensor for each in self.updates]
        self.handle.account.finite = all(bool(torch.isfinite(t).all()) for t in tensors)
        for each in self.updates:
            if self.handle.account.finite:
                each.update.finish_alone()
            else:
                each.flat.fill_(torch.nan)
        self._give_back()

    def _give_back(self) -> None:
        for each in self.updates:
            each.unit.give_back(each.flat)
        self._uncommitted = self.handle.account.finite
        if not self._driver.defers_commit:
            self.commit()

    def commit(self) -> None:
        """Remember what it left out. An exchange that is never committed leaves the state as it
        was."""
        if not self._uncommitted:
            return
        self._uncommitted = False
        for own, kept in zip(self.recalled or (), self._kept(), strict=True):
            kept.update(own)
        for each, compressor in zip(self.updates, self.compressors, strict=True):
            each.update.release()
            if each.state is None:
                each.update.commit(self._seed_key)
            else:
                each.update.commit(each.state.storage_key(self._seed_key.seed))
                each.state.committed(each.feedback, self._empties(each, compressor))

    def _empties(self, each: UnitUpdate, compressor: Compressor) -> bool:
        """Whether nothing waits to be sent when all was; the same on all ranks."""
        exact = each.flat.dtype == wide_type(each.flat.dtype) and self.options.nodes is None
        return (
            compressor.lossless
            and exact
            and isinstance(each.feedback, EF14)
            and not each.update.held_back
        )


def _unused_everywhere(transport: Transport, units: Sequence[Unit]) -> set[str]:
    """The tensors that are zero on all ranks."""
    named = [(n, p) for unit in units for n, p in zip(unit.names, unit.pieces, strict=True)]
    with transport.preparing():
        used = torch.tensor([bool(p.any()) for _, p in named], dtype=torch.uint8)
        used = used.to(transport.device)
    records = transport.meet([used.numel()], along=used)
    rows = transport.gather(used, [used.numel()] * transport.members.size, records)
    found = torch.stack([row.cpu() for row in rows]).amax(0).tolist()
    return {name for (name, _), any_used in zip(named, found, strict=True) if not any_used}


def _described(units: Sequence[Unit]) -> Details:
    """Which tensors: ranks must agree in names, types, shapes and grouping."""
    words = [
        "+".join(
            f"{n} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}"
            for n, p in zip(unit.names, unit.pieces, strict=True)
        )
        for unit in units
    ]
    text = LISTED.join(words)
    if len(text) > SHOWN:
        text = f"{text[:SHOWN]}... ({len(words)} units, {zlib.crc32(text.encode()):08x})"
    return (("tensors", text),)
