"""How the parameters of a sharded model lie on its ranks, by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.parallel.model import parameter_names
from thinwire.torch_internals import ParameterShard, ShardGroup, shard_groups

Replicas = dist.ProcessGroup | DeviceMesh


def replicas_of(given: Replicas) -> dist.ProcessGroup:
    """The group that a user means by it."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"replicate must be a mesh of one dimension, as mesh['replicate'] of one with "
                f"several, got {given.ndim} dimensions"
            )
        return given.get_group()
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"replicate must be a process group or a mesh (mesh['replicate']), got "
            f"{type(given).__name__}"
        )
    return given


@dataclass(frozen=True)
class NamedShard:
    """A parameter that is cut over ranks.

    Args:
        name: of the parameter in the module that the user wrote.
        place: how it lies.
        index, count: of this rank's part, and how many parts there are.
    """

    name: str
    place: ParameterShard
    index: int
    count: int

    @property
    def padded_numel(self) -> int:
        return self.place.padded.numel()

    @property
    def trained(self) -> bool:
        return bool(self.place.parameter.requires_grad)

    def whole(self, rows: Tensor) -> Tensor:
        """The flat parameter of its padded parts, one behind the other."""
        shape, dim = self.place.shape, self.place.dim
        parts = rows.view(self.count, *self.place.padded)
        if dim:
            return torch.cat(list(parts.unbind(0)), dim).reshape(-1)
        return parts.reshape(-1)[: shape.numel()].clone()

    def rows(self, whole: Tensor) -> Tensor:
        """The padded parts of a flat parameter, one behind the other."""
        shape, dim = self.place.shape, self.place.dim
        if dim:
            return torch.cat(whole.view(shape).chunk(self.count, dim), 0).reshape(-1)
        rows = whole.new_zeros(self.count * self.padded_numel)
        rows[: whole.numel()].copy_(whole)
        return rows

    def own(self, padded: Tensor) -> Tensor:
        """This rank's part without what it is padded with, flat."""
        numel = self.place.own.numel()  # what is padded stands last: other cuts are even
        return padded.reshape(-1)[:numel].clone()

    def padded(self, own: Tensor) -> Tensor:
        """The same, padded."""
        padded = own.new_zeros(self.padded_numel)
        padded[: own.numel()].copy_(own)
        return padded

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The flat parameter of flat parts, of which there may be another number."""
        shape, dim = self.place.shape, self.place.dim
        if not dim:
            return torch.cat(list(parts))
        each = [*shape[:dim], shape[dim] // len(parts), *shape[dim + 1 :]]
        return torch.cat([part.view(each) for part in parts], dim).reshape(-1)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a flat parameter."""
        return self.own(self.rows(whole).view(self.count, -1)[self.index])


@dataclass(frozen=True)
class NamedGroup:
    """Parameters that are gathered and reduced together.

    Args:
        name: of their module, "" for the root.
        module: that `fully_shard` was applied to.
        shards: all of them, in the order in which they lie in buffers.
        group: the ranks that they are cut over.
    """

    name: str
    module: nn.Module
    shards: tuple[NamedShard, ...]
    group: dist.ProcessGroup

    @property
    def title(self) -> str:
        return self.name or "(root)"

    @property
    def trained(self) -> list[NamedShard]:
        return [shard for shard in self.shards if shard.trained]


def stretches(shards: Iterable[NamedShard]) -> list[tuple[NamedShard, slice]]:
    """Where each lies in a rank's part of a buffer that holds these."""
    shards = list(shards)
    ends = accumulate((shard.padded_numel for shard in shards), initial=0)
    return [(shard, slice(lo, hi)) for shard, (lo, hi) in zip(shards, pairwise(ends), strict=True)]


def named_groups(model: nn.Module) -> list[NamedGroup]:
    """All groups of a model that has parameters cut by `fully_shard`; refuses what is cut in ways
    that cannot be followed."""
    found = shard_groups(model)
    if not found:
        raise TypeError("fully_shard was applied to this model, but it has no parameters")
    if len({id(each.group) for each in found}) > 1:
        sizes = sorted({dist.get_world_size(each.group) for each in found})
        raise ValueError(
            f"the modules of this model are sharded over different groups of ranks (of sizes "
            f"{sizes}): apply fully_shard with one mesh throughout"
        )
    if any(each.replicated for each in found):
        raise ValueError(TWO_DIMENSIONS)
    if any(shard.data.is_meta for each in found for shard in each.shards):
        raise ValueError(
            "parameters of this model are on the meta device: give them memory and values "
            "(to_empty, then initialise or load) before attach"
        )
    names = {id(parameter): name for parameter, name in parameter_names(model)}
    modules = {id(module): name for name, module in model.named_modules()}
    _check_one_group_each(found)
    return [
        NamedGroup(
            modules[id(each.module)].replace("_orig_mod.", "").removesuffix("_orig_mod"),
            each.module,
            tuple(
                NamedShard(
                    names[id(shard.parameter)],
                    shard,
                    dist.get_rank(each.group),
                    dist.get_world_size(each.group),
                )
                for shard in each.shards
            ),
            each.group,
        )
        for each in found
    ]


def _check_one_group_each(found: Sequence[ShardGroup]) -> None:
    if len({id(each.module) for each in found}) < len(found):
        raise ValueError(
            "a module of this model is sharded in several ways at once (shard_placement_fn with "
            "several meshes), which FSDP takes no collectives of others for"
        )


TWO_DIMENSIONS = """\
this model is sharded on a mesh of two dimensions (HSDP), and there FSDP averages over replicas by \
itself. Shard it on one dimension and let thinwire average over the other:
    fully_shard(module, mesh=mesh["shard"])          # for every module, in place of mesh=mesh
    tw.attach(model, compressor, replicate=mesh["replicate"])"""
