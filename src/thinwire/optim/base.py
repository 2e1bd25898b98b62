"""What the optimizers of this subpackage share: the exchange, the checks, checkpoints, statistics.

A step first computes, in tensors of its own, what is to be exchanged; then exchanges it; and only
when that has succeeded changes parameters and state. So a step that raises has changed nothing.
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire import check
from thinwire.collectives.allreduce import AllReduce
from thinwire.collectives.compiling import compile_in
from thinwire.collectives.options import Group, Options, Timeout
from thinwire.compressors import Compressor, NoCompression, ScaledSign, compressor_of
from thinwire.compressors.compiling import uses_of
from thinwire.errors import ThinwireWarning
from thinwire.kernels import Key
from thinwire.optim import adam
from thinwire.optim.adam import Slot, real_of
from thinwire.reducer.saved_state import (
    RANK,
    RANKS,
    check_values,
    gather,
    required,
    states_to_load,
    whose,
)
from thinwire.telemetry import Ledger, Parcel

ONE_BIT = ScaledSign("l2")
ALIKE = 2  # steps with the same gradients on all ranks that are no accident
UNCOMPRESSED = NoCompression()


class OptimizerStats(TypedDict):
    """What `stats` of these optimizers returns; see `thinwire.collectives.Account`."""

    steps: int
    skipped: int
    exchanges: int
    bytes_sent: int
    bytes_received: int
    network_bytes: int
    seconds: dict[str, float]
    error_norm: float


class ExchangingOptimizer(Optimizer):
    """Base of the optimizers that exchange by themselves.

    Subclasses implement `_advance`, and check their own settings of a group in `_check`.
    """

    collective: ClassVar[str] = "twoshot"  # of compressed exchanges
    usual: ClassVar[Compressor] = ONE_BIT  # what is used unless the user says otherwise
    # Settings that all param_groups have in common. The first is one that no other optimizer has:
    # with Adam in stages, when the first stage ends.
    shared: ClassVar[tuple[str, ...]]
    spread: ClassVar[tuple[str, ...]] = ("error",)  # state that differs between ranks
    # All that is kept of a parameter, besides its step: tensors of its shape, and numbers.
    vectors: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "error", "master")
    numbers: ClassVar[tuple[str, ...]] = ()
    # GradScaler then calls step() on every rank, whether that rank's gradient overflowed or not:
    # which steps to leave out is something the ranks find out together.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        group: Group,
        masks: Mapping[Tensor, Tensor] | None,
        compressor: Compressor | str,
        max_bytes: int | str | None,
        timeout: Timeout,
    ) -> None:
        who = type(self).__name__
        self._masks = _checked_masks(who, masks)
        self._compressor = compressor_of(compressor)
        self._options = Options.of(
            group, collective=self.collective, max_bytes=max_bytes, timeout=timeout
        )
        try:
            self._options.check([self._compressor])
        except ValueError as error:
            raise ValueError(f"{who}: {error}") from None
        self._ledger = Ledger()
        self._skipped = 0
        self._lives: dict[Tensor, Tensor | None] = {}  # while the variance stays as it is
        self._alike: int | None = 0  # steps with the same gradients on all ranks; None: settled
        super().__init__(params, defaults)
        known = {p for each in self.param_groups for p in each["params"]}
        if not self._masks.keys() <= known:
            raise ValueError(f"{who}: a mask is for a tensor that is none of the parameters")
        for device in {p.device for p in known}:
            uses = uses_of([self._compressor], {p.dtype for p in known}, device)
            compile_in(self._options.group, device, uses)

    @abstractmethod
    def _advance(self, slots: list[Slot], step: int) -> None:
        """Take the step of this number, counted from 1."""

    def _check(self, group: dict[str, Any]) -> None:
        """Refuse settings of a param_group that make no sense."""
        self._check_rates(group)
        group = _plain(group)
        who, betas = type(self).__name__, group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(
                f"{who}: betas must be two numbers such as (0.9, 0.999), got {betas!r}"
            )
        for i, beta in enumerate(betas):
            check.below(who, f"betas[{i}]", beta, 1)
        check.positive(who, "eps", group["eps"])

    def _check_rates(self, group: dict[str, Any]) -> None:
        group = _plain(group)
        for key in ("lr", "weight_decay"):
            check.at_least(type(self).__name__, key, group[key], 0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as for every torch optimizer; see the class for until when."""
        super().add_param_group(param_group)
        who, added = type(self).__name__, self.param_groups[-1]
        try:
            self._check(added)
            for p in added["params"]:
                _check_parameter(who, p)
            for key in self.shared:
                if added[key] != self.param_groups[0][key]:
                    raise ValueError(f"{who}: {key} is one for all parameter groups")
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchange, and move the parameters; all ranks of the group call this together.

        A step in which any rank's gradient holds NaN or infinity is left out by all ranks, with a
        `ThinwireWarning`; ``stats()["skipped"]`` counts them.

        Raises:
            MismatchError: ranks differ in parameters, settings or the number of steps.
            PeerError: another rank died, did not answer in time or failed.
                In both cases parameters and state are as before the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            slots = self._slots()
            if slots:
                self._advance(slots, max(slot.steps for slot in slots) + 1)
        return loss

    def _slots(self) -> list[Slot]:
        """The parameters that are trained now."""
        return self._slots_where(lambda p: p.requires_grad)

    def _known(self) -> list[Slot]:
        """Those of which something is kept, whether they are trained now or not."""
        return self._slots_where(self.state.__contains__)

    def _slots_where(self, holds: Callable[[Tensor], bool]) -> list[Slot]:
        return [
            Slot(names[i], p, group, self.state[p], self._masks.get(p))
            for g, group in enumerate(self.param_groups)
            for names in [group.get("param_names") or _numbers(g, len(group["params"]))]
            for i, p in enumerate(group["params"])
            if holds(p)
        ]

    def _gradients(self, slots: Sequence[Slot], *, copy: bool) -> list[Tensor]:
        """This rank's gradients without a GradScaler's scale, to be changed only in a copy."""
        scale = getattr(self, "grad_scale", None)
        return [slot.gradient(1.0 if scale is None else float(scale), copy) for slot in slots]

    def _average(self, slots: Sequence[Slot], tensors: list[Tensor], step: int) -> bool:
        """Average tensors over the group, in place, uncompressed.

        Returns:
            Whether all of it is finite; otherwise the step is to be left out.
        """
        self._carry(slots, tensors, [None] * len(tensors), UNCOMPRESSED, step)
        if not self._sound(all(map(is_finite, tensors))):
            return False
        if self._alike is not None and self._size > 1:
            self._compare(tensors, self._gradients(slots, copy=False))
        return True

    def _compare(self, averages: Sequence[Tensor], own: Sequence[Tensor], more: int = 1) -> None:
        """Warn if somebody has averaged the gradients already: an average that is no other than
        what this rank came with says so, whoever did it.

        Args:
            more: times as many roundings as there are in an average.
        """
        assert self._alike is not None
        if not any(bool(g.any()) for g in own):
            return  # zeros say nothing
        pairs, roundings = zip(averages, own, strict=True), more * self._size
        self._alike = self._alike + 1 if all(_same(*pair, roundings) for pair in pairs) else None
        if self._alike == ALIKE:
            self._alike = None
            warnings.warn(
                f"{type(self).__name__}: all ranks came with the same gradients in the first "
                f"{ALIKE} steps. DDP has averaged them, uncompressed, before this optimizer "
                "exchanges them once more: train the plain module, or put forward and backward "
                "into `with model.no_sync():`. (If nobody has averaged them, all ranks see the "
                "same batches.)",
                ThinwireWarning,
                stacklevel=5,
            )

    def _compress(self, slots: Sequence[Slot], tensors: list[Tensor], step: int) -> bool:
        """Average tensors over the group, in place, compressed both ways.

        What is left out, by this rank and, of its shard, as a server, goes into the `error` in the
        parameter's state. Elements that are not live take no part and come out as zero.
        """
        lives = [self._live(slot) for slot in slots]
        errors = [slot.kept("error") for slot in slots]
        sent = [_chosen(x, live) for x, live in zip(tensors, lives, strict=True)]
        kept = [_chosen(e, live) for e, live in zip(errors, lives, strict=True)]
        finite = self._carry(slots, sent, kept, self._compressor, step)
        if not self._sound(finite and (self._size > 1 or all(map(is_finite, sent)))):
            return False
        for x, live, x_sent, error, e_kept in zip(tensors, lives, sent, errors, kept, strict=True):
            if live is not None:
                x.zero_()[live] = x_sent
                error[live] = e_kept
        return True

    def _live(self, slot: Slot) -> Tensor | None:
        """Which elements take part; whoever changes variances clears `_lives`."""
        if slot.p not in self._lives:
            self._lives[slot.p] = slot.live()
        return self._lives[slot.p]

    def _carry(
        self,
        slots: Sequence[Slot],
        tensors: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        compressor: Compressor,
        step: int,
    ) -> bool:
        options = self._options
        exchange = AllReduce(
            f"{type(self).__name__}.step",
            tensors,
            residuals,
            [compressor] * len(tensors),
            replace(options, collective="auto") if compressor is UNCOMPRESSED else options,
            key=Key(step=step % (1 << 32)),
            details=(("step", f"{step}"), ("settings", self._settings())),
        )
        handle = exchange.start()
        parcels = [Parcel((s.name,), [t]) for s, t in zip(slots, tensors, strict=True)]
        self._ledger.note(handle, parcels, [compressor] * len(parcels))
        return handle.account.finite

    def _settings(self) -> str:
        """Of all groups, in words: replicas that step differently would part unnoticed."""
        plain = (int, float, bool, tuple, list)
        return "; ".join(
            ", ".join(f"{k}={v}" for k, v in sorted(_plain(group).items()) if isinstance(v, plain))
            for group in self.param_groups
        )

    def _sound(self, finite: bool, words: str = "the step is left out on all ranks") -> bool:
        """`finite`; if it is not, count that and say what follows."""
        if not finite:
            self._skipped += 1
            warnings.warn(
                f"{type(self).__name__}: a gradient holds NaN or infinity; {words}",
                ThinwireWarning,
                stacklevel=5,
            )
        return finite

    def _check_known(self, slots: Sequence[Slot], key: str) -> None:
        """Refuse parameters that came when the variance was frozen already.

        Args:
            key: of something that is kept of those that came in time.
        """
        late = [slot.name for slot in slots if key not in slot.state]
        if late:
            raise ValueError(
                f"{type(self).__name__}: {', '.join(late[:5])} took no part in the updates of the "
                f"variance before it was frozen ({self.shared[0]}="
                f"{self.param_groups[0][self.shared[0]]}), so there is none to divide by: set "
                "requires_grad before, or freeze later"
            )

    @property
    def _size(self) -> int:
        return dist.get_world_size(self._options.group)

    def stats(self) -> OptimizerStats:
        """What the exchanges came to on this rank since the optimizer was made.

        Returns:
            bytes_sent, bytes_received, network_bytes (with gloo's headers), exchanges, seconds
            (encode, network, decode), steps, skipped, and error_norm: the length of what is yet to
            be sent.
        """
        slots = self._known()
        errors = [s.state["error"].double().square().sum() for s in slots if "error" in s.state]
        return {
            "steps": max((slot.steps for slot in slots), default=0),
            "skipped": self._skipped,
            "exchanges": self._ledger.exchanges,
            "bytes_sent": self._ledger.bytes_sent,
            "bytes_received": self._ledger.bytes_received,
            "network_bytes": self._ledger.network_bytes,
            "seconds": dict(self._ledger.seconds),
            "error_norm": math.sqrt(sum(map(float, errors))),
        }

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """That of a torch optimizer, which also says of which rank it is.

        Once compressed steps have begun every rank saves its own: what is yet to be sent differs.
        Where one process saves for all, see `gathered_state_dict`.
        """
        return {**super().state_dict(), **whose(self._options.group)}

    def gathered_state_dict(self, *, everywhere: bool = False) -> dict[str, Any]:
        """The states of all ranks in one: for programs that save on rank 0 and load on all.

        All ranks call this together. Rank 0 of the group gets it, in the host's memory, and the
        others an empty dictionary: only one of them saves it. What is the same on all ranks is in
        it once.

        Args:
            everywhere: give it to all ranks.
        """
        own = self.state_dict()
        self._check_states([own])
        if own[RANK]:
            own["state"] = {
                key: {name: value for name, value in kept.items() if name in self.spread}
                for key, kept in own["state"].items()
            }
        step = max((slot.steps for slot in self._known()), default=0)
        return gather(type(self).__name__, own, f"step {step}", self._options, everywhere)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` or `gathered_state_dict` was taken.

        Args:
            state_dict: this rank's own (any rank's, as long as nothing has been compressed), or a
                gathered one. If that was saved by another number of ranks, each rank goes on with
                the mean of the errors: what is yet to be sent stays the same for the average. A
                state of torch.optim.Adam is taken as one of the first stage.

        Raises:
            ValueError: it is the state of another rank, or does not fit; nothing has changed.
        """
        chosen = self._chosen_state(state_dict)
        foreign = any(self.shared[0] not in group for group in chosen["param_groups"])
        if foreign:
            self._check_foreign(chosen)
        self._check_state(chosen, foreign)
        super().load_state_dict(chosen)
        self._lives.clear()
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for p, key in self._saved_keys(chosen):
            # torch has cast all this to the parameter's own type.
            for name, value in chosen["state"].get(key, {}).items():
                if isinstance(value, Tensor) and name != "step":
                    self.state[p][name] = value.detach().to(p.device, real_of(p), copy=True)
            if "step" in self.state[p]:
                self.state[p]["step"] = int(self.state[p]["step"])
        self._adopt(self._known())

    def _chosen_state(self, given: Any) -> dict[str, Any]:
        """What this rank goes on with."""
        who = type(self).__name__
        if isinstance(given, Mapping) and RANKS not in given:
            _check_form(who, given)
            if not any("error" in kept or kept.get("weight") for kept in given["state"].values()):
                return dict(given)  # nothing in it differs between ranks
        states = states_to_load(who, given, self._options.group)
        first: Mapping[str, Any] = given[RANKS][0] if RANKS in given else given
        for state in (first, *states):
            _check_form(who, state)
        if len(states) == 1:
            (own,) = states
            return {**first, "state": _updated(first["state"], own["state"])}
        self._check_states(states)
        means: dict[Any, dict[str, Any]] = {}
        for key, kept in first["state"].items():
            means[key] = {}
            for name in self.spread:
                if name in kept:
                    found = [state["state"].get(key, {}).get(name) for state in states]
                    for value in found:
                        check_values(f"{who}: {name} of parameter {key}", value, None)
                    means[key][name] = sum(found) / len(found)
        return {**first, "state": _updated(first["state"], means)}

    def _check_state(self, state: Mapping[str, Any], foreign: bool) -> None:
        """Refuse a state that is not one of these parameters."""
        who = type(self).__name__
        for group in state["param_groups"]:
            self._check({**self.defaults, **group})
        pairs = self._saved_keys(state)
        unknown = set(state["state"]) - {key for _, key in pairs}
        if unknown:
            raise ValueError(f"{who}: the state has a parameter {min(unknown, key=str)!r} too much")
        for p, key in pairs:
            for name, value in state["state"].get(key, {}).items():
                what = f"{who}: {name} of parameter {key}"
                if name in ("step", "variance_steps"):
                    number = value.item() if isinstance(value, Tensor) else value
                    if not check.is_number(number) or number < 0 or number % 1:
                        raise ValueError(f"{what} must be a number of steps, got {value!r}")
                elif name in self.numbers:
                    if not check.is_number(value):
                        raise ValueError(f"{what} must be a finite number, got {value!r}")
                elif name in self.vectors:
                    wide = value.to(real_of(p)) if foreign and isinstance(value, Tensor) else value
                    if check_values(what, wide, p).shape != p.shape:
                        raise ValueError(
                            f"{what} has the shape {list(value.shape)}, not {list(p.shape)}"
                        )
                else:
                    raise ValueError(f"{what} is something that {who} does not keep")

    def _saved_keys(self, state: Mapping[str, Any]) -> list[tuple[Tensor, Any]]:
        """The parameters, and what a state calls each of them."""
        own = [group["params"] for group in self.param_groups]
        saved = [group["params"] for group in state["param_groups"]]
        if list(map(len, own)) != list(map(len, saved)):
            raise ValueError(
                f"{type(self).__name__}: the state has {list(map(len, saved))} parameters in its "
                f"groups, not {list(map(len, own))}"
            )
        return [
            pair
            for params, keys in zip(own, saved, strict=True)
            for pair in zip(params, keys, strict=True)
        ]

    def _check_foreign(self, state: Mapping[str, Any]) -> None:
        """A state of Adam must be one of the first stage: all else is missing in it."""
        key = self.shared[0]
        taken = max((int(kept.get("step", 0)) for kept in state["state"].values()), default=0)
        if taken >= self.defaults[key]:
            raise ValueError(
                f"{type(self).__name__}: the state is that of another optimizer after {taken} "
                f"steps: {key} must be more than that, got {self.defaults[key]}"
            )

    def _adopt(self, slots: Sequence[Slot]) -> None:
        """Add what is missing in a state that was loaded: of Adam, or of an earlier version."""

    def _check_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse states that another number of ranks cannot go on from."""


class Staged(ExchangingOptimizer):
    """Base of `OneBitAdam` and `OneBitLamb`: two stages.

    Until the variance is frozen ranks average gradients, uncompressed; after that, compressed
    momenta.
    """

    numbers: ClassVar[tuple[str, ...]] = ("variance_steps",)

    @property
    def frozen(self) -> bool:
        """Whether the next step is a compressed one."""
        return max((slot.steps for slot in self._slots()), default=0) >= self._freeze_step

    @property
    def _freeze_step(self) -> int:
        step: int = self.param_groups[0]["freeze_step"]
        return step

    @abstractmethod
    def _dense(self, slots: list[Slot], grads: list[Tensor], step: int) -> None:
        """Move the parameters, with averaged gradients."""

    @abstractmethod
    def _frozen(self, slots: list[Slot], momenta: list[Tensor], step: int) -> None:
        """Move the parameters, with the momenta that have come out of the exchange."""

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        check.steps(type(self).__name__, "freeze_step", group["freeze_step"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups and self.frozen:
            raise ValueError(
                f"{type(self).__name__}: the variance has been frozen since step "
                f"{self._freeze_step}: parameters that come now have none"
            )
        super().add_param_group(param_group)

    def _advance(self, slots: list[Slot], step: int) -> None:
        if step > self._freeze_step:
            self._check_known(slots, "variance_steps")
        grads = self._gradients(slots, copy=step <= self._freeze_step)
        if step <= self._freeze_step:
            if self._average(slots, grads, step):
                self._lives.clear()
                self._dense(slots, grads, step)
                if step == self._freeze_step:
                    for slot in slots:
                        slot.kept("error")
            return
        momenta = [
            adam.ahead(slot, self._localized(slot, grad))
            for slot, grad in zip(slots, grads, strict=True)
        ]
        del grads
        if self._compress(slots, momenta, step):
            self._frozen(slots, momenta, step)

    def _localized(self, slot: Slot, grad: Tensor) -> Tensor:
        """This rank's gradient as it enters the momentum."""
        return adam.decayed(slot, grad)

    def _adopt(self, slots: Sequence[Slot]) -> None:
        compressed = max((slot.steps for slot in slots), default=0) - self._freeze_step
        for slot in slots:
            if slot.steps:
                found = max(1, slot.steps - max(0, compressed))
                slot.state.setdefault("variance_steps", found)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are; the ends of a tensor with NaN are NaN."""
    return not tensor.numel() or all(math.isfinite(end) for end in tensor.aminmax())


def _same(average: Tensor, own: Tensor, roundings: int) -> bool:
    """Whether an average has equal numbers in it: each addition and the division round once."""
    found = torch.finfo(average.dtype)
    return torch.allclose(average, own, rtol=roundings * found.eps, atol=roundings * found.tiny)


def _chosen(tensor: Tensor, live: Tensor | None) -> Tensor:
    return tensor if live is None else tensor[live]


def _check_form(who: str, state: Any) -> None:
    """Refuse what does not look like the state of an optimizer."""
    required(who, state, ("state", "param_groups"))
    kept, groups = state["state"], state["param_groups"]
    states = isinstance(kept, Mapping) and all(isinstance(one, Mapping) for one in kept.values())
    listed = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    if not states or not listed:
        raise ValueError(f"{who}: not the state_dict() of an optimizer")


def _updated(state: Mapping[Any, Any], more: Mapping[Any, Any]) -> dict[Any, dict[str, Any]]:
    """What is kept of each parameter, with more of it from elsewhere."""
    return {key: {**kept, **more.get(key, {})} for key, kept in state.items()}


def _numbers(group: int, count: int) -> list[str]:
    return [f"{group}.{i}" for i in range(count)]


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Settings without the parameters; a learning rate may be a tensor."""
    left_out = ("params", "param_names")
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in left_out
    }


def _check_parameter(who: str, p: Tensor) -> None:
    """What can be trained here: real floating-point numbers, dense."""
    if not p.dtype.is_floating_point or p.dtype.itemsize < 2:
        raise TypeError(f"{who}: parameters must be float32, float64 or half, got {p.dtype}")
    if p.layout != torch.strided:
        raise TypeError(f"{who}: parameters must be dense, got {p.layout}")


def _checked_masks(who: str, given: Any) -> dict[Tensor, Tensor]:
    """Bool tensors by parameter, each of its parameter's shape."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{who}: masks must be bool tensors by parameter, {{model.place.weight: mask}}, got "
            f"{type(given).__name__}"
        )
    for p, mask in given.items():
        if not isinstance(p, Tensor) or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"{who}: masks must map parameters to bool tensors")
        if mask.shape != p.shape:
            raise ValueError(
                f"{who}: a mask has the shape {list(mask.shape)}, its parameter {list(p.shape)}"
            )
    return dict(given)
