"""Who shares a node with whom: what a user says, and what that comes to in a group."""

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.compressors import Compressor, LocalCompressor, SparseCompressor, compressor_of

VARIABLE = "LOCAL_WORLD_SIZE"
FEEDBACKS = ("ef14", "none")
Ranks = tuple[tuple[int, ...], ...]  # of each node


@dataclass(frozen=True, init=False)
class Nodes:
    """How ranks share nodes, and what is sent inside them.

    Tensors are summed inside nodes first, lightly compressed or not at all; only what goes between
    nodes goes through the compressor of the call (collective "hierarchical").

    Args:
        ranks: number of ranks per node (consecutive ones of the world), lists of ranks
            ``[[0, 1], [2, 3, 4]]``, or a DeviceMesh of two dimensions, (nodes, ranks inside). None
            is what LOCAL_WORLD_SIZE says, which torchrun sets.
        inner: the compressor inside nodes: "none", "cast:bf16" or another one that sends all
            elements and draws no random numbers.
        feedback: "ef14" keeps in the residual what `inner` rounds off, too; "none" does not.

    Example:
        >>> import thinwire as tw
        >>> tw.Nodes(8, inner="cast:bf16")
        Nodes(ranks=8, inner=Cast(to='bf16', block=256), feedback='ef14')
    """

    ranks: int | Ranks | None
    inner: LocalCompressor
    feedback: str

    def __init__(
        self,
        ranks: int | Sequence[Sequence[int]] | DeviceMesh | None = None,
        *,
        inner: Compressor | str = "none",
        feedback: str = "ef14",
    ) -> None:
        if feedback not in FEEDBACKS:
            known = " or ".join(map(repr, FEEDBACKS))
            raise ValueError(f"Nodes: feedback must be {known}, got {feedback!r}")
        object.__setattr__(self, "ranks", _ranks_given(ranks))
        object.__setattr__(self, "inner", _inner_given(inner))
        object.__setattr__(self, "feedback", feedback)

    def layout(self, group: dist.ProcessGroup) -> "NodeLayout":
        """The nodes of a process group."""
        members = dist.get_process_group_ranks(group)
        if isinstance(self.ranks, tuple):
            found = self.ranks
            flat = [rank for node in found for rank in node]
            if sorted(flat) != sorted(members) or not all(found):
                raise ValueError(
                    f"nodes: each of the group's ranks {list(members)} must be in one node, got "
                    f"{[list(node) for node in found]}"
                )
        else:
            found = _consecutive(_ranks_per_node(self.ranks), members)
        places = tuple(tuple(members.index(rank) for rank in node) for node in found)
        return NodeLayout(places, found, self.inner, self.feedback == "ef14")


class NodeLayout(NamedTuple):
    """A group divided into nodes, and what is sent inside them.

    Args:
        places: of each node's members in the group.
        ranks: the same as global ranks.
        inner: the compressor inside nodes.
        remembers: whether residuals keep what that one leaves out.
    """

    places: Ranks
    ranks: Ranks
    inner: LocalCompressor
    remembers: bool

    @property
    def num_shards(self) -> int:
        """Members of the smallest node: so many of each node own a shard of its sum."""
        return min(map(len, self.places))

    @property
    def flat(self) -> bool:
        """Whether there is only one level: one node, or no node with two members."""
        return len(self.places) == 1 or max(map(len, self.places)) == 1

    def node_of(self, place: int) -> int:
        """The number of a member's node."""
        return next(i for i, node in enumerate(self.places) if place in node)

    def owners(self, shard: int) -> tuple[int, ...]:
        """Who owns a shard, node by node."""
        return tuple(node[shard] for node in self.places)

    def __str__(self) -> str:
        return " | ".join(", ".join(map(str, node)) for node in self.ranks)

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """What ranks must agree in."""
        feedback = "ef14" if self.remembers else "none"
        return ("nodes", str(self)), ("inner", f"{self.inner} with feedback {feedback}")


def nodes_of(nodes: Any) -> Nodes | None:
    """What a user gave as `nodes=`: Nodes, or what Nodes takes as its ranks."""
    return nodes if nodes is None or isinstance(nodes, Nodes) else Nodes(nodes)


def _ranks_given(ranks: Any) -> int | Ranks | None:
    if ranks is None:
        return None
    if isinstance(ranks, bool) or (isinstance(ranks, int) and ranks < 1):
        raise ValueError(f"nodes must be a number of ranks per node, got {ranks!r}")
    if isinstance(ranks, int):
        return ranks
    given = ranks
    mesh = getattr(ranks, "mesh", None)  # of a DeviceMesh
    if mesh is not None:
        if mesh.dim() != 2:
            raise ValueError(
                f"nodes: a mesh of two dimensions is needed, (nodes, ranks inside), got {ranks}"
            )
        ranks = mesh.tolist()
    try:
        return tuple(tuple(operator.index(rank) for rank in node) for node in ranks)
    except TypeError:
        raise TypeError(
            "nodes must be a number of ranks per node, lists of ranks, [[0, 1], [2, 3]], or a "
            f"DeviceMesh of two dimensions, got {given!r}"
        ) from None


def _inner_given(inner: Compressor | str) -> LocalCompressor:
    """A compressor for inside nodes, if it suits."""
    compressor = compressor_of(inner)
    if not isinstance(compressor, LocalCompressor):
        why = "it has no payload that could be sent to the owner of a shard"
    elif isinstance(compressor, SparseCompressor):
        why = "it would leave elements out of every result (inside a node all are sent, light)"
    elif compressor.random:
        why = "all nodes must round a result alike, so no random numbers may be drawn"
    else:
        return compressor
    raise ValueError(f"inner: {compressor} does not suit, {why}: 'none' and 'cast:bf16' do")


def _ranks_per_node(ranks: int | None) -> int:
    source, number = "nodes", ranks
    if number is None:
        source, given = VARIABLE, os.environ.get(VARIABLE, "")
        if not given:
            raise ValueError(
                f"hierarchical needs to know the nodes: {VARIABLE} is not set (torchrun sets it), "
                "so say nodes=8 for eight ranks per node, or nodes=[[0, 1], [2, 3]]"
            )
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"{source} must be a number of ranks per node, got {given!r}")
        number = int(given)
    world = dist.get_world_size()
    if world % number:
        raise ValueError(
            f"{source}: {world} ranks cannot be divided into nodes of {number}; uneven nodes are "
            "given as lists, nodes=[[0, 1], [2, 3, 4]]"
        )
    return number


def _consecutive(number: int, ranks: Sequence[int]) -> Ranks:
    """Consecutive ranks of the world share a node, whichever of them are in the group."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // number, []).append(rank)
    return tuple(map(tuple, nodes.values()))
