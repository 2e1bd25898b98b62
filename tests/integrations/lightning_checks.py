"""What Lightning and the wire refuse together, and a fit that goes on; started by torchrun.

torchrun --nproc-per-node 2 lightning_checks.py FOLDER
"""

import json
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_training import BATCHES, Net, data

import thinwire as tw


def fit(model: Net, callbacks: list[Any], folder: str, epochs: int = 1) -> str:
    try:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=epochs,
            callbacks=callbacks,
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            limit_val_batches=0,
        )
        trainer.fit(model, data())
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


class Attaching(Net):
    """Attaches by itself, when a callback may have done so."""

    def on_train_start(self) -> None:
        tw.attach(self.trainer.strategy.model, "topk:0.2")


class Early(Net):
    def __init__(self) -> None:
        super().__init__()
        tw.attach(self, "quantize:4")


def main(folder: str) -> None:
    torch.set_num_threads(1)
    compression = tw.lightning.Compression
    found: dict[str, Any] = {}
    found["two"] = fit(Net(), [compression("quantize:4"), compression("topk:0.1")], folder)
    found["two kinds"] = fit(Net(), [compression("quantize:4"), compression("diloco:2")], folder)
    found["attach"] = fit(Attaching(), [compression("quantize:4")], folder)
    try:
        Early()
    except TypeError as error:
        found["early"] = str(error)
    model, callback, steps = Net(), compression("quantize:4", min_numel=2), []
    for epochs in (1, 1):
        found["again"] = fit(model, [callback], folder, epochs)
        steps.append(callback.wire.step)
    found |= {"steps": steps, "batches": BATCHES, "losses": model.losses}
    if torch.distributed.get_rank() == 0:
        print("@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
