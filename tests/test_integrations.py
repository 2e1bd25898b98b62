"""What of the integrations needs no framework: arrays and bytes, and errors where one is missing.

The frameworks themselves: tests/integrations, by `make test-integrations`.
"""

import dataclasses
import importlib.util
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from nets import net, raised
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.integrations.wiring import wire_for

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "integrations.md"


@pytest.mark.parametrize("spec", ["topk:0.05|quantize:4", "onebit", "quantize:8", "none"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_what_is_decoded_and_what_is_left_make_up_the_array(spec, dtype):
    array = np.random.default_rng(0).normal(size=(40, 30)).astype(dtype)
    residual = np.zeros((40, 30), np.float64 if dtype == np.float64 else np.float32)
    before = array.copy()
    frame = tw.numpy.encode(array, spec, residual=residual)
    restored = tw.numpy.decode(frame)
    assert isinstance(frame, bytes)
    assert (restored.shape, restored.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(array, before)
    np.testing.assert_allclose(restored + residual, array, atol=2e-3)


def test_frames_are_those_of_tensors():
    array = np.arange(100, dtype=np.float32)
    frame = tw.numpy.encode(array, "quantize:4")
    assert frame == tw.pack(tw.Quantize(4).encode(array)).numpy().tobytes()
    for given in (bytearray(frame), memoryview(frame)):
        np.testing.assert_array_equal(tw.numpy.decode(given), tw.numpy.decode(frame))


@pytest.mark.parametrize("wrong", [b"", b"no frame at all", bytes(1000)])
def test_what_is_no_frame_is_a_frame_error(wrong):
    with pytest.raises(tw.FrameError):
        tw.numpy.decode(wrong)


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "flower", "lightning", "transformers"])
def test_a_missing_framework_is_told_with_the_pip_line(name):
    package = {"flower": "flwr"}.get(name, name)
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(tw.errors.MissingExtraError, match=rf"pip install 'thinwire\[{name}\]'"):
        getattr(tw, name)


# torchtitan: the function of the page, with a ModelSpec that has the fields it needs


@dataclasses.dataclass
class ModelSpec:
    """Of torchtitan, as far as training touches it."""

    parallelize_fn: Callable[..., nn.Module]
    post_optimizer_build_fn: Callable[..., None] | None


def parallelize(model: nn.Module, *, parallel_dims: Any, training: Any) -> nn.Module:
    """With torchtitan's signature and its way to divide gradients."""
    for layer in [*(each for each in model if isinstance(each, nn.Linear)), model]:
        fully_shard(layer, mesh=parallel_dims)
        layer.set_gradient_divide_factor(1.0)
    return model


def on_torchtitan(recipe: str) -> tuple[int, list[str], bool]:
    scope: dict[str, Any] = {}
    exec(recipe, scope)
    called: list[str] = []
    spec = scope["compressed"](
        ModelSpec(parallelize, lambda *_: called.append("before")), "quantize:4", min_numel=10
    )
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = net()
    model = spec.parallelize_fn(model, parallel_dims=mesh, training=None)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 0.01)
    optimizer = torch.optim.AdamW(model.parameters())
    spec.post_optimizer_build_fn([optimizer], [model], mesh)
    for _ in range(3):
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    wire = tw.wire_of(model)
    return wire.step, called, wire.stats()["total"]["ratio"] > 2


def test_the_function_for_torchtitan_attaches_to_what_it_makes():
    (text,) = re.findall(r"```py\n(# train_compressed\.py.*?)```", PAGE.read_text(), re.DOTALL)
    found = ranks.run(on_torchtitan, text.partition("# -- ")[0], ranks=2)
    assert found == [(3, ["before"], True)] * 2


# What the adapters of frameworks share


class DeepSpeedEngine(nn.Module):
    """Some other way to exchange gradients."""


def on_wires() -> dict[str, str]:
    def make(model: Any) -> Any:
        return wire_for("Compression", model, "quantize:4", [], {})

    def make_dgc(count: int, **options: Any) -> Any:
        model = DistributedDataParallel(net())
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.5) for _ in range(count)]
        wire = wire_for("Compression", model, "dgc:0.1", optimizers, options)
        assert optimizers[0].param_groups[0]["momentum"] == 0, "taken over"
        return wire

    wrapped = DistributedDataParallel(net())
    assert make(wrapped) is tw.wire_of(wrapped)
    make_dgc(1)
    scaler = torch.amp.GradScaler("cpu")
    for options in ({}, {"scaler": scaler}):
        passed = DistributedDataParallel(net())
        other = torch.amp.GradScaler("cpu")
        wire = wire_for("Compression", passed, "quantize:4", [], options, other)
        assert wire._configuration.scaler is options.get("scaler", other)
    return {
        "twice": raised(lambda: make(wrapped)),
        "other": raised(lambda: make(DeepSpeedEngine())),
        "bare": raised(lambda: make(net())),
        "early": raised(lambda: tw.attach(net(), "quantize:4")),
        "two optimizers": raised(lambda: make_dgc(2)),
    }


def test_models_that_cannot_be_attached_to_are_refused_with_what_to_do():
    for found in ranks.run(on_wires, ranks=2):
        assert "has a wire already" in found["twice"]
        assert "call its detach() first" in found["twice"]
        assert "the momentum of one optimizer, and this training has 2" in found["two optimizers"]
        assert "its model is a DeepSpeedEngine" in found["other"]
        assert "its model is a Sequential" in found["bare"]
        for each in ("other", "bare"):
            assert "docs/guides/integrations.md" in found[each]
        assert "takes a sharded (fully_shard) or DistributedDataParallel model" in found["early"]


def test_one_process_gives_a_warning_and_no_wire():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert wire_for("Compression", net(), "quantize:4", [], {}) is None
    assert "this training has one process" in str(caught[0].message)
