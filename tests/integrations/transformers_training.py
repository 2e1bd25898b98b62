"""A training with the Hugging Face Trainer, started by torchrun; rank 0 prints a line of JSON.

torchrun --nproc-per-node 2 transformers_training.py FOLDER MODE
"""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import thinwire as tw

STEPS = 8


class Numbers(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(50, (16,), generator=generator)
        return {"input_ids": row, "labels": row}


def main(folder: str, mode: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    saved = Path(folder, mode.removesuffix("-resumed"))
    arguments = TrainingArguments(
        output_dir=str(saved),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_steps=STEPS // 2,
        logging_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        ddp_backend="gloo",
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers())
    callback = None
    if not mode.startswith("plain"):
        method = "local-sgd:2,compressor=(quantize:8)" if mode.startswith("local") else "quantize:4"
        callback = tw.transformers.Compression(trainer, method)
        trainer.add_callback(callback)
    checkpoint = str(saved / f"checkpoint-{STEPS // 2}") if mode.endswith("-resumed") else None
    trainer.train(resume_from_checkpoint=checkpoint)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    found = {
        "losses": [row["loss"] for row in logs],
        "logged": logs[-1],
        "weights": [p.sum().item() for p in trainer.model.parameters()],
        "files": sorted(path.name for path in (saved / f"checkpoint-{STEPS // 2}").iterdir()),
    }
    if callback is not None:
        found |= {"steps": callback.wire.step, "ratio": callback.wire.stats()["total"]["ratio"]}
    if trainer.is_world_process_zero():
        print("@" + json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
