"""Hugging Face Accelerate: a handler for `prepare`, and checkpoints of every rank.

    accelerator = Accelerator()
    accelerator.ddp_handler = tw.accelerate.Handler("quantize:4")   # before prepare
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

or, with FSDP2 too,

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    wire = tw.attach(model, "quantize:4")

and in both cases for `save_state` and `load_state`

    accelerator.register_for_checkpointing(tw.accelerate.CheckpointedWire(model))
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from thinwire.integrations.wiring import framework, takes_local_steps
from thinwire.parallel import Wire, attach, wire_of
from thinwire.parallel.configuration import CompressorGiven

__all__ = ["CheckpointedWire", "Handler"]

_utils: Any = framework("accelerate.utils", extra="accelerate", purpose="tw.accelerate")


class Handler(_utils.DistributedDataParallelKwargs):  # type: ignore[misc]
    """Has Accelerate attach a wire to the model that it wraps in DistributedDataParallel.

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
                "after accelerator.prepare, or set accelerator.ddp_handler before it"
            )
        self.wire: Wire = found

    def state_dict(self) -> dict[str, Any]:
        """Called on all processes."""
        return self.wire.gathered_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.wire.load_state_dict(state)
