"""Hugging Face Accelerate: a handler for `prepare`, and checkpoints of every rank.

    accelerator = Accelerator()
    tw.accelerate.compress(accelerator, "quantize:4")   # before prepare
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

or, with FSDP2 too,

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    wire = tw.attach(model, "quantize:4")

and in both cases for `save_state` and `load_state`

    accelerator.register_for_checkpointing(tw.accelerate.CheckpointedWire(model))
"""

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from thinwire.errors import ThinwireWarning
from thinwire.integrations.wiring import framework, takes_local_steps
from thinwire.parallel import Wire, attach, wire_of
from thinwire.parallel.configuration import CompressorGiven

__all__ = ["CheckpointedWire", "Handler", "compress"]

_utils: Any = framework("accelerate.utils", extra="accelerate", purpose="tw.accelerate")


def compress(
    accelerator: Any, compressor: CompressorGiven = "quantize:4", **options: Any
) -> "Handler":
    """Have an Accelerator attach a wire to the model that it wraps in DistributedDataParallel.

    To be called before `prepare`. Options of DistributedDataParallel that the Accelerator was given
    stay, and its GradScaler is passed on.

    Args:
        accelerator: an Accelerator.
        compressor, options: as for `thinwire.attach`.

    Returns:
        The handler, whose `wire` is there when the model has been prepared.
    """
    if not hasattr(accelerator, "ddp_handler"):
        raise TypeError(f"compress takes an Accelerator, got {type(accelerator).__name__}")
    if getattr(accelerator, "_models", None):
        raise ValueError(
            "this Accelerator has prepared a model already: call compress before prepare, or "
            "tw.attach(model, ...) with the model that prepare returned"
        )
    kind = accelerator.distributed_type.value
    if kind == _utils.DistributedType.FSDP.value:
        raise ValueError(
            "this Accelerator shards models: use fsdp_version=2 and tw.attach(model, ...) with the "
            "model that prepare returned"
        )
    if kind == _utils.DistributedType.NO.value:
        warnings.warn(
            "tw.accelerate.compress: this training has one process, so nothing is exchanged and "
            "nothing compressed",
            ThinwireWarning,
            stacklevel=2,
        )
    elif not kind.startswith("MULTI_"):
        raise ValueError(
            f"this Accelerator trains with {kind}, which exchanges gradients by itself: use "
            "DistributedDataParallel or FSDP2 (docs/guides/integrations.md)"
        )
    before = accelerator.ddp_handler
    if isinstance(before, Handler):
        raise ValueError(f"this Accelerator compresses already, with {before.compressor}")
    given: dict[str, Any] = {}
    if before is not None:
        if before.comm_hook != _utils.DDPCommunicationHookType.NO:
            raise ValueError(
                f"DistributedDataParallelKwargs has comm_hook={before.comm_hook.name}, and DDP "
                "takes one hook: leave it out, or do without tw.accelerate"
            )
        given = before.to_kwargs()
    scaler = getattr(accelerator, "scaler", None)
    if scaler is not None:
        options.setdefault("scaler", scaler)
    accelerator.ddp_handler = handler = Handler(compressor, ddp=given, **options)
    return handler


class Handler(_utils.DistributedDataParallelKwargs):  # type: ignore[misc]
    """What `compress` gives an Accelerator as its `ddp_handler`.

    Args:
        compressor: as for `thinwire.attach`.
        ddp: options of DistributedDataParallel.
        options: of `thinwire.attach`.

    Attributes:
        wire: of the model, when it has been prepared.
    """

    def __init__(
        self,
        compressor: CompressorGiven = "quantize:4",
        *,
        ddp: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if takes_local_steps(compressor):
            raise ValueError(
                f"tw.accelerate.Handler: {compressor} exchanges what optimizers have done: use "
                "tw.LocalSteps(model, optimizer, ...) with what accelerator.prepare returns"
            )
        hooks = sorted(name for name in ddp or () if name.startswith("comm_"))
        if hooks:
            raise ValueError(
                f"tw.accelerate.Handler: {', '.join(hooks)}: DDP takes one communication hook, and "
                "this handler brings it: leave them out"
            )
        super().__init__(**(ddp or {}))
        self.compressor, self.options = compressor, options
        self.wire: Wire | None = None

    def to_dict(self, *_: Any) -> dict[str, Any]:
        """What DistributedDataParallel is made with."""
        known = {each.name for each in fields(_utils.DistributedDataParallelKwargs)}
        return {name: getattr(self, name) for name in known if not name.startswith("comm_")}

    def register_comm_hook(self, model: nn.Module) -> None:
        """Called by Accelerate with the wrapped model."""
        self.wire = attach(model, self.compressor, **self.options)


class CheckpointedWire:
    """What every rank remembers, for ``accelerator.register_for_checkpointing``.

    Accelerate saves an object once, on the main process, and loads it on all: so this is the state
    of all ranks, which any number of ranks can go on with.

    Args:
        of: a model that a wire is attached to, or a wire (`thinwire.LocalSteps` too).
    """

    def __init__(self, of: nn.Module | Wire) -> None:
        found = of if isinstance(of, Wire) else wire_of(of)
        if found is None:
            raise ValueError(
                "tw.accelerate.CheckpointedWire: no wire is attached to this model: attach one "
                "after accelerator.prepare, or call tw.accelerate.compress before it"
            )
        self.wire: Wire = found

    def state_dict(self) -> dict[str, Any]:
        """Called on all processes."""
        return self.wire.gathered_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called on all processes, with the state of all ranks."""
        self.wire.load_state_dict(state)
