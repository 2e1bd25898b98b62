"""A training with Lightning, started by torchrun; rank 0 prints a line of JSON.

torchrun --nproc-per-node 2 lightning_training.py FOLDER MODE [CHECKPOINT]
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw

BATCHES = 4  # of a rank in an epoch


class Net(pl.LightningModule):
    def __init__(self, sharded: bool = False, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
        self.sharded, self.automatic_optimization = sharded, not manual
        self.losses: list[float] = []
        self.validated: list[float] = []

    def configure_model(self):
        if self.sharded and not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
            torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.validated.append(nn.functional.cross_entropy(self.net(x), y).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(16 * BATCHES, 20, generator=generator),
        torch.randint(4, (16 * BATCHES,), generator=generator),
    )
    return DataLoader(TensorDataset(x, y), batch_size=8)


def main(folder: str, mode: str, checkpoint: str | None = None) -> None:
    torch.set_num_threads(1)
    options = {"min_numel": 2}
    strategy: object = "ddp"
    accumulate, callbacks, compressor = 1, [], "topk:0.2"
    if mode.startswith("fsdp"):
        strategy, compressor = (
            ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            "quantize:4",
        )
    if mode == "accumulate":
        accumulate = 2
    if mode.startswith("local"):
        compressor, options = "local-sgd:3,compressor=(quantize:8)", {}
    if mode == "hooked":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        strategy = DDPStrategy(ddp_comm_hook=fp16_compress_hook)
    if not mode.startswith("plain"):
        callbacks.append(tw.lightning.Compression(compressor, **options))
    model = Net(sharded=mode.startswith("fsdp"), manual=mode == "manual")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1 if mode.endswith("half") else 2,
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        logger=CSVLogger(folder, flush_logs_every_n_steps=1),
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=2,
        val_check_interval=BATCHES,
        use_distributed_sampler=True,
    )
    error = ""
    try:
        trainer.fit(model, data(), data(), ckpt_path=checkpoint)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found: dict[str, object] = {"error": error, "losses": model.losses}
    found["validated"] = model.validated
    if not error:
        trainer.save_checkpoint(Path(folder) / f"{mode}.ckpt")
        if callbacks:
            wire = callbacks[0].wire
            found["ratio"] = wire.stats()["total"]["ratio"]
            found["steps"] = wire.step
        found["logged"] = (
            Path(trainer.logger.log_dir, "metrics.csv").read_text() if callbacks else ""
        )
        whole = [p.full_tensor() if mode.startswith("fsdp") else p for p in model.parameters()]
        found["weights"] = [p.sum().item() for p in whole]
    if trainer.global_rank == 0:
        print("@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
