"""Lightning: ``Trainer(callbacks=[tw.lightning.Compression("quantize:4")])``."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.integrations.wiring import framework, takes_local_steps, wire_for
from thinwire.parallel import LocalSteps, Wire
from thinwire.parallel.configuration import CompressorGiven

__all__ = ["Compression"]

# Lightning is installed under two names; a trainer of one does not take callbacks of the other.
_NAMES = ["lightning.pytorch", "pytorch_lightning"]
if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
    _NAMES.reverse()
_pytorch: Any = framework(*_NAMES, extra="lightning", purpose="tw.lightning")


class Compression(_pytorch.Callback):  # type: ignore[misc]
    """Compresses what a trainer's processes exchange, from the start of training on.

    With DDP and with ModelParallelStrategy (FSDP2). Checkpoints hold what every rank remembers, so
    that training goes on bit for bit; with another number of ranks it goes on with the mean. The
    model in them is the one that was validated: of local steps, the common parameters.
    Figures go to the trainer's loggers every `log_every_n_steps` steps.

    Args:
        compressor: as for `thinwire.attach`, or a method of local steps ("diloco:50"), which is
            finished when training ends and whose common parameters are validated.
        options: of `thinwire.attach`, or of `thinwire.LocalSteps`.

    Attributes:
        wire: of the model, from the start of training on.

    Example:
        trainer = Trainer(strategy="ddp", callbacks=[tw.lightning.Compression("quantize:4")])
    """

    def __init__(self, compressor: CompressorGiven = "quantize:4", **options: Any) -> None:
        super().__init__()
        self.compressor, self.options = compressor, options
        self.wire: Wire | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._training: LocalSteps | None = None  # the wire, if it is one, while it trains
        self._ending = contextlib.ExitStack()  # of its training
        self._evaluation = contextlib.ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end_training()  # of a fit that an exception has ended

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        if getattr(strategy, "_ddp_comm_hook", None) is not None:
            raise ValueError(
                "tw.lightning.Compression: the strategy has a ddp_comm_hook of its own, and DDP "
                "takes one: leave one of them out"
            )
        self.wire = wire_for(
            "tw.lightning.Compression",
            strategy.model,
            self.compressor,
            trainer.optimizers,
            self.options,
            getattr(trainer.precision_plugin, "scaler", None),
        )
        if self.wire is not None and self._loaded is not None:
            self.wire.load_state_dict(self._loaded)
        self._loaded = None
        if isinstance(self.wire, LocalSteps):
            self._training = self.wire
            # A callback's on_save_checkpoint is not called for checkpoints of weights alone.
            strategy.lightning_module_state_dict = _common(
                self.wire, trainer.optimizers, strategy.lightning_module_state_dict
            )
            self._ending.callback(delattr, strategy, "lightning_module_state_dict")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.wire is None or not trainer.loggers or trainer.global_step == 0:
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:
            found = self.wire.scalars()
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._training is not None:
            self._evaluation.enter_context(self._training.common_parameters())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._evaluation.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._training is not None:
            self._training.finish()
            self._end_training()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._evaluation.close()  # the training has not ended: other callbacks may save it

    def _end_training(self) -> None:
        """From here on the model is what whoever sets its parameters makes it."""
        self._training = None
        self._ending.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and self.wire is not None:
            self.wire.detach()

    # Checkpoints: all processes come here, rank 0 writes.

    def state_dict(self) -> dict[str, Any]:
        return {} if self.wire is None else {"wire": self.wire.gathered_state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict.get("wire")

    @property
    def state_key(self) -> str:
        kind = "local steps" if takes_local_steps(self.compressor) else "gradients"
        return f"thinwire.Compression({kind})"


def _common(
    local: LocalSteps, optimizers: Sequence[Any], state_dict: Callable[[], dict[str, Any]]
) -> Callable[[], dict[str, Any]]:
    """What goes into checkpoints as the model: in the middle of a round every process has
    parameters of its own, and what was validated are the common ones.

    What is trained is copied to the host: a device may have no room for a second model.
    """

    def common() -> dict[str, Any]:
        trained = {
            _place(p) for each in optimizers for group in each.param_groups for p in group["params"]
        }
        copies: dict[Any, Tensor] = {}  # one of tied parameters
        with local.common_parameters():
            found = state_dict()
            for name, value in list(found.items()):
                if isinstance(value, Tensor) and _place(value) in trained:
                    place = _place(value)
                    if place not in copies:
                        copies[place] = value.to("cpu", copy=True)
                    found[name] = copies[place]
        return found

    return common


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
