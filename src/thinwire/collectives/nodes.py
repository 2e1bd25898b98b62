"""Who shares a node with whom: what the hierarchical collective is told, checked."""

import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from thinwire.compressors import Compressor, LocalCompressor, SparseCompressor, compressor_of

VARIABLE = "LOCAL_WORLD_SIZE"
FEEDBACKS = ("ef14", "none")
# Ranks a node, lists of ranks, a DeviceMesh, or None for what torchrun says.
Nodes = int | Sequence[Sequence[int]] | Any | None


class Layers(NamedTuple):
    """A group divided into nodes, and what travels inside them.

    Args:
        places: of each node's members in the group.
        ranks: the same as global ranks.
        inner: the compressor inside nodes.
        remembers: whether residuals keep what that one leaves out.
    """

    places: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    inner: LocalCompressor
    remembers: bool

    @property
    def num_shards(self) -> int:
        """Members of the smallest node: so many of each node own a shard of its sum."""
        return min(map(len, self.places))

    @property
    def flat(self) -> bool:
        """Whether there is only one layer: one node, or no node with two members."""
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


def layers_of(nodes: Nodes, inner: Compressor | str, inner_feedback: str, group: Any) -> Layers:
    """The nodes of a process group.

    Args:
        nodes, inner, inner_feedback: see `thinwire.all_reduce`.
        group: as from `process_group`.
    """
    if inner_feedback not in FEEDBACKS:
        known = " or ".join(map(repr, FEEDBACKS))
        raise ValueError(f"inner_feedback must be {known}, got {inner_feedback!r}")
    ranks = dist.get_process_group_ranks(group)
    if isinstance(nodes, Layers):
        found = nodes.ranks
    elif nodes is None or isinstance(nodes, int):
        found = _by_number(_ranks_a_node(nodes), ranks)
    else:
        found = _as_given(nodes, ranks)
    places = tuple(tuple(ranks.index(rank) for rank in node) for node in found)
    return Layers(places, found, inner_of(inner), inner_feedback == "ef14")


def inner_of(inner: Compressor | str) -> LocalCompressor:
    """A compressor for inside nodes, if it suits."""
    compressor = compressor_of(inner)
    if not isinstance(compressor, LocalCompressor):
        why = "it has no payload that could be sent to the owner of a shard"
    elif isinstance(compressor, SparseCompressor):
        why = "it would leave elements out of every result (inside a node travels all, light)"
    elif compressor.random:
        why = "all nodes must round a result alike, so nothing may be drawn"
    else:
        return compressor
    raise ValueError(f"inner: {compressor} does not suit, {why}: 'none' and 'cast:bf16' do")


def _ranks_a_node(nodes: int | None) -> int:
    source = "nodes"
    given: Any = nodes
    if nodes is None:
        given, source = os.environ.get(VARIABLE), VARIABLE
        if not given:
            raise ValueError(
                f"hierarchical needs to know the nodes: {VARIABLE} is not set (torchrun sets it), "
                "so say nodes=8 for eight ranks a node, or nodes=[[0, 1], [2, 3]]"
            )
    if isinstance(given, bool) or not str(given).isdecimal() or int(given) < 1:
        raise ValueError(f"{source} must be a number of ranks a node, got {given!r}")
    number, world = int(given), dist.get_world_size()
    if world % number:
        raise ValueError(
            f"{source}: {world} ranks cannot be divided into nodes of {number}; uneven nodes are "
            "given as lists, nodes=[[0, 1], [2, 3, 4]]"
        )
    return number


def _by_number(number: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks of the world share a node, whichever of them are in the group."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // number, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def _as_given(nodes: Any, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    mesh = getattr(nodes, "mesh", None)  # of a DeviceMesh
    if mesh is not None:
        if mesh.dim() != 2:
            raise ValueError(
                f"nodes: a mesh of two dimensions is needed, (nodes, ranks inside), got {nodes}"
            )
        nodes = mesh.tolist()
    try:
        found = tuple(tuple(operator.index(rank) for rank in node) for node in nodes)
    except TypeError:
        raise TypeError(
            "nodes must be a number of ranks a node, lists of ranks, [[0, 1], [2, 3]], or a "
            f"DeviceMesh of two dimensions, got {nodes!r}"
        ) from None
    flat = [rank for node in found for rank in node]
    if sorted(flat) != sorted(ranks) or not all(found):
        raise ValueError(
            f"nodes: each of the group's ranks {list(ranks)} must be in one node, got "
            f"{[list(node) for node in found]}"
        )
    return found
