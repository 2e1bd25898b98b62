"""A model's parameters: names that stay the same however it is wrapped, and what policies see."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.policies.base import TensorInfo
from thinwire.torch_internals import uncompiled


def parameter_names(model: nn.Module) -> list[tuple[nn.Parameter, str]]:
    """Every parameter once, with the name it has in the module that the user wrote."""
    inner: Any = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        inner = inner.module
    return [
        (parameter, name.replace("_orig_mod.", "")) for name, parameter in inner.named_parameters()
    ]


def described(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, TensorInfo]:
    """Parameters as policies see them."""
    owners = {id(p): m for m in module.modules() for p in m.parameters(recurse=False)}
    last = None
    for owner in owners.values():
        if not isinstance(owner, nn.Embedding) and any(
            p.dim() >= 2 for p in owner.parameters(recurse=False)
        ):
            last = owner
    return {
        name: TensorInfo(
            name, p.shape, p.dtype, _kind(owners.get(id(p))), owners.get(id(p)) is last
        )
        for name, p in parameters.items()
    }


def _kind(module: nn.Module | None) -> str:
    name = type(module).__name__.lower()
    for kind in ("embedding", "linear", "conv", "norm"):
        if kind in name:
            return kind
    return "other"
