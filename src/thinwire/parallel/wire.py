"""What a wire knows, whoever drives it: the hook of DDP, or a loop of one's own (`Reducer`)."""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire import check
from thinwire.collectives.compiling import compile_in
from thinwire.collectives.options import Group
from thinwire.compressors import Compressor, LocalCompressor
from thinwire.compressors.base import FLOATS
from thinwire.compressors.compiling import uses_of
from thinwire.errors import ThinwireWarning
from thinwire.feedback import DGC, EF14, NoFeedback, feedback_for
from thinwire.feedback.base import Remembering, Update
from thinwire.feedback.state import storage_uses
from thinwire.kernels import Key
from thinwire.parallel.choices import Choices, NoChoices, choices_of
from thinwire.parallel.configuration import Configuration
from thinwire.parallel.momentum import take_momentum
from thinwire.parallel.optimizers import KnownOptimizer, objection, trained_by
from thinwire.parallel.plan import Planner
from thinwire.parallel.stats import ErrorMeter, Stats, explanation_of, stats_of, table_of
from thinwire.policies.base import Decision, Journal, OptimizerKind, Policy, TensorInfo
from thinwire.policies.layerwise import Layerwise
from thinwire.reducer.saved_state import (
    RankState,
    ReducerState,
    check_known,
    gather,
    required,
    states_to_load,
    whose,
)
from thinwire.reducer.unit import Unit
from thinwire.reducer.units import UNCOMPRESSED

if TYPE_CHECKING:
    from thinwire.parallel.checkpoint import Checkpoint

log = logging.getLogger("thinwire")
VERSION = 2  # of `state_dict`
KEYS = ("step", "scale", "layout", "policy", "reducer")
Layout = list[list[str]]  # names of the tensors in each bucket, in the order of arrival


class Scalars(Protocol):
    """What `log_to` writes to: a torch.utils.tensorboard.SummaryWriter, or the like."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class GradientHook(Protocol):
    """What brings the gradients of a model: the hook of DDP."""

    @property
    def layout(self) -> Layout:
        """The buckets of the last whole step."""

    def replay(self, layout: Layout) -> None:
        """Go on with buckets of a loaded state."""

    def detach(self) -> None:
        """Leave the model."""


class Wire:
    """The connection of a model to the other ranks: how tensors are sent, what is remembered of
    them, what it cost.

    A driver tells it which tensors there are (`_learn_tensors`) and of each step (`_begin_step`,
    `_end_step`), and starts exchanges with its `_reducer` as an `ExchangeStep`.

    Attributes:
        step: backward passes with an exchange so far; calls of `Reducer.average`.
    """

    # What suits Adam, where a compressor does not.
    _advice = 'tw.LocalSteps(model, optimizer, "adam-update") or "quantize:4"'

    def __init__(self, configuration: Configuration) -> None:
        self.step = 0
        self._configuration = configuration
        self._reducer = configuration.reducer()
        self._journal = Journal()
        self._choices: Choices = NoChoices(configuration.policy_of(()))
        self._tensors: dict[str, TensorInfo] = {}
        self._parameters: dict[str, Tensor] = {}  # tensors like them
        self._optimizer = KnownOptimizer()
        self._meter = ErrorMeter(self._reducer.ledger)
        self._scale = 1.0  # of the loss, and with it of all that is remembered
        self._writers: list[tuple[Scalars, int]] = []
        self._hook: GradientHook | None = None  # set by attach
        self._layout: Layout = []  # of a wire without a hook
        self._return_momentum: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "detached" if self._hook is None else f"step {self.step}"
        return f"<thinwire: {self._reducer!r}, {len(self._parameters)} tensors, {state}>"

    def detach(self) -> None:
        """Let the model exchange its gradients as DDP does by itself.

        What is remembered stays here: to attach anew and go on with it, load this wire's state_dict
        into the new one.
        """
        if self._hook is not None:
            self._layout = self._hook.layout
            self._hook.detach()
            self._hook = None
        if self._return_momentum is not None:
            self._return_momentum()
            self._return_momentum = None

    def stats(self) -> Stats:
        """Bytes, seconds and errors so far, by tensor and in total; see docs/guides/ddp.md."""
        return stats_of(self)

    def summary(self, rows: int = 20) -> str:
        """The same as a table: the `rows` tensors that sent most, and the total."""
        return table_of(stats_of(self), rows)

    def log_to(self, writer: Scalars, every: int = 10) -> None:
        """Write totals to TensorBoard after every so many steps.

        Args:
            writer: a torch.utils.tensorboard.SummaryWriter, or whatever has its add_scalar.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"{type(writer).__name__} has no add_scalar")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every!r}")
        self._writers.append((writer, every))

    def reset(self) -> None:
        """Forget what was left out so far."""
        self._reducer.reset()

    @property
    def policy(self) -> Policy:
        """That chooses each tensor's compressor."""
        return self._choices.policy

    @property
    def decisions(self) -> list[Decision]:
        """What the policy has changed, and why; the last thousand."""
        return self._choices.decisions

    def settings(self) -> Layerwise:
        """What each tensor is sent with now, as a policy of its own, to be saved or attached."""
        return self._choices.settings()

    def observe(self, value: float) -> None:
        """Tell an `Accuracy` policy what a validation came to; on all ranks or some."""
        self._choices.observe(float(value))

    def explain(self) -> str:
        """In plain words: what is sent how, why, and what it brings."""
        return explanation_of(self)

    # Called by the driver.

    def _take_momentum(self, averaged: Sequence[Tensor] | None = None) -> None:
        """Have the optimizer's momentum act before compression, if that was asked for.

        Args:
            averaged: all parameters whose gradients are, if that is known.
        """
        feedback, optimizer = self._configuration.feedback, self._configuration.optimizer
        if self._configuration.takes_momentum:
            assert isinstance(feedback, DGC)
            assert optimizer is not None
            self._return_momentum = take_momentum(optimizer, feedback, averaged)

    def _learn_tensors(
        self, tensors: Mapping[str, TensorInfo], parameters: Mapping[str, Tensor]
    ) -> None:
        """Choose for these tensors too; what is refused changes nothing.

        Args:
            tensors: as policies see them.
            parameters: tensors of the same shapes, types and devices.
        """
        configuration, reducer = self._configuration, self._reducer
        known, like = {**self._tensors, **tensors}, {**self._parameters, **parameters}
        chosen_for = self._chosen_for(list(known.values()))
        policy = configuration.policy_of(tensor.name for tensor in chosen_for)
        configuration.check(policy)
        choices = choices_of(
            policy,
            chosen_for,
            size=dist.get_world_size(reducer.options.group),
            feedback=not isinstance(feedback_for(policy.main, configuration.feedback), NoFeedback),
            journal=self._journal,
            step=self.step + 1,
            device=next(iter(like.values())).device,
            options=reducer.options,
            ledger=reducer.ledger,
        )
        self._compile_for(policy, like.values())
        self._choices.hand_over(choices, self.step)
        if not self._tensors:
            reducer.decide(policy.main)
        self._choices, self._tensors, self._parameters = choices, known, like
        self._log_choices(tensors)
        self._choices.note_optimizer(self._optimizer.kind)
        if configuration.optimizer is not None:
            # The tensors of a loop of one's own are no parameters: any optimizer concerns all.
            trained = trained_by(configuration.optimizer, like) or like.keys()
            self._note_optimizer(configuration.optimizer, trained)

    def _note_optimizer(self, optimizer: Optimizer, trained: Iterable[str]) -> None:
        """This optimizer takes the averages of these tensors, perhaps one of several."""
        found = KnownOptimizer.of(optimizer)
        if self._optimizer.kind >= found.kind or self._choices.tensors.keys().isdisjoint(trained):
            return
        self._optimizer = found
        self._choices.note_optimizer(found.kind)
        if found.kind == OptimizerKind.ADAM_LIKE:
            why = objection(self.policy, self._reducer.feedback)
            if why is not None:
                warnings.warn(
                    f"{found.name} divides by a running second moment of the gradient, and {why}. "
                    f"Training will be slower than uncompressed, or end at a higher loss. Use "
                    f"{self._advice} instead (docs/guides/which-method.md)",
                    ThinwireWarning,
                    stacklevel=3,
                )

    def _chosen_for(self, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
        """The tensors that a policy chooses for; all others are sent uncompressed."""
        return self._configuration.chosen_for(tensors)

    def _compile_for(self, policy: Policy, tensors: Iterable[Tensor]) -> None:
        """Have all kernels compiled that training may need: not in the first step."""
        options, feedback = self._reducer.options, self._reducer.feedback
        inside = [] if options.nodes is None else [options.nodes.inner]
        others = [each for each in policy.under_adam if each not in policy.compressors]
        others = [each for each in others if options.carries(each)]
        compressors = [UNCOMPRESSED, *policy.compressors, *others, *inside]
        kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
        for device in {device for device, _ in kinds}:
            dtypes = {dtype for other, dtype in kinds if other == device and dtype in FLOATS}
            uses = uses_of(compressors, dtypes, device)
            if isinstance(feedback, Remembering):
                uses += storage_uses([feedback.storage], dtypes, device)
            compile_in(options.group, device, uses)

    def _log_choices(self, tensors: Iterable[str]) -> None:
        sizes: dict[str, list[int]] = {}
        for name in tensors:
            choice = str(self._choices.compressor_of(name) or "uncompressed")
            sizes.setdefault(choice, []).append(self._tensors[name].numel)
        for choice, own in sorted(sizes.items()):
            log.info("%s: %d tensors, %d elements", choice, len(own), sum(own))

    def _compressor_of(self, name: str) -> Compressor | None:
        """In this step; None for uncompressed."""
        return self._choices.compressor_of(name)

    def _planner(self, granularity: str, *, apart: bool = False) -> Planner:
        """One that plans exchanges as this wire sends them; see `Planner`."""
        options = self._reducer.options
        return Planner(
            self._compressor_of,
            granularity,
            size=dist.get_world_size(options.group),
            collective=options.collective,
            apart=apart,
        )

    def _begin_step(self) -> None:
        self.step += 1  # before anything can fail on this rank alone: ranks must agree in it
        self._choices.begin(self.step)
        scaler = self._configuration.scaler
        loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        if loss_scale != self._scale:
            self._reducer.scale(loss_scale / self._scale)
            self._choices.scale(loss_scale / self._scale)
            self._scale = loss_scale

    def _skip_step(self) -> None:
        """DDP itself has carried one out."""
        self.step += 1
        self._choices.skip(self.step)

    def _inspect(
        self, step: int, unit: Unit, update: Update, compressor: Compressor, key: Key
    ) -> None:
        """A unit is about to be sent: show it to the policy, and measure what is left of it."""
        if self._choices.watches(step):
            self._choices.watch(step, unit, update)
        # Not the first step, which may be special (EF21 sends it uncompressed).
        every = self._configuration.measure_every
        due = every and (step - 2) % every == 0
        # Only all ranks together know what a joint compressor leaves.
        if due and compressor is not UNCOMPRESSED and isinstance(compressor, LocalCompressor):
            self._meter.measure(unit, update, compressor, key)

    def _end_step(self) -> None:
        for writer, every in self._writers:
            if self.step % every == 0:
                for name, value in self.scalars().items():
                    writer.add_scalar(name, value, self.step)

    def scalars(self) -> dict[str, float]:
        """What `log_to` writes: totals so far, by their names in a log."""
        found = stats_of(self, norms=False)
        total = found["total"]
        values = {
            "ratio": total["ratio"],
            "bytes_sent": total["bytes_sent"],
            "bytes_in": total["bytes_in"],
            "relative_error": total["relative_error"],
            **{f"seconds/{kind}": seconds for kind, seconds in found["seconds"].items()},
        }
        return {f"thinwire/{name}": value for name, value in values.items() if value is not None}

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later as if nothing had happened.

        Every rank saves its own: residuals differ. Tensors and plain values only, so that
        ``torch.load(..., weights_only=True)`` reads it. Where one process saves for all, see
        `gathered_state_dict`; for torch.distributed.checkpoint see `stateful`.
        """
        layout = self._layout if self._hook is None else self._hook.layout
        return {
            "version": VERSION,
            **whose(self._state_group),
            "step": self.step,
            "scale": self._scale,
            "layout": [list(names) for names in layout],
            "policy": self._choices.state(),
            "reducer": self._reducer_state(),
        }

    @property
    def _state_group(self) -> Group:
        """The ranks whose states belong together."""
        return self._reducer.options.group

    def _reducer_state(self) -> dict[str, Any]:
        """What is remembered, as it is saved."""
        state, expected = self._reducer.state_dict(), self._expected()
        if expected is not None:  # DDP goes on sending what was frozen after it was made
            kept = state["tensors"].items()
            state["tensors"] = {name: each for name, each in kept if name in expected}
        return state

    def _adopt(self, state: ReducerState) -> None:
        """Go on with what was saved."""
        self._reducer.adopt(state)

    def gathered_state_dict(self, *, everywhere: bool = False) -> dict[str, Any]:
        """What all ranks need to go on, in one: for programs that save on rank 0 and load on all.

        All ranks call this together. Rank 0 of the group gets it, in the host's memory, and the
        others an empty dictionary: only one of them saves it, and it is as large as the states of
        all ranks together.

        Args:
            everywhere: give it to all ranks.
        """
        own = self.state_dict()
        moment = f"step {own['step']}"
        options = replace(self._reducer.options, group=self._state_group)
        return gather(type(self).__name__, own, moment, options, everywhere)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` or `gathered_state_dict` was taken.

        Args:
            state: of this rank, or a gathered one. If that was saved by another number of ranks,
                each rank goes on with the mean of what they remembered, so that what is yet to be
                sent stays the same for the average.

        Raises:
            ValueError: it is the state of another rank, or does not fit; nothing has changed.
        """
        who = type(self).__name__
        states = states_to_load(who, state, self._state_group, ("step", "version"))
        for one in states:
            required(who, one, ("version",))
            if one["version"] != VERSION:
                raise ValueError(
                    f"{who}: not a state of this version: version {one['version']!r}, not {VERSION}"
                )
            required(who, one, KEYS)
        first = states[0]
        check.whole(who, "step", first["step"], 0)
        check.positive(who, "scale", first["scale"])
        layout = self._read_layout(first["layout"])
        own = self._remembered_by(states)
        reducer = ReducerState.of(who, own, self._reducer.feedback, self._expected())
        self._choices.load(first["policy"], first["step"])  # all of it, or an error and nothing
        self._adopt(reducer)
        self.step, self._scale = first["step"], first["scale"]
        self._layout = layout
        if self._hook is not None:
            self._hook.replay(layout)

    def _remembered_by(self, states: Sequence[RankState]) -> Sequence[RankState]:
        """What this rank goes on with the mean of, in its own state or those of all ranks."""
        return [one["reducer"] for one in states]

    def _expected(self) -> Mapping[str, Tensor] | None:
        """All tensors that there will be; None if nobody knows."""
        return self._parameters

    def _read_layout(self, given: Any) -> Layout:
        if not isinstance(given, list | tuple) or not all(
            isinstance(names, list | tuple) for names in given
        ):
            raise ValueError("Wire: layout must be a list of buckets, each a list of names")
        layout = [list(names) for names in given]
        flat = [name for names in layout for name in names]
        for name in flat:
            check_known("Wire", name, self._parameters)
        if len(set(flat)) < len(flat):
            raise ValueError("Wire: layout has a parameter twice")
        # Taken before the first step, or of another model: plan anew.
        return layout if set(flat) == self._parameters.keys() else []

    def _remembered(self) -> dict[str, Tensor]:
        """The parameters of which something may be remembered."""
        feedback = self._reducer.feedback
        if not isinstance(feedback, EF14):
            return dict(self._parameters) if feedback.parts else {}
        chosen_for = self._choices.tensors
        return {name: p for name, p in self._parameters.items() if name in chosen_for}

    def stateful(self, path: Any = None) -> "Checkpoint":
        """This wire for torch.distributed.checkpoint: ``dcp.save({"wire": wire.stateful()}, ...)``.

        Args:
            path: of the checkpoint, for loading one that may come from another number of ranks.
                Torch's list of what it holds is read, which is a pickle: whoever can write to that
                directory can run code here. Load only checkpoints of your own.
        """
        from thinwire.parallel.checkpoint import Checkpoint

        return Checkpoint(self, path)
