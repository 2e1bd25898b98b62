"""Averaging units: compressor + feedback + collective, and what is remembered.

The one thing that everything which averages named tensors drives: `Reducer` for loops of one's own,
the DDP hook, and whatever comes.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives.channel import process_group
from thinwire.collectives.nodes import NodeLayout
from thinwire.collectives.options import SENDERS, Options
from thinwire.collectives.order import AT_ONCE
from thinwire.collectives.scatter import SCATTER
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
from thinwire.reducer.exchange import (
    Driver,
    Recalled,
    UnitExchange,
    UnitUpdate,
)
from thinwire.reducer.saved_state import ReducerState
from thinwire.reducer.state import FeedbackStates, LastExchange
from thinwire.reducer.unit import Unit
from thinwire.telemetry import Ledger

UNCOMPRESSED = NoCompression()  # ours; a user's own NoCompression is another object
AVERAGES = {"world": "AVG", "senders": SENDERS}  # ops, by the names of whom they average over
STEPS = 1 << 32  # that a key can tell apart
DIVIDED = 1 << 17  # bytes of uncompressed tensors from which four meetings cost less than they save


class UnitReducer:
    """Averages units over a group, and keeps their feedback state.

    Args:
        compressor: for exchanges that name no other; None for one that `decide` will name.
        feedback: what is remembered; "auto" is what suits each compressor.
        options: the group, the collective and the limits.
        seed: for compressors that draw random numbers; the same on all ranks.
        average: "world", over all ranks, or "senders", each element over the ranks that sent it.
    """

    def __init__(
        self,
        compressor: Compressor | str | None,
        feedback: Feedback | str,
        options: Options,
        seed: int = 0,
        average: str = "world",
    ) -> None:
        given = None if compressor is None else compressor_of(compressor)
        self._auto = isinstance(feedback, str) and feedback.strip().lower() == "auto"
        if isinstance(feedback, Feedback):
            self.feedback = feedback
        else:
            self.feedback = parse_feedback("ef14" if self._auto else feedback)
        self._op = AVERAGES[average]
        if self._op == SENDERS:
            check_senders(self.feedback)
        Key(seed=seed).checked()  # refused here and now
        self.options, self.seed = options, seed
        # For what is sent uncompressed and not divided among nodes.
        self._plain = replace(options, collective="auto", nodes=None)
        self.ledger = Ledger()
        self.states = FeedbackStates(self.feedback)
        self.compressor: Compressor = UNCOMPRESSED
        if given is not None:
            self.decide(given)
        self.recalled: Recalled = {}  # the same on all ranks
        self._buffers = ScratchBuffers()
        # Buffers take turns, as so many exchanges are under way at a time.
        self._turn = 0
        self._last = LastExchange()
        self._last_joint = LastExchange()

    def __repr__(self) -> str:
        feedback = feedback_for(self.compressor, "auto" if self._auto else self.feedback)
        return f"Reducer({str(self.compressor)!r}, feedback={str(feedback)!r})"

    def decide(self, compressor: Compressor) -> None:
        """Average with this, unless an exchange names another; nothing has been sent yet."""
        self.options.check([compressor], self._op)
        nodes, group = self.options.nodes, self.options.group
        if nodes is not None and dist.is_initialized():
            check_nodes(self.feedback, nodes.layout(process_group(group)))
        self.compressor = compressor

    # What is made here stays, and is written to by other threads: no tensors of inference mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, units: Sequence[Unit], driver: Driver, *, exact: bool = False) -> UnitExchange:
        """Start one exchange of several units, each with its compressor.

        Uncompressed units (`UNCOMPRESSED`) by themselves take the collective that suits them.

        Args:
            driver: see `Driver`.
            exact: uncompressed units are not divided among nodes, which may round them.
        """
        joint = any(isinstance(unit.compressor, JointCompressor) for unit in units)
        if joint:
            _check_joint(units)
        updates = self._updates(units, driver)
        compressors = [unit.compressor for unit in units]
        if any(each.feedback.dense_start and each.state and each.state.fresh for each in updates):
            joint, compressors = False, [UNCOMPRESSED] * len(units)
        names = [name for unit in units for name in unit.names]
        key = Key(self.seed, driver.step % STEPS, zlib.crc32("\n".join(names).encode()))
        options = self._options_for(units, compressors, exact)
        recalled = self.recalled if joint else None
        exchange = UnitExchange(updates, compressors, options, key, driver, recalled, self._op)
        handle = exchange.start(async_op=True)
        self._last.follow(handle)
        if joint:
            self._last_joint.follow(handle)
        for each in updates:
            if each.state is not None:
                each.state.exchange.follow(handle)
        self.ledger.note(handle, units, compressors)
        return exchange

    def divides(self, num_bytes: int) -> bool:
        """Whether so many bytes of uncompressed tensors are divided among nodes: what is small is
        sooner sent as it is."""
        return self.options.nodes is not None and num_bytes >= DIVIDED

    def _options_for(
        self, units: Sequence[Unit], compressors: Sequence[Compressor], exact: bool
    ) -> Options:
        if self.options.collective == SCATTER:
            return self.options
        uncompressed = all(compressor is UNCOMPRESSED for compressor in compressors)
        whole = exact or not self.divides(sum(unit.num_bytes for unit in units))
        return self._plain if uncompressed and whole else self.options

    def _updates(self, units: Sequence[Unit], driver: Driver) -> list[UnitUpdate]:
        updates = []
        turn = self._turn = (self._turn + 1) % AT_ONCE if self._last.under_way else 0
        separate = driver.defers_commit or driver.skips_unused
        size = dist.get_world_size(self.options.group)
        for i, unit in enumerate(units):
            used, feedback = unit.compressor, self._feedback_of(unit)
            if not (used.lossless and isinstance(feedback, NoFeedback)):
                _check_types(unit)
            state = None if isinstance(feedback, NoFeedback) else self.states.of_unit(unit)
            if state is not None and feedback.dense_start:
                state.exchange.wait_until_ended()  # whether it is fresh must not depend on speed
            first = state is None or state.fresh
            name = f"{turn} {i}"
            flat = unit.flat(self._buffers, name)
            whole = size == 1 or used.sends_all(flat.numel())
            workspace = Workspace(self._buffers, name, first, separate, size, whole)
            vectors = {} if state is None else state.vectors
            update = feedback.update(vectors, flat, workspace)
            updates.append(UnitUpdate(unit, flat, update, feedback, state))
        return updates

    def _feedback_of(self, unit: Unit) -> Feedback:
        """The feedback, unless nothing is lost and nothing waits to be sent."""
        compressor = unit.compressor
        needless = compressor.lossless and isinstance(self.feedback, EF14)
        if self._auto and not compressor.lossless:  # EF21 sees also what loses nothing
            needless = not compressor.wants_residual
        if needless and not self.states.knows(unit):
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
            name: {"steps": steps, **{part: values.clone() for part, values in state.items()}}
            for name, (state, steps) in self.states.of_tensors(self.states.names()).items()
        }
        self._last_joint.wait_until_ended()
        return {
            "seed": self.seed,
            "feedback": str(self.feedback),
            "recalled": {
                name: {part: values.clone() for part, values in kept.items()}
                for name, kept in self.recalled.items()
                if kept
            },
            "tensors": tensors,
        }

    def adopt(self, state: ReducerState) -> None:
        """Go on with this."""
        self.seed = state.seed
        self.recalled = state.recalled
        self.states.load(state.tensors)


def check_senders(feedback: Feedback) -> None:
    """Refuse a feedback that needs the mean over all ranks."""
    if isinstance(feedback, EF21):
        raise ValueError(
            f"{feedback} averages over all ranks: it adds each mean to that of what all ranks have "
            "sent, and a mean over senders is another. Use average='world', or feedback='ef14'"
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


def _check_joint(units: Sequence[Unit]) -> None:
    for unit in units:
        if len(unit.names) > 1 and isinstance(unit.compressor, JointCompressor):
            raise ValueError(f"{unit.compressor} sees each tensor by itself, not {unit.names}")


def _check_types(unit: Unit) -> None:
    for name, piece in zip(unit.names, unit.pieces, strict=True):
        if piece.dtype not in FLOATS:
            raise TypeError(
                f"{name}: {unit.compressor} takes floating-point tensors, not {piece.dtype}"
            )
