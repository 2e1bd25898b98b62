"""For programs that come from Horovod: its words, on torch.distributed.

    optimizer = tw.horovod.DistributedOptimizer(
        optimizer, model.named_parameters(), compression="quantize:4"
    )
    tw.horovod.broadcast_parameters(model.state_dict(), root_rank=0)
    tw.horovod.broadcast_optimizer_state(optimizer, root_rank=0)

and for Horovod itself what its own all-reduce can add up: `SummableCompression`. See
docs/tutorials/from-horovod.md for the rest of its words.
"""

import contextlib
import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire import check
from thinwire.collectives.channel import process_group
from thinwire.collectives.options import Group
from thinwire.collectives.states import state_from_bytes, state_to_bytes
from thinwire.compressors import Compressor, local_of
from thinwire.errors import ThinwireWarning
from thinwire.kernels import Key
from thinwire.optim.base import ExchangingOptimizer
from thinwire.parallel import Reducer
from thinwire.parallel.configuration import CompressorGiven
from thinwire.parallel.optimizer_watch import calling_scaler
from thinwire.torch_internals import common_device

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Sum",
    "SummableCompression",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

#: The mean over all ranks, for `op`.
Average = "Average"
#: The sum over all ranks, for `op`.
Sum = "Sum"
#: A name of Horovod's that `op` refuses, with a reason.
Adasum = "Adasum"
MIN_NUMEL = 1024  # as for `attach`: smaller tensors are sent uncompressed, together

NamedParameters = Iterable[tuple[str, Tensor]]


class HorovodCompression(Protocol):
    """What Horovod takes as `compression`: a class or an object."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]: ...
    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor: ...


def _pairs(given: NamedParameters) -> list[tuple[str, Tensor]]:
    pairs = list(given)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise TypeError(
            "named_parameters must be pairs of name and parameter, as model.named_parameters()"
        )
    return pairs


class SummableCompression:
    """A compressor as Horovod takes one, for Horovod's own DistributedOptimizer.

    Horovod sums what `compress` returns element by element. So this takes compressors whose
    payloads add up: casts, and random positions that all ranks draw alike. Nothing is remembered of
    what was left out: what is sent is right on average, or to rounding.

    Args:
        compressor: "cast:fp16", "cast:bf16", "randomk:0.01,shared=true" or the like.
        named_parameters: of the model; needed by those that draw positions, since Horovod names no
            tensor and its calls come in another order on another rank.
        seed: the same on all ranks.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        named_parameters: NamedParameters | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.compressor = local_of(compressor)
        if not self.compressor.summable:
            raise ValueError(
                f"{self.compressor}: Horovod adds up what ranks send, element by element, and this "
                "cannot be added up. Use cast:fp16, cast:bf16 or randomk with shared=true, or in "
                "place of Horovod tw.horovod.DistributedOptimizer, which takes every compressor"
            )
        if self.compressor.random and named_parameters is None:
            raise ValueError(
                f"{self.compressor}: all ranks must draw the same positions for a gradient, and "
                "Horovod does not say whose it is: pass named_parameters=model.named_parameters()"
            )
        self._parameters = [p for _, p in _pairs(named_parameters or ())]
        self._calls = [0] * len(self._parameters)
        self._places: dict[int, int] = {}  # of gradients, by their id
        self._seed = seed

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What is to be summed, and what `decompress` needs besides."""
        if not tensor.is_floating_point():
            return tensor, None
        key = self._next_key(tensor) if self.compressor.random else None
        payload = self.compressor.encode(tensor, key=key)
        values = payload.sections[0] if not payload.non_finite else None
        if values is None:  # ranks whose gradients are finite send as many values
            payload = self.compressor.encode(torch.zeros_like(tensor), key=key)
            values = torch.full_like(payload.sections[0], torch.nan)
        return values, payload

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """The gradient of what was summed."""
        if ctx is None:
            return tensor
        restored: Tensor = dataclasses.replace(ctx, sections=(tensor,), known=None).restore()
        return restored

    def _next_key(self, gradient: Tensor) -> Key:
        """Of a gradient: by whose it is and how often it was sent, the same on all ranks."""
        place = self._places.get(id(gradient))
        if place is None or self._parameters[place].grad is not gradient:
            self._places = {id(p.grad): i for i, p in enumerate(self._parameters)}
            place = self._places.get(id(gradient))
        if place is None:
            raise ValueError(
                f"a tensor of shape {tuple(gradient.shape)} that is the gradient of none of the "
                "named_parameters: pass those of the model that is trained"
            )
        self._calls[place] += 1
        return Key(self._seed, self._calls[place], place)


class Compression:
    """What Horovod has under this name, for `DistributedOptimizer` here and for Horovod's own.

    Attributes:
        none: uncompressed.
        fp16: cast to float16 for the sum.
        bf16: cast to bfloat16 for the sum.
    """

    none = SummableCompression("none")
    fp16 = SummableCompression("cast:fp16")
    bf16 = SummableCompression("cast:bf16")


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: CompressorGiven | HorovodCompression = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    **options: Any,
) -> Any:
    """An optimizer whose `step` averages gradients over all ranks first.

    The optimizer itself is changed and returned: its class becomes a subclass of what it was, so
    that learning rate schedules, whether made before or after, and isinstance work. As in Horovod
    it has `synchronize`, `skip_synchronize` and `set_backward_passes_per_step`; parameters without
    a gradient get one of zeros; accumulated gradients are not divided by the number of passes.

    Unlike Horovod it exchanges all gradients when `step` or `synchronize` is called, in one go, and
    not while backward runs. DistributedDataParallel with `thinwire.attach` does the latter.

    Args:
        optimizer: to average for.
        named_parameters: ``model.named_parameters()``: the names under which gradients are
            remembered, excluded and reported.
        compression: one of `Compression`, all that `thinwire.Reducer` takes ("quantize:4", a
            policy, a method), or a class in Horovod's style with `compress` and `decompress`,
            whose tensors are averaged uncompressed.
        backward_passes_per_step: most backward passes between two steps.
        op: `Average` or `Sum`.
        options: of `thinwire.Reducer`: feedback, exclude, scaler, group, ... `min_numel` is 1024
            unless given.

    Returns:
        The optimizer; ``optimizer.wire`` is its `thinwire.Reducer`, with statistics and the state
        to save on every rank besides ``optimizer.state_dict()``.
    """
    check.whole("DistributedOptimizer", "backward_passes_per_step", backward_passes_per_step, 1)
    _refuse(optimizer, op, gradient_predivide_factor, num_groups, groups, sparse_as_dense)
    if process_set is not None:
        raise ValueError("process_set is Horovod's: pass a process group of torch, group=...")
    named = _named(optimizer, named_parameters)
    style: HorovodCompression | None = None
    given: Any = compression
    if isinstance(compression, SummableCompression):  # as in Horovod, which remembers nothing
        given = compression.compressor
        options.setdefault("feedback", "none")
    elif _in_horovods_style(compression):
        given, style = "none", compression
    options.setdefault("min_numel", MIN_NUMEL)
    options.setdefault("optimizer", optimizer)
    reducer = Reducer(given, **options)
    gradients = Gradients(named, reducer, style, backward_passes_per_step, op == Sum)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (AveragingOptimizer, kind), {})
    optimizer._thinwire = gradients  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(_before_step)
    return optimizer


class Gradients:
    """Those that an optimizer uses: how often they were computed, and whether they are averages."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        reducer: Reducer,
        style: HorovodCompression | None,
        passes: int,
        summed: bool,
    ) -> None:
        self.reducer, self.passes = reducer, passes
        self.averaged, self.averages_wanted = False, True
        self._named, self._style, self._summed = named, style, summed
        self._computed = dict.fromkeys(named, 0)  # since the last exchange
        for name, parameter in named.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_counting(self, name))

    @property
    def pending(self) -> bool:
        """Whether there was a backward pass since the last exchange."""
        return any(self._computed.values())

    def count(self, name: str) -> None:
        """A gradient was computed."""
        self.averaged = False
        self._computed[name] += 1
        if self._computed[name] > self.passes:
            raise RuntimeError(
                f"the gradient of {name} was computed {self._computed[name]} times before "
                f"optimizer.step(), and backward_passes_per_step is {self.passes}: raise it to "
                "accumulate gradients, or call optimizer.step() after each backward pass"
            )

    def forget(self) -> None:
        """Nothing was computed yet."""
        self._computed = dict.fromkeys(self._computed, 0)
        self.averaged = False

    def average(self) -> None:
        """Exchange all gradients; what fails leaves them as they were."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            if parameter.requires_grad:
                if parameter.grad is None:  # other ranks may have one
                    parameter.grad = torch.zeros_like(parameter)
                found[name] = parameter.grad
        if self._style is None:
            self.reducer.average(found)
        else:
            made = {name: self._style.compress(gradient) for name, gradient in found.items()}
            self.reducer.average({name: tensor for name, (tensor, _) in made.items()})
            for name, (tensor, context) in made.items():
                found[name].copy_(self._style.decompress(tensor, context))
        if self._summed:
            size = dist.get_world_size(self.reducer._reducer.options.group)
            for gradient in found.values():
                gradient.mul_(size)
        self.forget()
        self.averaged = True


class AveragingOptimizer(Optimizer):
    """What `DistributedOptimizer` makes of an optimizer, in front of its own class."""

    _thinwire: Gradients

    @property
    def wire(self) -> Reducer:
        """That averages: statistics, and what is remembered."""
        return self._thinwire.reducer

    def synchronize(self) -> None:
        """Average gradients now, to clip or unscale them before ``step``."""
        self._thinwire.average()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Steps in here take gradients that `synchronize` has averaged."""
        self._thinwire.averages_wanted = False
        try:
            yield
        finally:
            self._thinwire.averages_wanted = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        check.whole("DistributedOptimizer", "backward_passes_per_step", passes, 1)
        self._thinwire.passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._thinwire.pending:
            raise RuntimeError(
                "optimizer.zero_grad() after backward() and before optimizer.step() or "
                "optimizer.synchronize(): the gradients would be lost on this rank alone. Call it "
                "before backward() or after step()"
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._thinwire.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(
            "parameters that are added now would not be averaged: call add_param_group before "
            "tw.horovod.DistributedOptimizer"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a distributed optimizer cannot be copied or pickled: copy it before "
            "tw.horovod.DistributedOptimizer, and save its state_dict() and wire.state_dict()"
        )


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook and no `step`: schedulers put a function in front of the step that they find."""
    if kwargs.get("closure") is not None or any(given is not None for given in args[1:]):
        raise ValueError(
            "a distributed optimizer takes no closure: gradients that are computed inside of "
            "step() would not be averaged. Call backward() before optimizer.step()"
        )
    gradients: Gradients = optimizer._thinwire
    if not gradients.averages_wanted:
        if not gradients.averaged:
            raise RuntimeError(
                "skip_synchronize() without synchronize(): these gradients are this rank's own. "
                "Call optimizer.synchronize() after backward()"
            )
    elif gradients.averaged:
        warnings.warn(
            "optimizer.step() after optimizer.synchronize(): gradients are averages already and "
            "are not exchanged again. Use `with optimizer.skip_synchronize(): optimizer.step()`",
            ThinwireWarning,
            stacklevel=4,
        )
    else:
        scaler = calling_scaler()
        if scaler is not None and scaler.is_enabled():
            raise RuntimeError(
                "scaler.step(optimizer) has unscaled the gradients of this rank and may leave out "
                "its step, while other ranks wait: call optimizer.synchronize() before, and "
                "scaler.step inside of `with optimizer.skip_synchronize():`"
            )
        gradients.average()
    gradients.averaged = False


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Any], root_rank: int = 0, *, group: Group = None
) -> None:
    """Give all ranks the tensors of one.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: whose they are, a global rank.
        group: of ranks; all by default.
    """
    entries = list(params.values() if isinstance(params, Mapping) else params)
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                "broadcast_parameters takes model.state_dict(), model.named_parameters() or "
                f"model.parameters(), got one with a {type(tensor).__name__}"
            )
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, root_rank, group=group)
        if not tensor.is_contiguous():
            tensor.detach().copy_(dense)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int = 0, *, group: Group = None
) -> None:
    """Give all ranks the state and the options of one rank's optimizer.

    Tensors and plain values are sent as bytes: nothing that arrives is executed.

    Args:
        optimizer: one of torch, or of `DistributedOptimizer`.
        root_rank: whose state it is, a global rank.
        group: of ranks; all by default.
    """
    device = common_device(process_group(group))
    own = state_to_bytes(optimizer.state_dict()).to(device)
    length = torch.tensor([own.numel()], device=device)
    dist.broadcast(length, root_rank, group=group)
    here = dist.get_rank() == root_rank
    data = own if here else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, root_rank, group=group)
    if not here:
        optimizer.load_state_dict(state_from_bytes(data.cpu()))


def _refuse(
    optimizer: Any, op: Any, predivide: float, num_groups: int, groups: Any, as_dense: bool
) -> None:
    """What cannot be done, with the reason."""
    if isinstance(optimizer, AveragingOptimizer):
        raise ValueError("this optimizer is distributed already")
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"DistributedOptimizer takes a torch.optim.Optimizer, got {kind}")
    if isinstance(optimizer, ExchangingOptimizer):
        raise ValueError(f"{type(optimizer).__name__} exchanges by itself: use it as it is")
    if op == Adasum:
        raise ValueError("Adasum is not there: use Average, with a learning rate for it")
    if op not in (Average, Sum):
        raise ValueError(f"op must be tw.horovod.Average or tw.horovod.Sum, got {op!r}")
    if predivide != 1.0:
        raise ValueError(
            "gradient_predivide_factor keeps sums of float16 from overflowing, which is seen to "
            "without it: leave it out"
        )
    if num_groups or groups is not None:
        raise ValueError("groups: all gradients are exchanged together: leave it out")
    if as_dense:
        raise ValueError(
            "sparse_as_dense: sparse gradients are not exchanged: make embeddings with sparse=False"
        )


def _named(optimizer: Optimizer, given: NamedParameters | None) -> dict[str, Tensor]:
    """The parameters of an optimizer by name, in an order that is the same on all ranks."""
    groups = [group["params"] for group in optimizer.param_groups]
    if given is None:
        return {f"{i}.{j}": p for i, group in enumerate(groups) for j, p in enumerate(group)}
    own = {id(p) for group in groups for p in group}
    pairs = _pairs(given)
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("named_parameters: a name comes twice, and names must be unique")
    names = {id(p): name for name, p in reversed(pairs)}  # the first of several
    unnamed = len(own - names.keys())
    if unnamed:
        raise ValueError(
            f"named_parameters: {unnamed} of the optimizer's {len(own)} parameters are not among "
            "them: pass model.named_parameters() of the model that it trains"
        )
    return {name: p for name, p in pairs if id(p) in own and names[id(p)] == name}


def _counting(gradients: Gradients, name: str) -> Callable[[Tensor], None]:
    reference = weakref.ref(gradients)  # the parameters outlive the optimizer

    def count(_: Tensor) -> None:
        found = reference()
        if found is not None:
            found.count(name)

    return count


def _in_horovods_style(compression: Any) -> TypeGuard[HorovodCompression]:
    if isinstance(compression, Compressor):
        return False
    if not hasattr(compression, "compress") or not hasattr(compression, "decompress"):
        return False
    if isinstance(compression, type) and not isinstance(
        inspect.getattr_static(compression, "compress"), staticmethod | classmethod
    ):
        raise TypeError(
            f"{compression.__name__}.compress must be a static method: or pass an object of it"
        )
    return True
