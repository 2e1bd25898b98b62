"""The laws of `attach` for models that `fully_shard` was applied to, with two to four real ranks.

Functions with a leading `on_` run on every rank, in the processes of ranks.py; what they return is
compared here. Models and batches are those of sharded_nets.py.
"""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import all_same
from sharded_nets import (
    Tower,
    adam,
    backward,
    columns,
    distance,
    gradients,
    parameters,
    shard,
    train,
    uneven,
    wired,
)
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

# What it computes

LAYOUTS: dict[str, Any] = {
    "nested": (Tower, {}),
    "uneven": (uneven, {}),
    "tied": (lambda: Tower(tied=True), {}),
    "columns": (lambda: Tower(24, 24, 12), {"shard_placement_fn": columns}),
}
STEPS = 4
# A sum of four in another order rounds otherwise, by 4 eps of elements below 1; AdamW's epsilon of
# 1e-3 makes at most lr / 1e-3 of that in each step.
ROUNDED = STEPS * 10 * 4 * 2**-23


def on_none() -> dict[str, tuple[float, bool]]:
    """How far parameters are from those of plain FSDP, and whether all bits are the same."""
    found = {}
    for name, (made, fsdp) in LAYOUTS.items():
        model, _ = wired("none", made(), fsdp)
        other = shard(made(), **fsdp)
        for each in (model, other):
            train(each, range(STEPS), adam(each))
        mine, plain = parameters(model), parameters(other)
        found[name] = distance(mine, plain), all_same(mine, plain)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_without_compression_it_is_plain_fsdp(size):
    """With two ranks in every bit: there is one way to add two numbers."""
    for found in ranks.run(on_none, ranks=size):
        for layout, (error, same) in found.items():
            assert error <= ROUNDED, layout
            assert same or size > 2, layout
