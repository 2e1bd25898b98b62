"""thinwire: communication compression for distributed training.

import torch, thinwire as tw

compressor = tw.TopK(0.01) | tw.Quantize(4)
residual = torch.zeros_like(gradient)
payload = compressor.encode(gradient, residual=residual)
frame = tw.pack(payload)  # bytes to send
restored = tw.decode(frame)  # on the other side, with nothing else
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import optim
    from thinwire.collectives import (
        Account,
        Handle,
        all_gather,
        all_reduce,
        all_reduce_coalesced,
        broadcast,
        irecv,
        isend,
        pipe_recv,
        pipe_send,
        pipe_wait,
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
        Chain,
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
        compressors,
        parse,
    )
    from thinwire.errors import (
        FrameError,
        MemoryLimitError,
        MismatchError,
        MissingExtraError,
        PeerError,
        ReplicaError,
        ThinwireError,
        ThinwireWarning,
    )
    from thinwire.feedback import (
        DGC,
        EF14,
        EF21,
        EF21M,
        Feedback,
        NoFeedback,
        Vote,
        feedbacks,
        parse_feedback,
    )
    from thinwire.kernels import Key
    from thinwire.methods import Reducer
    from thinwire.policies import (
        Accuracy,
        Auto,
        Bandwidth,
        Layerwise,
        Magnitude,
        Policy,
        Progressive,
        Ramp,
        Rule,
        Solve,
        Warmup,
        parse_policy,
    )
    from thinwire.telemetry import track
    from thinwire.training import Wire, attach, check_replicas
    from thinwire.wire import Payload, decode, pack, unpack

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "EF14",
    "EF21",
    "EF21M",
    "QSGD",
    "ARCTopK",
    "Account",
    "Accuracy",
    "Auto",
    "Bandwidth",
    "Bernoulli",
    "Cast",
    "Chain",
    "Compressor",
    "Feedback",
    "FrameError",
    "Handle",
    "Key",
    "Layerwise",
    "Lossless",
    "Magnitude",
    "MemoryLimitError",
    "MismatchError",
    "MissingExtraError",
    "Natural",
    "NoCompression",
    "NoFeedback",
    "OneBit",
    "Payload",
    "PeerError",
    "Policy",
    "PowerSGD",
    "Progressive",
    "Quantize",
    "Ramp",
    "RandomK",
    "Reducer",
    "ReplicaError",
    "Rule",
    "ScaledSign",
    "Solve",
    "TernGrad",
    "ThinwireError",
    "ThinwireWarning",
    "Threshold",
    "Tiered",
    "TopK",
    "Vote",
    "Warmup",
    "Wire",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "attach",
    "broadcast",
    "check_replicas",
    "compressors",
    "decode",
    "feedbacks",
    "irecv",
    "isend",
    "optim",
    "pack",
    "parse",
    "parse_feedback",
    "parse_policy",
    "pipe_recv",
    "pipe_send",
    "pipe_wait",
    "recv",
    "reduce_scatter",
    "send",
    "track",
    "unpack",
    "wait_all",
]

_ROOMS = (
    "errors",
    "telemetry",
    "kernels",
    "wire",
    "compressors",
    "collectives",
    "feedback",
    "methods",
    "policies",
    "training",
)


class _Face(ModuleType):
    """Loads torch with the first name that needs it, so that ``thinwire --help`` is quick."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
        if name == "optim":  # a room that keeps its names to itself
            return importlib.import_module("thinwire.optim")
        for room in _ROOMS:
            module = importlib.import_module(f"thinwire.{room}")
            found = {key: getattr(module, key) for key in __all__ if hasattr(module, key)}
            vars(self).update({key: value for key, value in found.items() if key != "compressors"})
            if name in found:
                break
        return vars(self)[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})

    @property
    def compressors(self) -> Any:
        """The function; the room of the same name is reached by importing it."""
        from thinwire.compressors.registry import compressors

        return compressors

    @compressors.setter
    def compressors(self, room: ModuleType) -> None:
        """Importing the room would otherwise put it in the function's place."""


sys.modules[__name__].__class__ = _Face
