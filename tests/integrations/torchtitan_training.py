"""torchtitan's own ModelSpec, parallelize_fn and optimizers with the function of
docs/guides/integrations.md, started by torchrun; rank 0 prints a line of JSON.

torchtitan's Trainer itself needs an accelerator: what it does with a ModelSpec is done here, in its
order, on CPU.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry

import thinwire as tw

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "integrations.md"


def causal(
    _: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool = False, **__: Any
) -> torch.Tensor:
    """Flex attention has no backward pass on CPU."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


def recipe() -> dict[str, object]:
    (text,) = re.findall(r"```py\n(# train_compressed\.py.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    exec(text.partition("# -- ")[0], scope)
    return scope


def main() -> None:
    torch.set_num_threads(1)
    FlexAttention.forward = causal
    parallel_dims.device_type = "cpu"  # "cuda" where there is no accelerator
    dist.init_process_group("gloo")
    parallelism = ParallelismConfig(data_parallel_shard_degree=2, spmd_backend="partial_dtensor")
    training = TrainingConfig(local_batch_size=2, seq_len=64, mixed_precision_param="float32")
    dims = ParallelDims.from_config(parallelism, 2)
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    spec = recipe()["compressed"](model_registry("debugmodel"), "quantize:4")
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizers = default_adamw(lr=8e-4).build(model_parts=[model])
    spec.post_optimizer_build_fn(optimizers, [model], dims)
    wire, losses = tw.wire_of(model), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(100, (2, 65), generator=generator)
    positions = torch.arange(64).expand(2, -1)
    for _ in range(5):
        logits = model(tokens[:, :-1], positions)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    found = {"losses": losses, "steps": wire.step, "ratio": wire.stats()["total"]["ratio"]}
    if dist.get_rank() == 0:
        print("@" + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
