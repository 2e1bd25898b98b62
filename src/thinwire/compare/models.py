"""A workload's model on all ranks: replicated by DDP, or sharded by FSDP2, perhaps in replicas."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.options import Options
from thinwire.compare.method import Method
from thinwire.compare.rank import RankPlan
from thinwire.compare.settings import BASELINE
from thinwire.parallel.replicas import ReplicaCheck, check_replicas
from thinwire.workloads import Workload


class DistributedModel(ABC):
    """A model of one training.

    Attributes:
        module: what is trained.
        options: of `attach`, for a method of ours.
    """

    module: nn.Module
    options: dict[str, Any]

    @abstractmethod
    def whole(self) -> nn.Module:
        """As one rank can evaluate it; called on all ranks."""

    def no_sync(self) -> AbstractContextManager[None]:
        """In which backward exchanges nothing."""
        return nullcontext()

    @abstractmethod
    def check(self) -> None:
        """Raise if ranks should hold the same and do not; on all ranks."""


class ReplicatedModel(DistributedModel):
    def __init__(self, task: Workload, seed: int, method: Method) -> None:
        self.module = self._ddp = DistributedDataParallel(task.model(seed), **ddp_options(method))
        self.options = {}

    def whole(self) -> nn.Module:
        found: nn.Module = self._ddp.module
        return found

    def no_sync(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    def check(self) -> None:
        check_replicas(self._ddp)


def ddp_options(method: Method) -> dict[str, Any]:
    """What DistributedDataParallel must be made with for a method."""
    # PyTorch's PowerSGD hook waits inside a bucket for what follows in the next: with more than one
    # it hangs on gloo.
    return {"bucket_cap_mb": 2**20} if method.rank else {}


class ShardedModel(DistributedModel):
    """
    Args:
        mesh: from `mesh_of`.
        weights: the compressor of parameters for a method of ours.
    """

    def __init__(
        self, task: Workload, seed: int, method: Method, mesh: DeviceMesh, weights: str | None
    ) -> None:
        from torch.distributed.fsdp import fully_shard

        self._task, self._seed, self._mesh = task, seed, mesh
        self.module = task.model(seed)
        self.options = {"weights": weights}
        # Plain HSDP averages over replicas by itself.
        over = mesh if method.kind == "torch" else mesh["shard"]
        if mesh.ndim > 1:
            self.options = {"replicate": mesh["replicate"]}
        for part in (*task.shards(self.module), self.module):
            fully_shard(part, mesh=over)

    def whole(self) -> nn.Module:
        # A copy: in the model itself each batch to evaluate would gather all parameters, and change
        # what `weights` remembers of them.
        copy = self._task.model(self._seed)
        with torch.no_grad():
            for mine, sharded in zip(copy.parameters(), self.module.parameters(), strict=True):
                found: Any = sharded
                mine.copy_(found.full_tensor())
            for own, buffer in zip(copy.buffers(), self.module.buffers(), strict=True):
                own.copy_(buffer)
        return copy

    def check(self) -> None:
        if self._mesh.ndim == 1:
            return  # each shard is there once
        group = self._mesh["replicate"].get_group()
        parameters: dict[str, Any] = dict(self.module.named_parameters())
        shards = {name: parameter.to_local() for name, parameter in parameters.items()}
        ReplicaCheck(shards, Options.of(group)).start()


def mesh_of(plan: RankPlan) -> DeviceMesh | None:
    """The mesh of all ranks that a plan asks for; made on all ranks, once for all trainings.

    Ranks that follow each other, which share a rack, hold the shards of one replica.
    """
    if plan.parallel == BASELINE:
        return None
    world = dist.get_world_size()
    if plan.parallel == "fsdp":
        return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    shape = (plan.replicas, world // plan.replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def model_of(
    task: Workload, seed: int, method: Method, mesh: DeviceMesh | None, weights: str | None
) -> DistributedModel:
    """A fresh model on all ranks."""
    if mesh is None:
        return ReplicatedModel(task, seed, method)
    return ShardedModel(task, seed, method, mesh, weights)


class PlainAverage:
    """Over replicas, uncompressed: in place of what `attach` would set, for a script's baseline."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)

    def __call__(self, shard: Tensor) -> None:
        dist.all_reduce(shard, group=self._group)  # gloo has no AVG
        shard.div_(self._size)


class CollectiveClock:
    """Seconds that FSDP's own collectives take while the block lasts: training waits for them.

    FSDP looks them up in torch.distributed and calls them on the thread that trains. What thinwire
    exchanges runs on others, and is known from its figures.

    Attributes:
        seconds: so far.
    """

    # Those of older versions of torch, too.
    NAMES = (
        *("all_gather_single", "all_gather_into_tensor", "all_reduce"),
        *("reduce_scatter_single", "reduce_scatter_tensor"),
    )

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread, self._inside = threading.get_ident(), False
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> "CollectiveClock":
        for name in self.NAMES:
            if hasattr(dist, name):
                self._originals[name] = getattr(dist, name)
                setattr(dist, name, self._timed(self._originals[name]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return original(*args, **options)
            self._inside, begin = True, time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - begin

        return timed
