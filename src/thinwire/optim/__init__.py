"""Optimizers that talk by themselves: gradients stay local, and what is exchanged is one bit an
element.

`OneBitAdam`, `OneBitLamb` and `ZeroOneAdam` are torch optimizers over a process group. They do the
averaging that DDP would do, so train the plain module, or DDP inside `no_sync()`.
"""

from thinwire.optim.onebit_adam import OneBitAdam
from thinwire.optim.onebit_lamb import OneBitLamb
from thinwire.optim.zero_one_adam import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
