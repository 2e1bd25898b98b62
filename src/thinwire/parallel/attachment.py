"""attach: one line that switches compression on for a model."""

import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.collectives.compiling import compile_in
from thinwire.collectives.options import NodesGiven, Options, Timeout
from thinwire.compressors import Compressor
from thinwire.compressors.compiling import uses_of
from thinwire.feedback import DGC, Feedback, NoFeedback, Vote, feedback_for
from thinwire.feedback.base import Remembering
from thinwire.feedback.state import storage_uses
from thinwire.methods import NamedMethod, Recipe, method_of
from thinwire.parallel.choices import Choices, choices_of
from thinwire.parallel.ddp import DDPHook, Scaler
from thinwire.parallel.model import described, parameter_names
from thinwire.parallel.momentum import take_momentum, with_momentum
from thinwire.parallel.plan import Planner
from thinwire.parallel.wire import Wire
from thinwire.policies.base import ByName, Fixed, Policy, policy_of
from thinwire.reducer.units import UNCOMPRESSED, UnitReducer
from thinwire.torch_internals import uncompiled

log = logging.getLogger("thinwire")
ByFunction = Callable[[str], Compressor | str | None]


def attach(
    model: nn.Module,
    compressor: Compressor | Policy | NamedMethod | str | ByFunction,
    *,
    feedback: Feedback | str = "auto",
    granularity: str = "bucket",
    collective: str = "auto",
    nodes: NodesGiven = None,
    min_numel: int = 1024,
    exclude: str | Sequence[str] = (),
    scaler: Scaler | None = None,
    optimizer: Optimizer | None = None,
    seed: int = 0,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    check_every: int = 0,
    measure_every: int = 100,
) -> Wire:
    """Compress what a DistributedDataParallel model exchanges in its backward passes.

    Tensors with fewer than two dimensions, with fewer than `min_numel` elements or excluded are
    sent uncompressed, together. Compression and communication run on a thread of their own while
    backward goes on. Errors come out of ``backward()``.

    Args:
        model: a DistributedDataParallel module without a communication hook (torch.compile around
            it or inside it is fine).
        compressor: a compressor or a policy that chooses one, or the spec of either ("topk:0.01",
            "auto", see docs/policies.md); a method or its spec ("dgc:0.001", see `thinwire
            methods`); or a function from a parameter's name to a compressor or its spec, or to None
            for uncompressed.
        feedback: what is remembered of what was left out: "none", "ef14", "ef21", "ef21m:0.1" or an
            object; "auto" is EF14, or none where nothing is lost or the compressor is unbiased.
        granularity: "bucket" compresses all tensors of one of DDP's buckets as one, which is
            faster; "tensor" compresses each by itself.
        collective, max_bytes, timeout: as for `thinwire.all_reduce`.
        nodes: as for `thinwire.all_reduce`: ``nodes=8`` for eight ranks per node adds gradients up
            inside nodes and compresses only what goes between them; ``tw.Nodes(8,
            inner="cast:bf16")`` also says how gradients are sent inside. So are tensors that are
            sent uncompressed, unless they come to less than 128 KiB together.
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
    ddp = uncompiled(model)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"attach takes a DistributedDataParallel model, got {type(ddp).__name__}: wrap it, or "
            "average gradients in a loop of your own with tw.Reducer"
        )
    _check_counts(min_numel, check_every, measure_every)
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(f"scaler must be a GradScaler, got {type(scaler).__name__}")
    named = parameter_names(ddp)
    trained = {name: parameter for parameter, name in named if parameter.requires_grad}
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise TypeError(f"{name}: DDP hooks cannot carry {parameter.dtype} parameters")
    options = Options.of(
        ddp.process_group, collective=collective, nodes=nodes, max_bytes=max_bytes, timeout=timeout
    )
    method = method_of(compressor)
    recipe = None if method is None else method.recipe()
    given: Any = compressor
    if recipe is not None:
        if feedback != "auto":
            raise ValueError(f"{recipe.name} has a feedback of its own, got {feedback!r}")
        given, feedback = recipe.policy, _feedback_of(recipe, optimizer, scaler)
        if options.collective == "auto":
            options = Options.of(
                ddp.process_group,
                collective=recipe.collective,
                max_bytes=options.max_bytes,
                timeout=options.timeout,
            )
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    policy, large = _policy(given, {n: p for p, n in named}, min_numel, patterns)
    for each in policy.compressors:
        options.check(each)
    reducer = UnitReducer(policy.main, feedback, options, seed)
    choices = choices_of(
        policy,
        described(ddp.module, {name: p for name, p in trained.items() if name in large}),
        size=dist.get_world_size(ddp.process_group),
        feedback=not isinstance(feedback_for(policy.main, feedback), NoFeedback),
        device=next(iter(trained.values())).device,
        options=options,
    )
    _compile_for(reducer, policy, list(trained.values()))
    wire = Wire(reducer, choices, trained, measure_every)
    hook = DDPHook(
        wire,
        {id(parameter): name for parameter, name in named},
        trained,
        Planner(choices.compressor_of, granularity),
        find_unused=ddp.find_unused_parameters,
        scaler=scaler,
        check_every=check_every,
    )
    hook.attach(ddp)
    wire._hook = hook
    if recipe is not None and recipe.momentum:
        assert isinstance(feedback, DGC)
        assert optimizer is not None
        hook.undo_on_detach(take_momentum(optimizer, feedback))
    _log_choices(trained, choices)
    return wire


def _compile_for(reducer: UnitReducer, policy: Policy, parameters: Sequence[nn.Parameter]) -> None:
    """Have all kernels compiled that training may need: not in the first backward pass."""
    options, feedback = reducer.options, reducer.feedback
    inside = [] if options.nodes is None else [options.nodes.inner]
    compressors = [UNCOMPRESSED, *policy.compressors, *inside]
    for device in {p.device for p in parameters}:
        dtypes = {p.dtype for p in parameters if p.device == device}
        uses = uses_of(compressors, dtypes, device)
        if isinstance(feedback, Remembering):
            uses += storage_uses([feedback.storage], dtypes, device)
        compile_in(options.group, device, uses)


def _check_counts(min_numel: int, check_every: int, measure_every: int) -> None:
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
        raise ValueError(f"min_numel must be a number of elements, got {min_numel!r}")
    for what, value in (("check_every", check_every), ("measure_every", measure_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{what} must be a number of steps, 0 for never, got {value!r}")


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


def _policy(
    given: Any, parameters: dict[str, nn.Parameter], min_numel: int, exclude: Sequence[str]
) -> tuple[Policy, set[str]]:
    """What chooses, and for which tensors; all others are sent uncompressed."""
    unmatched = [p for p in exclude if not any(fnmatchcase(name, p) for name in parameters)]
    if unmatched:
        some = ", ".join(list(parameters)[:3])
        raise ValueError(f"exclude: no parameter is named like {unmatched[0]!r} (there are {some})")
    function = callable(given) and not isinstance(given, type)
    policy = None if function else policy_of(given)
    # What sends all uncompressed anyway takes whole buckets, as they lie in memory.
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


def _log_choices(parameters: dict[str, nn.Parameter], choices: Choices) -> None:
    sizes: dict[str, list[int]] = {}
    for name, parameter in parameters.items():
        choice = str(choices.compressor_of(name) or "uncompressed")
        sizes.setdefault(choice, []).append(parameter.numel())
    for choice, own in sorted(sizes.items()):
        log.info("%s: %d tensors, %d elements", choice, len(own), sum(own))
