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
    return [(parameter, unwrapped_name(name)) for name, parameter in inner.named_parameters()]


# What torch.compile and torch's wrappers for activation checkpoints add to the names of modules.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped_name(name: str) -> str:
    """The name that a module or parameter has in the module that the user wrote."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# Where frameworks keep the model that they have wrapped in DDP.
PLACES = (
    *("module", "model", "_forward_module", "model_wrapped", "strategy.model"),
    *("trainer.strategy.model", "trainer.model_wrapped"),
)
FRAMEWORKS = {  # by the package of a class: where its DDP model will be
    "lightning_fabric": "Fabric's is `fabric.setup(model, optimizer)[0]._forward_module`",
    "lightning": "Lightning's is `trainer.strategy.model`, from a callback's on_train_start on",
    "transformers": (
        "the Trainer's is `trainer.model_wrapped`, from a callback's on_train_begin on (in a loop "
        "of your own, wrap the model)"
    ),
    "accelerate": "Accelerate's is what `accelerator.prepare(model)` returns",
    "deepspeed": (
        "DeepSpeed has none, as it exchanges gradients by itself: use "
        "`tw.deepspeed.attach(engine, ...)`"
    ),
}
PACKAGES = {  # under which else they are installed
    "lightning.fabric": "lightning_fabric",
    "pytorch_lightning": "lightning",
}


def not_ddp(given: object) -> str:
    """Why something that is no DDP model cannot be attached to, and what can."""
    if isinstance(given, type):
        return f"{given.__name__} is a class, give a model that was made with it"
    got = f"got {type(given).__name__}"
    for place in PLACES:
        if isinstance(_found_at(given, place), DistributedDataParallel):
            return f"{got}, whose DDP model is its .{place}: attach to that"
    for each in type(given).__mro__:
        for package, hint in FRAMEWORKS.items():
            names = [package, *(name for name, same in PACKAGES.items() if same == package)]
            if any(f"{each.__module__}.".startswith(f"{name}.") for name in names):
                return f"{got}: {hint}"
    return f"{got}: wrap it, or average gradients in a loop of your own with tw.Reducer"


def _found_at(given: Any, place: str) -> Any:
    try:
        for name in place.split("."):
            given = uncompiled(getattr(given, name))
    except Exception:  # a property may raise whatever it likes
        return None
    return given


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
