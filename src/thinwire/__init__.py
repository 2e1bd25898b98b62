"""thinwire: communication compression for distributed training.

import torch, thinwire as tw

compressor = tw.TopK(0.01) | tw.Quantize(4)
residual = torch.zeros_like(gradient)
payload = compressor.encode(gradient, residual=residual)
frame = tw.pack(payload)  # bytes to send
restored = tw.decode(frame)  # on the other side, with nothing else

Names are imported when first used: ``thinwire --help`` does without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import (
        collectives,
        compressors,
        errors,
        feedback,
        lab,
        methods,
        optim,
        pipeline,
        policies,
        workloads,
    )
    from thinwire.collectives import (
        Handle,
        Nodes,
        all_gather,
        all_reduce,
        all_reduce_coalesced,
        broadcast,
        irecv,
        isend,
        recv,
        reduce_scatter,
        send,
        wait_all,
    )
    from thinwire.compressors import (
        QSGD,
        ARCTopK,
        Bernoulli,
        Cast,
        Compressor,
        Lossless,
        Natural,
        NoCompression,
        OneBit,
        PowerSGD,
        Quantize,
        RandomK,
        ScaledSign,
        TernGrad,
        Threshold,
        Tiered,
        TopK,
        TwoBit,
        list_compressors,
        parse,
    )
    from thinwire.errors import (
        FrameError,
        MemoryLimitError,
        MismatchError,
        PeerError,
        ThinwireError,
    )
    from thinwire.feedback import list_feedbacks
    from thinwire.frames import Payload, decode, pack, unpack
    from thinwire.integrations import accelerate as accelerate
    from thinwire.integrations import deepspeed as deepspeed
    from thinwire.integrations import flower as flower
    from thinwire.integrations import horovod as horovod
    from thinwire.integrations import lightning as lightning
    from thinwire.integrations import numpy as numpy
    from thinwire.integrations import torchft as torchft
    from thinwire.integrations import transformers as transformers
    from thinwire.kernels import Key
    from thinwire.methods import OuterSGD, list_methods
    from thinwire.parallel import (
        LoadedCheckpoint,
        LocalSteps,
        Reducer,
        SavedCheckpoint,
        Wire,
        attach,
        check_replicas,
        load_checkpoint,
        new_checkpoint,
        newest_checkpoint,
        save_checkpoint,
        wire_of,
    )
    from thinwire.policies import list_policies
    from thinwire.telemetry import track

__version__ = "0.1.0"

# Where each name lives. What most users type; the rest is in the submodules.
_NAMES = {
    "collectives": (
        *("Handle", "Nodes", "all_gather", "all_reduce", "all_reduce_coalesced", "broadcast"),
        *("irecv", "isend", "recv", "reduce_scatter", "send", "wait_all"),
    ),
    "compressors": (
        *("QSGD", "ARCTopK", "Bernoulli", "Cast", "Compressor", "Lossless", "Natural"),
        *("NoCompression", "OneBit", "PowerSGD", "Quantize", "RandomK", "ScaledSign"),
        *("TernGrad", "Threshold", "Tiered", "TopK", "TwoBit", "list_compressors", "parse"),
    ),
    "errors": ("FrameError", "MemoryLimitError", "MismatchError", "PeerError", "ThinwireError"),
    "feedback": ("list_feedbacks",),
    "frames": ("Payload", "decode", "pack", "unpack"),
    "kernels": ("Key",),
    "methods": ("OuterSGD", "list_methods"),
    "parallel": (
        *("LoadedCheckpoint", "LocalSteps", "Reducer", "SavedCheckpoint", "Wire", "attach"),
        *(
            "check_replicas",
            "load_checkpoint",
            "new_checkpoint",
            "newest_checkpoint",
            "save_checkpoint",
            "wire_of",
        ),
    ),
    "policies": ("list_policies",),
    "telemetry": ("track",),
}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names}
_SUBMODULES = (
    *("collectives", "compressors", "errors", "feedback", "lab", "methods", "optim"),
    *("pipeline", "policies", "workloads"),
)

# Not in __all__: each needs its framework, or imports it.
_INTEGRATIONS = (
    *("accelerate", "deepspeed", "flower", "horovod", "lightning", "numpy", "torchft"),
    "transformers",
)

__all__ = [
    "QSGD",
    "ARCTopK",
    "Bernoulli",
    "Cast",
    "Compressor",
    "FrameError",
    "Handle",
    "Key",
    "LoadedCheckpoint",
    "LocalSteps",
    "Lossless",
    "MemoryLimitError",
    "MismatchError",
    "Natural",
    "NoCompression",
    "Nodes",
    "OneBit",
    "OuterSGD",
    "Payload",
    "PeerError",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Reducer",
    "SavedCheckpoint",
    "ScaledSign",
    "TernGrad",
    "ThinwireError",
    "Threshold",
    "Tiered",
    "TopK",
    "TwoBit",
    "Wire",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "attach",
    "broadcast",
    "check_replicas",
    "collectives",
    "compressors",
    "decode",
    "errors",
    "feedback",
    "irecv",
    "isend",
    "lab",
    "list_compressors",
    "list_feedbacks",
    "list_methods",
    "list_policies",
    "load_checkpoint",
    "methods",
    "new_checkpoint",
    "newest_checkpoint",
    "optim",
    "pack",
    "parse",
    "pipeline",
    "policies",
    "recv",
    "reduce_scatter",
    "save_checkpoint",
    "send",
    "track",
    "unpack",
    "wait_all",
    "wire_of",
    "workloads",
]


if not TYPE_CHECKING:  # a checker sees the imports above, and that anything else is a mistake

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"thinwire.{name}")
        if name in _INTEGRATIONS:
            return importlib.import_module(f"thinwire.integrations.{name}")
        if name not in _ROOM_OF:
            raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"thinwire.{_ROOM_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
