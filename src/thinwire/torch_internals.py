"""Everything of torch that is not part of its public interface, in one place.

Each function says why the public way does not do. When a new release of torch breaks thinwire, this
is where to look first; `make test-torch TORCH=...` runs the tests on another release.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch import Tensor

_c10d: Any = dist.distributed_c10d
PendingOperation = Any  # torch._C._distributed_c10d.Work, which has no types


class Backend(NamedTuple):
    """What a process group uses for the tensors of one kind of device."""

    name: str  # "gloo", "nccl", ...
    store: Any  # where members of the group find each other
    network_devices: Any  # gloo's, which decide the interface
    timeout: timedelta


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """The backend of a group, its store and its time limit.

    A group of our own must use the same network interface, store and time limit as the user's; no
    public function tells them.
    """
    backend: Any = group._get_backend(torch.device(device.type))
    options = backend.options
    return Backend(
        backend.name(),
        _c10d._get_process_group_store(group),
        getattr(options, "_devices", None),
        getattr(options, "_timeout", dist.default_pg_timeout),
    )


def common_device(group: dist.ProcessGroup) -> torch.device:
    """Where to put what belongs to no device: into the host's memory, if the group can move that.

    No public function tells which kinds of devices a group has a backend for.
    """
    kinds = [kind.type for kind in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def prefixed(prefix: str, store: Any) -> Any:
    """A store whose keys begin with a prefix."""
    return _c10d.PrefixStore(prefix, store)


def gloo_group(store: Any, index: int, size: int, network_devices: Any, timeout: timedelta) -> Any:
    """A gloo group over a store, without torch.distributed.new_group.

    `new_group` needs every rank of the world, and names the new group by how many groups a rank
    has, which need not be the same everywhere.
    """
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = network_devices
    options._threads = 2  # of operations at a time; more of one group come in turn
    options._timeout = timeout
    return _c10d.ProcessGroupGloo(store, index, size, options)


PULSE_TAG = 2_147_461_523  # of messages that nobody receives
ABORT_TAG = PULSE_TAG + 1  # of messages that nobody sends


def connects_at_once(group: dist.ProcessGroup) -> bool:
    """Whether the members of a group are connected from its beginning: gloo, unless told not to."""
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "y", "yes", "t", "true")
    return not lazy and _gloo_of(group) is not None


def connection_closed(group: dist.ProcessGroup, place: int) -> bool:
    """Whether a gloo group's connection to a member is closed: its process has ended.

    No function tells. But gloo refuses at once to send over a closed connection; over an open one
    it offers an empty message that nobody will ask for, which costs some bytes of memory.
    """
    try:
        _gloo_of(group).send([torch.empty(0, dtype=torch.uint8)], place, PULSE_TAG)
    except RuntimeError:
        return True
    return False


def _gloo_of(group: dist.ProcessGroup) -> Any:
    """The gloo backend of a group, for tensors of the host; None if it has none."""
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return backend if backend.name() == "gloo" else None


# Operations of a single group with a time limit of their own: the public functions take none.


def all_gather(group: Any, out: Tensor, mine: Tensor, timeout: timedelta) -> PendingOperation:
    """`out` <- the members' tensors of one length, one behind the other."""
    options = _c10d.AllgatherOptions()
    options.timeout = timeout
    return group._allgather_base(out, mine, options)


def all_to_all(
    group: Any,
    out: Tensor,
    outgoing: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    timeout: timedelta,
) -> PendingOperation:
    """sent[j] elements to member j, received[j] from it."""
    options = _c10d.AllToAllOptions()
    options.timeout = timeout
    return group.alltoall_base(out, outgoing, list(received), list(sent), options)


def all_reduce(group: Any, tensor: Tensor, op: Any, timeout: timedelta) -> PendingOperation:
    options = _c10d.AllreduceOptions()
    options.timeout = timeout
    options.reduceOp = op
    return group.allreduce([tensor], options)


def broadcast(group: Any, tensor: Tensor, root: int, timeout: timedelta) -> PendingOperation:
    options = _c10d.BroadcastOptions()
    options.timeout = timeout
    options.rootRank = root
    return group.broadcast([tensor], options)


def gather_options() -> Any:
    """What the method `allgather` of a process group takes: torch.distributed's own functions do
    not know the groups of torchft."""
    return _c10d.AllgatherOptions()


def abort(group: Any) -> None:
    """Close the connections of a gloo group at once; operations that wait for them end.

    gloo cannot cancel an operation, and the `abort` of its groups does nothing. But a receive that
    times out closes all connections of its group, and whatever waits for one of them ends. Not so
    an operation that has sent or received a part of a message: it ends with its own time limit.
    """
    with contextlib.suppress(RuntimeError):
        nothing = torch.empty(1, dtype=torch.uint8)
        group.recv_anysource([nothing], ABORT_TAG).wait(timedelta(milliseconds=1))


def keep(group: Any) -> None:
    """Do not destroy a group, not even when the interpreter ends, until `let_go` is called.

    Its destructor waits for operations that have not ended.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def let_go(group: Any) -> None:
    """Undo `keep`: the operations have ended."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def queue_callback(callback: Callable[[], None]) -> bool:
    """Have the autograd engine call this when its backward pass ends; False if there is none.

    DDP ends its own passes in this way. Hooks of tensors and modules run too early: DDP has not
    finished its buckets then.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def register_hook(ddp: Any, state: object, hook: Callable[..., Any]) -> None:
    """Register a communication hook that copies of the DDP module do not inherit.

    DDP's reducer has it then; the list of hooks on the module is for torch's Python reducer, which
    calls them with single gradients instead of buckets. A copy of the module would have the list
    but no hook in its reducer, and could not be loaded where thinwire is missing.
    """
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "this model was made with torch._dynamo.config.optimize_ddp = 'python_reducer', with "
            "which DDP gives hooks no buckets: make it with optimize_ddp = True"
        )
    ddp.register_comm_hook(state, hook)
    ddp._comm_hooks.pop()


def ignored_by_ddp(ddp: Any) -> set[int]:
    """The parameters and buffers that a DDP model was told to ignore, by their id: each rank has
    its own."""
    every, told = ddp.module.named_modules(), ddp.parameters_to_ignore
    kept = {
        id(parameter)
        for place, module in every
        for name, parameter in module.named_parameters(recurse=False)
        if f"{place}.{name}" not in told  # as DDP looks them up, the root's too
    }
    parameters = {id(parameter) for parameter in ddp.module.parameters()} - kept
    buffers = {id(buffer) for name, buffer in ddp.module.named_buffers() if name in told}
    return (parameters | buffers) - delayed_by_ddp(ddp)


def delayed_by_ddp(ddp: Any) -> set[int]:
    """The parameters whose gradients a DDP model averages by itself, outside of its buckets
    (`delay_all_reduce_named_params`); it lists them as ignored, too."""
    return {id(parameter) for parameter in getattr(ddp, "_delay_all_reduce_params", ())}


class BucketReducer(NamedTuple):
    """What DDP forms its buckets with, and what logs for it."""

    reducer: Any
    logger: Any


def reducer_of(ddp: Any) -> BucketReducer:
    """The one that a DDP model uses."""
    return BucketReducer(ddp.reducer, ddp.logger)


class ToldReducer:
    """A reducer of DDP that says whether it was told of the next backward pass.

    It averages the gradients of one backward pass after each call of `prepare_for_backward`. That
    comes from a forward pass with gradients outside of `no_sync`, or from whoever tells the reducer
    by himself, as torch's own pipelines do. No function asks for it.

    Attributes:
        awaits: a pass that it was told of; whoever sees it come says so here.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer
        self.awaits = False

    def prepare_for_backward(self, *outputs: Any) -> None:
        self._reducer.prepare_for_backward(*outputs)
        self.awaits = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def use_reducer(ddp: Any, which: BucketReducer) -> None:
    """Have a DDP model use this one from its next forward pass on.

    Another one of the same model may stay: the hooks that it has on the gradients do nothing in a
    pass that it was not told of in the forward pass.
    """
    ddp.reducer, ddp.logger = which


def reducer_without_hook(ddp: Any) -> BucketReducer:
    """A second one for a DDP model, made as DDP makes its first: DDP cannot take back a hook.

    Its reducer is a `ToldReducer`.
    """
    first = reducer_of(ddp)
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    try:
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        return BucketReducer(ToldReducer(ddp.reducer), ddp.logger)
    finally:
        use_reducer(ddp, first)


def may_have_two_reducers(ddp: Any) -> bool:
    """Whether nothing of a DDP model is tied to its first one: views of its buckets as gradients,
    what it learns of the graph in the first pass, hooks that name it."""
    parameters = list(ddp.module.parameters())
    return (
        not (ddp.find_unused_parameters or ddp.static_graph or ddp.gradient_as_bucket_view)
        and getattr(ddp, "mixed_precision", None) is None
        and not delayed_by_ddp(ddp)
        and not any(hasattr(each, "_in_backward_optimizers") for each in parameters)
        and all(hasattr(ddp, each) for each in ("_ddp_init_helper", "_build_params_for_reducer"))
    )


def is_joining(ddp: Any) -> bool:
    """Whether a DDP model is inside of its `join`."""
    return bool(ddp._join_config.enable)


def reset_ddp(ddp: Any) -> None:
    """Let a DDP model forget a backward pass that did not end.

    It asserts in the next forward pass otherwise. Only for models that never form their buckets
    anew (`find_unused_parameters` without `static_graph`): others would do so, and ask all ranks.
    """
    ddp.reducer._reset_state()


def profiler_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A named range for torch's profiler, if one is running.

    `record_function` costs microseconds even when nobody profiles, in each stage of an exchange;
    whether somebody does is only told by this flag.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return contextlib.nullcontext()


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is spread over ranks.

    `torch.distributed.tensor` takes seconds to import; where nobody has, there is none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp1(module: Any) -> bool:
    """Whether a module is a FullyShardedDataParallel; its import takes as long."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def is_fully_sharded(module: Any) -> bool:
    """Whether `fully_shard` was applied to a module (FSDP2); its import takes as long."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


class ParameterShard(NamedTuple):
    """How a parameter lies on the ranks that share it.

    Args:
        parameter: as the optimizer sees it, a DTensor.
        shape: of the whole.
        padded: of a rank's part, which is padded with zeros to this.
        own: of this rank's part.
        dim: along which it is cut.
        data: this rank's part, padded and flat.
        dtype: in which its gradients are reduced.
    """

    parameter: Any
    shape: torch.Size
    padded: torch.Size
    own: torch.Size
    dim: int
    data: Tensor
    dtype: torch.dtype


class ShardGroup(NamedTuple):
    """The parameters that FSDP gathers and reduces together.

    Args:
        module: to which `fully_shard` was applied.
        shards: in the order in which they lie in what is gathered and reduced.
        group: over whose ranks they are cut.
        replicated: whether FSDP itself averages over replicas (HSDP on a mesh of two dimensions).
    """

    module: Any
    shards: tuple[ParameterShard, ...]
    group: dist.ProcessGroup
    replicated: bool


def reshard(model: Any) -> None:
    """Have the modules of a model hold their shards.

    Between the passes some of them may still hold whole parameters: FSDP leaves those of the root
    as they are after a forward pass.
    """
    for module in filter(is_fully_sharded, model.modules()):
        module.reshard()


def shard_groups(model: Any) -> list[ShardGroup]:
    """All of a model. Which parameters lie where in FSDP's buffers no public function tells."""
    found = []
    seen = set()  # `fully_shard` may have been given several modules to form one group of
    for module in filter(is_fully_sharded, model.modules()):
        for group in _fsdp_groups(module):
            if id(group) in seen:
                continue
            seen.add(id(group))
            mesh = group.mesh_info
            if not hasattr(mesh, "shard_process_group"):
                raise TypeError(
                    f"{type(module).__name__} is replicated by torch's replicate(), not sharded: "
                    "wrap the model in DistributedDataParallel, or shard it with fully_shard"
                )
            shards = tuple(
                ParameterShard(
                    each.sharded_param,
                    each._orig_size,
                    each.padded_sharded_param_size,
                    each.sharded_size,
                    each.fsdp_placement.dim,
                    each._sharded_param_data,
                    group.mp_policy.reduce_dtype
                    or group.mp_policy.param_dtype
                    or each._sharded_param_data.dtype,
                )
                for each in group.fsdp_params
            )
            replicated = hasattr(mesh, "replicate_process_group")
            found.append(ShardGroup(module, shards, mesh.shard_process_group, replicated))
    return found


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def drop_gradients(module: Any) -> None:
    """Let a module of FSDP forget gradients that were not reduced.

    A backward pass that an error has ended leaves them with the whole parameters, and FSDP would
    add those of the next pass to them: neither `zero_grad` nor `reset_iter_state` sees them.
    """
    for group in _fsdp_groups(module):
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None


def restore_collectives(module: Any) -> None:
    """Have a module of FSDP gather and reduce by itself again; there are functions to set a
    collective of one's own, but none to take it back."""
    fresh: Any = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_collectives"]
    for group in _fsdp_groups(module):
        group._all_gather_comm = fresh.DefaultAllGather()
        group._reduce_scatter_comm = fresh.DefaultReduceScatter()


def restore_all_reduce(module: Any) -> None:
    """Take back a hook that was set with `set_all_reduce_hook`."""
    for group in _fsdp_groups(module):
        group._all_reduce_hook = None


def has_own_collectives(module: Any) -> bool:
    """Whether somebody has set collectives or a hook of a module of FSDP already."""
    fresh: Any = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_collectives"]
    return any(
        type(group._all_gather_comm) is not fresh.DefaultAllGather
        or type(group._reduce_scatter_comm) is not fresh.DefaultReduceScatter
        or group._all_reduce_hook is not None
        for group in _fsdp_groups(module)
    )


def backward_pass() -> int:
    """A number of the backward pass that this thread is in; -1 if in none.

    A pass that an error has ended calls nobody back: the next is known by another number.
    """
    number: int = torch._C._current_graph_task_id()
    return number


def uncompiled(model: Any) -> Any:
    """The module that torch.compile was given; no public attribute leads back to it."""
    return getattr(model, "_orig_mod", model)
