"""Collectives on compressed tensors, over any torch.distributed process group."""

from thinwire.collectives.allgather import all_gather, broadcast
from thinwire.collectives.allreduce import all_reduce, all_reduce_coalesced
from thinwire.collectives.handle import Account, Handle, wait_all
from thinwire.collectives.nodes import Nodes
from thinwire.collectives.reducescatter import reduce_scatter
from thinwire.collectives.send_recv import irecv, isend, recv, send

__all__ = [
    "Account",
    "Handle",
    "Nodes",
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
