"""Names of parameters that stay the same however a model is wrapped."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrapped(model: Any) -> Any:
    """What torch.compile was given."""
    return getattr(model, "_orig_mod", model)


def parameter_names(model: nn.Module) -> list[tuple[nn.Parameter, str]]:
    """Every parameter once, with the name it has in the module that the user wrote."""
    inner = unwrapped(model)
    if isinstance(inner, DistributedDataParallel):
        inner = inner.module
    return [
        (parameter, name.replace("_orig_mod.", "")) for name, parameter in inner.named_parameters()
    ]
