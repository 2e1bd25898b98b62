"""Training with compressed exchanges: attaching to a model, local steps, a reducer for loops of
one's own, checkpoints, the check of replicas."""

from thinwire.parallel.attachment import attach, wire_of
from thinwire.parallel.local import LocalSteps
from thinwire.parallel.reducer import Reducer
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
    "LocalSteps",
    "Reducer",
    "SavedCheckpoint",
    "Wire",
    "attach",
    "check_replicas",
    "load_checkpoint",
    "new_checkpoint",
    "newest_checkpoint",
    "save_checkpoint",
    "wire_of",
]
