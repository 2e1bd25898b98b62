"""attach: one line that switches compression on for a DDP model."""

import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.nodes import Nodes
from thinwire.collectives.reduce import check_collective
from thinwire.collectives.start import Timeout
from thinwire.compressors import Compressor
from thinwire.feedback import DGC, Feedback, NoFeedback, Vote, feedback_for
from thinwire.methods import method_of
from thinwire.parallel.momentum import take_momentum, with_momentum
from thinwire.parallel.names import parameter_names, unwrapped
from thinwire.parallel.steering import Steering, targets_of
from thinwire.parallel.wire import Wire
from thinwire.policies.base import ByName, Fixed, Policy, policy_of
from thinwire.reducer.reducer import Reducer

log = logging.getLogger("thinwire")
Choice = Compressor | str | None
SOCKET = "_thinwire_socket"


class Socket:
    """DDP takes one hook for ever: this one asks whether a wire is plugged in."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.wire: Wire | None = None


def _hook(
    socket: Socket,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    if socket.wire is None:
        return allreduce_hook(socket.group, bucket)
    return socket.wire.carry(bucket)


def attach(
    model: nn.Module,
    compressor: Compressor | Policy | str | Callable[[str], Choice],
    *,
    feedback: Feedback | str = "auto",
    granularity: str = "bucket",
    collective: str = "auto",
    nodes: Nodes = None,
    inner: Compressor | str = "none",
    inner_feedback: str = "ef14",
    min_numel: int = 1024,
    exclude: str | Sequence[str] = (),
    scaler: Any = None,
    optimizer: Any = None,
    seed: int = 0,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    check_every: int = 0,
    measure_every: int = 100,
) -> Wire:
    """Compress what a DistributedDataParallel model exchanges in its backward passes.

    Tensors with fewer than two dimensions, with fewer than `min_numel` elements or excluded travel
    as they are, together. Compression and communication run on a thread of their own while backward
    goes on. Errors come out of ``backward()``.

    Args:
        model: a DistributedDataParallel module without a communication hook (torch.compile around
            it or inside it is fine).
        compressor: a compressor or a policy that chooses one, the spec of either ("topk:0.01",
            "auto", see docs/policies.md), a method's name ("dgc:0.001", see `thinwire methods`), or
            a function from a parameter's name to a compressor or its spec, or to None for what is
            to travel as it is.
        feedback: what is remembered of what was left out: "none", "ef14", "ef21", "ef21m:0.1" or an
            object; "auto" is EF14, or none where nothing is lost or the compressor is unbiased.
        granularity: "bucket" compresses all tensors of one of DDP's buckets as one, which is
            faster; "tensor" compresses each by itself.
        collective, max_bytes, timeout: as for `thinwire.all_reduce`.
        nodes, inner, inner_feedback: as for `thinwire.all_reduce`: ``nodes=8`` for eight ranks a
            node adds gradients up inside nodes, as they are or with the compressor `inner`, and
            compresses only what goes between nodes. Tensors that travel as they are do so, too,
            unless they come to less than 128 KiB together.
        exclude: patterns of parameter names, as in a shell ("embed*", "*.head.*").
        scaler: the GradScaler of this model, if there is one: residuals follow its scale and stay
            as they were in steps that it skips (at the cost of a second copy of the residuals).
        optimizer: that trains the model; needed by "dgc", which takes its momentum over.
        seed: for compressors that draw random numbers; the same on all ranks.
        check_every: compare the replicas every so many steps; 0 for never.
        measure_every: steps between two measurements of the compression error; 0 for never.

    Returns:
        The wire: `stats`, `summary`, `explain`, `state_dict`, `load_state_dict`, `detach`.

    Example:
        model = DistributedDataParallel(net)
        wire = tw.attach(model, "topk:0.01", feedback="ef14")
    """
    ddp = unwrapped(model)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"attach takes a DistributedDataParallel model, got {type(ddp).__name__}: wrap it, or "
            "average gradients in a loop of your own with tw.Reducer"
        )
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
        raise ValueError(f"min_numel must be a number of elements, got {min_numel!r}")
    for what, value in (("check_every", check_every), ("measure_every", measure_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{what} must be a number of steps, 0 for never, got {value!r}")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(f"scaler must be a GradScaler, got {type(scaler).__name__}")
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    named = parameter_names(ddp)
    parameters = {name: parameter for parameter, name in named if parameter.requires_grad}
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise TypeError(f"{name}: DDP hooks cannot carry {parameter.dtype} parameters")
    method = method_of(compressor)
    recipe = None if method is None else method.recipe()
    given: Any = compressor
    if recipe is not None:
        if feedback != "auto":
            raise ValueError(f"{recipe.name} has a feedback of its own, got {feedback!r}")
        given, feedback = recipe.policy, recipe.feedback
        if check_collective(collective, recipe.compressor, nodes, inner) == "auto":
            collective = recipe.collective
        if recipe.momentum:
            if optimizer is None:
                raise ValueError(f"{recipe.name} takes over the optimizer's momentum: optimizer=")
            assert isinstance(feedback, DGC)
            feedback = with_momentum(feedback, optimizer)
        if scaler is not None and (isinstance(feedback, Vote) or recipe.clips):
            raise ValueError(
                f"{recipe.name} depends on the size of gradients, so it takes no scaler="
            )
    policy, large = _policy(given, {n: p for p, n in named}, min_numel, patterns)
    for each in policy.compressors:
        check_collective(collective, each, nodes, inner)
    group = ddp.process_group
    reducer = Reducer(
        policy.main,
        feedback=feedback,
        collective=collective,
        nodes=nodes,
        inner=inner,
        inner_feedback=inner_feedback,
        group=group,
        max_bytes=max_bytes,
        timeout=timeout,
        seed=seed,
    )
    governed = {name: p for name, p in parameters.items() if name in large}
    steering = Steering(
        policy,
        targets_of(ddp.module, governed),
        size=dist.get_world_size(group),
        feedback=not isinstance(feedback_for(policy.main, feedback), NoFeedback),
        device=next(iter(parameters.values())).device,
        group=group,
        timeout=timeout,
    )
    wire = Wire(
        reducer,
        steering,
        granularity,
        {id(parameter): name for parameter, name in named},
        parameters,
        group=group,
        timeout=timeout,
        census=ddp.find_unused_parameters,
        scaler=scaler,
        check_every=check_every,
        measure_every=measure_every,
    )
    _plug_in(ddp, wire)
    if recipe is not None and recipe.momentum:
        assert isinstance(feedback, DGC)
        wire.on_detach = take_momentum(optimizer, feedback)
    _tell(parameters, {name: steering.compressor_of(name) for name in parameters})
    return wire


def _policy(
    given: Any, parameters: dict[str, nn.Parameter], min_numel: int, exclude: Sequence[str]
) -> tuple[Policy, set[str]]:
    """What chooses, and for which tensors; all others travel as they are."""
    unmatched = [p for p in exclude if not any(fnmatchcase(name, p) for name in parameters)]
    if unmatched:
        some = ", ".join(list(parameters)[:3])
        raise ValueError(f"exclude: no parameter is named like {unmatched[0]!r} (there are {some})")
    function = callable(given) and not isinstance(given, type)
    policy = None if function else policy_of(given)
    # What sends all as it is anyway takes whole buckets, as they lie in memory.
    whole = isinstance(policy, Fixed) and policy.main.lossless and policy.main.summable
    large = {
        name
        for name, parameter in parameters.items()
        if (whole or (parameter.dim() >= 2 and parameter.numel() >= min_numel))
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }
    if policy is None:
        policy = ByName.of(given, [name for name in parameters if name in large])
    return policy, large


def _plug_in(ddp: DistributedDataParallel, wire: Wire) -> None:
    socket: Socket | None = getattr(ddp, SOCKET, None)
    if socket is None:
        socket = Socket(wire._group)
        try:
            ddp.register_comm_hook(socket, _hook)
        except RuntimeError as error:
            if "comm_hook" not in str(error):
                raise
            raise ValueError(
                "this model has a communication hook already, and DDP takes only one: attach to a "
                "DistributedDataParallel model without one"
            ) from error
        setattr(ddp, SOCKET, socket)
    if socket.wire is not None:
        raise ValueError("this model has a wire already: call its detach() first")
    socket.wire = wire
    wire._socket = socket


def _tell(parameters: dict[str, nn.Parameter], choices: dict[str, Compressor | None]) -> None:
    for choice in sorted({str(c) for c in choices.values()}):
        own = [parameters[name] for name, c in choices.items() if str(c) == choice]
        log.info(
            "%s: %d tensors, %d elements",
            "as they are" if choice == "None" else choice,
            len(own),
            sum(parameter.numel() for parameter in own),
        )
