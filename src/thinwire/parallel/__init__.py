"""Training with compressed exchanges: attaching to a model, checkpoints, the check of replicas."""

from thinwire.parallel.attachment import attach, wire_of
from thinwire.parallel.replicas import check_replicas
from thinwire.parallel.wire import Wire

__all__ = ["Wire", "attach", "check_replicas", "wire_of"]
