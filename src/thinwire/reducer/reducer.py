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

from thinwire.collectives.channel import process_group
from thinwire.collectives.handle import Handle
from thinwire.collectives.memory import limit_of
from thinwire.collectives.nodes import Nodes, layers_of
from thinwire.collectives.reduce import check_collective, start
from thinwire.collectives.start import Group, Timeout, span_of
from thinwire.collectives.talk import Talk
from thinwire.compressors import Compressor, JointCompressor, NoCompression, compressor_of
from thinwire.compressors.base import FLOATS
from thinwire.feedback import EF14, Feedback, NoFeedback, feedback_for
from thinwire.feedback import parse as parse_feedback
from thinwire.feedback.base import Desk, Turn
from thinwire.feedback.vector import Room
from thinwire.kernels import Key
from thinwire.reducer.exchange import Exchange
from thinwire.reducer.layers import check_layers
from thinwire.reducer.unit import Slabs, State, Unit
from thinwire.telemetry import Ledger

DENSE = NoCompression()  # what travels as it is; a user's own NoCompression is another object
SHOWN = 300  # letters of names in an error
DIVIDED = 1 << 17  # bytes of dense tensors from which four meetings cost less than they save


class Reducer:
    """Averages named tensors over a group, compressed, and remembers what was left out.

    Args:
        compressor: a compressor or its spec.
        feedback: what is remembered: a feedback or its spec ("none", "ef14", "ef21", "ef21m:0.1");
            "auto" is EF14, or none for compressors that are unbiased or lose nothing.
        collective, nodes, inner, inner_feedback, group, max_bytes, timeout: as for
            `thinwire.all_reduce`. `feedback` is about what goes between nodes.
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
        nodes: Nodes = None,
        inner: Compressor | str = "none",
        inner_feedback: str = "ef14",
        group: Group = None,
        max_bytes: int | str | None = None,
        timeout: Timeout = None,
        seed: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.compressor = compressor_of(compressor)
        self._auto = isinstance(feedback, str) and feedback.strip().lower() == "auto"
        if self._auto:
            natural = (
                self.compressor.feedback if isinstance(self.compressor, JointCompressor) else "ef14"
            )
            self.feedback: Feedback = parse_feedback(natural)
        else:
            self.feedback = feedback if isinstance(feedback, Feedback) else parse_feedback(feedback)
        limit_of(max_bytes), span_of(timeout), Key(seed=seed).checked()  # refused here and now
        self._collective = check_collective(collective, self.compressor, nodes, inner)
        self._layers: dict[str, Any] = {}
        if self._collective == "hierarchical":
            self._layers = {"nodes": nodes, "inner": inner, "inner_feedback": inner_feedback}
            if dist.is_initialized():
                layers = layers_of(nodes, inner, inner_feedback, process_group(group))
                check_layers(self.feedback, layers)
                self._layers["nodes"] = layers
        self._options: dict[str, Any] = {
            "group": group,
            "max_bytes": max_bytes,
            "timeout": timeout,
        }
        self._size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.seed = seed
        self.ledger = Ledger() if ledger is None else ledger
        self.slabs = Slabs(self.feedback)
        # What a joint compressor finds again, the same on all ranks, by the name of a tensor.
        self.recalled: dict[str, dict[str, Tensor]] = {}
        self.turns: dict[str, int] = {}  # exchanges begun, by the name of their first tensor
        self._room = Room()
        self._last: Handle | None = None  # the last exchange with a joint compressor

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
        if not isinstance(tensors, Mapping):
            kind = type(tensors).__name__
            raise TypeError(f"average takes tensors by name, {{'weight': tensor}}, got a {kind}")
        if not tensors:
            raise ValueError("average needs at least one tensor")
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"the name of a tensor must be a string, got {name!r}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.layout != torch.strided:
                raise TypeError(f"{name}: a sparse tensor, call to_dense() first")
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
            self.ledger.fold()
        return exchange.handle

    def start(
        self,
        units: Sequence[Unit],
        compressor: Compressor | None = None,
        *,
        later: bool = False,
        gate: Callable[[], None] | None = None,
        census: bool = False,
        measure: Callable[[Unit, Turn, Compressor, Key], None] | None = None,
    ) -> Exchange:
        """Start one exchange of several units.

        Args:
            compressor: for this exchange; by default the reducer's own. What travels as it is
                (`DENSE`) takes the collective that suits it.
            gate: called before anything is sent; what it raises ends the exchange on this rank.
            census: leave out what is remembered of tensors that are zero on all ranks. DDP throws
                away the averages of parameters that nobody has used.
            later: `commit` will be called, or not, when more is known.
            measure: called by the exchanging thread before each unit is compressed.
        """
        compressor = self.compressor if compressor is None else compressor
        feedback = self._feedback_of(units, compressor)
        if not (compressor.lossless and isinstance(feedback, NoFeedback)):
            for unit in units:
                check_types(unit, compressor)
        exchange = Exchange(units, feedback, later, self._recalled_by(units, compressor))
        if self._seat(exchange, feedback, later or census):
            compressor = DENSE
        names = [name for unit in units for name in unit.names]
        turn_number = self.turns.get(names[0], 0)
        key = Key(self.seed, turn_number, zlib.crc32("\n".join(names).encode()))
        asked = census and "residual" in feedback.parts

        def ask(talk: Talk) -> None:
            if gate is not None:
                gate()
            if asked:
                exchange.idle = idle_names(talk, units)

        def measured(unit: Unit, turn: Turn) -> None:
            if measure is not None:
                measure(unit, turn, compressor, key)

        exchange.handle = start(
            "average",
            [turn.tensor for turn in exchange.turns],
            compressor,
            [turn.residual for turn in exchange.turns],
            None,  # a handle that is kept must not keep the tensors
            op=dist.ReduceOp.AVG,
            async_op=True,
            **self._way(units, compressor),
            key=key,
            about=_about(units),
            gate=ask,
            before=lambda: exchange.prepare(measured),
            after=exchange.finish,
            shapes=[unit.shape for unit in units],
            recall=exchange.recall,
            **self._options,
        )
        if exchange.handle.collective == "none":  # a group of one rank
            exchange.alone()
        if isinstance(compressor, JointCompressor):
            self._last = exchange.handle
        self.turns[names[0]] = (turn_number + 1) % (1 << 32)
        for slab in exchange.slabs:
            slab.begun(exchange.handle)
        self.ledger.note(exchange.handle, units, compressor)
        return exchange

    def _way(self, units: Sequence[Unit], compressor: Compressor) -> dict[str, Any]:
        """Through which collective; what is small is sooner sent as it is than divided."""
        small = sum(unit.num_bytes for unit in units) < DIVIDED
        if compressor is DENSE and (small or not self._layers):
            return {"collective": "auto"}
        return {"collective": self._collective, **self._layers}

    def _seat(self, exchange: Exchange, feedback: Feedback, apart: bool) -> bool:
        """Give each unit its turn; whether the exchange must go uncompressed.

        Args:
            apart: the turns work beside what is remembered, which others may still read.
        """
        dense = False
        for i, unit in enumerate(exchange.units):
            own = self._feedback_of([unit], DENSE) if unit.plain else feedback
            slab = None if isinstance(own, NoFeedback) else self.slabs.of(unit)
            if slab is not None and feedback.dense_start:
                slab.settled()  # whether this one goes uncompressed must not depend on speed
                dense = dense or slab.fresh
            first = slab is None or slab.fresh
            desk = Desk(self._room, f"{i}", first, apart, self._size)
            flat = unit.flat(self._room, f"{i}")
            exchange.add(slab, flat, own.turn({} if slab is None else slab.vectors, flat, desk))
        return dense

    def _recalled_by(
        self, units: Sequence[Unit], compressor: Compressor
    ) -> dict[str, dict[str, Tensor]] | None:
        """Where a joint compressor finds again what it wants to."""
        if not isinstance(compressor, JointCompressor):
            return None
        for unit in units:
            if len(unit.names) > 1:
                raise ValueError(f"{compressor} sees each tensor by itself, not {unit.names}")
        return self.recalled

    def _feedback_of(self, units: Sequence[Unit], compressor: Compressor) -> Feedback:
        """What is remembered anyway, unless nothing is lost and nothing waits to be sent."""
        needless = compressor.lossless and isinstance(self.feedback, EF14)
        needless = needless or (self._auto and compressor.unbiased)
        if needless and not any(self.slabs.knows(unit) for unit in units):
            return NoFeedback()
        return self.feedback

    def reset(self) -> None:
        """Forget what was left out."""
        self.slabs.reset()
        self.recalled.clear()

    def scale(self, factor: float) -> None:
        """Multiply all that is remembered, when the loss is from now on scaled by that factor."""
        self.slabs.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers; tensors and plain values only."""
        tensors = {
            name: {"steps": steps, **state}
            for name in self.slabs.names()
            for state, steps in [self.slabs.state(name)]
        }
        if self._last is not None:
            self._last.ended()
        return {
            "seed": self.seed,
            "feedback": str(self.feedback),
            "turns": dict(self.turns),
            "recalled": {
                name: {part: values.clone() for part, values in kept.items()}
                for name, kept in self.recalled.items()
            },
            "tensors": tensors,
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state_dict` was taken.

        Args:
            state: of this rank; or a list of all ranks' states. If the list has not as many
                entries as the group has members, each rank goes on with the mean of what they
                remembered: what is yet to be sent stays the same for the average.
        """
        states = [state] if isinstance(state, Mapping) else state
        if not isinstance(states, Sequence) or not states or not all(map(_is_state, states)):
            raise ValueError("expected the state of a reducer, or a list of all ranks' states")
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
        self.recalled = {
            name: {part: values.clone() for part, values in kept.items()}
            for name, kept in chosen.get("recalled", {}).items()
        }
        self.slabs.load(
            {
                name: (
                    {part: kept[part].clone().flatten() for part in kept if part != "steps"},
                    kept["steps"],
                )
                for name, kept in chosen["tensors"].items()
            }
        )


def idle_names(talk: Talk, units: Sequence[Unit]) -> set[str]:
    """The tensors that are zero on all ranks."""
    named = [(n, p) for unit in units for n, p in zip(unit.names, unit.pieces, strict=True)]
    with talk.preparing():
        used = torch.tensor([bool(p.any()) for _, p in named], dtype=torch.uint8)
        used = used.to(talk.device)
    talk.meet([used.numel()])
    rows = talk.gather(used, [used.numel()] * talk.members.size)
    found = torch.stack([row.cpu() for row in rows]).amax(0).tolist()
    return {name for (name, _), any_used in zip(named, found, strict=True) if not any_used}


def check_types(unit: Unit, compressor: Compressor) -> None:
    for name, piece in zip(unit.names, unit.pieces, strict=True):
        if piece.dtype not in FLOATS:
            raise TypeError(f"{name}: {compressor} takes floating-point tensors, not {piece.dtype}")


def _about(units: Sequence[Unit]) -> tuple[tuple[str, str], ...]:
    """Which tensors: ranks must agree in names, types, shapes and grouping."""
    words = [
        "+".join(
            f"{n} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}"
            for n, p in zip(unit.names, unit.pieces, strict=True)
        )
        for unit in units
    ]
    text = ", ".join(words)
    if len(text) > SHOWN:
        text = f"{text[:SHOWN]}... ({len(words)} units, {zlib.crc32(text.encode()):08x})"
    return (("tensors", text),)


def _is_state(state: Any) -> bool:
    keys = ("seed", "feedback", "turns", "tensors")
    return isinstance(state, Mapping) and all(key in state for key in keys)


def mean_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of all ranks' memories: with it on any number of ranks, the average of what is
    remembered, and so of what will be sent, is what it was."""
    first = states[0]
    if any(state["tensors"].keys() != first["tensors"].keys() for state in states):
        raise ValueError("the states are not of one model: they remember different tensors")
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
