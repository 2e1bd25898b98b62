"""Collectives on compressed tensors, over any torch.distributed process group."""

from thinwire.collectives.handle import Account, Handle, wait_all
from thinwire.collectives.point import irecv, isend, recv, send
from thinwire.collectives.reduce import all_reduce, all_reduce_coalesced
from thinwire.collectives.scatter import reduce_scatter
from thinwire.collectives.spread import all_gather, broadcast

__all__ = [
    "Account",
    "Handle",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "send",
    "wait_all",
]
