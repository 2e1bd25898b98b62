"""Trainings with DeepSpeed, started by torchrun; rank 0 prints a line of JSON.

torchrun --nproc-per-node 2 deepspeed_training.py FOLDER PART

A start takes seconds, so each part does several trainings.
"""

import json
import os
import re
import sys
import warnings
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from torch import nn

import thinwire as tw

# DeepSpeed would compile a C++ extension for sums through shared memory.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# It has float16 with some CPUs only; what is tested here is arithmetic that PyTorch does anywhere.
get_accelerator().is_fp16_supported = lambda: True

STEPS = 6


class Net(nn.Module):
    """
    Args:
        kind: "sparse" for an embedding with sparse gradients, "experts" for a mixture of them.
    """

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32, sparse=kind == "sparse")
        self.hidden = nn.Linear(32, 64)
        self.experts = None
        if kind == "experts":
            self.experts = MoE(64, nn.Linear(64, 64), num_experts=2, use_rts=False)
        self.head = nn.Linear(64, 4)
        self.unused = nn.Linear(8, 8)  # has no gradient

    def forward(self, tokens):
        hidden = self.hidden(self.embed(tokens)).tanh()
        if self.experts is not None:
            hidden = hidden + self.experts(hidden)[0]
        return self.head(hidden)


def config_of(**more) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.5}},
    }
    return config | more


def batches(micro_steps: int):
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(micro_steps):
        tokens = torch.randint(50, (8,), generator=generator)
        yield tokens, torch.randint(4, (8,), generator=generator)


def started(config: dict, kind: str = "", optimizer=None):
    net = Net(kind)
    given = {} if optimizer is None else {"optimizer": optimizer(net)}
    config = {key: value for key, value in config.items() if not given or key != "optimizer"}
    parameters = list(net.parameters())
    made = deepspeed.initialize(model=net, model_parameters=parameters, config=config, **given)
    if kind == "by columns":  # DeepSpeed wants rows here, but only here
        net.hidden.weight.data = net.hidden.weight.data.t().contiguous().t()
    return made[0]


def step(engine, tokens, targets) -> float:
    loss = nn.functional.cross_entropy(engine(tokens).float(), targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(engine, steps: int = STEPS, skip: int = 0) -> list[float]:
    """A loss for each micro-batch, on this rank."""
    accumulate = engine.gradient_accumulation_steps()
    found = list(batches(steps * accumulate))[skip * accumulate :]
    return [step(engine, *batch) for batch in found]


def weights(engine) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in engine.module.parameters()]


def error_of(function) -> str:
    try:
        function()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


# Parts.


CONFIGS = {
    "plain": {},
    "accumulate": {"gradient_accumulation_steps": 3},
    "clipped": {"gradient_clipping": 0.05},
    "prescale": {"prescale_gradients": True},
    "predivide": {"gradient_predivide_factor": 2.0},
    "sent as fp16": {"communication_data_type": "fp16"},
    "summed": {"gradient_allreduce_op": "sum"},
    "sparse": {},
    "experts": {},
    "by columns": {},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 4.0}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "boundaries by hand": {"managed_gradient_accumulation": False},
}


def averages(folder: Path) -> dict:
    """The same training with plain DeepSpeed, uncompressed through a wire, and quantized."""
    found: dict = {}
    for name, more in CONFIGS.items():
        runs = {}
        for compressor in (None, "none", "quantize:8"):
            engine = started(config_of(**more), kind=name)
            originals = (engine.allreduce_no_retain, engine.buffered_allreduce_fallback)
            wire = None
            if compressor is not None:
                wire = tw.deepspeed.attach(engine, compressor, min_numel=2)
            runs[str(compressor)] = train(engine), weights(engine)
            if wire is not None:
                found.setdefault(name, {})[f"{compressor} steps"] = wire.step
                found[name][f"{compressor} ratio"] = wire.stats()["total"]["ratio"]
                tw.check_replicas(engine.module)
                wire.detach()
                ours = (engine.allreduce_no_retain, engine.buffered_allreduce_fallback)
                assert ours == originals
        found[name] |= {"losses": {key: losses for key, (losses, _) in runs.items()}}
        found[name] |= {"weights": {key: kept for key, (_, kept) in runs.items()}}
    return found


def overflow(folder: Path) -> dict:
    """A gradient that is not finite on one rank: all skip the step, and nothing is remembered."""
    found = {}
    for kind in ("fp16", "bf16", "autocast"):
        engine = started(config_of(**CONFIGS[kind]))
        wire = tw.deepspeed.attach(engine, "topk:0.3", min_numel=2)
        train(engine, 3)
        before, kept = weights(engine), residuals(wire)
        tokens, _ = next(batches(1))
        loss = engine(tokens).float().square().mean()
        engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
        engine.step()
        found[kind] = {
            "skipped": engine.skipped_steps,
            "unchanged": weights(engine) == before,
            "residual": sum(map(abs, kept)),
            "remembered": residuals(wire) == kept,
        }
        train(engine, 2)
        tw.check_replicas(engine.module)
        found[kind] |= {"steps": wire.step, "moved": weights(engine) != before}
    return found


def residuals(wire) -> list[float]:
    def tensors(state):
        if isinstance(state, torch.Tensor):
            yield state
        elif isinstance(state, dict):
            for value in state.values():
                yield from tensors(value)

    flat = [tensor.double().flatten() for tensor in tensors(wire.state_dict()["reducer"])]
    return torch.cat(flat).tolist()


def checkpoints(folder: Path) -> dict:
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
    engine = started(config_of(**adam))
    wire = tw.deepspeed.attach(engine, "quantize:2", min_numel=2)
    losses = train(engine, 3)
    engine.save_checkpoint(folder, client_state={"thinwire": wire.gathered_state_dict()})
    losses += train(engine, STEPS, skip=3)
    whole = weights(engine)
    engine = started(config_of(**adam))
    wire = tw.deepspeed.attach(engine, "quantize:2", min_numel=2)
    _, kept = engine.load_checkpoint(folder)
    wire.load_state_dict(kept["thinwire"])
    resumed = train(engine, STEPS, skip=3)
    found = {"whole": losses, "resumed": resumed, "equal": weights(engine) == whole}
    found |= {"steps": wire.step, "summary": wire.summary(), "explained": wire.explain()}
    # Without it training goes on, but not as if nothing had happened.
    engine = started(config_of(**adam))
    tw.deepspeed.attach(engine, "quantize:2", min_numel=2)
    engine.load_checkpoint(folder)
    train(engine, STEPS, skip=3)
    return found | {"forgotten": weights(engine) == whole}


def refusals(folder: Path) -> dict:
    attach, found = tw.deepspeed.attach, {}
    for stage in (1, 2, 3):
        zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
        engine = started(config_of(**zero))
        found[f"zero {stage}"] = error_of(lambda engine=engine: attach(engine, "quantize:4"))
    engine = started(config_of())
    found["model"] = error_of(lambda: attach(engine.module, "quantize:4"))
    found["tuple"] = error_of(lambda: attach((engine, None, None, None), "quantize:4"))
    found["number"] = error_of(lambda: attach(3, "quantize:4"))
    found["local"] = error_of(lambda: attach(engine, "diloco:50"))
    found["group"] = error_of(lambda: attach(engine, "quantize:4", group=dist.group.WORLD))
    found["exclude"] = error_of(lambda: attach(engine, "quantize:4", exclude="heads*"))
    found["attach"] = error_of(lambda: tw.attach(engine, "quantize:4"))
    wire = attach(engine, "quantize:4")  # what was refused has left nothing behind
    found["twice"] = error_of(lambda: attach(engine, "quantize:4"))
    engine.module.unused.weight.requires_grad_(False)
    wire.detach()
    attach(engine, "quantize:4")
    engine.module.unused.weight.requires_grad_(True)
    found["new parameter"] = error_of(lambda: train(engine, 1))
    engine = started(config_of())
    engine.enable_backward_allreduce = False
    found["no exchange"] = error_of(lambda: attach(engine, "quantize:4"))
    layers = [nn.Linear(8, 8) for _ in range(2)]
    pipeline = deepspeed.pipe.PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())
    engine = deepspeed.initialize(
        model=pipeline, model_parameters=pipeline.parameters(), config=config_of()
    )[0]
    found["pipeline"] = error_of(lambda: attach(engine, "quantize:4"))
    return found


def others(folder: Path) -> dict:
    """Local steps, and optimizers that exchange by themselves, with an engine."""
    found: dict = {}
    engine = started(config_of(gradient_accumulation_steps=2))
    engine.enable_backward_allreduce = False
    with tw.LocalSteps(engine.module, engine.optimizer, "diloco:3") as local:
        found["losses"] = train(engine, 6)
    found["inner steps"], found["exchanges"] = local.inner_steps, local.step
    tw.check_replicas(engine.module)
    made = {
        "OneBitAdam": lambda net: tw.optim.OneBitAdam(net.parameters(), lr=0.01, freeze_step=3),
        "OneBitLamb": lambda net: tw.optim.OneBitLamb(net.parameters(), lr=0.01, freeze_step=3),
        "ZeroOneAdam": lambda net: tw.optim.ZeroOneAdam(
            net.parameters(), lr=0.01, var_freeze_step=3
        ),
    }
    for name, optimizer in made.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", tw.errors.ThinwireWarning)
            engine = started(config_of(), optimizer=optimizer)
            engine.enable_backward_allreduce = False
            losses = train(engine, 8)
        if name == "ZeroOneAdam":
            engine.optimizer.sync()
        tw.check_replicas(engine.module)
        kept = engine.optimizer.gathered_state_dict()
        engine.save_checkpoint(folder / name, client_state={"optimizer of all ranks": kept})
        step(engine, *next(batches(1)))
        whole = weights(engine)
        engine = started(config_of(), optimizer=optimizer)
        engine.enable_backward_allreduce = False
        _, client = engine.load_checkpoint(folder / name, load_optimizer_states=False)
        engine.optimizer.load_state_dict(client["optimizer of all ranks"])
        step(engine, *next(batches(1)))
        found[name] = {"losses": losses, "equal": weights(engine) == whole}
    return found


def documented(folder: Path) -> dict:
    """The blocks of docs/tutorials/from-deepspeed.md, one after the other."""
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "from-deepspeed.md").read_text()
    old = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    error = error_of(lambda: started(old))
    del old["optimizer"]
    names = {"deepspeed": deepspeed, "tw": tw, "net": Net(), "config": old}
    names |= {"loader": batches(6), "loss_of": nn.functional.cross_entropy}
    blocks = re.findall(r"```py(?:thon)?\n(.*?)```", page, re.DOTALL)
    os.chdir(folder)
    for block in blocks:
        exec(compile(block, "from-deepspeed.md", "exec"), names)
    return {
        "blocks": len(blocks),
        "steps": names["engine"].optimizer.stats()["steps"],
        "error": error,
    }


def killed(folder: Path) -> dict:
    engine = started(config_of())
    tw.deepspeed.attach(engine, "quantize:4", min_numel=2, timeout=20)
    train(engine, 2)
    if dist.get_rank() == 1:
        os._exit(0)
    return {"error": error_of(lambda: train(engine, 2))}


def alone(folder: Path) -> dict:
    engine = started(config_of())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wire = tw.deepspeed.attach(engine, "quantize:4")
    losses = train(engine)
    said = [str(w.message) for w in caught if w.category is tw.errors.ThinwireWarning]
    return {"warnings": said, "losses": losses, "sent": wire.stats()["total"]["bytes_sent"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, part = sys.argv[1:]
    deepspeed.init_distributed("gloo", verbose=False)
    result = globals()[part](Path(folder))
    if dist.get_rank() == 0:
        print("@" + json.dumps(result), flush=True)
    if part == "killed":
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()
