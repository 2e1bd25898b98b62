"""Training with compressed exchanges: the DDP hook, checkpoints, the check of replicas."""

from thinwire.training.ddp import attach
from thinwire.training.replicas import check_replicas
from thinwire.training.wire import Wire

__all__ = ["Wire", "attach", "check_replicas"]
