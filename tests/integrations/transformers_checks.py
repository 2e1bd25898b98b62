"""What the Trainer's settings do to a wire, and what is refused; started by torchrun.

torchrun --nproc-per-node 2 transformers_checks.py FOLDER
"""

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from programs import raised
from torch.utils.data import Subset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import HPSearchBackend
from transformers_training import Numbers

import thinwire as tw


class Watching(TrainerCallback):
    """Sees the log after or before the figures are in it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))


class EverWorse(Trainer):
    """Whose first evaluation is the best one."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_score": -float(self.state.global_step)}
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def trainer_of(
    folder: Path, name: str, callbacks: Any = (), kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    given = {"max_steps": 4, "save_strategy": "no", "logging_steps": 1} | options
    arguments = TrainingArguments(
        output_dir=str(folder / name), per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, ddp_backend="gloo", seed=0, **given,
    )  # fmt: skip
    return kind(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Subset(Numbers(), range(16)),  # an epoch of 4 steps
        eval_dataset=Subset(Numbers(), range(4)),
        callbacks=list(callbacks),
    )


def settings(folder: Path) -> dict[str, Any]:
    before, after = Watching(), Watching()
    trainer = trainer_of(
        folder, "settings", [before], gradient_accumulation_steps=2, max_grad_norm=1e-3
    )
    callback = tw.transformers.Compression(trainer, "quantize:4")
    trainer.add_callback(callback)
    trainer.add_callback(after)
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    steps = [callback.wire.step]
    trainer.train()
    steps.append(callback.wire.step)
    figures = [all("thinwire_ratio" in row for row in each.seen) for each in (before, after)]
    return {"steps": steps, "norms": norms, "figures": figures, "seen": len(before.seen)}


def wrong_use(folder: Path) -> dict[str, str]:
    found = {}
    trainer = trainer_of(folder, "two")
    for spec in ("quantize:4", "quantize:8"):
        trainer.add_callback(tw.transformers.Compression(trainer, spec))
    found["two"] = raised(trainer.train)
    trainer = trainer_of(folder, "early")
    found["early"] = raised(lambda: tw.attach(trainer.model, "quantize:4"))
    return found


def elsewhere(folder: Path) -> list[str]:
    """A checkpoint that was copied without what is remembered."""
    trainer = trainer_of(folder, "saved", max_steps=2, save_strategy="steps", save_steps=2)
    trainer.add_callback(tw.transformers.Compression(trainer, "quantize:4"))
    trainer.train()
    torch.distributed.barrier()
    copied = folder / "copied" / "checkpoint-2"
    if trainer.is_world_process_zero():
        shutil.copytree(folder / "saved" / "checkpoint-2", copied)
        (copied / "thinwire.pt").unlink()
    torch.distributed.barrier()
    trainer = trainer_of(folder, "copied", max_steps=3)
    trainer.add_callback(tw.transformers.Compression(trainer, "quantize:4"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=str(copied))
    return [str(each.message) for each in caught if "is not there" in str(each.message)]


def best(folder: Path) -> dict[str, Any]:
    """The best model is loaded at the end: in the middle of the training, and of a round."""
    by_steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    cases: dict[str, dict[str, Any]] = {
        "whole": {**by_steps, "save_steps": 2, "max_steps": 8},
        "stopped": {**by_steps, "save_steps": 2, "max_steps": 8},
        "stopped after an epoch": {
            **{"eval_strategy": "epoch", "save_strategy": "epoch"},
            **{"max_steps": -1, "num_train_epochs": 5},
        },
    }
    found = {}
    for name, options in cases.items():
        callbacks = [] if name == "whole" else [EarlyStoppingCallback(1)]
        trainer = trainer_of(
            folder, name, callbacks, EverWorse, load_best_model_at_end=True,
            metric_for_best_model="eval_score", greater_is_better=True, learning_rate=1e-2,
            **options,
        )  # fmt: skip
        callback = tw.transformers.Compression(trainer, "diloco:every=3,compressor=(quantize:4)")
        trainer.add_callback(callback)
        trainer.train()
        saved = GPT2LMHeadModel.from_pretrained(trainer.state.best_model_checkpoint)
        ends = dict(trainer.model.named_parameters())
        same = all(torch.equal(ends[name], p) for name, p in saved.named_parameters())
        everywhere = [None, None]
        torch.distributed.all_gather_object(everywhere, same)
        found[name] = {
            "best": Path(trainer.state.best_model_checkpoint).name,
            "steps": trainer.state.global_step,
            "finished": callback.wire.finished,
            "same": everywhere,
        }
    return found


class Trial(dict[str, Any]):
    """As of optuna, as far as the Trainer touches it; which takes a dict for one of Ray's."""

    number, params = 3, {}


def search(folder: Path) -> list[str]:
    trainer = trainer_of(folder, "search", max_steps=2, save_strategy="steps", save_steps=2)
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, None
    trainer.hp_space = lambda trial: {}
    trainer.add_callback(tw.transformers.Compression(trainer, "quantize:4"))
    trainer.train(trial=Trial())
    torch.distributed.barrier()
    return sorted(str(path.relative_to(folder)) for path in folder.glob("search/**/thinwire.pt"))


def main(folder: str) -> None:
    torch.set_num_threads(1)
    place = Path(folder)
    found = {"settings": settings(place), "wrong": wrong_use(place), "copied": elsewhere(place)}
    found |= {"best": best(place), "search": search(place)}
    if torch.distributed.get_rank() == 0:
        print("@" + json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
