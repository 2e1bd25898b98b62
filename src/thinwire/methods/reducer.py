"""The reducer: compressor + feedback + collective, for named tensors.

It owns what is remembered of each tensor. Whoever trains (a DDP hook, a loop of one's own) hands it
tensors with their names and gets back their averages over the group.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.handle import Account, Handle
from thinwire.collectives.memory import limit_of
from thinwire.collectives.reduce import start
from thinwire.collectives.start import Group, Timeout, compressor_of, span_of
from thinwire.compressors import Compressor, NoCompression
from thinwire.feedback import EF14, Feedback, NoFeedback, feedback_for, parse_feedback
from thinwire.feedback.base import Desk, Turn
from thinwire.feedback.vector import Room
from thinwire.kernels import Key
from thinwire.methods.unit import Slab, Slabs, State, Unit
from thinwire.telemetry import Ledger

DENSE = NoCompression()


class Exchange:
    """An exchange under way.

    Args:
        handle: to wait for.
        units: what is averaged.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.handle: Handle
        self._turns: list[tuple[Slab | None, Turn]] = []
        self._feedback: Feedback
        self._ready = False  # whether there is something to commit

    def commit(self) -> None:
        """Remember what it left out. The reducer does this itself unless told that it comes later;
        an exchange that is never committed leaves what is remembered as it was."""
        if not self._ready:
            return
        self._ready = False
        for slab, turn in self._turns:
            turn.commit()
            if slab is not None:
                slab.committed(self._feedback)


class Reducer:
    """Averages named tensors over a group, compressed, and remembers what was left out.

    Args:
        compressor: a compressor or its spec.
        feedback: what is remembered: a feedback or its spec ("none", "ef14", "ef21", "ef21m:0.1");
            "auto" is EF14, or none for compressors that are unbiased or lose nothing.
        collective, group, max_bytes, timeout: as for `thinwire.all_reduce`.
        seed: for compressors that draw random numbers; the same on all ranks.

    Example:
        >>> import torch, torch.distributed as dist, thinwire as tw
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> reducer = tw.Reducer("topk:0.01", feedback="ef14")
        >>> gradients = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
        >>> reducer.average(gradients).is_completed()
        True
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        compressor: Compressor | str,
        *,
        feedback: Feedback | str = "auto",
        collective: str = "auto",
        group: Group = None,
        max_bytes: int | str | None = None,
        timeout: Timeout = None,
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.compressor = compressor_of(compressor)
        self._auto = isinstance(feedback, str) and feedback.strip().lower() == "auto"
        if self._auto:
            self.feedback: Feedback = EF14()
        else:
            self.feedback = feedback if isinstance(feedback, Feedback) else parse_feedback(feedback)
        limit_of(max_bytes), span_of(timeout), Key(seed=seed).checked()  # refused here and now
        self._options = {
            "collective": collective,
            "group": group,
            "max_bytes": max_bytes,
            "timeout": timeout,
        }
        self.seed = seed
        self.ledger = Ledger() if ledger is None else ledger
        self.slabs = Slabs(self.feedback)
        self.turns: dict[str, int] = {}  # exchanges begun, by the name of their first tensor
        self._room = Room()

    def __repr__(self) -> str:
        feedback = feedback_for(self.compressor, "auto" if self._auto else self.feedback)
        return f"Reducer({str(self.compressor)!r}, feedback={str(feedback)!r})"

    def average(
        self, tensors: Mapping[str, Tensor], *, together: bool = False, async_op: bool = False
    ) -> Handle:
        """Average tensors over the group in one exchange, in place.

        All ranks pass the same names in the same order. When the call fails, the tensors and what
        is remembered of them are as before.

        Args:
            tensors: by name.
            together: compress them as one: the largest elements of all tensors, not of each.
            async_op: return at once; the tensors belong to the call until the handle has ended.
        """
        if not tensors:
            raise ValueError("average needs at least one tensor")
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if together:
            kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
            if len(kinds) > 1:
                raise ValueError(f"together: tensors of one type and device, got {kinds}")
            units = [Unit(list(tensors), list(tensors.values()))]
        else:
            units = [Unit([name], [tensor]) for name, tensor in tensors.items()]
        exchange = self.start(units)
        if not async_op:
            exchange.handle.wait()
        return exchange.handle

    def start(
        self,
        units: Sequence[Unit],
        compressor: Compressor | None = None,
        *,
        later: bool = False,
        measure: Callable[[Unit, Turn, Compressor, Key], None] | None = None,
    ) -> Exchange:
        """Start one exchange of several units.

        Args:
            compressor: for this exchange; by default the reducer's own.
            later: `commit` will be called, or not, when more is known.
            measure: called by the exchanging thread before each unit is compressed.
        """
        exchange = Exchange(units)
        compressor = self.compressor if compressor is None else compressor
        feedback = exchange._feedback = self._feedback_of(units, compressor)
        flats: list[Tensor] = []
        for i, unit in enumerate(units):
            slab = None if isinstance(feedback, NoFeedback) else self.slabs.of(unit)
            desk = Desk(self._room, f"{i}", slab is None or slab.fresh, later)
            flat = unit.flat(self._room, f"{i}")
            flats.append(flat)
            turn = feedback.turn({} if slab is None else slab.vectors, flat, desk)
            exchange._turns.append((slab, turn))
            if slab is not None and slab.fresh and feedback.dense_start:
                compressor = DENSE
        key = self._key(units)

        def before() -> None:
            for unit, flat, (_, turn) in zip(units, flats, exchange._turns, strict=True):
                unit.fill(flat)
                turn.before()
                if measure is not None:
                    measure(unit, turn, compressor, key)

        def after(account: Account) -> None:
            for unit, flat, (_, turn) in zip(units, flats, exchange._turns, strict=True):
                if account.finite:
                    turn.after()
                else:
                    flat.fill_(torch.nan)
                unit.give_back(flat)
            exchange._ready = account.finite
            if not later:
                exchange.commit()

        tensors = [turn.tensor for _, turn in exchange._turns]
        exchange.handle = start(
            "average",
            tensors,
            compressor,
            [turn.residual for _, turn in exchange._turns],
            [piece for unit in units for piece in unit.pieces],
            op=dist.ReduceOp.AVG,
            async_op=True,
            key=key,
            before=before,
            after=after,
            **self._options,
        )
        self.ledger.note(exchange.handle, units, compressor)
        return exchange

    def _feedback_of(self, units: Sequence[Unit], compressor: Compressor) -> Feedback:
        """What is remembered anyway, unless nothing is lost and nothing waits to be sent."""
        needless = compressor.lossless and isinstance(self.feedback, EF14)
        needless = needless or (self._auto and compressor.unbiased)
        if needless and not any(self.slabs.knows(unit) for unit in units):
            return NoFeedback()
        return self.feedback

    def _key(self, units: Sequence[Unit]) -> Key:
        """Of this exchange: other numbers for other tensors, and each time."""
        names = [name for unit in units for name in unit.names]
        turn = self.turns.get(names[0], 0)
        self.turns[names[0]] = (turn + 1) % (1 << 32)
        return Key(self.seed, turn, zlib.crc32("\n".join(names).encode()))

    def reset(self) -> None:
        """Forget what was left out."""
        self.slabs.reset()

    def scale(self, factor: float) -> None:
        """Multiply all that is remembered, when the loss is from now on scaled by that factor."""
        self.slabs.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers; tensors and plain values only."""
        return {
            "seed": self.seed,
            "feedback": str(self.feedback),
            "turns": dict(self.turns),
            "tensors": {
                name: {"steps": steps, **state}
                for name in self.slabs.names()
                for state, steps in [self.slabs.state(name)]
            },
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state_dict` was taken.

        Args:
            state: of this rank; or a list of all ranks' states. If the list has not as many
                entries as the group has members, each rank goes on with the mean of what they
                remembered: what is yet to be sent stays the same for the average.
        """
        size = dist.get_world_size(self._options["group"])
        if isinstance(state, Mapping):
            chosen: Mapping[str, Any] = state
        elif len(state) == size:
            chosen = state[dist.get_rank(self._options["group"])]
        else:
            chosen = mean_state(state)
        found, own = chosen["feedback"], str(self.feedback)
        if found.partition(":")[0] != own.partition(":")[0]:
            raise ValueError(f"the state is that of feedback {found!r}, this is {own!r}")
        self.seed = chosen["seed"]
        self.turns = dict(chosen["turns"])
        self.slabs.load(
            {
                name: (
                    {part: kept[part].clone().flatten() for part in kept if part != "steps"},
                    kept["steps"],
                )
                for name, kept in chosen["tensors"].items()
            }
        )


def mean_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of all ranks' memories: with it on any number of ranks, the average of what is
    remembered, and so of what will be sent, is what it was."""
    first = states[0]
    tensors: dict[str, Any] = {}
    for name, kept in first["tensors"].items():
        means: State = {}
        for part in kept:
            if part != "steps":
                total = kept[part].clone()
                for other in states[1:]:
                    total += other["tensors"][name][part]
                means[part] = total / len(states)
        tensors[name] = {"steps": kept["steps"], **means}
    return {**first, "tensors": tensors}
