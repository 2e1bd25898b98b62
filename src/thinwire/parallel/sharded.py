"""What carries the gradients of a sharded model (FSDP2).

FSDP reduces the gradients of one module after the other, each as soon as backward has passed it:

    FSDP              copies the gradients of a module into one buffer, a row for each rank
    GradientScatter   in place of its reduce-scatter: names -> plan -> exchanges; own row <- average
    ReplicaAverage    with HSDP, after its reduce-scatter: the same for the own row and its replicas
    end of backward   the step is committed

FSDP waits for each of them, so errors come out of `backward()` as themselves.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives.allreduce import op_name
from thinwire.collectives.scatter import SCATTER
from thinwire.compressors import Cast, Chain, Compressor, JointCompressor, Quantize
from thinwire.errors import MemoryLimitError
from thinwire.feedback import EF14, Feedback, NoFeedback
from thinwire.feedback import parse as parse_feedback
from thinwire.feedback.base import Remembering
from thinwire.feedback.state import stored_bytes
from thinwire.formatting import show_bytes
from thinwire.parallel.configuration import Configuration
from thinwire.parallel.model import described
from thinwire.parallel.optimizer_watch import OptimizerWatch
from thinwire.parallel.plan import Piece, PlannedExchange, PlannedUnit, Planner, check_granularity
from thinwire.parallel.replicas import ReplicaCheck
from thinwire.parallel.shards import NamedGroup, NamedShard, stretches
from thinwire.parallel.step import ExchangeStep, raise_first
from thinwire.parallel.weights import TorchMemory, WeightGather, WeightSettings, explanation
from thinwire.parallel.wire import Layout, Wire
from thinwire.policies.base import Measured, Policy
from thinwire.reducer.saved_state import RankState, ReducerState, required, states_to_load
from thinwire.telemetry import span
from thinwire.torch_internals import (
    backward_pass,
    drop_gradients,
    has_own_collectives,
    queue_callback,
    restore_all_reduce,
    restore_collectives,
)


def attach_sharded(
    model: nn.Module,
    groups: Sequence[NamedGroup],
    configuration: Configuration,
    granularity: str,
    replicas: dist.ProcessGroup | None,
    weights: WeightSettings | None,
) -> "ShardedWire":
    """Compress what a model exchanges that `fully_shard` was applied to.

    Args:
        configuration: whose group is that of the shards, or of the replicas.
        replicas: their group, if what is averaged over them is compressed.
        weights: how parameters are sent; None leaves that to FSDP.
    """
    if replicas is None:
        scatter = ScatterWire(for_scatter(configuration), groups, weights)
        # Each tensor by itself: in several joined ones a rank's rows would not lie together.
        check_granularity(granularity)
        planner = scatter._planner("tensor")
        hook: ShardedHook = ScatterHook(scatter, groups, planner)
        wire: ShardedWire = scatter
    else:
        wire = ReplicaWire(configuration, groups)
        hook = ReplicaHook(wire, groups, wire._planner(granularity))
    wire._learn_shards(model)
    wire._take_momentum([shard.place.parameter for group in groups for shard in group.shards])
    try:
        hook.attach()
    except BaseException:
        wire.detach()
        raise
    wire._hook = hook
    return wire


def sharded_wire_of(model: Any) -> "ShardedWire | None":
    """The wire of a sharded model, if it has one."""
    for module in model.modules():
        hook = getattr(module, ATTRIBUTE, None)
        if hook is not None:
            wire: ShardedWire = hook.wire
            return wire
    return None


def for_scatter(configuration: Configuration) -> Configuration:
    """The same with what a reduce-scatter can carry."""
    options, policy = configuration.options, configuration.chooser
    if options.nodes is not None:
        raise ValueError(
            "nodes= is for gradients that are averaged on all ranks; FSDP scatters them. Shard "
            "inside of nodes and give the group between them as replicate= instead"
        )
    compressors = policy.compressors if isinstance(policy, Policy) else ()
    feedback = feedback_for_scatter(compressors, configuration.feedback)
    return replace(configuration, feedback=feedback, options=replace(options, collective=SCATTER))


def feedback_for_scatter(
    compressors: Sequence[Compressor], feedback: Feedback | str
) -> Feedback | str:
    """The feedback of gradients that are scattered, "auto" for what suits each compressor; refuses
    what needs averages on all ranks."""
    for each in compressors:
        if isinstance(each, JointCompressor):
            raise ValueError(
                f"{each} finds with all ranks together what is sent of a whole matrix, and FSDP "
                "scatters parts of it. Use a quantizer ('quantize:4') or a sparsifier "
                "('topk:0.01'), or shard inside of nodes and use it between replicas "
                "(replicate=)"
            )
    auto = isinstance(feedback, str) and feedback.strip().lower() == "auto"
    if auto and compressors and not any(map(_needs_feedback, compressors)):
        feedback = NoFeedback()
    elif not auto and isinstance(feedback, str):
        feedback = parse_feedback(feedback)
    if isinstance(feedback, Feedback) and not isinstance(feedback, NoFeedback | EF14):
        raise ValueError(
            f"{feedback} needs averages on all ranks, and FSDP scatters them: use feedback='ef14' "
            "or 'none'"
        )
    return feedback


def _needs_feedback(compressor: Compressor) -> bool:
    """Whether what it leaves out is too much to lose.

    A residual is that of the whole gradient, on each rank: as much memory as FSDP saves. Four bits
    and more do without.
    """
    stages = compressor.stages if isinstance(compressor, Chain) else (compressor,)
    return any(
        each.wants_residual
        and not isinstance(each, Cast)
        and not (isinstance(each, Quantize) and each.bits >= 4)
        for each in stages
    )


ATTRIBUTE = "_thinwire_sharded_hook"  # of the modules of a model that has one


class ShardedPass(ExchangeStep):
    """The exchanges of one backward pass.

    Args:
        number: of the pass, -1 outside of one.
    """

    def __init__(self, wire: Wire, number: int) -> None:
        super().__init__(wire)
        self.number = number
        self.waited = 0.0  # seconds

    def wait_until_ended(self) -> None:
        for handle in self.handles:
            handle.wait_until_ended()


class ShardedHook(ABC):
    """Exchanges the gradients of a sharded model's modules, and tells its wire of each step.

    Args:
        wire: of the model.
        groups: its modules.
        planner: of the exchanges of a module.
    """

    def __init__(self, wire: "ShardedWire", groups: Sequence[NamedGroup], planner: Planner) -> None:
        self.wire, self._groups, self._planner = wire, groups, planner
        self._reducer = wire._reducer
        self._pass: ShardedPass | None = None
        self._ended = time.perf_counter()
        trained = {shard.name: shard.place.parameter for g in groups for shard in g.trained}
        self._watch: OptimizerWatch | None = OptimizerWatch(trained, wire)

    @property
    def layout(self) -> Layout:
        return []  # exchanges follow from the modules

    def replay(self, layout: Layout) -> None:
        return None

    def attach(self) -> None:
        for group in self._groups:
            if has_own_collectives(group.module):
                raise ValueError(
                    f"{group.title} has collectives or an all-reduce hook of its own already: "
                    "attach to a model without, or detach() the wire that it has"
                )
        for group in self._groups:
            self._set(group)
            setattr(group.module, ATTRIBUTE, self)

    @abstractmethod
    def _set(self, group: NamedGroup) -> None:
        """Have FSDP call this for a module."""

    def detach(self) -> None:
        for group in self._groups:
            restore_collectives(group.module)
            restore_all_reduce(group.module)
            delattr(group.module, ATTRIBUTE)
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    # A backward pass.

    def exchange(self, tensors: Mapping[str, Tensor]) -> None:
        """Average the gradients of one module in place."""
        here = self._begin()
        try:
            for planned in self._planned(tensors):
                here.send(planned, tensors)
        except BaseException as error:
            here.fail(error, next(iter(tensors.values())))
        begin = time.perf_counter()
        with span("wait"):
            here.wait()
        here.waited += time.perf_counter() - begin
        if here.errors:
            self.abandon()
            raise_first(here.errors)
        if here.number < 0:
            self._finish()

    def abandon(self) -> None:
        """The pass ends with an error: nothing of it may become part of the next one."""
        self._pass = None
        for group in self._groups:
            drop_gradients(group.module)

    def _planned(self, tensors: Mapping[str, Tensor]) -> list[PlannedExchange]:
        pieces = [Piece(name, tensor.nbytes, tensor.dtype) for name, tensor in tensors.items()]
        return self._planner.add(pieces, last=True)

    def _begin(self) -> ShardedPass:
        """The pass that is under way."""
        number, here = backward_pass(), self._pass
        if here is not None and here.number == number:
            return here
        if here is not None:  # ended by an error or Ctrl-C: nothing of it may still be under way
            here.wait_until_ended()
        if self._watch is not None and self._watch.done:
            self._stop_watching()
        here = self._pass = ShardedPass(self.wire, number)
        self.wire._begin_step()
        here.step = self.wire.step
        self._planner.begin()
        self._check(here)
        if number >= 0:
            queue_callback(self._finish)
        return here

    @abstractmethod
    def _check(self, here: ShardedPass) -> None:
        """Compare what should be the same on ranks, if that is due."""

    def _finish(self) -> None:
        done, self._pass = self._pass, None
        if done is None:
            return
        end = time.perf_counter()
        ledger = self._reducer.ledger
        ledger.add_seconds("waiting", done.waited)
        ledger.fold()
        ledger.end_step()
        done.commit()
        before, self._ended = self._ended, end
        measured = Measured(end - before, 0.0, done.waited, *done.totals())
        self.wire._choices.end(self.wire.step, measured)
        self.wire._end_step()


class ShardedWire(Wire, ABC):
    """The connection of a sharded model to the other ranks.

    What is remembered of a parameter is kept as it lies in FSDP's buffers, and saved as it lies in
    the parameter, so that another number of ranks can go on with it.
    """

    _advice = '"quantize:4"'

    def __init__(self, configuration: Configuration, groups: Sequence[NamedGroup]) -> None:
        super().__init__(configuration)
        self._groups = groups
        self._shards = {shard.name: shard for group in groups for shard in group.shards}

    def _learn_shards(self, model: nn.Module) -> None:
        """Choose for all that is trained."""
        trained = {name: shard for name, shard in self._shards.items() if shard.trained}
        like = {name: self._like(shard) for name, shard in trained.items()}
        if not like:
            raise ValueError("no parameter of this model is trained: there is nothing to exchange")
        parameters = {name: shard.place.parameter for name, shard in trained.items()}
        infos = {
            name: info._replace(shape=like[name].shape, dtype=like[name].dtype)
            for name, info in described(model, parameters).items()
        }
        self._learn_tensors(infos, like)

    def _like(self, shard: NamedShard) -> Tensor:
        """A tensor of the shape and type of what is remembered of a parameter, without memory."""
        return torch.zeros((), dtype=shard.place.dtype, device=shard.place.data.device).expand(
            self._shape(shard)
        )

    @abstractmethod
    def _shape(self, shard: NamedShard) -> torch.Size:
        """Of what a state holds of a parameter."""

    @abstractmethod
    def _saved(self, shard: NamedShard, values: Tensor) -> Tensor:
        """What a state holds of a parameter, from what is kept of it."""

    @abstractmethod
    def _kept(self, shard: NamedShard, values: Tensor) -> Tensor:
        """The inverse."""

    def _reducer_state(self) -> dict[str, Any]:
        state = super()._reducer_state()
        state["tensors"] = {
            name: {
                part: self._saved(self._shards[name], values) if part != "steps" else values
                for part, values in kept.items()
            }
            for name, kept in state["tensors"].items()
        }
        return state

    def _adopt(self, state: ReducerState) -> None:
        tensors = {
            name: (
                {part: self._kept(self._shards[name], values) for part, values in kept.items()},
                steps,
            )
            for name, (kept, steps) in state.tensors.items()
        }
        super()._adopt(replace(state, tensors=tensors))

    def stateful(self, path: Any = None) -> Any:
        from thinwire.parallel.checkpoint import LocalCheckpoint

        return LocalCheckpoint(self, path)

    def detach(self) -> None:
        """Let the model exchange its gradients as FSDP does by itself.

        What is remembered stays here: to attach anew and go on with it, load this wire's state_dict
        into the new one.
        """
        super().detach()


# FSDP


class ScatterWire(ShardedWire):
    """Of a model whose gradients are reduced and scattered over all ranks.

    Args:
        weights: how parameters are sent; None leaves that to FSDP.
    """

    def __init__(
        self,
        configuration: Configuration,
        groups: Sequence[NamedGroup],
        weights: WeightSettings | None = None,
    ) -> None:
        super().__init__(configuration, groups)
        self._weights = weights
        options = replace(configuration.options, collective="auto")
        self.gathers: dict[str, WeightGather] = {}
        if weights is not None:
            ledger = self._reducer.ledger
            self.gathers = {
                group.title: WeightGather(group, weights, options, ledger) for group in groups
            }

    def _learn_shards(self, model: nn.Module) -> None:
        super()._learn_shards(model)
        self._check_memory()

    def _check_memory(self) -> None:
        """Refuse to keep more than the limit on extra memory allows."""
        limit = self._configuration.options.max_bytes
        copies = sum(gather.num_bytes for gather in self.gathers.values())
        if limit is not None and self._residual_bytes() + copies > limit:
            raise MemoryLimitError(
                f"residuals of whole gradients take {show_bytes(self._residual_bytes())} and a "
                f"copy of the parameters {show_bytes(copies)} on each rank, the limit is "
                f"{show_bytes(limit)}. Raise max_bytes, use feedback='none' or "
                "'ef14:storage=int8', or leave out weights="
            )

    def _residual_bytes(self) -> int:
        """Of all tensors that a policy chooses for: what it may come to."""
        feedback = self._reducer.feedback
        if not isinstance(feedback, Remembering):
            return 0
        chosen = [self._shards[name] for name in self._choices.tensors]
        return sum(
            stored_bytes(feedback.storage, each.count * each.padded_numel, each.place.dtype)
            for each in chosen
        )

    def _shape(self, shard: NamedShard) -> torch.Size:
        return shard.place.shape

    def _saved(self, shard: NamedShard, values: Tensor) -> Tensor:
        return shard.whole(values)

    def _kept(self, shard: NamedShard, values: Tensor) -> Tensor:
        return shard.rows(values)

    def reset(self) -> None:
        """Forget what was left out so far, of gradients and of parameters."""
        super().reset()
        for gather in self.gathers.values():
            gather.load(None)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["weights"] = {title: gather.state() for title, gather in self.gathers.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        who = type(self).__name__
        states = states_to_load(who, state, self._reducer.options.group)
        kept = states[0].get("weights", {}) if len(states) == 1 else {}
        for title, gather in self.gathers.items():
            if title in kept:
                gather.check(kept[title])
        super().load_state_dict(state)
        for title, gather in self.gathers.items():
            gather.load(kept.get(title))

    def explain(self) -> str:
        lines = [super().explain()]
        feedback = self._reducer.feedback
        if isinstance(feedback, Remembering):
            where = "the host's memory" if feedback.storage == "host" else "memory"
            lines.append(
                f"Residuals are those of whole gradients, not of shards: "
                f"{show_bytes(self._residual_bytes())} of {where} on each rank "
                "(feedback='ef14:storage=int8' takes a quarter of float32's, 'none' nothing)."
            )
        if self._weights is not None:
            lines.append(explanation(list(self.gathers.values()), self._weights))
        return "\n".join(lines)


class ScatterHook(ShardedHook):
    """Takes the place of FSDP's reduce-scatter, and of its all-gather if parameters are
    compressed."""

    wire: ScatterWire

    def _check(self, here: ShardedPass) -> None:
        every = self.wire._configuration.check_every
        gathers = self.wire.gathers.items()
        held = {title: g.common for title, g in gathers if g.common is not None}
        if held and every and here.step % every == 0:
            check = ReplicaCheck(held, replace(self._reducer.options, collective="auto"))
            here.follow(check.start(async_op=True), set())

    def _set(self, group: NamedGroup) -> None:
        module: Any = group.module
        module.set_custom_reduce_scatter(GradientScatter(self, group))
        gather = self.wire.gathers.get(group.title)
        if gather is not None:
            module.set_custom_all_gather(gather)

    def _planned(self, tensors: Mapping[str, Tensor]) -> list[PlannedExchange]:
        return [  # what is sent uncompressed, too
            PlannedExchange(
                tuple(
                    PlannedUnit((name,), unit.compressor)
                    for unit in planned.units
                    for name in unit.names
                )
            )
            for planned in super()._planned(tensors)
        ]


class GradientScatter(TorchMemory):
    """The reduce-scatter of one module, as FSDP calls it."""

    def __init__(self, hook: ScatterHook, group: NamedGroup) -> None:
        self._hook, self._group = hook, group

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        weight = self._weight(op, size)
        rows = input_tensor.view(size, -1)
        self._hook.exchange(_by_name(self._group, rows))
        output_tensor.copy_(rows[rank])
        if weight != 1:
            output_tensor.mul_(weight)

    def _weight(self, op: Any, size: int) -> int:
        try:
            name = op_name(op)
        except ValueError:
            name = ""
        if name not in ("AVG", "SUM"):
            self._hook.abandon()
            raise ValueError(
                f"{self._group.title} reduces with {op}, as a gradient divide factor was set: call "
                "set_force_sum_reduction_for_comms(True) on each FSDP module, then FSDP divides by "
                "itself"
            )
        return size if name == "SUM" else 1


# HSDP


class ReplicaWire(ShardedWire):
    """Of a model whose shards are averaged over replicas: its group is that of a shard's
    replicas."""

    def _shape(self, shard: NamedShard) -> torch.Size:
        return shard.place.own

    def _saved(self, shard: NamedShard, values: Tensor) -> Tensor:
        return shard.own(values)

    def _kept(self, shard: NamedShard, values: Tensor) -> Tensor:
        return shard.padded(values)

    # States are those of all ranks, of all replicas and all shards.

    @property
    def _state_group(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        first = self._groups[0].shards[0]
        state["shard"] = [dist.get_rank(self._reducer.options.group), first.index, first.count]
        return state

    def _remembered_by(self, states: Sequence[RankState]) -> Sequence[RankState]:
        if len(states) == 1:
            return super()._remembered_by(states)
        for state in states:
            required(type(self).__name__, state, ("shard",))
        index, count = self._groups[0].shards[0].index, self._groups[0].shards[0].count
        if all(state["shard"][2] == count for state in states):
            return [state["reducer"] for state in states if state["shard"][1] == index]
        replicas: dict[int, dict[int, Any]] = {}
        for state in states:
            replica, shard, _ = state["shard"]
            replicas.setdefault(replica, {})[shard] = state["reducer"]
        return [
            self._cut_anew([parts[i] for i in sorted(parts)])
            for _, parts in sorted(replicas.items())
        ]

    def _cut_anew(self, parts: Sequence[RankState]) -> RankState:
        """What a replica remembers of this rank's shard, from what its ranks do of theirs; what
        joint compressors find again is of shards of other shapes, and forgotten."""
        tensors = {}
        for name, kept in parts[0]["tensors"].items():
            shard = self._shards.get(name)
            if shard is None:  # which is refused later
                tensors[name] = kept
                continue
            tensors[name] = {
                part: values
                if part == "steps"
                else shard.part(shard.joined([each["tensors"][name][part] for each in parts]))
                for part, values in kept.items()
            }
        return {**parts[0], "tensors": tensors, "recalled": {}}


class ReplicaHook(ShardedHook):
    """Averages, after FSDP's reduce-scatter, what replicas of a shard have come to."""

    def _set(self, group: NamedGroup) -> None:
        module: Any = group.module
        module.set_all_reduce_hook(ReplicaAverage(self, group))

    def _check(self, here: ShardedPass) -> None:
        every = self.wire._configuration.check_every
        # Nobody else looks whether replicas begin alike.
        if here.step == 1 or (every and here.step % every == 0):
            shards = {
                s.name: s.place.parameter.to_local() for group in self._groups for s in group.shards
            }
            check = ReplicaCheck(shards, self._reducer.options)
            here.follow(check.start(async_op=True), set())


class ReplicaAverage:
    """The average of one module's shard over replicas, as FSDP calls it."""

    def __init__(self, hook: ReplicaHook, group: NamedGroup) -> None:
        self._hook, self._group = hook, group

    def __call__(self, reduced: Tensor) -> None:
        found = _by_name(self._group, reduced[None])
        shapes = {shard.name: shard.place.padded for shard in self._group.shards}
        self._hook.exchange(
            {name: piece[0].view(shapes.get(name, piece[0].shape)) for name, piece in found.items()}
        )


def _by_name(group: NamedGroup, rows: Tensor) -> dict[str, Tensor]:
    """The gradients in a buffer.

    Where some parameters got none in this pass nobody tells which: then the buffer is one tensor
    without a known name, which is sent uncompressed.
    """
    found = stretches(group.trained)
    if not found or found[-1][1].stop != rows.shape[1]:
        return {f"{group.title} (some of its parameters)": rows}
    return {shard.name: rows[:, where] for shard, where in found}
