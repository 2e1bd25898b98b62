"""A policy at work on one model: its choices, and what ranks tell each other for them."""

from collections.abc import Callable, Mapping, Sequence
from glob import escape
from typing import Any

import torch
from torch import nn

from thinwire.collectives.handle import Handle
from thinwire.collectives.numbers import gather_numbers
from thinwire.collectives.start import Timeout
from thinwire.compressors import Compressor
from thinwire.feedback.base import Turn
from thinwire.policies.base import (
    Choice,
    Fixed,
    Journal,
    Measured,
    Policy,
    PolicyContext,
    TensorInfo,
)
from thinwire.policies.layerwise import Layerwise, Rule
from thinwire.reducer.unit import Unit


class Steering:
    """Asks a policy before each step and tells it what all ranks have seen after it.

    Args:
        policy: that chooses.
        targets: the tensors that it chooses for; all others travel as they are.
        size: ranks of the group.
        feedback: whether what is left out is remembered.
    """

    def __init__(
        self,
        policy: Policy,
        targets: Sequence[TensorInfo],
        *,
        size: int,
        feedback: bool,
        device: torch.device,
        group: Any,
        timeout: Timeout = None,
    ) -> None:
        self.policy = policy
        self.journal = Journal()
        self.targets = {target.name: target for target in targets}
        self.chooser = policy.begin(PolicyContext(targets, size, feedback, self.journal))
        self._step = 0  # that has begun last
        self._choices = self._chosen(1)
        self._where: dict[str, Any] = {"device": device, "group": group, "timeout": timeout}
        self._told: tuple[int, Handle, list[list[float]]] | None = None

    def compressor_of(self, name: str) -> Compressor | None:
        """In this step; None for what travels as it is."""
        return self._choices.get(name)

    def begin(self, step: int) -> None:
        """A step begins: hear what was said after the last one, and choose."""
        self.settle()
        self._step = step
        if not self.chooser.fixed:
            self._choices = self._chosen(step)

    def _chosen(self, step: int) -> dict[str, Choice]:
        return {name: self.chooser.choose(target, step) for name, target in self.targets.items()}

    def settle(self) -> None:
        """Have heard all that was said."""
        if self._told is not None:
            (step, handle, rows), self._told = self._told, None
            handle.wait()
            self.chooser.learn(step, rows)

    def end(self, step: int, measured: Measured) -> None:
        """A step has ended: tell the others."""
        if self.chooser.due(step):
            try:
                numbers: Sequence[float] | Exception = self.chooser.report(measured)
            except Exception as error:
                numbers = error  # which all will hear
            what = f"{self.policy} after step {step}"
            self._told = (step, *gather_numbers(numbers, what, **self._where))

    def watcher(self, step: int) -> Callable[[Unit, Turn], None] | None:
        """Who looks at what is about to be sent in this step."""
        return self._watch if self.chooser.watches(step) else None

    def _watch(self, unit: Unit, turn: Turn) -> None:
        for name, (lo, hi) in unit.spans():
            if name in self.targets:
                residual = None if turn.residual is None else turn.residual[lo:hi]
                self.chooser.watch(self.targets[name], turn.tensor[lo:hi], residual)

    def settings(self) -> Layerwise:
        """What each tensor travels with in the next step, as a policy."""
        self.settle()
        choices = self._chosen(self._step + 1).items()
        return Layerwise(
            tuple(Rule(None if c is None else Fixed(c), escape(name)) for name, c in choices)
        )

    def state(self) -> list[float]:
        """What the policy knows, the same on all ranks."""
        self.settle()
        return self.chooser.state()

    def load(self, state: Sequence[float], step: int) -> None:
        """Go on after a step."""
        expected = len(self.chooser.state())
        if len(state) != expected:
            raise ValueError(
                f"the state is not one of policy {self.policy}: it has {len(state)} numbers, not "
                f"{expected}"
            )
        self._told = None
        self.chooser.load(state)
        self._step = step
        self._choices = self._chosen(step + 1)


def targets_of(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[TensorInfo]:
    """Parameters as policies see them."""
    owners = {id(p): m for m in module.modules() for p in m.parameters(recurse=False)}
    last = None
    for owner in owners.values():
        if not isinstance(owner, nn.Embedding) and any(
            p.dim() >= 2 for p in owner.parameters(recurse=False)
        ):
            last = owner
    return [
        TensorInfo(name, p.shape, p.dtype, _kind(owners.get(id(p))), owners.get(id(p)) is last)
        for name, p in parameters.items()
    ]


def _kind(module: nn.Module | None) -> str:
    name = type(module).__name__.lower()
    for kind in ("embedding", "linear", "conv", "norm"):
        if kind in name:
            return kind
    return "other"
