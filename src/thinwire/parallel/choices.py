"""The compressor of each tensor in each step: fixed, or chosen by a policy as training goes on."""

import contextlib
from collections.abc import Mapping, Sequence
from glob import escape

import torch

from thinwire.collectives.handle import Handle
from thinwire.collectives.numbers import GatherNumbers
from thinwire.collectives.options import Options
from thinwire.collectives.probe import LinkProbe
from thinwire.compressors import Compressor
from thinwire.feedback.base import Update
from thinwire.policies.base import (
    LISTENS_EVERY,
    Choice,
    Chooser,
    Decision,
    Fixed,
    Journal,
    Measured,
    OptimizerKind,
    Policy,
    PolicyContext,
    TensorInfo,
)
from thinwire.policies.layerwise import Layerwise, Rule
from thinwire.reducer.unit import Unit
from thinwire.telemetry import Ledger


class Choices:
    """Choices that never change: one compressor for each tensor, None for uncompressed.

    This is also what a wire asks when a policy is at work (`PolicyRunner`); here most of it has
    nothing to do.

    Args:
        policy: that has chosen.
        tensors: that it has chosen for; all others are sent uncompressed.
        choices: by the name of a tensor.
        explanation: sentences on them.
    """

    fixed = True
    doubts = False  # this rank would rather hear from the others soon

    @property
    def listens_every(self) -> int:
        """See `Chooser`."""
        return LISTENS_EVERY

    def __init__(
        self,
        policy: Policy,
        tensors: Mapping[str, TensorInfo],
        choices: Mapping[str, Choice],
        explanation: Sequence[str] = (),
    ) -> None:
        self.policy, self.tensors = policy, tensors
        self._choices, self._explanation = choices, list(explanation)

    def compressor_of(self, name: str) -> Compressor | None:
        """In this step; None for uncompressed."""
        return self._choices.get(name)

    def begin(self, step: int) -> None:
        """A step begins."""

    def idle(self, step: int) -> bool:
        """Whether the next step may be left to DDP itself; then `skip` takes the place of
        `begin`."""
        return False

    def idle_when_heard(self, step: int) -> bool:
        """The same, unless what ranks tell each other at this moment says otherwise: see `hear`."""
        return False

    def hear(self) -> None:
        """Wait for what ranks tell each other: it counts from here. An error waits for `begin`."""

    def skip(self, step: int) -> None:
        """A step is left to DDP itself."""

    def ask_next(self, step: int) -> None:
        """Some rank had doubts in a step that was left to DDP: the one after it should not be."""

    def is_known(self, error: BaseException) -> bool:
        """Whether an error that came out of this was told to all ranks."""
        return False

    def end(self, step: int, measured: Measured, asked: bool = False) -> None:
        """A step has ended, and came to this.

        Args:
            asked: some rank had doubts before it, as all have heard.
        """

    def watches(self, step: int) -> bool:
        """Whether `watch` is to be called in this step."""
        return False

    def watch(self, step: int, unit: Unit, update: Update) -> None:
        """What a unit is about to send."""

    def scale(self, factor: float) -> None:
        """The loss, and with it all gradients, is from now on so many times as large."""

    def observe(self, value: float) -> None:
        """A validation came to this."""

    def note_optimizer(self, kind: OptimizerKind) -> None:
        """What takes the averages, as far as this rank knows."""

    def explain(self) -> list[str]:
        """Sentences on what is done, and why."""
        return self._explanation

    @property
    def decisions(self) -> list[Decision]:
        """What was changed, and why."""
        return []

    def settings(self) -> Layerwise:
        """What each tensor is sent with in the next step, as a policy."""
        return Layerwise(
            tuple(
                Rule(None if choice is None else Fixed(choice), escape(name))
                for name, choice in self._next().items()
            )
        )

    def _next(self) -> Mapping[str, Choice]:
        return self._choices

    def hand_over(self, to: "Choices", step: int) -> None:
        """What is known goes over to the choices for more tensors, after a step."""

    def due(self, step: int) -> bool:
        """Whether ranks tell each other their numbers after this step."""
        return False

    def state(self) -> list[float]:
        """What the policy knows, the same on all ranks."""
        return []

    def check_state(self, state: Sequence[float]) -> None:
        """Refuse a state that is not one of this policy."""
        if not isinstance(state, list | tuple) or not all(map(_is_number, state)):
            raise ValueError(f"the state of a policy is a list of numbers, got {state!r:.60}")
        expected = len(self.state())
        if len(state) != expected:
            raise ValueError(
                f"the state is not one of policy {self.policy}: it has {len(state)} numbers, not "
                f"{expected}"
            )

    def load(self, state: Sequence[float], step: int) -> None:
        """Go on after a step; what is refused changes nothing."""
        self.check_state(state)


class NoChoices(Choices):
    """While no tensor is known: keeps what is loaded or told for the choices that will be made."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, {}, {}, ["No tensor is known yet."])
        self._loaded: list[float] | None = None
        self._observed: float | None = None

    def hand_over(self, to: Choices, step: int) -> None:
        if self._loaded is not None:
            to.load(self._loaded, step)
        if self._observed is not None:
            to.observe(self._observed)

    def observe(self, value: float) -> None:
        self._observed = value

    def settings(self) -> Layerwise:
        raise ValueError("no tensor is known yet: ask for settings() after the first exchange")

    def state(self) -> list[float]:
        return list(self._loaded or ())

    def load(self, state: Sequence[float], step: int) -> None:
        self._loaded = list(state)


class PolicyRunner(Choices):
    """Asks a policy before each step and tells it what all ranks have seen after it.

    Args:
        chooser: the policy at work.
        step: that comes first.
        device: where the group's tensors are.
        options: the group and the time limit.
        ledger: where bytes of reports and probes are counted.
    """

    fixed = False

    def __init__(
        self,
        policy: Policy,
        tensors: Mapping[str, TensorInfo],
        chooser: Chooser,
        journal: Journal,
        step: int,
        device: torch.device,
        options: Options,
        ledger: Ledger,
    ) -> None:
        self.chooser, self._journal, self._ledger = chooser, journal, ledger
        self._device, self._options = device, options
        self._step = step - 1  # that has begun last
        self._reports: tuple[int, GatherNumbers] | None = None  # after the last step, under way
        self._probe: LinkProbe | None = None  # under way, or ended and not told of
        self._failed: Handle | None = None  # the last exchange that did
        self._error: BaseException | None = None  # outside of steps, which nobody was told
        first = {name: chooser.choose(tensor, step) for name, tensor in tensors.items()}
        super().__init__(policy, tensors, first)

    def begin(self, step: int) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._wait()
        self._learn()
        self._step = step
        self._choices = self._chosen(step)

    def idle(self, step: int) -> bool:
        # What ranks have told each other may change the choice.
        return self._reports is None and self._idle(step)

    def idle_when_heard(self, step: int) -> bool:
        # A probe takes longer, and asks for a report after the next step.
        return self._reports is not None and self._probe is None and self._idle(step)

    def _idle(self, step: int) -> bool:
        return self._error is None and self.chooser.idle(step)

    def hear(self) -> None:
        with contextlib.suppress(Exception):
            self._learn_outside()

    def _learn_outside(self) -> None:
        """The same as `_learn`, outside of steps: the next one fails if this does, so that other
        ranks hear of it."""
        self._wait()
        try:
            self._learn()
        except BaseException as error:
            self._error = error
            raise

    def skip(self, step: int) -> None:
        self._step = step

    def ask_next(self, step: int) -> None:
        self.chooser.ask(step + 1)

    def _chosen(self, step: int) -> dict[str, Choice]:
        return {name: self.chooser.choose(tensor, step) for name, tensor in self.tensors.items()}

    def _wait(self) -> None:
        """For reports, and for a probe, which must not share the link with what comes next. After
        Ctrl-C here nothing is lost."""
        if self._probe is not None:
            self._probe.handle.wait_until_ended()
        if self._reports is not None:
            self._reports[1].handle.wait_until_ended()

    def _learn(self) -> None:
        """From reports that have ended."""
        probe, self._probe = self._probe, None
        if probe is not None:
            self._check(probe.handle)
            self._probe = probe  # its figures go out with the next report
        if self._reports is not None:
            (step, reports), self._reports = self._reports, None
            self._check(reports.handle)
            self._ledger.add_bytes(reports.handle.account)
            self.doubts = False  # all have been heard
            self.chooser.learn(step, reports.rows)

    def _check(self, handle: Handle) -> None:
        if handle.exception() is not None:
            self._failed = handle
            handle.wait()

    def is_known(self, error: BaseException) -> bool:
        failed = self._failed
        return failed is not None and failed.account.announced and failed.exception() is error

    def hand_over(self, to: Choices, step: int) -> None:
        state = self.state()
        # What a policy knows of each tensor cannot be known of more of them.
        if len(state) == len(to.state()):
            to.load(state, step)

    @property
    def listens_every(self) -> int:
        return self.chooser.listens_every

    def due(self, step: int) -> bool:
        return self.chooser.due(step)

    def end(self, step: int, measured: Measured, asked: bool = False) -> None:
        if asked:
            self.chooser.ask(step)
        self.doubts = self.doubts or self.chooser.doubts(measured)
        if self.due(step):
            probe, self._probe = self._probe, None
            if probe is not None:
                probe.handle.wait_until_ended()
                self._check(probe.handle)
                self._ledger.add_bytes(probe.handle.account)
                measured = measured._replace(
                    probed=float(probe.probe_size.num_bytes),
                    meeting=probe.meeting,
                    moving=probe.moving,
                    moving_part=probe.moving_part,
                    tries=float(probe.probe_size.tries),
                )
            try:
                numbers: Sequence[float] | Exception = self.chooser.report(measured)
            except Exception as error:
                numbers = error  # which all are told
            what = f"{self.policy} after step {step}"
            reports = GatherNumbers(numbers, what, self._device, self._options)
            reports.start(async_op=True)
            self._reports = (step, reports)
            size = self.chooser.probes(step)
            if size is not None:
                self._probe = LinkProbe(size, self._device, self._options)
                self._probe.start(async_op=True)

    def watches(self, step: int) -> bool:
        return self.chooser.watches(step)

    def watch(self, step: int, unit: Unit, update: Update) -> None:
        for name, (lo, hi) in unit.spans():
            if name in self.tensors:
                residual = None if update.residual is None else update.residual[lo:hi]
                self.chooser.watch(self.tensors[name], step, update.tensor[lo:hi], residual)

    def scale(self, factor: float) -> None:
        self.chooser.scale(factor)

    def observe(self, value: float) -> None:
        self.chooser.observe(value)

    def note_optimizer(self, kind: OptimizerKind) -> None:
        self.chooser.note_optimizer(kind)

    def explain(self) -> list[str]:
        return self.chooser.explain()

    @property
    def decisions(self) -> list[Decision]:
        return list(self._journal.decisions)

    def _next(self) -> Mapping[str, Choice]:
        self._learn_outside()
        return self._chosen(self._step + 1)

    def state(self) -> list[float]:
        self._learn_outside()
        return self.chooser.state()

    def load(self, state: Sequence[float], step: int) -> None:
        super().load(state, step)
        before = self.chooser.state()
        try:
            self.chooser.load(state)
            choices = self._chosen(step + 1)
        except Exception:
            self.chooser.load(before)
            raise
        self._reports = self._probe = self._error = None
        self._step, self._choices = step, choices


def _is_number(value: object) -> bool:
    """Infinity and NaN included: policies may have seen them."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def choices_of(
    policy: Policy,
    tensors: Sequence[TensorInfo],
    *,
    size: int,
    feedback: bool,
    journal: Journal,
    step: int,
    device: torch.device,
    options: Options,
    ledger: Ledger,
) -> Choices:
    """The choices of a policy for some tensors.

    Args:
        size: ranks of the group.
        feedback: whether what is left out is remembered.
        step: that comes first.
        ledger: where bytes of what a policy exchanges are counted.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    chooser = policy.begin(PolicyContext(tensors, size, feedback, journal, options))
    if chooser.fixed:
        chosen = {tensor.name: chooser.choose(tensor, step) for tensor in tensors}
        return Choices(policy, by_name, chosen, chooser.explain())
    return PolicyRunner(policy, by_name, chooser, journal, step, device, options, ledger)
