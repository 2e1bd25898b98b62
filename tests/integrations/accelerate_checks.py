"""What Accelerate and the wire refuse together, and what else goes; started by torchrun.

torchrun --nproc-per-node 2 accelerate_checks.py
"""

import json
import warnings
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.utils import DDPCommunicationHookType, DistributedType
from accelerate_training import net
from programs import raised
from torch import nn
from torch.distributed.fsdp import FSDPModule

import thinwire as tw


def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    model = net()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        loss = model(torch.randn(8, 20, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrong_use() -> dict[str, str]:
    found = {"early": raised(lambda: tw.attach(net(), "quantize:4"))}
    late = Accelerator(cpu=True)
    prepared(late)
    found["late"] = raised(lambda: tw.accelerate.compress(late))

    fp16 = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    hooked = Accelerator(cpu=True, kwargs_handlers=[fp16])
    found["hooked"] = raised(lambda: tw.accelerate.compress(hooked))
    model, _ = prepared(hooked)
    found["hooked, attach"] = raised(lambda: tw.attach(model, "quantize:4"))

    twice = Accelerator(cpu=True)
    tw.accelerate.compress(twice, "quantize:4")
    found["twice"] = raised(lambda: tw.accelerate.compress(twice))
    model, _ = prepared(twice)
    found["twice, attach"] = raised(lambda: tw.attach(model, "quantize:4"))
    found["no accelerator"] = raised(lambda: tw.accelerate.compress(model))
    hook = {"comm_hook": DDPCommunicationHookType.FP16}
    found["hook in options"] = raised(lambda: tw.accelerate.Handler("quantize:4", ddp=hook))
    return found


def options_stay() -> bool:
    given = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=7)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[given])
    handler = tw.accelerate.compress(accelerator, "quantize:4")
    model, _ = prepared(accelerator)
    ours = handler.wire is tw.wire_of(model) is not None
    return ours and model.find_unused_parameters and model.bucket_bytes_cap == 7 << 20


def scaler_is_passed_on() -> bool:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # as with fp16 on a GPU
    handler = tw.accelerate.compress(accelerator, "quantize:4")
    model, optimizer = prepared(accelerator)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.errors.ThinwireWarning)  # of a scaler not passed
        train(accelerator, model, optimizer, 2)
    return handler.wire.step == 2


def local_steps() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    local = tw.LocalSteps(model, optimizer.optimizer, "local-sgd:2")
    train(accelerator, model, optimizer, 5)
    apart = accelerator.gather(model.module[0].weight.sum().reshape(1)).tolist()
    local.finish()
    together = accelerator.gather(model.module[0].weight.sum().reshape(1)).tolist()
    return {"apart": apart, "together": together}


def sharded() -> dict[str, Any]:
    """Accelerate chooses FSDP for accelerators alone; what it then does also goes on CPU."""
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    refused = raised(lambda: tw.accelerate.compress(accelerator))
    model, optimizer = prepared(accelerator)
    wire = tw.attach(model, "quantize:4", min_numel=2)
    losses = train(accelerator, model, optimizer, 4)
    return {
        "refused": refused,
        "sharded": isinstance(model, FSDPModule),
        "losses": losses,
        "steps": wire.step,
        "ratio": wire.stats()["total"]["ratio"],
    }


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"wrong": wrong_use(), "options": options_stay()}
    found |= {"scaler": scaler_is_passed_on(), "local": local_steps(), "sharded": sharded()}
    if torch.distributed.get_rank() == 0:
        print("@" + json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
