"""Optimizers that exchange by themselves: gradients stay local, what is sent is far smaller.

`OneBitAdam`, `OneBitLamb`, `ZeroOneAdam` (one bit per element) and `DeMo` (the largest elements)
are torch optimizers over a process group. They do the averaging that DDP would do, so train the
plain module, or DDP inside `no_sync()`.
"""

from thinwire.optim.demo import DeMo
from thinwire.optim.onebit_adam import OneBitAdam
from thinwire.optim.onebit_lamb import OneBitLamb
from thinwire.optim.zero_one_adam import ZeroOneAdam

__all__ = ["DeMo", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
