"""The methods that can be compared, by name.

ddp, fsdp, hsdp        DistributedDataParallel, FSDP2 or HSDP, uncompressed
torch:fp16, :bf16      PyTorch's own hooks
torch:powersgd[:RANK]
COMPRESSOR[+FEEDBACK]  thinwire, as in "topk:0.01|quantize:4+ef14"; without a feedback "auto"
POLICY[+FEEDBACK]      thinwire, as in "auto" or "warmup:50,(topk:0.01)+ef14"
dgc:0.001, signum, ... methods by name, of gradients
diloco:50, sparseloco, adam-update, local-sgd:10,compressor=(quantize:4), ...
                       methods by name, of local steps
onebit-adam, onebit-lamb, zero-one-adam, demo
                       optimizers of thinwire that exchange by themselves
script                 a user's script, unchanged
"""

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.compare.settings import (
    BASELINE,
    PARALLELISMS,
    ComparisonSettingError,
    ParallelName,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from thinwire.feedback import Feedback
    from thinwire.kernels.compiling import KernelUse
    from thinwire.methods import LocalRecipe
    from thinwire.policies.base import Policy

_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
_ARGUMENT = re.compile(rf"({_NUMBER}|\(.*\))(\+.*)?|true|false|none|[^:|+(]*=.*", re.IGNORECASE)
_TITLES = {
    **{str(name): f"plain {each.title}, fp32" for name, each in PARALLELISMS.items()},
    "torch:fp16": "torch's fp16 hook",
    "torch:bf16": "torch's bf16 hook",
    "script": "the script, unchanged",
}


@dataclass(frozen=True)
class Method:
    """One way to train together: to exchange gradients, or what optimizers have done.

    Args:
        name: as users write it.
        title: as people read it.
        kind: "torch", "thinwire", "local", "optimizer" or "script".
        policy, feedback: of thinwire's own; a compressor alone is a policy that never changes.
        rank: of PyTorch's PowerSGD.
        named: whether it goes to `attach` or `LocalSteps` by its name.
    """

    name: str
    title: str
    kind: str
    policy: "Policy | None" = None
    feedback: "Feedback | None" = None
    rank: int = 0
    named: bool = False


def to_json(method: Method) -> dict[str, Any]:
    """A method for another process, in plain types; `from_json` makes an equal one of it."""
    from thinwire import spec

    return {
        "name": method.name,
        "title": method.title,
        "kind": method.kind,
        "policy": None if method.policy is None else spec.to_json(method.policy),
        "feedback": None if method.feedback is None else spec.to_json(method.feedback),
        "rank": method.rank,
        "named": method.named,
    }


def from_json(found: dict[str, Any]) -> Method:
    """The method that `to_json` described. Raises ValueError if it cannot be read."""
    from thinwire import spec

    policy, feedback = found["policy"], found["feedback"]
    parts = {
        "policy": None if policy is None else spec.from_json(policy),
        "feedback": None if feedback is None else spec.from_json(feedback),
    }
    return Method(**{**found, **parts})


# The optimizers by name: class, and title.
OPTIMIZERS = {
    "onebit-adam": ("OneBitAdam", "1-bit Adam"),
    "onebit-lamb": ("OneBitLamb", "1-bit LAMB"),
    "zero-one-adam": ("ZeroOneAdam", "0/1 Adam"),
    "demo": ("DeMo", "DeMo"),
}


def split(text: str) -> list[str]:
    """The methods in a list: separated by ';', or by commas that do not separate arguments.

    >>> split("none, quantize:4,stochastic=true, warmup:5,(topk:0.01)+ef14")
    ['none', 'quantize:4,stochastic=true', 'warmup:5,(topk:0.01)+ef14']
    """
    from thinwire.spec import split as split_at

    try:
        if ";" in text:
            return [part for part in split_at(text, ";") if part]
        methods: list[str] = []
        for part in split_at(text, ","):
            if methods and ":" in methods[-1] and _ARGUMENT.fullmatch(part) and part != "none":
                methods[-1] += f",{part}"
            elif part:
                methods.append(part)
    except ValueError as error:
        raise ComparisonSettingError(f"--with: {error}") from None
    return methods


def read(text: str, parallel: ParallelName = BASELINE) -> Method:
    """The method of that name, for models that are divided like this (see `PARALLELISMS`).

    Raises ComparisonSettingError that says what is known, or why it does not fit.
    """
    method = _read(text, parallel)
    if (why := _misfit(method, parallel)) is not None:
        raise ComparisonSettingError(
            f"{text.strip()} does not go with --parallel {parallel}: {why}"
        )
    try:
        back = from_json(to_json(method))
    except (TypeError, ValueError, OSError) as error:
        raise ComparisonSettingError(_unreadable(text, str(error))) from None
    if back != method:
        raise ComparisonSettingError(_unreadable(text, f"it reads as {back.name!r}"))
    return method


def _unreadable(text: str, why: str) -> str:
    return (
        f"{text!r} cannot be compared: its description cannot be read back by the processes that "
        f"train with it ({why})"
    )


def _misfit(method: Method, parallel: ParallelName) -> str | None:
    """Why a method cannot train models that are divided like this, if so."""
    if method.name in PARALLELISMS:
        own = f"it is the baseline of --parallel {method.name}"
        return own if method.name != parallel else None
    if parallel == BASELINE:
        return None
    if method.kind == "torch":
        return "it is a hook of DistributedDataParallel, and FSDP takes none"
    if method.kind == "local":
        return "local steps train a whole model on each host, and FSDP's hosts have parts of one"
    if method.kind == "optimizer":
        return (
            "it exchanges gradients of a whole model by itself, and FSDP's hosts have parts of one"
        )
    if parallel == "fsdp" and method.policy is not None and method.feedback is not None:
        try:
            _scattered_feedback(method.policy, method.feedback)
        except ValueError as error:
            return str(error)
    return None


def _scattered_feedback(policy: "Policy", feedback: "Feedback | str") -> "Feedback | str":
    """The feedback that `attach` would take for a sharded model. Raises ValueError if none does."""
    from thinwire.parallel.sharded import feedback_for_scatter

    return feedback_for_scatter(policy.compressors, feedback)


def _read(text: str, parallel: ParallelName) -> Method:
    name = text.strip().lower()
    if name in _TITLES:
        return Method(name, _TITLES[name], "script" if name == "script" else "torch")
    if name in OPTIMIZERS:
        from thinwire import optim
        from thinwire.policies.base import Fixed

        kind, title = OPTIMIZERS[name]
        return Method(name, title, "optimizer", Fixed(getattr(optim, kind).usual))
    if name.startswith("torch:"):
        return _powersgd(name)
    from thinwire.methods import LocalRecipe, method_of

    try:
        method = method_of(name)
    except ValueError as error:
        own = len(_at_plus(name)) > 1
        hint = " (a method by name has a feedback of its own: leave it out)" if own else ""
        raise ComparisonSettingError(f"{text!r}: {error}{hint}") from None
    if method is not None:
        recipe = method.recipe()
        made = recipe.policy, recipe.feedback
        if isinstance(recipe, LocalRecipe):
            return Method(recipe.name, _local_title(recipe), "local", *made, named=True)
        return Method(recipe.name, recipe.name, "thinwire", *made, named=True)
    from thinwire.feedback import feedback_for
    from thinwire.policies.base import POLICIES, policy_of

    # Patterns of names may have capitals.
    parts = _at_plus(text.strip() if POLICIES.knows(name) else name)
    compressor, *feedback = parts
    if len(feedback) > 1:
        raise ComparisonSettingError(f"{text!r}: a method is COMPRESSOR or COMPRESSOR+FEEDBACK")

    try:
        chosen = policy_of(compressor)
        remembering = feedback_for(chosen.main, feedback[0] if feedback else "auto")
    except (TypeError, ValueError) as error:
        known = (
            f"{', '.join(PARALLELISMS)}, torch:fp16, torch:bf16, torch:powersgd, COMPRESSOR or "
            "POLICY[+FEEDBACK], a name that thinwire methods lists, such as dgc or diloco"
        )
        raise ComparisonSettingError(f"{text!r} is no method ({known}): {error}") from None
    if parallel == "fsdp" and not feedback:
        with contextlib.suppress(ValueError):  # a misfit, which is told of with its name
            remembering = feedback_for(chosen.main, _scattered_feedback(chosen, "auto"))
    name = str(chosen) if remembering.name == "none" else f"{chosen}+{remembering}"
    return Method(name, name, "thinwire", chosen, remembering)


def uses_of_method(
    method: Method, dtypes: "Sequence[torch.dtype] | None" = None
) -> "list[KernelUse]":
    """What has to be compiled for a method; by default on float32 tensors."""
    import torch

    from thinwire.compressors.compiling import uses_of
    from thinwire.feedback.base import Remembering
    from thinwire.feedback.state import storage_uses

    if method.policy is None:
        return []
    types = [torch.float32] if dtypes is None else dtypes
    compressors = method.policy.compressors
    others = [each for each in method.policy.under_adam if each not in compressors]
    uses = uses_of([*compressors, *others], types)
    if isinstance(method.feedback, Remembering):
        uses += storage_uses([method.feedback.storage], types)
    return uses


def local_recipe(method: Method) -> "LocalRecipe | None":
    """What a method of local steps consists of; None for any other."""
    from thinwire.methods import LocalRecipe, parse

    if method.kind != "local":
        return None
    recipe = parse(method.name).recipe()
    assert isinstance(recipe, LocalRecipe)
    return recipe


def _local_title(recipe: "LocalRecipe") -> str:
    """When what is exchanged."""
    when = "updates of each step" if recipe.every == 1 else f"exchange every {recipe.every} steps"
    if recipe.fragments > 1:
        when += f" in {recipe.fragments} fragments"
    if recipe.warmup:
        when += f" after the first {recipe.warmup}"
    how = str(recipe.compressor)
    return f"{when}, {'uncompressed' if how == 'none' else how}"


def _at_plus(text: str) -> list[str]:
    """Split at each plus outside parentheses and quotes, but not at that of 1e+3."""
    from thinwire.spec import split as split_at

    try:
        first, *others = split_at(text, "+")
    except ValueError as error:
        raise ComparisonSettingError(f"{text!r}: {error}") from None
    parts = [first]
    for other in others:
        if other[:1].isalpha():
            parts.append(other)
        else:
            parts[-1] += f"+{other}"
    return parts


def _powersgd(name: str) -> Method:
    match = re.fullmatch(r"torch:powersgd(?::(\d+))?", name)
    if match is None or match[1] == "0":
        hooks = "torch:fp16, torch:bf16, torch:powersgd, torch:powersgd:RANK"
        raise ComparisonSettingError(f"unknown hook {name!r}, known: {hooks}")
    rank = int(match[1] or 2)
    return Method(name, f"torch's PowerSGD hook, rank {rank}, one bucket", "torch", rank=rank)
