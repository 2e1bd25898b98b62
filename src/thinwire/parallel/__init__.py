"""Training with compressed exchanges: attaching to a model, checkpoints, the check of replicas."""

from thinwire.parallel.attachment import attach
from thinwire.parallel.replicas import check_replicas
from thinwire.parallel.saving import (
    LoadedCheckpoint,
    SavedCheckpoint,
    load_checkpoint,
    new_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from thinwire.parallel.wire import Wire

__all__ = [
    "LoadedCheckpoint",
    "SavedCheckpoint",
    "Wire",
    "attach",
    "check_replicas",
    "load_checkpoint",
    "new_checkpoint",
    "newest_checkpoint",
    "save_checkpoint",
]
