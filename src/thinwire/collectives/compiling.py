"""Compiling kernels while other ranks may be waiting.

A rank that compiles says so in the store of its group, and those that wait for it to come to the
first exchange then have patience with it (`Link`). Nobody has to take part in anything: ranks whose
kernels are compiled already do not even look.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from thinwire.collectives.channel import members_of, process_group
from thinwire.collectives.connect import Members
from thinwire.collectives.options import Group
from thinwire.kernels.compiling import KernelUse, compile_kernels


def compile_in(group: Group, device: torch.device, uses: Sequence[KernelUse]) -> None:
    """Have kernels compiled before the first exchange of a group on this device."""
    if not dist.is_initialized() or dist.get_world_size(group) < 2:
        compile_kernels(uses)
    elif uses:
        compile_among(members_of(process_group(group), device), uses)


def compile_among(members: Members, uses: Sequence[KernelUse]) -> None:
    """Have kernels compiled, and let the other members know while that takes time."""
    compile_kernels(uses, _announced(members))


@contextlib.contextmanager
def _announced(members: Members) -> Iterator[None]:
    store, key = members.own_store(), members.compiling_key(members.index)
    store.add(key, 1)
    try:
        yield
    finally:
        store.add(key, -1)
