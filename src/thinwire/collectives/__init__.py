"""Collectives on compressed tensors, over any torch.distributed process group."""

from thinwire.collectives.handle import Account, Handle, wait_all
from thinwire.collectives.reduce import all_reduce, all_reduce_coalesced

__all__ = ["Account", "Handle", "all_reduce", "all_reduce_coalesced", "wait_all"]
