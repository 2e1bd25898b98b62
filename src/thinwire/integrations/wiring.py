"""What the adapters share: the wire of a model that a framework has wrapped."""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.errors import MissingExtraError, ThinwireWarning
from thinwire.methods import LocalRecipe, Recipe, method_of
from thinwire.parallel import LocalSteps, Wire, attach
from thinwire.parallel.configuration import CompressorGiven, Scaler
from thinwire.torch_internals import is_fully_sharded, uncompiled


def framework(*names: str, extra: str, purpose: str) -> ModuleType:
    """The first of these modules that can be imported; an error with the pip line if none can."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name.partition(".")[0]):
                raise
    raise MissingExtraError(names[0].partition(".")[0], extra, purpose) from None


def takes_local_steps(compressor: CompressorGiven) -> bool:
    """Whether a method exchanges what optimizers have done, and not gradients."""
    return isinstance(_recipe_of(compressor), LocalRecipe)


def _recipe_of(compressor: CompressorGiven) -> Recipe | LocalRecipe | None:
    method = method_of(compressor)
    return None if method is None else method.recipe()


def wire_for(
    who: str,
    model: Any,
    compressor: CompressorGiven,
    optimizers: Sequence[Optimizer],
    options: Mapping[str, Any],
    scaler: Scaler | None = None,
) -> Wire | None:
    """The wire of a wrapped model; None where there is one process and nothing to exchange.

    Args:
        who: asks, for errors.
        optimizers: that train it, for methods of local steps and those that take over momentum.
        options: of `attach` or `LocalSteps`, as the user gave them.
        scaler: of the framework, unless the user gave one.
    """
    inner = uncompiled(model)
    sharded = hasattr(inner, "modules") and any(map(is_fully_sharded, inner.modules()))
    if not sharded and not isinstance(inner, DistributedDataParallel):
        if not dist.is_initialized() or dist.get_world_size() == 1:
            warnings.warn(
                f"{who}: this training has one process, so nothing is exchanged and nothing "
                "compressed",
                ThinwireWarning,
                stacklevel=3,
            )
            return None
        raise TypeError(
            f"{who}: compression works with DistributedDataParallel and FSDP2 (fully_shard), and "
            f"this training exchanges gradients in another way (its model is a "
            f"{type(inner).__name__}): choose one of these two in the framework's settings "
            "(docs/guides/integrations.md says how)"
        )
    given = dict(options)
    if scaler is not None:
        given.setdefault("scaler", scaler)
    recipe = _recipe_of(compressor)
    if isinstance(recipe, LocalRecipe):
        return LocalSteps(model, list(optimizers), compressor, **given)
    if recipe is not None and recipe.momentum and "optimizer" not in given:
        if len(optimizers) != 1:
            raise ValueError(
                f"{who}: {compressor} takes over the momentum of one optimizer, and this training "
                f"has {len(optimizers)}: use another compressor, such as 'topk:0.01'"
            )
        given["optimizer"] = optimizers[0]
    return attach(model, compressor, **given)
