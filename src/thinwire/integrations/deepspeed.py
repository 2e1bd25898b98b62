"""DeepSpeed: ``wire = tw.deepspeed.attach(engine, "quantize:4")``.

An engine with ZeRO stage 0 averages gradients at the end of a backward pass:

    allreduce_gradients -> buffered_allreduce_fallback -> allreduce_no_retain   dense gradients
                                                       -> sparse_allreduce_...  sparse ones

The wire takes the place of `allreduce_no_retain`, where it only takes note of gradients, and of
`buffered_allreduce_fallback`, at whose end it averages all of them at once. So a step is one call,
however many types and buckets there are. What is sparse, and what belongs to the experts of a
mixture, DeepSpeed averages by itself as before.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.errors import ThinwireWarning
from thinwire.integrations.wiring import framework, takes_local_steps
from thinwire.parallel import Reducer
from thinwire.parallel.configuration import CompressorGiven, Scaler
from thinwire.parallel.model import described, parameter_names

__all__ = ["EngineWire", "attach"]

_deepspeed: Any = framework("deepspeed", extra="deepspeed", purpose="tw.deepspeed")
WHO = "tw.deepspeed.attach"


def attach(engine: Any, compressor: CompressorGiven = "quantize:4", **options: Any) -> "EngineWire":
    """Compress the gradients that a DeepSpeed engine averages, with ZeRO stage 0.

    Accumulation, clipping, `prescale_gradients`, `gradient_predivide_factor` and
    `communication_data_type` mean what they do without. Errors come out of ``engine.backward()``.

    Args:
        engine: the first of what `deepspeed.initialize` returns.
        compressor: as for `thinwire.attach`.
        options: of `thinwire.Reducer`, with ``min_numel=1024`` as for `thinwire.attach`. The
            group and the loss scale are those of the engine, and so is the optimizer, unless given.

    Returns:
        The wire: `stats`, `summary`, `explain`, `state_dict`, `load_state_dict`, `detach`.

    Example:
        engine, optimizer, _, _ = deepspeed.initialize(model=net, config=config)
        wire = tw.deepspeed.attach(engine, "quantize:4")
    """
    _check(engine)
    if takes_local_steps(compressor):
        raise ValueError(
            f"{WHO}: {compressor} exchanges what the optimizer has done, not gradients: set "
            "engine.enable_backward_allreduce = False and use tw.LocalSteps(engine.module, "
            f"engine.optimizer, {str(compressor)!r}), without fp16 and bf16"
        )
    for name in ("group", "scaler"):
        if name in options:
            raise ValueError(f"{WHO}: leave {name}= out, the engine has one")
    if dist.get_world_size(engine.seq_data_parallel_group) == 1:
        warnings.warn(
            f"{WHO}: this training has one process, so nothing is exchanged and nothing compressed",
            ThinwireWarning,
            stacklevel=2,
        )
    return EngineWire(engine, compressor, options)


class EngineWire(Reducer):
    """The wire of a DeepSpeed engine, made by `attach`: a `thinwire.Reducer` that the engine calls.

    Attributes:
        step: backward passes with an exchange so far.
    """

    def __init__(self, engine: Any, compressor: CompressorGiven, options: dict[str, Any]) -> None:
        given = {
            "min_numel": 1024,
            "optimizer": getattr(engine, "basic_optimizer", None),
            **options,
            "group": engine.seq_data_parallel_group,
            "scaler": _scaler_of(engine),
        }
        super().__init__(compressor, **given)
        self._engine = engine
        self._trained = {
            name: p
            for p, name in parameter_names(engine.module)
            if p.requires_grad and p.numel() and getattr(p, "allreduce", True)  # False for experts
        }
        self._noted: list[Tensor] | None = None  # while the engine averages
        try:
            self._learn(engine)
        except BaseException:
            super().detach()
            raise
        self._average_dense = engine.allreduce_no_retain
        self._average_all = engine.buffered_allreduce_fallback
        engine.allreduce_no_retain = self._note
        engine.buffered_allreduce_fallback = self._average_gradients

    def detach(self) -> None:
        """Let the engine average its gradients by itself again.

        What is remembered stays here: to attach anew and go on with it, load this wire's state_dict
        into the new one.
        """
        if not self._detached:
            self._engine.allreduce_no_retain = self._average_dense
            self._engine.buffered_allreduce_fallback = self._average_all
        super().detach()

    def _learn(self, engine: Any) -> None:
        """Choose for all parameters now: kernels are then not compiled in the first step."""
        self._configuration.check_exclude(self._trained, "parameter")
        dtype = engine.communication_data_type
        tensors = {
            name: info._replace(dtype=dtype)
            for name, info in described(engine.module, self._trained).items()
        }
        likes = {
            name: p.new_zeros((), dtype=dtype).expand(p.shape) for name, p in self._trained.items()
        }
        self._learn_tensors(tensors, likes)

    def _expected(self) -> Mapping[str, Tensor]:
        return self._parameters

    # In the place of the engine's own.

    def _average_gradients(self, *args: Any, **options: Any) -> None:
        self._noted = []
        try:
            self._average_all(*args, **options)
            noted = {gradient.data_ptr(): gradient for gradient in self._noted}
        finally:
            self._noted = None
        if not noted:
            return
        dtype = self._engine.communication_data_type
        gradients = {
            name: noted.pop(p.grad.data_ptr())
            for name, p in self._trained.items()
            if p.grad is not None and not p.grad.is_sparse and p.grad.data_ptr() in noted
        }
        if noted:
            raise RuntimeError(
                f"{len(noted)} of the gradients that DeepSpeed averages are not those of "
                "parameters that were trained when the wire was attached: detach it, and attach "
                "anew"
            )
        sent = {name: gradient.to(dtype) for name, gradient in gradients.items()}
        self.average(sent)
        for name, gradient in gradients.items():
            average = sent[name]
            if self._factor != 1:
                average.mul_(self._factor)
            if average is not gradient:
                gradient.copy_(average)

    @property
    def _factor(self) -> float:
        """From the average over the group to what the engine would make."""
        if not self._engine.gradient_average:
            return float(dist.get_world_size(self._engine.seq_data_parallel_group))
        # The ranks of a sequence hold parts of one gradient, which are added up.
        return float(self._engine.sequence_parallel_size)

    def _note(self, bucket: Sequence[Tensor], dp_group: Any, *args: Any, **options: Any) -> None:
        if self._noted is None or dp_group is not self._engine.seq_data_parallel_group:
            self._average_dense(bucket, dp_group, *args, **options)  # those of experts
        else:
            self._noted += bucket


class OverflowSkips:
    """The loss scale of DeepSpeed's optimizers for fp16 and bf16, which skip a step that
    overflows."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def get_scale(self) -> float:
        # The engine scales the loss by this method. Optimizers of ZeRO stage 0 do not have it
        # (DeepSpeed 0.19.8), whatever their loss_scale says.
        scaled = hasattr(self.optimizer, "scale_if_loss")
        return float(self.optimizer.loss_scale) if scaled else 1.0


def _scaler_of(engine: Any) -> Scaler | None:
    scaler: Scaler | None = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if scaler is None and hasattr(engine.optimizer, "overflow"):
        return OverflowSkips(engine.optimizer)
    return scaler


def _check(engine: Any) -> None:
    """Refuse what is no engine, and engines that average in another way."""
    if not isinstance(engine, _deepspeed.DeepSpeedEngine):
        hint = "pass the engine, the first of what deepspeed.initialize(model=..., ...) returns"
        if isinstance(engine, tuple) and engine and hasattr(engine[0], "allreduce_gradients"):
            hint = "pass its first item, the engine"
        elif isinstance(engine, nn.Module):
            hint = f"call deepspeed.initialize first, and {hint}"
        raise TypeError(f"{WHO} takes a DeepSpeedEngine, got {type(engine).__name__}: {hint}")
    if engine.pipeline_parallelism:
        raise ValueError(
            f"{WHO}: a pipeline engine adds up gradients of tied stages before it averages them. "
            "Train it uncompressed, or the model without a pipeline"
        )
    stage = int(engine.zero_optimization_stage())
    if stage:
        raise ValueError(
            f"{WHO}: ZeRO stage {stage} reduces gradients in its own optimizer, which has no place "
            "for compression. Use ZeRO++ (zero_quantized_gradients, with stage 3), FSDP2 "
            "(fully_shard) with tw.attach, or stage 0"
        )
    if engine.is_deepcompile_enabled():
        raise ValueError(
            f"{WHO}: with deepcompile gradients are averaged inside of compiled graphs: switch it "
            "off in the configuration (compile.deepcompile)"
        )
    if isinstance(getattr(engine.allreduce_no_retain, "__self__", None), EngineWire):
        raise ValueError(f"{WHO}: a wire is attached to this engine already: detach it first")
    if not engine.enable_backward_allreduce:
        raise ValueError(
            f"{WHO}: this engine averages no gradients (enable_backward_allreduce is False), as "
            "with tw.LocalSteps and optimizers that exchange by themselves"
        )
