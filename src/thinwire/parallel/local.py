"""Local steps: optimizers work alone, and now and then the ranks agree on common parameters.

    each step       theta = optimizer(theta, this rank's own gradients)
    each round      D     = mean over ranks of C(Theta - theta)
                    Theta = outer(Theta, D)
                    theta = Theta, or a mixture of both

With `keep`, a rank goes on from Theta - keep * e instead, e being what it has not sent yet. With
`gain`, differences are multiplied by a factor that is measured for each tensor (`noise.py`).

Theta are the parameters that all ranks hold, theta those that a rank trains. What is exchanged is
what the optimizer has done, so it needs to know nothing of compression. Rounds of one step are
compressed updates; longer ones are local SGD, DiLoCo and their relatives, which `thinwire.methods`
has recipes of.
"""

import logging
import statistics
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from thinwire import check
from thinwire.collectives.allgather import broadcast
from thinwire.collectives.exchange import Details
from thinwire.collectives.options import Group, NodesGiven, Timeout
from thinwire.errors import ReplicaError, ThinwireWarning
from thinwire.feedback import DGC, Feedback, Vote
from thinwire.formatting import plural, show_bytes
from thinwire.frames.code import wide_type
from thinwire.methods import LocalRecipe, LocalSGD, OuterSGD, method_of
from thinwire.optim.base import ExchangingOptimizer
from thinwire.parallel.averaging import AverageHandle, AveragingStep, AveragingWire, check_together
from thinwire.parallel.buffers import BUFFER, FLAGS, ModelBuffers, check_alike, mean, move
from thinwire.parallel.configuration import (
    CompressorGiven,
    Configuration,
    Scaler,
    check_scaler,
)
from thinwire.parallel.ddp import hook_of
from thinwire.parallel.model import described, parameter_names
from thinwire.parallel.noise import NoiseGain
from thinwire.parallel.optimizers import KnownOptimizer
from thinwire.parallel.plan import Piece, check_granularity
from thinwire.parallel.replicas import ReplicaCheck, listed
from thinwire.parallel.stats import Stats, stats_of
from thinwire.policies.base import OptimizerKind, TensorInfo
from thinwire.policies.schedule import Warmup
from thinwire.reducer.saved_state import required, states_to_load
from thinwire.torch_internals import ignored_by_ddp, is_dtensor, is_fsdp1, uncompiled

if TYPE_CHECKING:
    from thinwire.parallel.checkpoint import LocalCheckpoint

log = logging.getLogger("thinwire")
PROGRESS = "(progress)"  # a tensor that says which ranks have worked, and which have finished
NOISE = "(noise)"  # a tensor that the noise of gradients is measured with
LOCAL_KEYS = (
    *("inner_steps", "unsent", "skipped", "shared", "bases", "outer", "parameters"),
    *("buffers", "common_buffers", "inner", "noise", "round"),
)

# Optimizers and DDP models that take local steps.
FOLLOWED: weakref.WeakSet[Optimizer | nn.Module] = weakref.WeakSet()

OuterGiven = OuterSGD | Callable[[list[Tensor]], Optimizer]


class LocalStats(Stats):
    """What `LocalSteps.stats` returns: that of a wire, whose steps are exchanges, and more.

    Keys:
        inner_steps: steps of the optimizer, taken or skipped by a GradScaler.
        rounds: times that all parameters have been exchanged.
        skipped_rounds: exchanges that were left out because something was not finite.
        bytes_per_inner_step, bytes_per_round: that this rank sent.
    """

    inner_steps: int
    rounds: float
    skipped_rounds: int
    bytes_per_inner_step: float
    bytes_per_round: float


class LocalSteps(AveragingWire):
    """Trains a model with optimizer steps of each rank's own, and exchanges what they have done.

    The training loop stays as it is: after every `every` calls of ``optimizer.step()`` the
    difference between the common parameters and this rank's is averaged over the ranks,
    compressed, and all ranks go on from the same parameters. Gradients are not exchanged at all: a
    DistributedDataParallel model is kept from it until `detach`.

    All ranks call ``finish()`` when they have no more data (or use this as a context manager, which
    does so): it brings the last round home, and ranks that have more data than others are not left
    alone. The optimizer's own state (moments) stays with each rank.

    Errors come out of ``optimizer.step()``; parameters and residuals are then as before the
    exchange.

    Args:
        model: a module, or one in DistributedDataParallel. Ranks that come with different
            parameters or buffers, trained or not, start from those of the first rank of the group,
            but for what DDP was told to ignore.
            Floating-point buffers are averaged from when they first change; others stay with each
            rank.
        optimizer: that trains it; or several, which all step once in each step, the last of them
            at its end.
        compressor: of the differences: as for `thinwire.attach`, or one of the methods for local
            steps or its spec ("adam-update", "diloco", "sparseloco:every=30", see `thinwire
            methods`), which brings the settings below with it, as far as they are not given.
        every: steps in a round; 1 by default.
        outer: how the common parameters are moved by the mean difference: a `thinwire.OuterSGD`, or
            a function from a list of tensors to a torch optimizer (that of the tensors; one for
            each fragment); by default they are the average of the ranks' parameters.
        warmup: steps at the beginning after each of which all is averaged, uncompressed.
        fragments: parts of the model that are exchanged one after the other, each once in `every`
            steps.
        overlap: steps that go on while an exchange is under way.
        mixing: share of the local parameters that stays when the common ones arrive.
        keep: share of what a rank has not sent yet (its residual) that its own parameters have
            already. Without it (0) a rank trains on parameters that lack what nobody has sent, of
            its own steps too. More makes its gradients less stale, and the ranks differ by their
            residuals.
        gain: multiply what is averaged by how much larger ranks' gradients are than their mean,
            measured for each tensor, at most sqrt(ranks). For Adam and its like, which divide by
            the size of the gradients they see: those of one rank are noisier, and its steps
            shorter, than those of an optimizer that sees the mean.
        average: "world" or "senders", as for `thinwire.Reducer`.
        feedback, collective, nodes, max_bytes, timeout, seed: as for `thinwire.attach`.
        granularity: "tensor" compresses each tensor by itself, "bucket" all that are exchanged
            together as one.
        min_numel: tensors with fewer than two dimensions or with fewer elements are sent
            uncompressed, 1024 by default; 0 compresses all.
        exclude: patterns of names of parameters that are sent uncompressed.
        scaler: the GradScaler, if there is one. It may skip a step on one rank alone: then that
            counts as a step in which nothing has changed.
        group: a process group; by default that of a DDP model, or the default one.
        check_every: compare the common parameters of all ranks every so many exchanges; 0 for
            never.
        measure_every: exchanges between two measurements of the compression error; 0 for never.

    Attributes:
        step: exchanges so far.
        inner_steps: steps of the optimizer so far.
        finished: whether `finish` has been called since the last of them.
        outer: the outer optimizers, one for each fragment, from the first step on; none for
            averages.

    Example:
        with tw.LocalSteps(model, optimizer, "diloco:every=100"):
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    """

    _all_or_nothing = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        compressor: CompressorGiven = "none",
        *,
        every: int | None = None,
        outer: OuterGiven | None = None,
        warmup: int | None = None,
        fragments: int | None = None,
        overlap: int | None = None,
        mixing: float | None = None,
        keep: float | None = None,
        gain: bool | None = None,
        average: str | None = None,
        feedback: Feedback | str = "auto",
        granularity: str = "tensor",
        collective: str = "auto",
        nodes: NodesGiven = None,
        min_numel: int | None = None,
        exclude: str | Sequence[str] = (),
        scaler: Scaler | None = None,
        group: Group = None,
        max_bytes: int | str | None = None,
        timeout: Timeout = None,
        seed: int = 0,
        check_every: int = 0,
        measure_every: int = 10,
    ) -> None:
        if scaler is not None:
            check_scaler(scaler)
        self._optimizers = _checked_optimizers(optimizer)
        self._model = _checked_model(model)
        ddp = self._model if isinstance(self._model, DistributedDataParallel) else None
        self._live = _trained(self._model, self._optimizers)
        self._others = [p for p in _parameters(self._optimizers) if not p.requires_grad]
        self._count = len(self._live) + len(self._others)  # of the optimizers, as last looked at
        module: nn.Module = self._model if ddp is None else ddp.module
        ignored = set() if ddp is None else ignored_by_ddp(ddp)
        self._ignored = ignored.difference(map(id, self._live.values()))
        self._buffers = ModelBuffers(module, ignored)
        check_granularity(granularity)
        self._together = granularity == "bucket"
        given = {
            "every": every,
            "warmup": warmup,
            "fragments": fragments,
            "overlap": overlap,
            "mixing": mixing,
            "keep": keep,
            "gain": gain,
            "average": average,
            "min_numel": min_numel,
        }
        recipe, chooser = _recipe_of(compressor, given, feedback)
        if recipe is not None:
            feedback = recipe.feedback
            collective = recipe.collective if collective == "auto" else collective
        self._settings = recipe or _plain_recipe(given)
        self._outer_given: OuterGiven = _checked_outer(
            self._settings.outer if outer is None else outer
        )
        self.outer: list[Optimizer] = []
        super().__init__(
            Configuration.of(
                chooser,
                ddp.process_group if group is None and ddp is not None else group,
                feedback=feedback,
                collective=collective,
                nodes=nodes,
                average=self._settings.average,
                min_numel=self._settings.min_numel or None,
                exclude=exclude,
                scaler=None,
                optimizer=None,
                seed=seed,
                max_bytes=max_bytes,
                timeout=timeout,
                check_every=check_every,
                measure_every=measure_every,
            )
        )
        _check_feedback(self._reducer.feedback, self._settings.keep)
        self._noise: NoiseGain | None = None
        if self._settings.gain:
            _check_divides(self._optimizers)
            self._noise = NoiseGain(list(self._live), seed)
        self._configuration.check_exclude(self._live, "parameter")
        if self._settings.warmup:
            self._warm_up()
        self._fragments = _dealt(self._live, self._buffers.names, self._settings.fragments)
        self._learn(module)
        self.inner_steps = 0
        self.finished = False
        self._unsent = [0] * len(self._fragments)  # steps since the last exchange of each began
        self._skipped = 0
        self._all_finished = False  # all ranks, in the last exchange
        self._shared: dict[str, Tensor] = {}  # Theta, from the first step on
        self._bases: dict[str, Tensor] = {}  # what steps began from, where that is not Theta
        self._differences: dict[str, Tensor] = {}  # scratch buffers
        self._round: Round | None = None
        self._unsent_buffers = False  # that have changed, as the last exchange found
        self._removals: list[Callable[[], None]] = []
        self._connect(ddp, scaler)

    # Coming to a model and leaving it.

    def _warm_up(self) -> None:
        configuration = self._configuration
        policy = configuration.policy_of(self._live)
        self._configuration = replace(configuration, chooser=Warmup(self._settings.warmup, policy))

    def _learn(self, module: nn.Module) -> None:
        """Choose for all tensors, and have compiled what that takes."""
        infos = described(module, cast("dict[str, nn.Parameter]", self._live))
        tensors = {n: info._replace(dtype=wide_type(info.dtype)) for n, info in infos.items()}
        likes = {name: _like(p) for name, p in self._live.items()}
        if self._together:
            check_together("granularity='bucket'", likes)
        for name, buffer in self._buffers.held(self._buffers.names).items():
            likes[BUFFER + name] = _like(buffer)
        likes[PROGRESS] = torch.zeros(2, device=self._device)
        if self._buffers.names:
            likes[FLAGS] = torch.zeros(2, len(self._buffers.names), device=self._device)
        if self._noise is not None:
            likes[NOISE] = torch.zeros(self._noise.shape, device=self._device)
        for name, like in likes.items():
            tensors.setdefault(name, TensorInfo(name, like.shape, like.dtype))
        self._learn_tensors(tensors, likes)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._live.values())).device

    def _chosen_for(self, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
        return super()._chosen_for([tensor for tensor in tensors if tensor.name in self._live])

    def _connect(self, ddp: DistributedDataParallel | None, scaler: Scaler | None) -> None:
        # In a compiled optimizer.step() they run as they are.
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        for optimizer in self._optimizers:
            FOLLOWED.add(optimizer)
            self._removals.append(lambda own=optimizer: FOLLOWED.discard(own))  # type: ignore[misc]
            self._removals.append(optimizer.register_step_pre_hook(before).remove)
        last = self._optimizers[-1]
        self._removals.append(last.register_step_post_hook(after).remove)
        if ddp is not None:
            FOLLOWED.add(ddp)
            self._removals.append(lambda: FOLLOWED.discard(ddp))
            self._removals += _without_exchange(ddp)
            log.info(
                "DDP's own exchange of gradients is switched off: LocalSteps exchanges what the "
                "optimizer has done"
            )
        if scaler is not None:
            self._removals.append(self._count_attempts(scaler))

    def _count_attempts(self, scaler: Any) -> Callable[[], None]:
        """A step that the scaler skips on this rank is a step all the same: others take it."""
        original, before_us = scaler.step, vars(scaler).get("step")

        def step(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
            before = self.inner_steps
            result = original(optimizer, *args, **options)
            ours = optimizer is self._optimizers[-1] and not self._detached
            if ours and self.inner_steps == before:
                self._before_step()
                self._after_step()
            return result

        def remove() -> None:
            if vars(scaler).get("step") is step:  # else others have come after us
                del scaler.step
                if before_us is not None:
                    scaler.step = before_us

        scaler.step = step
        return remove

    def __repr__(self) -> str:
        state = "detached" if self._detached else f"{self.inner_steps} steps"
        return (
            f"<thinwire local steps: {self._reducer!r}, {len(self._live)} tensors, every "
            f"{self._settings.every}, {state}>"
        )

    def __enter__(self) -> "LocalSteps":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.detach()

    def detach(self) -> None:
        """Leave the model: the optimizer's steps are no longer followed, and a DDP model exchanges
        its gradients again.

        Parameters stay as they are on this rank: call `finish` before, on all ranks, for common
        ones.
        """
        if self._detached:
            return
        super().detach()
        for remove in reversed(self._removals):
            remove()
        self._removals = []

    # Steps.

    def _check_optimizers(self, whole: bool) -> None:
        """Refuse parameters that nobody knows.

        Args:
            whole: look at each of them, also where as many are there as before.
        """
        count = sum(len(group["params"]) for o in self._optimizers for group in o.param_groups)
        if not (whole or count != self._count or any(p.requires_grad for p in self._others)):
            return
        self._count = count
        known = {id(p) for p in self._live.values()}
        known.update(id(p) for p in self._others if not p.requires_grad)
        new = [p for p in _parameters(self._optimizers) if id(p) not in known]
        if new:
            raise ValueError(
                f"the optimizer trains {plural(len(new), 'tensor')} that it did not train when "
                "LocalSteps was made (added to it, or frozen at that time), and nobody would "
                "exchange them: detach, and make LocalSteps anew"
            )

    def _step_details(self) -> Details:
        """What ranks must agree in, besides the tensors."""
        outer = self._outer_given
        moved = str(outer) if isinstance(outer, OuterSGD) else "an optimizer"
        settings = self._settings
        words = (
            f"every {settings.every}, {settings.fragments} fragments, overlap {settings.overlap}, "
            f"mixing {settings.mixing:g}, keep {settings.keep:g}, "
            f"gain {'measured' if settings.gain else 'none'}, {moved}"
        )
        return (("local steps", words),)

    def _exact(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Flags, sums of gradients and buffers, where nodes would divide what is uncompressed."""
        dense = [piece for piece in pieces if self._compressor_of(piece.name) is None]
        if not self._reducer.divides(sum(piece.num_bytes for piece in dense)):
            return []
        return [piece for piece in dense if piece.name not in self._live]

    def _before_step(self, *_: Any) -> None:
        if not self._shared:
            with torch.no_grad():
                self._start()

    def _after_step(self, *_: Any) -> None:
        with torch.no_grad():
            self.inner_steps += 1
            self.finished = False
            self._unsent = [steps + 1 for steps in self._unsent]
            due = min(self._unsent) >= self._period
            self._check_optimizers(whole=due)
            if self._round is not None and self.inner_steps >= self._round.due:
                self._land()
            if due:
                self._exchange(self._settings.overlap)

    @property
    def _warm(self) -> bool:
        """Whether the next exchange is one of the warm-up."""
        return self.step < self._settings.warmup

    @property
    def _period(self) -> int:
        """Steps from the last exchange to the next."""
        return 1 if self._warm else self._settings.every // self._settings.fragments

    @property
    def _fragment(self) -> int:
        """That the next exchange is of. All ranks have had as many exchanges, if not steps."""
        return (self.step - self._settings.warmup) % len(self._fragments)

    def _start(self) -> None:
        """All ranks begin with the same model."""
        options = self._reducer.options
        self._buffers.part(self._device, options)
        tensors: dict[str, Tensor] = {
            name: p for p, name in parameter_names(self._model) if id(p) not in self._ignored
        }
        for name, buffer in self._buffers.held(self._buffers.like).items():
            tensors[BUFFER + name] = buffer
        check = ReplicaCheck(tensors, options)
        try:
            check.start()
        except ReplicaError:
            log.info(
                "ranks came with different tensors, and all take those of the first rank: %s",
                listed(check.different),
            )
            self._take_first([tensors[name] for name in check.different])
        self._agree({name: p.detach().to(wide_type(p.dtype)) for name, p in self._live.items()})
        self._buffers.agree([name.removeprefix(BUFFER) for name in check.different])

    def _take_first(self, tensors: list[Tensor]) -> None:
        """As bytes: tensors may be of any type."""
        options = self._reducer.options
        first = dist.get_global_rank(options.group or dist.group.WORLD, 0)  # type: ignore[arg-type]
        own = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors]
        flat = torch.cat([each.to(self._device) for each in own])
        broadcast(flat, "none", src=first, group=options.group, timeout=options.timeout)
        for t, part in zip(tensors, flat.split([each.numel() for each in own]), strict=True):
            t.copy_(part.clone().view(t.dtype).view(t.shape))

    def _agree(self, parameters: Mapping[str, Tensor]) -> None:
        """Have these as common parameters, with outer optimizers that know nothing yet."""
        self._shared = {name: p.clone() for name, p in parameters.items()}
        self.outer = []
        given = self._outer_given
        if isinstance(given, OuterSGD):
            if given.averages:
                return
            make: Callable[[list[Tensor]], Optimizer] = _sgd_of(given)
        else:
            make = given
        for fragment in self._fragments:
            own = [self._shared[name] for name in fragment.parameters]
            made = make(own)
            _check_outer(made, own)
            self.outer.append(made)

    def _exchange(self, overlap: int, finishing: bool = False) -> None:
        """Begin an exchange; unless it overlaps, end it."""
        if self._round is not None:
            self._land()
        warm, fragment = self._warm, self._fragment
        parts = self._fragments if warm else self._fragments[fragment : fragment + 1]
        tensors: dict[str, Tensor] = {}
        for part in parts:
            for name in part.parameters:
                tensors[name] = self._difference(name)
        buffers = [name for part in parts for name in part.buffers]
        tensors.update(self._buffers.due(buffers, self._device))
        which = range(len(self._fragments)) if warm else range(fragment, fragment + 1)
        progress = [float(any(self._unsent[i] for i in which)), float(finishing)]
        tensors[PROGRESS] = torch.tensor(progress, device=self._device)
        if self._noise is not None:
            tensors[NOISE] = self._noise.sketch(self._live, self.step)
        before = self._unsent
        self._unsent = [0 if i in which else steps for i, steps in enumerate(before)]
        overlap = 0 if warm or finishing else overlap
        try:
            handle = self._average(tensors, together=self._together, async_op=True)
            due = self.inner_steps + overlap
            self._round = Round(tensors, due, None if warm else fragment, handle)
            if not overlap:
                self._land()
        except BaseException:
            if self._round is None:  # otherwise it is still under way
                self._unsent = before
            raise

    def _difference(self, name: str) -> Tensor:
        base, own = self._bases.get(name, self._shared[name]), self._live[name].detach()
        if name not in self._differences:
            self._differences[name] = torch.empty_like(base)
        found = torch.sub(base, own, out=self._differences[name])
        return found if self._noise is None else found.mul_(self._gain(name))

    def _gain(self, name: str) -> float:
        if self._noise is None:
            return 1.0
        return self._noise.gain(name, dist.get_world_size(self._reducer.options.group))

    @property
    def gains(self) -> dict[str, float]:
        """By how much the common steps of each parameter are lengthened now; 1 without `gain`."""
        return {name: self._gain(name) for name in self._live}

    def _land(self) -> None:
        """Wait for the exchange under way, and go on with what it came to."""
        landed = self._round
        assert landed is not None
        try:
            landed.wait()
        finally:
            if landed.ended:  # otherwise somebody interrupts the waiting
                self._round = None
        size = dist.get_world_size(self._reducer.options.group)
        worked, finished = (round(float(x) * size) for x in landed.tensors[PROGRESS])
        self._all_finished = finished == size
        self._learn_of_buffers(landed, size)
        if self._noise is not None and worked == size:
            self._noise.learn(landed.tensors[NOISE])
        if not landed.finite:
            self._skip(landed)
            return
        parts = self._fragments_of(landed)
        # Those that had nothing to do have moved nothing: the others' average is what counts.
        scale = size / worked if worked and self._settings.average == "world" else 1.0
        plain = landed.fragment is None or worked == 0 or not self.outer
        for part in parts:
            for name in part.parameters:
                if scale != 1:
                    landed.tensors[name].mul_(scale)
                if plain:
                    self._shared[name].sub_(landed.tensors[name])
                else:
                    self._shared[name].grad = landed.tensors[name]
        if not plain:
            assert landed.fragment is not None
            self.outer[landed.fragment].step()
        # With everybody at the end nothing of a rank's own stays.
        ending = landed.fragment is None or self._all_finished
        mixing = 0.0 if ending else self._settings.mixing
        for part in parts:
            for name in part.parameters:
                self._shared[name].grad = None
                move(self._live[name], self._shared[name], mixing)
            self._keep(part.parameters, 0.0 if ending else self._settings.keep)
        self._buffers.land(landed.tensors, mixing)

    def _fragments_of(self, landed: "Round") -> "list[Fragment]":
        return self._fragments if landed.fragment is None else [self._fragments[landed.fragment]]

    def _learn_of_buffers(self, landed: "Round", size: int) -> None:
        changed, replaced = self._buffers.learn(landed.tensors, size)
        self._unsent_buffers = bool(changed)
        if replaced:
            warnings.warn(
                "LocalSteps: a rank has replaced buffers by others of another shape or kind, or "
                f"removed them: {listed(sorted(replaced))}. They are not averaged any more: each "
                "rank keeps its own",
                ThinwireWarning,
                stacklevel=2,
            )

    def _keep(self, names: list[str], share: float) -> None:
        """Have parameters that were set to the common ones go on with what was not sent yet."""
        for name in names:
            self._bases.pop(name, None)
        if not share:
            return
        for name, (state, _) in self._reducer.states.of_tensors(names, "residual").items():
            if "residual" in state:
                own = self._live[name].detach()
                own.sub_(state["residual"].view_as(own).to(own.dtype), alpha=share)
                self._bases[name] = own.to(wide_type(own.dtype), copy=True)

    def _skip(self, landed: "Round") -> None:
        """Something was not finite: all ranks go back to the last common parameters."""
        self._skipped += 1
        bad = [n for n, t in landed.tensors.items() if not bool(t.isfinite().all())]
        buffers = [name.removeprefix(BUFFER) for name in bad if name.startswith(BUFFER)]
        what = ["parameters"] if not buffers or any(name in self._live for name in bad) else []
        what += [f"buffers ({listed(buffers)})"] if buffers else []
        names = [name for part in self._fragments_of(landed) for name in part.buffers]
        parted = sorted(self._buffers.go_back(names, landed.tensors))
        apart = f". {listed(parted)} held infinity before, too: not averaged any more"
        warnings.warn(
            f"LocalSteps: {' and '.join(what)} of a rank hold NaN or infinity; all ranks go back "
            "to those of the round before. A rank whose optimizer holds NaN will bring it again"
            f"{apart if parted else ''}",
            ThinwireWarning,
            stacklevel=2,
        )
        for name in landed.tensors:
            if name in self._shared:
                move(self._live[name], self._shared[name], 0.0)
                self._bases.pop(name, None)

    def finish(self) -> None:
        """This rank has no more data: end with common parameters. All ranks call this.

        A rank with less data than others takes part in their exchanges until they have finished
        too. Training may go on afterwards.
        """
        if self._detached:
            raise ValueError("these local steps are detached: there is nothing to finish")
        with torch.no_grad():
            if not self._shared:
                self._start()
            left = None
            while left is None or left > 0:
                warm = self._warm
                self._exchange(0, finishing=True)
                if self._all_finished:
                    # From the first exchange that finds everybody here, each fragment once; and
                    # once more from one that finds buffers which it should have sent.
                    if left is None:
                        left = 1 if warm else len(self._fragments)
                    left = len(self._fragments) if self._unsent_buffers else left - 1
            if self._configuration.check_every:
                ReplicaCheck(self._live, self._reducer.options).start()
        self.finished = True

    @contextmanager
    def common_parameters(self) -> Iterator[None]:
        """The model has the parameters that all ranks hold, for an evaluation in the middle of a
        round; afterwards again this rank's own."""
        own = {name: p.detach().clone() for name, p in self._live.items() if self._shared}
        with torch.no_grad():
            for name in own:
                move(self._live[name], self._shared[name], 0.0)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, values in own.items():
                    self._live[name].copy_(values)

    def _check_averages(self, step: AveragingStep, tensors: Mapping[str, Tensor]) -> None:
        every = self._configuration.check_every
        if every and self.step % every == 0:
            check = ReplicaCheck(self._shared, self._reducer.options, driver=step)
            step.follow(check.start(async_op=True), set())

    # Figures.

    @property
    def exchanging(self) -> bool:
        """Whether an exchange is under way beside the steps (`overlap`)."""
        return self._round is not None

    def stats(self) -> LocalStats:
        """Bytes, seconds and errors so far, as of a wire whose steps are exchanges; with the
        optimizer's steps, and bytes for each of them and for each round."""
        return self._with_rounds(stats_of(self))

    def _with_rounds(self, stats: Stats) -> LocalStats:
        sent = stats["total"]["bytes_sent"]
        warm = min(self.step, self._settings.warmup)
        rounds = warm + (self.step - warm) / len(self._fragments)
        return {
            **stats,
            "inner_steps": self.inner_steps,
            "rounds": rounds,
            "skipped_rounds": self._skipped,
            "bytes_per_inner_step": sent / max(1, self.inner_steps),
            "bytes_per_round": sent / rounds if rounds else 0.0,
        }

    def summary(self, rows: int = 20) -> str:
        """The same as a table: the `rows` tensors that sent most, and the total; a step in it is an
        exchange."""
        return f"{super().summary(rows)}\n{self._in_rounds()}"

    def explain(self) -> str:
        """In plain words: what is sent when and how, why, and what it brings."""
        settings = self._settings
        count = sum(p.numel() for p in self._live.values())
        words = [
            f"Each rank takes {plural(settings.every, 'optimizer step')} of its own, then what "
            f"they have done to {count:,} elements is averaged"
        ]
        if settings.fragments > 1:
            words.append(f"in {settings.fragments} fragments, one after the other")
        if settings.overlap:
            words.append(
                f"while {plural(settings.overlap, 'more step')} go on "
                f"(of which {settings.mixing:.0%} stays)"
            )
        if settings.keep:
            words.append(f"and {settings.keep:.0%} of what it has not sent stays with each rank")
        if settings.average == "senders":
            words.append("over the ranks that sent each element")
        if settings.gain:
            found = self.gains.values()
            words.append(
                f"and multiplied by {min(found):.2f} to {max(found):.2f}, as the ranks' gradients "
                "are noisier than their mean"
            )
        outer = self._outer_given
        if not isinstance(outer, OuterSGD):
            words.append("and the outer optimizer that was given takes a step with it")
        elif not outer.averages:
            words.append(f"and taken as a gradient by {outer}")
        lines = [", ".join(words) + "."]
        if settings.warmup:
            lines.append(
                f"In the first {settings.warmup} steps all is averaged after each step, "
                "uncompressed."
            )
        copies = (self._shared, self._bases, self._differences)
        kept = sum(tensor.nbytes for each in copies for tensor in each.values())
        kept += sum(
            value.nbytes
            for optimizer in self.outer
            for entry in optimizer.state.values()
            for value in entry.values()
            if isinstance(value, Tensor)
        )
        if kept:
            lines.append(
                f"Common parameters, differences and the outer optimizer take {show_bytes(kept)} "
                "beside the residuals."
            )
        lines += [super().explain(), self._in_rounds()]
        return "\n".join(lines)

    def _in_rounds(self) -> str:
        found = self._with_rounds(stats_of(self, norms=False))
        return (
            f"{plural(self.inner_steps, 'optimizer step')}, {found['rounds']:.4g} rounds: "
            f"{show_bytes(found['bytes_per_inner_step'])} sent per optimizer step, "
            f"{show_bytes(found['bytes_per_round'])} per round"
        )

    def scalars(self) -> dict[str, float]:
        found = self._with_rounds(stats_of(self, norms=False))
        return {
            **super().scalars(),
            "thinwire/inner_steps": float(found["inner_steps"]),
            "thinwire/bytes_per_inner_step": found["bytes_per_inner_step"],
            "thinwire/bytes_per_round": found["bytes_per_round"],
            **(
                {}
                if self._noise is None
                else {"thinwire/gain": statistics.median(self.gains.values())}
            ),
        }

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later as if nothing had happened, also from the middle of
        a round: its parameters and buffers, the common ones, the states of the optimizer and the
        outer optimizer, and what a wire keeps. Every rank saves its own.

        An exchange that is under way is waited for.
        """
        if self._round is not None:
            self._round.wait()
        return {
            **super().state_dict(),
            "local": {
                "inner_steps": self.inner_steps,
                "unsent": list(self._unsent),
                "skipped": self._skipped,
                "shared": dict(self._shared),
                "bases": dict(self._bases),
                "outer": [optimizer.state_dict() for optimizer in self.outer],
                "parameters": {name: p.detach() for name, p in self._live.items()},
                **self._buffers.state(),
                "inner": [optimizer.state_dict() for optimizer in self._optimizers],
                "noise": None if self._noise is None else self._noise.state(),
                "round": None if self._round is None else self._round.state(),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` or `gathered_state_dict` was taken: this sets the model's
        parameters and the optimizer's state too.

        Args:
            state: of this rank, or a gathered one. Of another number of ranks: each goes on from
                the mean of their parameters and residuals, with the optimizer state of one of them.

        Raises:
            ValueError: it is the state of another rank, or does not fit; nothing has changed.
        """
        who = type(self).__name__
        group = self._reducer.options.group
        states = states_to_load(who, state, group, ("step", "version"))
        for one in states:
            required(who, one, ("local",))
            required(who, one["local"], LOCAL_KEYS)
            self._check_local(one["local"])
        own = states[dist.get_rank(group) % len(states)]["local"]
        first = states[0]["local"]
        super().load_state_dict(state)
        with torch.no_grad():
            self.inner_steps, self._unsent = first["inner_steps"], list(first["unsent"])
            self._skipped, self._differences = first["skipped"], {}
            for name, p in self._live.items():
                found = [one["local"]["parameters"][name] for one in states]
                p.copy_(mean(found))
            self._buffers.load([one["local"] for one in states], bool(first["shared"]))
            for optimizer, kept in zip(self._optimizers, own["inner"], strict=True):
                optimizer.load_state_dict(kept)
            self._shared, self.outer, self._round = {}, [], None
            self._bases = {
                name: self._wide(name, mean([one["local"]["bases"][name] for one in states]))
                for name in first["bases"]
            }
            if first["shared"]:
                self._agree({n: self._wide(n, first["shared"][n]) for n in self._live})
                for optimizer, kept in zip(self.outer, first["outer"], strict=True):
                    optimizer.load_state_dict(kept)
            if self._noise is not None:
                self._noise.load(first["noise"])
            if first["round"] is not None:
                self._round = Round.of(first["round"], self._live)

    def _wide(self, name: str, loaded: Tensor) -> Tensor:
        """As copies of a parameter are kept: where it is, in the type that is worked with."""
        p = self._live[name]
        return loaded.to(p.device, wide_type(p.dtype))

    def _check_local(self, local: Mapping[str, Any]) -> None:
        """Refuse what does not fit this model, these optimizers and these settings."""
        who = type(self).__name__
        for key in ("inner_steps", "skipped"):
            check.whole(who, key, local[key], 0)
        check_alike(f"{who}: parameters", local["parameters"], self._live)
        self._buffers.check(who, local, bool(local["shared"]))
        unsent = local["unsent"]
        if not isinstance(unsent, list | tuple) or len(unsent) != len(self._fragments):
            raise ValueError(f"{who}: the state is not one of {len(self._fragments)} fragments")
        for steps in unsent:
            check.whole(who, "unsent", steps, 0)
        if local["shared"]:
            check_alike(f"{who}: shared", local["shared"], self._live)
        required(f"{who}: bases", local["bases"], ())
        kept = {name: p for name, p in self._live.items() if name in local["bases"]}
        check_alike(f"{who}: bases", local["bases"], kept)
        for kind, count in (("inner", len(self._optimizers)), ("outer", self._outers)):
            listed = isinstance(local[kind], list | tuple)
            if not listed or (len(local[kind]) != count and (kind == "inner" or local["shared"])):
                raise ValueError(f"{who}: the state is not one of {plural(count, kind)} optimizers")
        for optimizer, kept in zip(self._optimizers, local["inner"], strict=True):
            required(f"{who}: inner", kept, ("state", "param_groups"))
            sizes = [len(group["params"]) for group in kept["param_groups"]]
            if sizes != [len(group["params"]) for group in optimizer.param_groups]:
                raise ValueError(f"{who}: the optimizer has other parameters than the saved one")
        if (local["noise"] is None) != (self._noise is None):
            raise ValueError(
                f"{who}: the state is one {'with' if local['noise'] else 'without'} gain"
            )
        if self._noise is not None:
            check_alike(f"{who}: noise", local["noise"], self._noise.state())
        if local["round"] is not None:
            required(f"{who}: round", local["round"], ("tensors", "due", "fragment", "finite"))

    @property
    def _outers(self) -> int:
        """How many outer optimizers there are once training has begun."""
        given = self._outer_given
        return 0 if isinstance(given, OuterSGD) and given.averages else len(self._fragments)

    def stateful(self, path: Any = None) -> "LocalCheckpoint":
        """These local steps for torch.distributed.checkpoint: ``dcp.save({"local":
        local.stateful()}, ...)``, and ``dcp.load({"local": local.stateful(path)}, ...)``.

        It holds this rank's parameters and optimizer state too, which differ between ranks.

        Args:
            path: of the checkpoint, for loading: what is to be loaded is as large as it says there.
                Torch's list of what it holds is read, which is a pickle: whoever can write to that
                directory can run code here. Load only checkpoints of your own.
        """
        from thinwire.parallel.checkpoint import LocalCheckpoint

        return LocalCheckpoint(self, path)


@dataclass
class Round:
    """An exchange, from its beginning until the model goes on with what it came to.

    Args:
        tensors: by name: differences, buffers, and the progress; averages when it has ended.
        due: the optimizer step at which the model goes on with it.
        fragment: it is of; None for all of them, averaged.
        handle: of the exchange; None for one that was loaded.
        loaded_finite: whether that was finite.
    """

    tensors: dict[str, Tensor]
    due: int
    fragment: int | None
    handle: AverageHandle | None
    loaded_finite: bool = True

    @classmethod
    def of(cls, state: Mapping[str, Any], live: Mapping[str, Tensor]) -> "Round":
        device = next(iter(live.values())).device
        tensors = {name: tensor.to(device).clone() for name, tensor in state["tensors"].items()}
        return cls(tensors, state["due"], state["fragment"], None, bool(state["finite"]))

    def state(self) -> dict[str, Any]:
        """Of one that has ended."""
        return {
            "tensors": dict(self.tensors),
            "due": self.due,
            "fragment": self.fragment,
            "finite": self.finite,
        }

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()

    @property
    def ended(self) -> bool:
        return self.handle is None or self.handle.is_completed()

    @property
    def finite(self) -> bool:
        return self.loaded_finite if self.handle is None else self.handle.step.all_finite()


@dataclass
class Fragment:
    """Names of parameters and buffers that are exchanged together."""

    parameters: list[str]
    buffers: list[str]


# What was given.


def _checked_optimizers(given: Any) -> list[Optimizer]:
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            got = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            raise TypeError(f"optimizer must be a torch optimizer, or a list of them, got {got}")
        if isinstance(optimizer, ExchangingOptimizer):
            raise TypeError(
                f"{type(optimizer).__name__} exchanges by itself: use one of torch's optimizers"
            )
        if any("ZeroRedundancy" in each.__name__ for each in type(optimizer).__mro__):
            raise TypeError(
                "ZeroRedundancyOptimizer divides the parameters among the ranks, and local steps "
                "need an optimizer that moves all of them on each rank"
            )
        if optimizer in FOLLOWED:
            raise ValueError(
                f"this {type(optimizer).__name__} takes local steps already: detach those first"
            )
    if not optimizers:
        raise ValueError("optimizer: an empty list")
    return optimizers


def _checked_model(given: Any) -> nn.Module:
    model = uncompiled(given)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(given).__name__}")
    sharded = any(map(is_fsdp1, model.modules())) or any(map(is_dtensor, model.parameters()))
    if sharded:
        raise TypeError(
            "LocalSteps takes models that each rank holds whole, and this one is sharded (FSDP): "
            "its ranks hold different shards, so there are no parameters of one rank to average "
            "with those of another"
        )
    if hook_of(model) is not None:
        raise ValueError("a wire is attached to this model: detach it first")
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        raise ValueError(
            "a DistributedDataParallel model with static_graph=True exchanges the gradients of its "
            "first backward pass whatever it is told: make it without"
        )
    return model


def _trained(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The parameters that the optimizers train, by name."""
    wanted = {id(p): p for p in _parameters(optimizers) if p.requires_grad}
    named = [(p, name) for p, name in parameter_names(model) if id(p) in wanted]
    if len(named) < len(wanted):
        raise ValueError(
            f"the optimizer trains {plural(len(wanted), 'tensor')}, of which {len(named)} are "
            "parameters of the model: make it of model.parameters()"
        )
    if not named:
        raise ValueError("the optimizer trains no parameter of the model")
    for p, name in named:
        if not p.is_floating_point() or p.dtype.itemsize < 2:
            raise TypeError(f"{name}: parameters must be float32, float64 or half, got {p.dtype}")
    return {name: p for p, name in named}


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def _recipe_of(
    compressor: CompressorGiven, given: Mapping[str, Any], feedback: Feedback | str
) -> tuple[LocalRecipe | None, CompressorGiven]:
    """What a method for local steps consists of, with what was given beside it; and what chooses
    compressors."""
    method = method_of(compressor)
    recipe = None if method is None else method.recipe()
    if not isinstance(recipe, LocalRecipe):
        return None, compressor
    if feedback != "auto":
        raise ValueError(f"{recipe.name} has a feedback of its own, got {feedback!r}")
    changed = {key: value for key, value in given.items() if value is not None}
    return replace(recipe, **changed), recipe.policy


def _plain_recipe(given: Mapping[str, Any]) -> LocalRecipe:
    changed = {key: value for key, value in given.items() if value is not None}
    return replace(LocalSGD(1).recipe(), **{"name": "LocalSteps", **changed})


def _checked_outer(given: Any) -> OuterGiven:
    if isinstance(given, OuterSGD) or (callable(given) and not isinstance(given, Optimizer)):
        return cast("OuterGiven", given)
    if isinstance(given, Optimizer):
        raise TypeError(
            "outer must be a function that makes the optimizer, as it works on parameters that "
            "LocalSteps holds: outer=lambda tensors: torch.optim.SGD(tensors, lr=0.7)"
        )
    raise TypeError(
        f"outer must be a thinwire.OuterSGD, or a function from tensors to an optimizer, got "
        f"{given!r}"
    )


def _sgd_of(outer: OuterSGD) -> Callable[[list[Tensor]], Optimizer]:
    return lambda tensors: SGD(
        tensors, lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov
    )


def _check_outer(made: Any, tensors: list[Tensor]) -> None:
    if not isinstance(made, Optimizer):
        raise TypeError(f"outer must return a torch optimizer, got {type(made).__name__}")
    held = {id(p) for group in made.param_groups for p in group["params"]}
    if held != {id(t) for t in tensors}:
        raise ValueError("outer must return an optimizer of all the tensors that it gets")


def _check_feedback(feedback: Feedback, keep: float) -> None:
    if isinstance(feedback, DGC | Vote):
        raise ValueError(
            f"{feedback} is made for gradients: what is exchanged here are changes of parameters. "
            "Use 'ef14' or 'none'"
        )
    if keep and "residual" not in feedback.parts:
        raise ValueError(
            f"keep={keep:g} is about what is left out, and {feedback} remembers nothing of it: use "
            "'ef14'"
        )


def _check_divides(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        known = KnownOptimizer.of(optimizer)
        if known.kind is not OptimizerKind.ADAM_LIKE:
            raise ValueError(
                f"gain is for optimizers that divide by the size of gradients, like Adam, and "
                f"{known.name} does not: leave it out"
            )


# The model.


def _without_exchange(ddp: DistributedDataParallel) -> list[Callable[[], None]]:
    """Keep a DDP model from exchanging gradients: whether it does so is decided in its forward
    pass, whatever a user's loop sets before. Returns how to undo it."""
    before = [ddp.require_backward_grad_sync]

    def begin(module: Any, *_: Any) -> None:
        before[0] = module.require_backward_grad_sync
        module.require_backward_grad_sync = False

    def end(module: Any, *_: Any) -> None:
        module.require_backward_grad_sync = before[0]

    hooks = [
        ddp.register_forward_pre_hook(_Uncopied(begin)),
        ddp.register_forward_hook(_Uncopied(end), always_call=True),
    ]
    return [hook.remove for hook in hooks]


class _Uncopied:
    """A hook of a module, of which a copy of the module has only a shadow that does nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *_: Any) -> None:
        return None


def _like(tensor: Tensor) -> Tensor:
    """Shape, type and device of what is exchanged of it, in the memory of one element."""
    return torch.zeros((), dtype=wide_type(tensor.dtype), device=tensor.device).expand(tensor.shape)


def _dealt(parameters: Mapping[str, Tensor], buffers: Sequence[str], count: int) -> list[Fragment]:
    """Layers dealt out to fragments in turn, so that each has some of the first and of the last."""
    if count > len(parameters):
        raise ValueError(
            f"{count} fragments, but the optimizer trains only {plural(len(parameters), 'tensor')}"
        )
    layers = list(dict.fromkeys(map(_layer, parameters)))
    by_tensor = len(layers) < count
    order = list(parameters) if by_tensor else layers
    place = {each: i % count for i, each in enumerate(order)}
    found = [Fragment([], []) for _ in range(count)]
    for name in parameters:
        found[place[name if by_tensor else _layer(name)]].parameters.append(name)
    for name in buffers:
        found[place.get(_layer(name), 0)].buffers.append(name)
    return found


def _layer(name: str) -> str:
    """What a tensor's layer is called: up to the first number in its name, or its module."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])
