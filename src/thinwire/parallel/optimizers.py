"""Optimizers like Adam, and what does not go with them.

Adam divides by the root of v, a running mean of squared gradients. A coordinate with a steady
gradient g, of which a share r of the steps sends a burst g/r, has the mean g but the mean square
g^2/r: it moves sqrt(r) times as far as it should. One whose gradients are noise keeps its v. So no
learning rate makes up for it. Quantizers and low ranks send every element in every step.
"""

import re
from collections.abc import Mapping
from math import sqrt
from typing import Any, NamedTuple

from torch import Tensor, optim
from torch.optim import Optimizer

from thinwire.compressors import (
    ARCTopK,
    Chain,
    Compressor,
    OneBit,
    ScaledSign,
    SparseCompressor,
    Tiered,
)
from thinwire.feedback import DGC, EF21, Feedback, Vote
from thinwire.policies.base import OptimizerKind, Policy
from thinwire.policies.ladder import knob

_TORCH = (
    *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.SparseAdam),
    *(optim.Adagrad, optim.Adadelta, optim.Adafactor, optim.RMSprop),
)
_NAMES = re.compile("adam|adagrad|adadelta|adafactor|rmsprop|lamb(?!da)", re.IGNORECASE)
_SECOND_MOMENT = "exp_avg_sq"  # what most optimizers call it in their state
_INSIDE = ("optimizer", "optim")  # where Accelerate and ZeroRedundancyOptimizer keep the real one
_LARGE = 1 << 20  # elements of which a compressor sends all, if it ever does


class KnownOptimizer(NamedTuple):
    """What is known of an optimizer."""

    name: str = ""
    kind: OptimizerKind = OptimizerKind.UNKNOWN

    @classmethod
    def of(cls, given: Any) -> "KnownOptimizer":
        """
        Args:
            given: an optimizer, or what is wrapped around one.
        """
        chain = [given]
        while (found := _inside(chain[-1])) is not None and found not in chain:
            chain.append(found)
        for each in reversed(chain):
            if _like_adam(each):
                return cls(type(each).__name__, OptimizerKind.ADAM_LIKE)
        return cls(type(chain[-1]).__name__, OptimizerKind.OTHER)


def check_optimizer(given: Any) -> None:
    """Refuse what is no optimizer."""
    if isinstance(given, type):
        raise TypeError(f"optimizer must be an optimizer, got the class {given.__name__}")
    if not callable(getattr(given, "step", None)) or not hasattr(given, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {given!r}")


def trained_by(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> set[str]:
    """The names of those parameters that an optimizer has."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name for name, parameter in parameters.items() if id(parameter) in own}


def objection(policy: Policy, feedback: Feedback) -> str | None:
    """Why gradients that are sent so do not go with an optimizer like Adam; None if they do."""
    for compressor in policy.under_adam:
        if compressor.lossless or compressor.sends_all(_LARGE):
            continue
        why = _objection_to(compressor, feedback)
        if why is not None:
            return why
    return None


def _objection_to(compressor: Compressor, feedback: Feedback) -> str | None:
    if isinstance(feedback, Vote):
        return (
            "a majority of signs has lost the magnitudes that it goes by; signSGD and Signum are "
            "made for SGD without momentum"
        )
    if isinstance(feedback, DGC):
        return "DGC's momentum belongs to SGD, and adds to the momentum that it has itself"
    if isinstance(feedback, EF21):
        return (
            f"{feedback} hands it parts of old gradients over and over, whose noise then no longer "
            "averages out in its momentum"
        )
    if isinstance(compressor, Tiered):
        return _objection_to(compressor.small, feedback)
    first = compressor.stages[0] if isinstance(compressor, Chain) else compressor
    if isinstance(first, SparseCompressor | ARCTopK):
        found = knob(first)
        slowly = "sqrt(density) times as far as they should"
        if found is not None:
            slowly += f", {sqrt(found[1]):.2g} times with {compressor}"
        return (
            f"what {compressor} sends of an element arrives in bursts, which inflate that moment: "
            f"elements with a steady gradient move about {slowly}"
        )
    if isinstance(first, OneBit | ScaledSign):
        return (
            f"{compressor} gives all elements of a block the same few magnitudes, and so inflates "
            "that moment where gradients are small"
        )
    return None


def _like_adam(optimizer: Any) -> bool:
    if isinstance(optimizer, _TORCH):
        return True
    if any(_NAMES.search(kind.__name__) for kind in type(optimizer).__mro__):
        return True
    state = getattr(optimizer, "state", None)
    kept = state.values() if isinstance(state, Mapping) else ()
    return any(isinstance(each, Mapping) and _SECOND_MOMENT in each for each in kept)


def _inside(optimizer: Any) -> Any:
    """The optimizer that another is wrapped around."""
    for name in _INSIDE:
        found = getattr(optimizer, name, None)
        if hasattr(found, "param_groups") and callable(getattr(found, "step", None)):
            return found
    return None
