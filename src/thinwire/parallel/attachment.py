"""attach: one line that switches compression on for a model."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.collectives.options import NodesGiven, Timeout
from thinwire.compressors import Compressor
from thinwire.feedback import Feedback
from thinwire.parallel.configuration import CompressorGiven, Configuration, Scaler
from thinwire.parallel.ddp import DDPHook, hook_of
from thinwire.parallel.local import FOLLOWED
from thinwire.parallel.model import described, not_ddp, parameter_names
from thinwire.parallel.sharded import attach_sharded, sharded_wire_of
from thinwire.parallel.shards import Replicas, named_groups, replicas_of
from thinwire.parallel.weights import WeightSettings
from thinwire.parallel.wire import Wire
from thinwire.torch_internals import delayed_by_ddp, ignored_by_ddp, is_fully_sharded, uncompiled


def attach(
    model: nn.Module,
    compressor: CompressorGiven,
    *,
    feedback: Feedback | str = "auto",
    granularity: str = "bucket",
    collective: str = "auto",
    nodes: NodesGiven = None,
    average: str = "world",
    min_numel: int = 1024,
    exclude: str | Sequence[str] = (),
    scaler: Scaler | None = None,
    optimizer: Optimizer | None = None,
    seed: int = 0,
    max_bytes: int | str | None = None,
    timeout: Timeout = None,
    check_every: int = 0,
    measure_every: int = 100,
    weights: Compressor | str | None = None,
    resync_every: int = 1000,
    replicate: Replicas | None = None,
) -> Wire:
    """Compress what a DistributedDataParallel or sharded model exchanges in its backward passes.

    For a training loop without DDP there is `thinwire.Reducer`, which does the same.

    Tensors with fewer than two dimensions, with fewer than `min_numel` elements or excluded are
    sent uncompressed, together. Compression and communication run on a thread of their own while
    backward goes on. Errors come out of ``backward()``.

    Args:
        model: a DistributedDataParallel module without a communication hook, or one that
            `fully_shard` was applied to (FSDP2, see docs/guides/fsdp.md). torch.compile around it
            or inside it is fine.
        compressor: a compressor or a policy that chooses one, or the spec of either ("topk:0.01",
            "auto", see docs/guides/policies.md); a method or its spec ("dgc:0.001", see `thinwire
            methods`); or a function from a parameter's name to a compressor or its spec, or to None
            for uncompressed.
        feedback: what is remembered of what was left out: "none", "ef14", "ef21", "ef21m:0.1" or an
            object; "auto" is EF14, or none where nothing is lost, where the compressor is unbiased,
            and for TernGrad.
        granularity: "bucket" compresses all tensors of one of DDP's buckets as one, which is
            faster; "tensor" compresses each by itself.
        collective, max_bytes, timeout: as for `thinwire.all_reduce`.
        nodes: as for `thinwire.all_reduce`: ``nodes=8`` for eight ranks per node adds gradients up
            inside nodes and compresses only what goes between them; ``tw.Nodes(8,
            inner="cast:bf16")`` also says how gradients are sent inside. So are tensors that are
            sent uncompressed, unless they come to less than 128 KiB together.
        average: "world" is the mean over all ranks, "senders" that of each element over the ranks
            that sent it, where compressors leave elements out. What one of P ranks has sent is then
            not divided by P, so steps are larger (see docs/guides/ddp.md). "senders" goes through
            "gather", without `nodes`.
        exclude: patterns of parameter names, as in a shell ("embed*", "*.head.*").
        scaler: the GradScaler of this model, if there is one: residuals follow its scale and stay
            as they were in steps that it skips (at the cost of a second copy of the residuals).
        optimizer: that trains the model; needed by "dgc", which takes its momentum over. Otherwise
            its first step shows whether it is like Adam, for which "auto" goes another way and
            sparse or 1-bit gradients give a warning.
        seed: for compressors that draw random numbers; the same on all ranks.
        check_every: compare the replicas every so many steps; 0 for never.
        measure_every: steps between two measurements of the compression error; 0 for never.
        weights: for a sharded model, a compressor or its spec ("quantize:8"): its parameters are
            gathered as differences to what all ranks hold, of which each rank keeps a copy.
        resync_every: gathers of a module after which its parameters are sent as they are; 0 for
            only the first time.
        replicate: for a sharded model of which there are replicas (HSDP), their group or mesh
            (``mesh["replicate"]``): what is averaged over them is compressed, and FSDP reduces
            inside of a replica by itself. The model is sharded on ``mesh["shard"]`` alone.

    Returns:
        The wire: `stats`, `summary`, `explain`, `state_dict`, `load_state_dict`, `detach`.

    Example:
        model = DistributedDataParallel(net)
        wire = tw.attach(model, "topk:0.01", feedback="ef14")
    """
    ddp = uncompiled(model)
    sharded = any(map(is_fully_sharded, ddp.modules())) if isinstance(ddp, nn.Module) else False
    if not sharded and not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"attach takes a sharded (fully_shard) or DistributedDataParallel model, {not_ddp(ddp)}"
        )
    if ddp in FOLLOWED:
        raise ValueError(
            "this model takes local steps, which exchange no gradients: detach LocalSteps first"
        )
    if not sharded and (replicate is not None or weights is not None):
        raise ValueError(
            "weights= and replicate= are for a model that fully_shard was applied to: DDP sends "
            "no parameters, and averages over all ranks of its process group"
        )
    if sharded and replicate is None and collective != "auto":
        raise ValueError(
            f"collective={collective!r}: FSDP's gradients go through a reduce-scatter, whatever "
            "the compressor. Leave it out"
        )
    if replicate is not None and weights is not None:
        raise ValueError(
            "weights= goes without replicate=: with replicas parameters are gathered inside of "
            "one, where links are fast"
        )
    groups = named_groups(ddp) if sharded else []
    named = parameter_names(ddp)
    ignored = set() if sharded else ignored_by_ddp(ddp) | delayed_by_ddp(ddp)
    trained = {name: p for p, name in named if p.requires_grad and id(p) not in ignored}
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise TypeError(f"{name}: hooks cannot carry {parameter.dtype} parameters")
    replicas = None if replicate is None else replicas_of(replicate)
    configuration = Configuration.of(
        compressor,
        (replicas or groups[0].group) if sharded else ddp.process_group,
        feedback=feedback,
        collective=collective,
        nodes=nodes,
        min_numel=min_numel,
        exclude=exclude,
        scaler=scaler,
        optimizer=optimizer,
        seed=seed,
        average=average,
        max_bytes=max_bytes,
        timeout=timeout,
        check_every=check_every,
        measure_every=measure_every,
    )
    configuration.check_exclude([name for _, name in named], "parameter")
    if sharded:
        settings = None
        if weights is not None:
            settings = WeightSettings.of(weights, resync_every, configuration.exclude, seed)
        return attach_sharded(ddp, groups, configuration, granularity, replicas, settings)
    if not trained:
        raise ValueError("no parameter of this model is trained by DDP: nothing to exchange")
    wire = Wire(configuration)
    hook = DDPHook(
        wire,
        {name: parameter for parameter, name in named},
        trained,
        wire._planner(granularity),
        find_unused=ddp.find_unused_parameters,
    )
    wire._learn_tensors(described(ddp.module, trained), trained)
    # DDP never lets go of a hook, so plugging in comes last: what fails before it can be undone.
    wire._take_momentum([p for p, _ in named if id(p) not in ignored])
    try:
        hook.attach(ddp)
    except BaseException:
        wire.detach()
        raise
    wire._hook = hook
    return wire


def wire_of(model: nn.Module) -> Wire | None:
    """The wire that is attached to a DistributedDataParallel or sharded model (torch.compile around
    it or not), or None.

    Example:
        wire = tw.wire_of(model)
        if wire is not None:
            print(wire.summary())
    """
    inner = uncompiled(model)
    hook = hook_of(inner)
    return sharded_wire_of(inner) if hook is None else hook.wire
