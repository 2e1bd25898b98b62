"""A step with each method: what it takes, what it gains, what it costs; and what to use.

Every figure follows from the formulas of `thinwire.collectives.costs`, a table of codecs and the
sizes of a model. Nothing is measured here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinwire.collectives.costs import (
    Coding,
    Due,
    Interconnect,
    StepCost,
    local_step,
    overlapped_step,
    waiting_step,
)
from thinwire.compressors import Compressor, JointCompressor, PowerSGD
from thinwire.feedback import Feedback, feedback_for
from thinwire.formatting import show_rate, show_ratio, show_seconds
from thinwire.methods import LocalRecipe, method_of
from thinwire.parallel.optimizers import objection
from thinwire.plan.sizes import Model
from thinwire.policies import Fixed, Policy, Progressive, Ramp, Warmup
from thinwire.policies.base import policy_of
from thinwire.policies.codecs import CodecTable

PLAIN = "ddp"
# What is compared unless --with says otherwise.
METHODS = (
    *("cast:bf16", "quantize:8", "quantize:4", "onebit", "powersgd:4", "topk:0.01"),
    *("topk:0.01|quantize:4", "diloco:100,compressor=(quantize:4)"),
)
PARALLELISMS = ("ddp", "fsdp")
# Dollars for a gigabyte that leaves a host: between regions of one provider (AWS, list price of
# us-east-1 to other regions, 2025). Inside of a zone nothing is charged, to the internet 0.09.
PRICE = 0.02
# Of a second of codec work, what backward loses: codecs run on the cores, or the GPU, that train.
BUSY = 1.0
# Software of FSDP around a collective of its own, as a share of ours around an exchange: 9 of them
# took 25 ms more of a step than they move (images, 4 hosts on two cores, 100 Mbit/s).
SHARDING = 0.7
WORTH = 1.05  # times faster: less is within the error of the model
# Bits per second between which a break-even is looked for.
SLOWEST, FASTEST = 1e4, 1e13
HALVINGS = 30  # of that interval: to a millionth


@dataclass(frozen=True)
class PlannedMethod:
    """A method as far as costs go.

    Args:
        name: as it was asked for.
        compressor: None for uncompressed.
        plain: PyTorch's own exchange, without thinwire.
        every, fragments, overlap: of local steps; 0 for gradients in every step.
        suits_adam: `attach` would not warn of it under an optimizer like Adam.
    """

    name: str
    compressor: Compressor | None = None
    plain: bool = False
    every: int = 0
    fragments: int = 1
    overlap: int = 0
    suits_adam: bool = True

    @property
    def low_rank(self) -> bool:
        """Suits Adam, but cost accuracy under it in long trainings."""
        return isinstance(self.compressor, PowerSGD) and not self.every


def read_method(text: str) -> PlannedMethod:
    """The method of a name: "ddp", a compressor, a schedule that ends at one, a method by name.

    Raises ValueError.
    """
    name = text.strip()
    if name in (PLAIN, "fsdp"):
        return PlannedMethod(name, plain=True)
    found = method_of(name)
    if found is not None:
        recipe = found.recipe()
        if isinstance(recipe, LocalRecipe):
            main = recipe.policy.main
            return PlannedMethod(
                name, _some(main), False, recipe.every, recipe.fragments, recipe.overlap
            )
        return _of_gradients(name, recipe.policy, recipe.feedback)
    chosen, _, remembered = name.partition("+")
    policy = policy_of(chosen)
    last = policy
    while isinstance(last, Warmup):
        last = last.then
    # Others go by the tensor, or by what training comes to: no one compressor says what they send.
    if not isinstance(last, Fixed | Ramp | Progressive):
        raise ValueError(
            f"{chosen!r} chooses for each tensor, or as it trains: plan with what it chooses from "
            "instead, such as quantize:4 or topk:0.01|quantize:4"
        )
    return _of_gradients(name, policy, feedback_for(policy.main, remembered or "auto"))


def _of_gradients(name: str, policy: Policy, feedback: Feedback) -> PlannedMethod:
    suits = objection(policy, feedback) is None
    return PlannedMethod(name, _some(policy.main), suits_adam=suits)


def _some(compressor: Compressor) -> Compressor | None:
    return None if str(compressor) == "none" else compressor


@dataclass(frozen=True)
class Setting:
    """What is to be predicted.

    Args:
        compute: seconds of a step without any communication.
        nodes: sums inside of hosts first.
        weights: what FSDP gathers parameters with; None for its own.
        price: dollars per gigabyte that leaves a host.
    """

    model: Model
    network: Interconnect
    table: CodecTable
    compute: float
    parallel: str = "ddp"
    nodes: bool = False
    weights: Compressor | None = None
    busy: float = BUSY
    price: float = PRICE

    def at(self, rate: float) -> "Setting":
        """The same with links of so many bytes per second; uplinks stay in proportion."""
        network = self.network
        uplink = network.uplink * rate / network.rate
        return replace(self, network=network._replace(rate=rate, uplink=uplink))


@dataclass(frozen=True)
class Prediction:
    """What one method comes to.

    Args:
        speedup: over plain PyTorch.
        egress_bytes: that leave all hosts in 1,000 steps.
        dollars: that these cost.
        break_even: bits per second from which on plain PyTorch is as fast; 0 if it always is,
            infinity if it never is.
    """

    method: PlannedMethod
    cost: StepCost
    speedup: float
    egress_bytes: float
    dollars: float
    break_even: float

    def as_json(self) -> dict[str, Any]:
        cost = self.cost
        return {
            "method": self.method.name,
            "bytes_sent": cost.sent,
            "encode_seconds": cost.encode,
            "network_seconds": cost.network,
            "decode_seconds": cost.decode,
            "hidden_seconds": cost.hidden,
            "step_seconds": cost.seconds,
            "speedup": self.speedup,
            "efficiency": cost.efficiency,
            "egress_bytes_per_1000_steps": self.egress_bytes,
            "dollars_per_1000_steps": self.dollars,
            "break_even_bits_per_second": None if math.isinf(self.break_even) else self.break_even,
        }


@dataclass(frozen=True)
class PlannedStep:
    """A step with a method, at any rate of the links."""

    method: PlannedMethod
    gathers: Sequence[Due]  # of FSDP's parameters
    exchanges: Sequence[Due]

    @classmethod
    def of(cls, method: PlannedMethod, setting: Setting) -> "PlannedStep":
        model, compressor, table = setting.model, method.compressor, setting.table
        if setting.parallel == "fsdp":
            return cls(method, *_sharded(method, setting))
        if method.plain:
            return cls(method, (), model.plain())
        if method.every:
            return cls(method, (), model.fragment(compressor, table, method.fragments))
        return cls(method, (), model.compressed(compressor, table, setting.network.ranks))

    def cost(self, setting: Setting) -> StepCost:
        method, network, compute = self.method, setting.network, setting.compute
        if setting.parallel == "fsdp":
            return waiting_step(self.gathers, self.exchanges, network, compute)
        nodes = setting.nodes and not method.plain
        if method.every:
            rounds = method.every, method.fragments, method.overlap
            return local_step(self.exchanges, network, compute, *rounds, nodes)
        return overlapped_step(self.exchanges, network, compute, setting.busy, nodes)


def step_of(method: PlannedMethod, setting: Setting) -> StepCost:
    """A step with a method."""
    return PlannedStep.of(method, setting).cost(setting)


def _sharded(method: PlannedMethod, setting: Setting) -> tuple[list[Due], list[Due]]:
    """FSDP gathers each module twice, and sums its gradients; with `weights` it gathers once."""
    modules = setting.model.modules()
    plain = Coding("plain", exchange=SHARDING * setting.table.exchange)
    if method.every or isinstance(method.compressor, JointCompressor):
        raise ValueError(f"{method.name} does not go with --parallel fsdp")
    if method.plain:
        coding, weights = plain, plain
    else:
        coding = setting.table.coding(method.compressor)
        weights = plain if setting.weights is None else setting.table.coding(setting.weights)
    times = 2 if weights.kind == "plain" else 1
    gathers = [Due(weights, numel, 0.0) for numel in modules] * times
    return gathers, [Due(coding, numel, 1.0) for numel in modules]


def break_even(method: PlannedMethod, setting: Setting) -> float:
    """Bits per second from which on plain PyTorch is as fast, by halving an interval.

    Seen from the link of the setting: the first such rate above it if the method pays there, else
    the one below it from which on down it does.
    """
    plain = PlannedStep.of(PlannedMethod(setting.parallel, plain=True), setting)
    own = PlannedStep.of(method, setting)

    def pays(bits: float) -> bool:
        there = setting.at(bits / 8)
        return own.cost(there).seconds < plain.cost(there).seconds

    here = 8 * setting.network.rate
    if pays(here):
        if pays(FASTEST):
            return math.inf
        low, high = math.log2(here), math.log2(FASTEST)
    else:
        if not pays(SLOWEST):
            return 0.0
        low, high = math.log2(SLOWEST), math.log2(here)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(2**middle) else (low, middle)
    return float(2**low)


def predict(methods: Sequence[PlannedMethod], setting: Setting) -> list[Prediction]:
    """Plain PyTorch first, then each method."""
    plain = PlannedMethod(setting.parallel, plain=True)
    base = step_of(plain, setting)
    found = []
    for method in [plain, *(each for each in methods if not each.plain)]:
        cost = step_of(method, setting)
        egress = 1000 * cost.egress * setting.network.ranks
        found.append(
            Prediction(
                method,
                cost,
                base.seconds / cost.seconds,
                egress,
                egress / 1e9 * setting.price,
                math.inf if method.plain else break_even(method, setting),
            )
        )
    return found


# What to use


def fastest(predictions: Sequence[Prediction], adam: bool = False) -> Prediction:
    """The method with the shortest step that exchanges gradients; plain if none is worth it."""
    plain, *others = predictions
    able = [each for each in others if not each.method.every]
    if adam:
        able = [each for each in able if each.method.suits_adam and not each.method.low_rank]
    best = min(able, key=lambda each: each.cost.seconds, default=plain)
    return best if best.speedup >= WORTH else plain


def advice(
    predictions: Sequence[Prediction], optimizer: str | None = None, setting: Setting | None = None
) -> str:
    """What to use, and from which rate on it stops paying, in a sentence or two.

    Args:
        optimizer: "adam", "sgd", or None if it is not known.
        setting: of the predictions, to say what sums inside of hosts would bring.
    """
    plain = predictions[0]
    dense = fastest(predictions, adam=True)
    best = dense if optimizer == "adam" else fastest(predictions)
    share = f"{100 * (1 - plain.cost.efficiency):.0f} % of a step for the network"
    if len(predictions) == 1:
        text = f"Plain {plain.method.name} waits {share}. Nothing was compared with it."
    elif best is plain:
        which = "method for Adam" if optimizer == "adam" else "method"
        text = f"Stay with plain {plain.method.name}: it waits {share}, and no {which} gains 5 %."
    else:
        text = f"Use {best.method.name}: {_gain(best, plain)}; {_until(best)}."
    if optimizer is None and dense is not best:
        under = dense.method.name if dense is not plain else f"plain {plain.method.name}"
        gain = f" ({_gain(dense, plain)})" if dense is not plain else ""
        unsuited = "sparse and 1-bit gradients do not suit them"
        if best.method.low_rank:
            unsuited = "low ranks cost them accuracy in long trainings"
        text += f" With Adam and its like use {under}{gain}: {unsuited}."
    if optimizer == "adam":
        text += _low_rank_hint(predictions, best)
    if setting is not None:
        text += nodes_hint([each.method for each in predictions], setting, best)
    rounds = [each for each in predictions if each.method.every]
    if rounds:
        rare = min(rounds, key=lambda each: each.cost.seconds)
        if rare.cost.seconds * WORTH < best.cost.seconds:
            text += (
                f" If your training stands local steps, {rare.method.name} takes "
                f"{show_seconds(rare.cost.seconds)}."
            )
    return text


def _low_rank_hint(predictions: Sequence[Prediction], best: Prediction) -> str:
    """What a low rank would bring under Adam, and cost; nothing if that is not much."""
    low = [each for each in predictions if each.method.low_rank]
    fast = min(low, key=lambda each: each.cost.seconds, default=best)
    if fast.cost.seconds * WORTH >= best.cost.seconds:
        return ""
    return (
        f" {fast.method.name} would take {show_seconds(fast.cost.seconds)}, but low ranks cost "
        "accuracy in long trainings with Adam (docs/guides/which-method.md)."
    )


def nodes_hint(methods: Sequence[PlannedMethod], setting: Setting, best: Prediction) -> str:
    """What sums inside of hosts would bring, in a sentence; nothing if that is not much."""
    s = setting.network.ranks_per_host
    if s == 1 or setting.nodes or setting.parallel != "ddp" or setting.network.hosts == 1:
        return ""
    inside = replace(setting, nodes=True)
    able = [each for each in methods if not each.every and not each.plain]
    if best.method.suits_adam:
        able = [each for each in able if each.suits_adam and not each.low_rank]
    steps = [(step_of(each, inside).seconds, each.name) for each in able]
    seconds, name = min(steps, default=(math.inf, ""))
    if seconds * WORTH >= best.cost.seconds:
        return ""
    return (
        f" With sums inside of hosts first (nodes={s}), {name} would take {show_seconds(seconds)}."
    )


def _gain(one: Prediction, plain: Prediction) -> str:
    step, before = show_seconds(one.cost.seconds), show_seconds(plain.cost.seconds)
    return f"{step} per step instead of {before}, {show_ratio(one.speedup)} faster"


def _until(one: Prediction) -> str:
    if math.isinf(one.break_even):
        return "it pays at any rate of the link"
    return f"it stops paying from {show_rate(one.break_even)} on"
