"""A script as users write it, for type checkers alone: nothing runs it, `make check` reads it.

Every public name is used at least once, in the forms that the documentation shows. An error here
is what a user's editor would show for a correct program.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, assert_type

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def compressors(gradient: Tensor, residual: Tensor) -> None:
    assert_type(tw.__version__, str)
    assert_type(tw.list_compressors(), dict[str, str])
    chain = tw.TopK(0.01) | tw.Quantize(4) | tw.Lossless()
    local: list[tw.compressors.LocalCompressor] = [
        chain,
        tw.compressors.Chain.of(tw.RandomK(0.1), tw.Cast("fp16")),
        tw.Bernoulli(0.1),
        tw.Threshold(0.5),
        tw.QSGD(7, bucket=None, entropy=True),
        tw.TernGrad(),
        tw.Natural(),
        tw.OneBit(block=1024),
        tw.TwoBit(block=4096),
        tw.TopK(0.03, chunk=4096),
        tw.ScaledSign("l2"),
        tw.Tiered(0.01, large=tw.Cast("bf16"), small=tw.Quantize(2)),
        tw.NoCompression(),
    ]
    every: list[tw.Compressor] = [*local, tw.PowerSGD(2), tw.ARCTopK(0.2), tw.parse("topk:0.01")]
    assert_type([str(compressor) for compressor in every], list[str])

    payload = chain.encode(gradient, residual=residual, key=tw.Key(seed=1, step=2, tensor=3))
    assert_type(payload, tw.Payload)
    assert_type(payload.num_bytes, int)
    assert_type(payload.compression_ratio, float)
    assert_type(chain.decode(payload), Tensor)
    assert_type(chain.encode(gradient.numpy(), residual=residual.numpy()), tw.Payload)
    chain.accumulate([payload, payload], gradient, 0.5)
    frame = tw.pack(payload)
    assert_type(frame, Tensor)
    assert_type(tw.pack({"weight": payload}), bytes)
    try:
        assert_type(tw.unpack(frame, max_numel=1000), tw.Payload)
        assert_type(tw.decode(frame), Tensor)
        assert_type(tw.decode(frame, max_numel=1000, max_bytes="1MiB"), Tensor)
    except tw.FrameError as error:
        print(error)


def collectives(gradient: Tensor, residual: Tensor, group: dist.ProcessGroup) -> None:
    handle = tw.all_reduce(gradient, "topk:0.01", residual=residual, op="avg")
    assert_type(handle, tw.Handle)
    tw.all_reduce(gradient, "topk:0.01", residual=residual, op="senders")
    assert_type(handle.bytes_sent, int)
    assert_type(handle.collective, str)
    assert_type(handle.account, tw.collectives.Account)
    tw.all_reduce(gradient, tw.NoCompression(), op=dist.ReduceOp.MAX, group=group)
    tw.all_reduce(gradient, "topk:0.01", nodes=8, max_bytes="512MiB", timeout=timedelta(seconds=5))
    tw.all_reduce(gradient, "topk:0.01", nodes=[[0, 1], [2, 3, 4]], timeout=2.5)
    tw.all_reduce(gradient, "topk:0.01", nodes=tw.Nodes(8, inner="cast:bf16", feedback="none"))
    tw.all_reduce_coalesced([gradient], tw.Quantize(8), residuals=[None], async_op=True).wait()
    tw.all_gather([gradient, gradient], gradient, "quantize:8")
    tw.reduce_scatter(gradient, [gradient, gradient], "quantize:8", residual=[residual, None])
    tw.broadcast(gradient, tw.Cast("fp16"), src=0)
    tw.send(gradient, "topk:0.1", dst=1, residual=residual)
    tw.recv(gradient, src=0, tag=1)
    handles = [tw.isend(gradient, "topk:0.1", dst=1), tw.irecv(gradient, src=0)]
    tw.wait_all(handles)

    reducer = tw.Reducer("topk:0.01", feedback=tw.feedback.EF21M(0.1), nodes=tw.Nodes(8))
    try:
        reducer.average({"weight": gradient}, together=True)
    except (tw.MismatchError, tw.MemoryLimitError, tw.PeerError):
        reducer.reset()
    except tw.ThinwireError as error:
        print(isinstance(error, tw.errors.ReplicaError))
    reducer.load_state_dict(reducer.state_dict())
    reducer.load_state_dict(reducer.gathered_state_dict(everywhere=True))
    assert_type(reducer.stats()["total"]["bytes_sent"], int)
    assert_type(reducer.summary(), str)
    assert_type(reducer.ledger.exchanges, int)
    wire: tw.Wire = tw.Reducer(tw.policies.Auto(), min_numel=1024, exclude="embed*", check_every=10)
    print(wire.explain(), wire.decisions, wire.settings())
    tw.Reducer(lambda name: "topk:0.001" if "embed" in name else None, group=group)
    tw.Reducer("dgc:0.001", optimizer=torch.optim.SGD([gradient], lr=0.1, momentum=0.9)).detach()


def local_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    outer = tw.OuterSGD(0.7, 0.9, nesterov=True)
    with tw.LocalSteps(model, optimizer, "topk:0.01", every=10, outer=outer) as local:
        print(local.stats()["bytes_per_round"], local.summary(), local.explain())
    tw.LocalSteps(model, [optimizer], tw.methods.DiLoCo(every=50), scaler=None).detach()


def feedbacks() -> None:
    every: list[tw.feedback.Feedback] = [
        tw.feedback.NoFeedback(),
        tw.feedback.EF14(0.9, storage="int8", reset=1024),
        tw.feedback.EF21(),
        tw.feedback.DGC(momentum=0.9, nesterov=True, clip=1.0),
        tw.feedback.Vote(0.9),
        tw.feedback.parse("ef14:storage=bf16"),
    ]
    print(every)
    assert_type(tw.list_feedbacks(), dict[str, str])


def policies() -> None:
    topk = tw.TopK(0.01)
    warmup = tw.policies.Warmup(500, "topk:0.01")
    assert_type(warmup.then, tw.policies.Policy)
    every: list[tw.policies.Policy] = [
        warmup,
        tw.policies.Warmup(500, topk),
        tw.policies.Warmup(steps=500, then=tw.policies.Bandwidth("topk:0.001|quantize:4")),
        tw.policies.Ramp(1000, "topk:0.01", shape="dgc"),
        tw.policies.Ramp(1000, tw.parse("topk:0.01"), start=0.5),
        tw.policies.Progressive(1000, "topk:0.001", dense=True),
        tw.policies.Progressive(1000, topk),
        tw.policies.Bandwidth(topk | tw.Quantize(4), target=0.2),
        tw.policies.Accuracy("topk:0.01", band=0.5, target=92.0),
        tw.policies.Accuracy(topk, 0.5, [(0, 50.0), (100, 90)], higher=False),
        tw.policies.Accuracy(topk, 0.5, "curve.json"),
        tw.policies.Magnitude(0.05, small="quantize:2"),
        tw.policies.Magnitude(large=tw.Cast("bf16"), small=tw.parse("quantize:2"), every=4),
        tw.policies.Solve("topk:0.01", 1.0, 50),
        tw.policies.Solve(topk, candidates=["onebit", tw.Quantize(8)]),
        tw.policies.Solve(topk, candidates="onebit; quantize:8"),
        tw.policies.Layerwise.solve("topk:0.01", error_budget=0.9, candidates=("onebit", topk)),
        tw.policies.Layerwise(),
        tw.policies.Layerwise({"embed*": "topk:0.001", "*.bias": None, "*": topk}),
        tw.policies.Layerwise([("embed*", "topk:0.001"), ("*", topk), ("*.bias", "dense")]),
        tw.policies.Layerwise([tw.policies.Rule("topk:0.001", match="embed*", least=4096)]),
        tw.policies.Layerwise([tw.policies.Rule(None, kind="norm"), ("*", warmup)]),
        tw.policies.Layerwise("embed*=topk:0.001; (most=4096)=dense"),
        tw.policies.Layerwise(Path("rules.toml")),
        tw.policies.Auto(warmup=100),
        tw.policies.Fixed("topk:0.01"),
        tw.policies.parse("auto"),
    ]
    print(every)
    assert_type(tw.list_policies(), dict[str, str])
    method = tw.methods.parse("dgc:0.001")
    assert_type(method.recipe().compressor, tw.Compressor)
    assert_type(tw.list_methods(), dict[str, str])


class EveryOther(tw.policies.Policy):
    """A policy of one's own."""

    name: ClassVar[str] = "every-other"

    def begin(self, context: tw.policies.PolicyContext) -> tw.policies.Chooser:
        return EveryOtherChooser()

    @property
    def main(self) -> tw.Compressor:
        return tw.TopK(0.01)


class EveryOtherChooser(tw.policies.Chooser):
    def choose(self, tensor: tw.policies.TensorInfo, step: int) -> tw.policies.Choice:
        return tw.TopK(0.01) if step % 2 and tensor.numel > 4096 else None


def training(net: nn.Module) -> None:
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = tw.attach(model, "topk:0.01", feedback="ef14", exclude=["embed*"])
    assert_type(wire, tw.Wire)
    assert_type(tw.wire_of(model), tw.Wire | None)
    wire.detach()
    tw.attach(model, tw.policies.Auto(), scaler=torch.amp.GradScaler("cpu"), nodes=8).detach()
    tw.attach(model, tw.methods.parse("dgc:0.001"), optimizer=optimizer).detach()
    tw.attach(model, EveryOther(), feedback=tw.feedback.EF14()).detach()
    wire = tw.attach(model, lambda name: "topk:0.001" if "embed" in name else None)
    stats = wire.stats()
    assert_type(stats["total"]["bytes_sent"], int)
    assert_type(stats["tensors"]["weight"]["relative_error"], float | None)
    assert_type(wire.summary(), str)
    assert_type(wire.explain(), str)
    wire.observe(92.5)
    wire.settings().save("rules.toml")
    state: dict[str, Any] = wire.state_dict()
    wire.load_state_dict(state)
    assert_type(wire.gathered_state_dict(everywhere=True), dict[str, Any])
    path = tw.save_checkpoint("checkpoints", {"wire": state}, step=wire.step, keep=3)
    assert_type(path, Path)
    loaded = tw.load_checkpoint("checkpoints")
    if loaded is not None:
        assert_type(loaded, tw.LoadedCheckpoint)
        wire.load_state_dict(loaded.state["wire"])
    with tw.new_checkpoint(Path("checkpoints"), step=8) as path:
        print(wire.stateful(), path)
    found = tw.newest_checkpoint("checkpoints", timeout=5.0)
    assert_type(found, tw.SavedCheckpoint | None)
    tw.check_replicas(model, buffers=True)
    tw.track(92.5, "test accuracy, %", higher_is_better=True)


def optimizers(net: nn.Module) -> None:
    adam = tw.optim.OneBitAdam(net.parameters(), lr=1e-3, freeze_step=100, decoupled=True)
    lamb = tw.optim.OneBitLamb([{"params": net.parameters()}], freeze_step=100)
    demo = tw.optim.DeMo(net.parameters(), 1e-3, ratio=0.01, dct=True, compressor=tw.TwoBit())
    rare = tw.optim.ZeroOneAdam(net.parameters(), var_freeze_step=10, compressor="scaledsign")
    every: Sequence[torch.optim.Optimizer] = [adam, lamb, demo, rare]
    for optimizer in every:
        optimizer.step()
    assert_type(adam.stats()["steps"], int)
    assert_type(lamb.stats()["error_norm"], float)
    assert_type(rare.synced, bool)
    adam.load_state_dict(adam.gathered_state_dict())


def pipeline(activations: Tensor, first: bool) -> None:
    if first:
        tw.pipeline.send(activations, "quantize:8", dst=1).backward()
    else:
        received = tw.pipeline.recv(activations.shape, src=0, grad_compressor=tw.Cast("bf16"))
        assert_type(received, Tensor)
    tw.pipeline.wait()


def slow_network() -> None:
    task = tw.workloads.workload("images:batch_size=64")
    assert_type(task.evaluate(task.model(seed=0)), float)
    with tw.lab.Lab(hosts=4, link="100mbit") as lab:
        for result in lab.run(["python", Path("train.py")], timeout=600):
            assert_type(result.stdout, str)
        assert_type(lab.counters()[0].sent_bytes, int)
    with tw.lab.Loopback(2) as loopback:
        loopback.run(["true"])
