"""Hugging Face Trainer:
``trainer.add_callback(tw.transformers.Compression(trainer, "quantize:4"))``."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.errors import ThinwireWarning
from thinwire.integrations.wiring import framework, wire_for
from thinwire.parallel import LocalSteps, Wire
from thinwire.parallel.configuration import CompressorGiven

__all__ = ["Compression"]

_callback: Any = framework(
    "transformers.trainer_callback", extra="transformers", purpose="tw.transformers"
)
FILE = "thinwire.pt"  # in the folder of a checkpoint


class Compression(_callback.TrainerCallback):  # type: ignore[misc]
    """Compresses what the processes of a Trainer exchange.

    Every checkpoint holds what all ranks remember, in a file of its own, and
    ``train(resume_from_checkpoint=...)`` goes on with it. Totals are in the Trainer's log.

    Args:
        trainer: the Trainer, whose model is wrapped when training begins.
        compressor: as for `thinwire.attach`; the default suits AdamW, which the Trainer uses unless
            told otherwise. Or a method of local steps ("sparseloco").
        options: of `thinwire.attach`, or of `thinwire.LocalSteps`.

    Attributes:
        wire: of the model, from the start of training on.
    """

    def __init__(
        self, trainer: Any, compressor: CompressorGiven = "quantize:4", **options: Any
    ) -> None:
        if not hasattr(trainer, "model_wrapped"):
            raise TypeError(
                f"tw.transformers.Compression takes the Trainer first, got "
                f"{type(trainer).__name__}: it needs the model that the Trainer wraps"
            )
        self.trainer, self.compressor, self.options = trainer, compressor, options
        self.wire: Wire | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        optimizer = self.trainer.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)  # within Accelerate's
        self.wire = wire_for(
            "tw.transformers.Compression",
            self.trainer.model_wrapped,
            self.compressor,
            [inner],
            self.options,
            getattr(self.trainer.accelerator, "scaler", None),
        )
        if self.wire is not None and state.global_step:
            self._resume(self._folder(state) / FILE)
        # Callbacks that report see a log only after those before them.
        others = self.trainer.callback_handler.callbacks
        if self in others:
            others.remove(self)
            others.insert(0, self)

    def _folder(self, state: Any) -> Path:
        # In a search of hyperparameters every trial has a folder of its own.
        return Path(self.trainer._get_output_dir(self.trainer._trial)) / (
            f"checkpoint-{state.global_step}"
        )

    def _resume(self, path: Path) -> None:
        assert self.wire is not None
        if path.exists():
            self.wire.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            return
        warnings.warn(
            f"training goes on from a checkpoint, but {path} is not there: what was remembered of "
            "gradients is lost, and compression starts anew. To keep it, resume from a checkpoint "
            "in output_dir",
            ThinwireWarning,
            stacklevel=2,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Before the last evaluation and the last checkpoint, and before the best model is loaded.
        if state.global_step >= state.max_steps and isinstance(self.wire, LocalSteps):
            self.wire.finish()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.wire is None:
            return
        found = self.wire.gathered_state_dict()
        if dist.get_rank() == 0:
            path = self._folder(state) / FILE
            partly = path.with_suffix(".part")
            torch.save(found, partly)
            partly.replace(path)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.wire is None or not isinstance(logs, dict):
            return
        total = self.wire.stats()["total"]
        found = {
            "thinwire_ratio": round(total["ratio"], 2),
            "thinwire_mb_sent": round(total["bytes_sent"] / 1e6, 3),
        }
        logs.update(found)  # for the callbacks that report
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if isinstance(self.wire, LocalSteps) and not self.wire.finished:
            # Stopped early. The best model, which may have been loaded by now, stays.
            loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
            with _staying(self.trainer.model) if loaded else nullcontext():
                self.wire.finish()
        if self.wire is not None:
            self.wire.detach()


@contextmanager
def _staying(model: nn.Module) -> Iterator[None]:
    """Whatever happens meanwhile, the model has the parameters and buffers afterwards that it has
    now."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
