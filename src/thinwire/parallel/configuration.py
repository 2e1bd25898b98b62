"""What a wire is asked for, whoever drives it: checked once, and passed on whole."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch.optim import Optimizer

from thinwire import check
from thinwire.collectives.options import Group, NodesGiven, Options, Timeout
from thinwire.compressors import Compressor
from thinwire.feedback import DGC, Feedback, Vote
from thinwire.methods import LocalRecipe, NamedMethod, Recipe, method_of
from thinwire.parallel.momentum import with_momentum
from thinwire.parallel.optimizers import check_optimizer
from thinwire.policies.base import ByName, Fixed, Policy, TensorInfo, policy_of
from thinwire.reducer.units import AVERAGES, UnitReducer

ByFunction = Callable[[str], Compressor | str | None]
CompressorGiven = Compressor | Policy | NamedMethod | str | ByFunction


class Scaler(Protocol):
    """A torch.amp.GradScaler, or the like."""

    def get_scale(self) -> float: ...


@dataclass(frozen=True)
class Configuration:
    """What `attach` or a `Reducer` was asked for.

    Args:
        chooser: a policy, or a function of the tensors' names.
        feedback: what is remembered; "auto" is what suits the compressor.
        options: the group, the collective and the limits.
        min_numel: tensors with fewer elements, or fewer than two dimensions, are sent uncompressed;
            None for no such rule.
        exclude: patterns of names of tensors that are sent uncompressed.
        scaler: of the loss.
        optimizer: that takes the averages, if that is known.
        takes_momentum: whether `feedback` takes over the optimizer's momentum.
        seed: for compressors that draw random numbers.
        average: over whom, "world" or "senders".
        check_every: compare the replicas every so many steps; 0 for never.
        measure_every: steps between two measurements of the compression error; 0 for never.
    """

    chooser: Policy | ByFunction
    feedback: Feedback | str
    options: Options
    min_numel: int | None
    exclude: tuple[str, ...]
    scaler: Scaler | None
    optimizer: Optimizer | None
    takes_momentum: bool
    seed: int
    average: str
    check_every: int
    measure_every: int

    @classmethod
    def of(
        cls,
        compressor: CompressorGiven,
        group: Group,
        *,
        feedback: Feedback | str,
        collective: str,
        nodes: NodesGiven,
        min_numel: int | None,
        exclude: str | Sequence[str],
        scaler: Scaler | None,
        optimizer: Optimizer | None,
        seed: int,
        average: str,
        max_bytes: int | str | None,
        timeout: Timeout,
        check_every: int,
        measure_every: int,
    ) -> "Configuration":
        """From what a user gave; refuses what makes no sense."""
        if min_numel is not None and (not check.is_whole(min_numel) or min_numel < 0):
            raise ValueError(f"min_numel must be a number of elements, got {min_numel!r}")
        for what, value in (("check_every", check_every), ("measure_every", measure_every)):
            if not check.is_whole(value) or value < 0:
                raise ValueError(f"{what} must be a number of steps, 0 for never, got {value!r}")
        if average not in tuple(AVERAGES):
            known = " or ".join(map(repr, AVERAGES))
            raise ValueError(f"average must be {known}, got {average!r}")
        if scaler is not None:
            check_scaler(scaler)
        if optimizer is not None:
            check_optimizer(optimizer)
        options = Options.of(
            group, collective=collective, nodes=nodes, max_bytes=max_bytes, timeout=timeout
        )
        method = method_of(compressor)
        recipe = None if method is None else method.recipe()
        given: Any = compressor
        if isinstance(recipe, LocalRecipe):
            raise ValueError(
                f"{recipe.name} exchanges what the optimizer has done, not gradients: use "
                f"tw.LocalSteps(model, optimizer, {recipe.name!r})"
            )
        if recipe is not None:
            if feedback != "auto":
                raise ValueError(f"{recipe.name} has a feedback of its own, got {feedback!r}")
            given, feedback = recipe.policy, _feedback_of(recipe, optimizer, scaler)
            if options.collective == "auto":
                options = Options.of(
                    group,
                    collective=recipe.collective,
                    max_bytes=options.max_bytes,
                    timeout=options.timeout,
                )
        function = callable(given) and not isinstance(given, type)
        made = cls(
            chooser=given if function else policy_of(given),
            feedback=feedback,
            options=options,
            min_numel=min_numel,
            exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
            scaler=scaler,
            optimizer=optimizer,
            takes_momentum=recipe is not None and recipe.momentum,
            seed=seed,
            average=average,
            check_every=check_every,
            measure_every=measure_every,
        )
        if isinstance(made.chooser, Policy):
            made.check(made.chooser)
        return made

    def policy_of(self, names: Iterable[str]) -> Policy:
        """That chooses for tensors of these names."""
        if isinstance(self.chooser, Policy):
            return self.chooser
        return ByName.of(self.chooser, list(names))

    def check(self, policy: Policy) -> None:
        """Refuse a policy whose compressors cannot go through the collective, or be averaged
        so."""
        for each in policy.compressors:
            self.options.check([each], AVERAGES[self.average])

    def reducer(self) -> UnitReducer:
        """That averages with what the policy comes to in the end. What a function comes to is known
        when tensors are."""
        main = self.chooser.main if isinstance(self.chooser, Policy) else None
        return UnitReducer(main, self.feedback, self.options, self.seed, self.average)

    def check_exclude(self, names: Iterable[str], kind: str) -> None:
        """Refuse a pattern that matches nothing."""
        names = list(names)
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(names[:3])
                raise ValueError(f"exclude: no {kind} is named like {pattern!r} (there are {some})")

    def chosen_for(self, tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
        """The tensors that a policy chooses for; all others are sent uncompressed."""
        policy = self.chooser if isinstance(self.chooser, Policy) else None
        # What sends all uncompressed anyway takes whole buckets, as they lie in memory.
        whole = isinstance(policy, Fixed) and policy.main.lossless and policy.main.summable
        least = None if whole else self.min_numel
        return [
            tensor
            for tensor in tensors
            if (least is None or (len(tensor.shape) >= 2 and tensor.numel >= least))
            and not any(fnmatchcase(tensor.name, pattern) for pattern in self.exclude)
        ]


def check_scaler(scaler: object) -> None:
    """Refuse what is no GradScaler."""
    if isinstance(scaler, type) or not callable(getattr(scaler, "get_scale", None)):
        got = f"the class {scaler.__name__}" if isinstance(scaler, type) else type(scaler).__name__
        raise TypeError(f"scaler must be a GradScaler, got {got}")


def _feedback_of(recipe: Recipe, optimizer: Optimizer | None, scaler: Scaler | None) -> Feedback:
    """The feedback of a method, with the optimizer's momentum if it takes that over."""
    feedback = recipe.feedback
    if recipe.momentum:
        if optimizer is None:
            raise ValueError(
                f"{recipe.name} takes over the optimizer's momentum: pass it, optimizer=optimizer"
            )
        assert isinstance(feedback, DGC)
        feedback = with_momentum(feedback, optimizer)
    if scaler is not None and (isinstance(feedback, Vote) or recipe.clips):
        raise ValueError(f"{recipe.name} depends on the size of gradients, so it takes no scaler=")
    return feedback
