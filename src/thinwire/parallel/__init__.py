"""Training with compressed exchanges: the DDP hook, checkpoints, the check of replicas."""

from thinwire.parallel.ddp import attach
from thinwire.parallel.replicas import check_replicas
from thinwire.parallel.wire import Wire

__all__ = ["Wire", "attach", "check_replicas"]
