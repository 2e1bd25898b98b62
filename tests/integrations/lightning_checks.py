"""What Lightning and the wire refuse together, and a fit that goes on; started by torchrun.

torchrun --nproc-per-node 2 lightning_checks.py FOLDER
"""

import json
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_training import BATCHES, Net, data

import thinwire as tw


def fit(
    model: Net, callbacks: list[Any], folder: str, epochs: int = 1, saving: bool = False
) -> str:
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
            enable_checkpointing=saving,
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


class Scored(Net):
    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("score", torch.nn.functional.cross_entropy(self.net(x), y), sync_dist=True)


class Scores(pl.Callback):
    """What validations came to, by step."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.found[trainer.global_step] = trainer.callback_metrics["score"].item()


def local_steps(folder: str) -> dict[str, Any]:
    """Checkpoints in the middle of rounds: what they score, and where a fit that goes on ends."""

    def trainer_of(*more: Any) -> Any:
        return pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=2,
            callbacks=[tw.lightning.Compression("local-sgd:3"), *more],
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            val_check_interval=2,
        )

    def checkpoints(**given: Any) -> ModelCheckpoint:
        return ModelCheckpoint(folder, save_top_k=-1, auto_insert_metric_name=False, **given)

    scores, model = Scores(), Scored()
    trainer = trainer_of(
        scores,
        checkpoints(filename="whole-{step}", monitor="score"),
        checkpoints(filename="weights-{step}", monitor="score", mode="max", save_weights_only=True),
        checkpoints(filename="epoch-{epoch}", save_on_train_epoch_end=True),
    )
    trainer.fit(model, data(), data())
    ended = [p.sum().item() for p in model.parameters()]
    fitted, again = dict(scores.found), {}
    for kind in ("whole", "weights"):
        for step in fitted:
            path = f"{folder}/{kind}-{step}.ckpt"
            (found,) = trainer.validate(model, data(), ckpt_path=path, verbose=False)
            again[f"{kind} {step}"] = [found["score"], fitted[step]]
    resumed = Scored()
    trainer_of(checkpoints()).fit(resumed, data(), data(), ckpt_path=f"{folder}/epoch-0.ckpt")
    resumed_end = [p.sum().item() for p in resumed.parameters()]
    return {"scores": again, "ended": ended, "resumed": resumed_end}


class Failing(Net):
    """Fails in the middle of a round, with ranks that have parameters of their own; frozen ones
    and tied ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.frozen = self.net[0], torch.nn.Linear(2, 2).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.global_step == 2:
            local = next(
                c.wire for c in self.trainer.callbacks if isinstance(c, tw.lightning.Compression)
            )
            own = self.net[0].weight.detach().clone()
            with local.common_parameters():
                self.common = self.net[0].weight.detach().clone()
            self.apart = not torch.equal(own, self.common)
            raise RuntimeError("in the middle of a round")


def failed(folder: str) -> dict[str, Any]:
    """What is saved when an exception ends a fit, and what the model is afterwards."""
    model, compression = Failing(), tw.lightning.Compression("local-sgd:3")
    checkpoint = ModelCheckpoint(folder, filename="failed", save_on_exception=True)
    error = fit(model, [compression, checkpoint], folder, saving=True)
    kept = torch.load(f"{folder}/failed.ckpt", weights_only=False)["state_dict"]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[compression],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.nn.init.ones_(model.net[0].weight)
    trainer.validate(model, data(), verbose=False)
    return {
        "error": error,
        "apart": model.apart,
        "common": torch.equal(kept["net.0.weight"], model.common),
        "tied": kept["net.0.weight"].data_ptr() == kept["tied.weight"].data_ptr(),
        "frozen": torch.equal(kept["frozen.weight"], model.frozen.weight),
        "loaded": bool((model.net[0].weight == 1).all()),
    }


class WithMomentum(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


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
    found["local"] = local_steps(folder)
    found["failed"] = failed(folder)
    model, callback = WithMomentum(), compression("dgc:0.1", min_numel=2)
    found["momentum"] = fit(model, [callback], folder)
    if torch.distributed.get_rank() == 0:
        print("@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
