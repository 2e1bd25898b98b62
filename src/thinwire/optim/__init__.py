"""Optimizers that exchange by themselves: gradients stay local, one bit per element is exchanged.

`OneBitAdam`, `OneBitLamb` and `ZeroOneAdam` are torch optimizers over a process group. They do the
averaging that DDP would do, so train the plain module, or DDP inside `no_sync()`.
"""

from thinwire.optim.onebit_adam import OneBitAdam
from thinwire.optim.onebit_lamb import OneBitLamb
from thinwire.optim.zero_one_adam import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
