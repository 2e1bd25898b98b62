"""Averaging units: compressor + feedback + collective, and what is remembered.

The one thing that everything which averages named tensors drives: `Reducer` for loops of one's own,
the DDP hook, and whatever comes.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from thinwire.collectives.channel import process_group
from thinwire.collectives.handle import Handle
from thinwire.collectives.nodes import NodeLayout
from thinwire.collectives.options import Options
from thinwire.compressors import Compressor, JointCompressor, NoCompression, compressor_of
from thinwire.compressors.base import FLOATS
from thinwire.feedback import (
    DGC,
    EF14,
    EF21,
    Feedback,
    NoFeedback,
    Vote,
    feedback_for,
)
from thinwire.feedback import parse as parse_feedback
from thinwire.feedback.base import Workspace
from thinwire.feedback.state import ScratchBuffers
from thinwire.kernels import Key
from thinwire.reducer.exchange import LOOP, Driver, Recalled, UnitExchange, UnitUpdate
from thinwire.reducer.state import FeedbackStates, TensorState
from thinwire.reducer.unit import Unit
from thinwire.telemetry import Ledger

UNCOMPRESSED = NoCompression()  # ours; a user's own NoCompression is another object
DIVIDED = 1 << 17  # bytes of uncompressed tensors from which four meetings cost less than they save


class UnitReducer:
    """Averages units over a group, and keeps their feedback state.

    Args:
        compressor: for exchanges that name no other.
        feedback: what is remembered; "auto" is what suits each compressor.
        options: the group, the collective and the limits.
        seed: for compressors that draw random numbers; the same on all ranks.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        feedback: Feedback | str,
        options: Options,
        seed: int = 0,
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
        Key(seed=seed).checked()  # refused here and now
        options.check(self.compressor)
        if options.nodes is not None and dist.is_initialized():
            check_nodes(self.feedback, options.nodes.layout(process_group(options.group)))
        self.options, self.seed = options, seed
        self.ledger = Ledger()
        self.states = FeedbackStates(self.feedback)
        self.recalled: Recalled = {}  # the same on all ranks
        self.counts: dict[str, int] = {}  # exchanges begun, by the name of their first tensor
        self._buffers = ScratchBuffers()
        self._last_joint: Handle | None = None

    def __repr__(self) -> str:
        feedback = feedback_for(self.compressor, "auto" if self._auto else self.feedback)
        return f"Reducer({str(self.compressor)!r}, feedback={str(feedback)!r})"

    def start(
        self,
        units: Sequence[Unit],
        compressor: Compressor | None = None,
        driver: Driver = LOOP,
    ) -> UnitExchange:
        """Start one exchange of several units.

        Args:
            compressor: for this exchange; by default the reducer's own. Uncompressed units
                (`UNCOMPRESSED`) take the collective that suits them.
            driver: see `Driver`.
        """
        compressor = self.compressor if compressor is None else compressor
        feedback = self._feedback_of(units, compressor)
        if not (compressor.lossless and isinstance(feedback, NoFeedback)):
            for unit in units:
                _check_types(unit, compressor)
        recalled = self._recalled_by(units, compressor)
        updates = self._updates(units, feedback, compressor, driver)
        if feedback.dense_start and any(each.state and each.state.fresh for each in updates):
            compressor = UNCOMPRESSED
        names = [name for unit in units for name in unit.names]
        count = self.counts.get(names[0], 0)
        key = Key(self.seed, count, zlib.crc32("\n".join(names).encode()))
        options = self._options_for(units, compressor)
        exchange = UnitExchange(updates, feedback, compressor, options, key, driver, recalled)
        handle = exchange.start(async_op=True)
        if isinstance(compressor, JointCompressor):
            self._last_joint = handle
        self.counts[names[0]] = (count + 1) % (1 << 32)
        for each in updates:
            if each.state is not None:
                each.state.follow(handle)
        self.ledger.note(handle, units, compressor)
        return exchange

    def _options_for(self, units: Sequence[Unit], compressor: Compressor) -> Options:
        """What is small is sooner sent uncompressed than divided among nodes."""
        small = sum(unit.num_bytes for unit in units) < DIVIDED
        if compressor is UNCOMPRESSED and (small or self.options.nodes is None):
            return replace(self.options, collective="auto", nodes=None)
        return self.options

    def _updates(
        self, units: Sequence[Unit], feedback: Feedback, compressor: Compressor, driver: Driver
    ) -> list[UnitUpdate]:
        updates = []
        separate = driver.defers_commit or driver.skips_unused
        size = dist.get_world_size(self.options.group)
        for i, unit in enumerate(units):
            used = UNCOMPRESSED if unit.uncompressed else compressor
            own = self._feedback_of([unit], used) if unit.uncompressed else feedback
            state = None if isinstance(own, NoFeedback) else self.states.of_unit(unit)
            if state is not None and feedback.dense_start:
                state.wait_until_idle()  # whether it is fresh must not depend on speed
            first = state is None or state.fresh
            flat = unit.flat(self._buffers, f"{i}")
            whole = size == 1 or used.sends_all(flat.numel())
            workspace = Workspace(self._buffers, f"{i}", first, separate, size, whole)
            vectors = {} if state is None else state.vectors
            updates.append(UnitUpdate(unit, flat, own.update(vectors, flat, workspace), state))
        return updates

    def _recalled_by(self, units: Sequence[Unit], compressor: Compressor) -> Recalled | None:
        """Where a joint compressor finds again what it wants to."""
        if not isinstance(compressor, JointCompressor):
            return None
        for unit in units:
            if len(unit.names) > 1:
                raise ValueError(f"{compressor} sees each tensor by itself, not {unit.names}")
        return self.recalled

    def _feedback_of(self, units: Sequence[Unit], compressor: Compressor) -> Feedback:
        """The feedback, unless nothing is lost and nothing waits to be sent."""
        needless = compressor.lossless and isinstance(self.feedback, EF14)
        if self._auto and not compressor.lossless:  # EF21 sees also what loses nothing
            needless = not compressor.wants_residual
        if needless and not any(self.states.knows(unit) for unit in units):
            return NoFeedback()
        return self.feedback

    def reset(self) -> None:
        """Forget what was left out."""
        self.states.reset()
        self.recalled.clear()

    def scale(self, factor: float) -> None:
        """Multiply all that is remembered, when the loss is from now on scaled by that factor."""
        self.states.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers; tensors and plain values only."""
        tensors = {
            name: {"steps": steps, **state}
            for name in self.states.names()
            for state, steps in [self.states.of_tensor(name)]
        }
        if self._last_joint is not None:
            self._last_joint.wait_until_ended()
        return {
            "seed": self.seed,
            "feedback": str(self.feedback),
            "counts": dict(self.counts),
            "recalled": {
                name: {part: values.clone() for part, values in kept.items()}
                for name, kept in self.recalled.items()
            },
            "tensors": tensors,
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state_dict` was taken; see `Reducer.load_state_dict`."""
        states = [state] if isinstance(state, Mapping) else state
        if not isinstance(states, Sequence) or not states or not all(map(_is_state, states)):
            raise ValueError("expected the state of a reducer, or a list of all ranks' states")
        size = dist.get_world_size(self.options.group)
        if isinstance(state, Mapping):
            chosen: Mapping[str, Any] = state
        elif len(state) == size:
            chosen = state[dist.get_rank(self.options.group)]
        else:
            chosen = mean_state(state)
        found, own = chosen["feedback"], str(self.feedback)
        if found.partition(":")[0] != own.partition(":")[0]:
            raise ValueError(f"the state is that of feedback {found!r}, this is {own!r}")
        self.seed = chosen["seed"]
        self.counts = dict(chosen["counts"])
        self.recalled = {
            name: {part: values.clone() for part, values in kept.items()}
            for name, kept in chosen.get("recalled", {}).items()
        }
        self.states.load(
            {
                name: (
                    {part: kept[part].clone().flatten() for part in kept if part != "steps"},
                    kept["steps"],
                )
                for name, kept in chosen["tensors"].items()
            }
        )


def check_nodes(feedback: Feedback, nodes: NodeLayout) -> None:
    """Refuse a feedback that a hierarchical exchange would break."""
    if isinstance(feedback, DGC):
        raise ValueError(
            "DGC cannot go through 'hierarchical': it stops the momentum of elements that a rank "
            "has sent itself, and between nodes only sums of ranks are sent"
        )
    if isinstance(feedback, Vote):
        raise ValueError(
            "Vote cannot go through 'hierarchical': a majority of nodes is not one of ranks"
        )
    if isinstance(feedback, EF21) and not (nodes.remembers or nodes.inner.lossless):
        raise ValueError(
            f"{feedback} with inner {nodes.inner} needs Nodes(feedback='ef14'): what is rounded "
            "off inside a node and forgotten would part it from the mean that all ranks know"
        )


def _check_types(unit: Unit, compressor: Compressor) -> None:
    for name, piece in zip(unit.names, unit.pieces, strict=True):
        if piece.dtype not in FLOATS:
            raise TypeError(f"{name}: {compressor} takes floating-point tensors, not {piece.dtype}")


def _is_state(state: Any) -> bool:
    keys = ("seed", "feedback", "counts", "tensors")
    return isinstance(state, Mapping) and all(key in state for key in keys)


def mean_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of all ranks' states: with it on any number of ranks, the average of what is
    remembered, and so of what will be sent, is what it was."""
    first = states[0]
    if any(state["tensors"].keys() != first["tensors"].keys() for state in states):
        raise ValueError("the states are not of one model: they remember different tensors")
    tensors: dict[str, Any] = {}
    for name, kept in first["tensors"].items():
        means: TensorState = {}
        for part in kept:
            if part != "steps":
                total = kept[part].clone()
                for other in states[1:]:
                    total += other["tensors"][name][part]
                means[part] = total / len(states)
        tensors[name] = {"steps": kept["steps"], **means}
    return {**first, "tensors": tensors}
