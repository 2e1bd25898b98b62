"""Giving a DDP model its method."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from thinwire.compare.method import OPTIMIZERS, Method
from thinwire.compressors import LocalCompressor
from thinwire.frames import decode, pack
from thinwire.kernels import Key
from thinwire.optim.base import ExchangingOptimizer
from thinwire.parallel import attach
from thinwire.parallel.wire import Wire
from thinwire.policies import policy_of

_POWERSGD_START = 2  # the step from which it compresses, the least that it takes (default 1000)
_HOOKS = {
    "torch:fp16": default_hooks.fp16_compress_hook,
    "torch:bf16": default_hooks.bf16_compress_hook,
}


def equip(model: DistributedDataParallel, method: Method, **options: Any) -> Wire | None:
    """Let a model exchange its gradients by a method; the wire if it is one of ours."""
    if method.named:
        return attach(model, method.name, **options)
    if method.kind == "thinwire":
        return attach(model, method.compressor, feedback=method.feedback, **options)
    if method.name in _HOOKS:
        model.register_comm_hook(dist.group.WORLD, _HOOKS[method.name])
    elif method.rank:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=method.rank, start_powerSGD_iter=_POWERSGD_START
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def optimizer_of(method: Method, given: Optimizer, steps: int) -> Optimizer:
    """The optimizer of a method with one of its own, in place of a workload's Adam.

    A fifth of the steps goes uncompressed; the papers take 15 to 25 %.
    """
    if method.kind != "optimizer":
        return given
    from thinwire import optim

    first = given.param_groups[0]
    if "betas" not in first:
        raise ValueError(
            f"{method.name} takes the place of Adam, and this workload trains with "
            f"{type(given).__name__}: compare it on one that uses Adam (text)"
        )
    name, _ = OPTIMIZERS[method.name]
    options = {"decoupled": isinstance(given, AdamW)} if name != "OneBitLamb" else {}
    freeze = "var_freeze_step" if name == "ZeroOneAdam" else "freeze_step"
    parameters = [p for group in given.param_groups for p in group["params"]]
    kept = {key: first[key] for key in ("lr", "betas", "eps", "weight_decay")}
    made: Optimizer = getattr(optim, name)(
        parameters, **kept, **{freeze: max(1, steps // 5)}, **options
    )
    return made


def stats_of(wire: Wire | None, optimizer: Optimizer | None = None) -> Mapping[str, Any] | None:
    """What thinwire reports of a training, if it took part in it."""
    if wire is not None:
        return wire.stats()
    if isinstance(optimizer, ExchangingOptimizer):
        told = optimizer.stats()
        return {"total": told, "seconds": told["seconds"], "tensors": {}}
    return None


def ddp_options(method: Method) -> dict[str, Any]:
    """What DistributedDataParallel must be made with for a method."""
    # PyTorch's PowerSGD hook waits inside a bucket for what follows in the next: with more than one
    # it hangs on gloo.
    return {"bucket_cap_mb": 2**20} if method.rank else {}


def warm_up(method: Method) -> None:
    """Have the kernels of a method compiled, or loaded, before anything is timed."""
    if method.kind not in ("thinwire", "optimizer"):
        return
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    used = [c for c in policy_of(method.compressor).compressors if isinstance(c, LocalCompressor)]
    for compressor, residual in product(used, (None, torch.zeros(5000))):
        try:
            payload = compressor.encode(x, residual=residual, key=Key(0))
        except ValueError:
            continue  # some take no residual
        payload.add_to(x.clone(), 1.0)
        decode(pack(payload))
