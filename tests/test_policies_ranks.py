"""Policies on several ranks: they choose the same, whatever each rank sees."""

import copy
import io
import re
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import TIMEOUT, all_same, backward, named, plain, train, wired

import thinwire as tw
from thinwire.collectives.probe import LinkProbe, ProbeSize
from thinwire.policies import Chooser, Policy, PolicyContext, TensorInfo

STEADY = [  # what goes by steps and values, not by the clock
    "warmup:3,(topk:0.1)",
    "ramp:6,(topk:0.05),0.5",
    "progressive:6,(topk:0.03)",
    "layerwise:(0.*=topk:0.1; 2.*=warmup:3,(quantize:4); *=dense)",
    "solve:(topk:0.1),steps=3",
    "magnitude:0.1",
    "magnitude:0.1,small=(quantize:2)",
    "accuracy:(topk:0.1),1,5",
]
TIMED = ["bandwidth:(topk:0.01)", "auto:2", "warmup:2,(bandwidth:(onebit))"]


def used(wire: tw.Wire) -> list[str]:
    wire._reducer.ledger.fold()
    return [line.compressor for line in wire._reducer.ledger.lines.values()]


def on_uneven_ranks(spec: str) -> tuple[Any, ...]:
    """One rank is slow, and every rank has other data, one of them much larger."""
    me = dist.get_rank()
    model, wire = wired(spec, granularity="tensor")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chosen = []
    for step in range(12):
        model.zero_grad()
        if me == 1:
            time.sleep(0.01)
        (model(torch.randn(8, 20) * (100 if me == 2 else 1)).square().mean()).backward()
        optimizer.step()
        chosen.append(used(wire))
        if me != 1 and step < 11:
            wire.observe(step + 10.0 * me)
    tw.check_replicas(model)
    decisions = [decision._replace(why="") for decision in wire.decisions]
    return chosen, decisions, wire.state_dict()["policy"], wire.explain().splitlines()[0]


@pytest.mark.parametrize("spec", STEADY + TIMED)
def test_ranks_decide_alike(spec):
    first, *others = ranks.run(on_uneven_ranks, spec, ranks=3)
    for other in others:
        assert other == first
    assert first[3].startswith(str(tw.policies.parse(spec)))
    if spec not in TIMED:
        assert len({tuple(row) for row in first[0]}) > 1, "it did change something"


def on_timed_link(spec: str) -> tuple[Any, ...]:
    """The probes of a training, and one by itself."""
    model, wire = wired(spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, range(9), optimizer)
    stats = wire.stats()
    of_tensors = sum(each["bytes_sent"] for each in stats["tensors"].values())
    assert stats["total"]["bytes_sent"] > of_tensors + (1 << 16), "probes are sent, too"
    probe = LinkProbe(ProbeSize(1 << 16, 3), torch.device("cpu"), wire._reducer.options)
    probe.start()
    return wire.state_dict()["policy"], wire.explain(), probe.meeting, probe.moving


@pytest.mark.parametrize("spec", TIMED[:2])
def test_ranks_time_their_link_and_show_what_follows(spec):
    found = ranks.run(on_timed_link, spec, ranks=3)
    assert found[0][0] == found[1][0] == found[2][0]
    for _, words, meeting, moving in found:
        assert 0 < meeting < 60
        assert 0 < moving < 60
        assert "Ranks hear from each other in" in words
        assert "A step, forecast from that and measured:" in words
        assert re.search(r"\n  uncompressed +\d+ ms +\d+ ms", words), words


def on_checkpoint(spec: str, path: str) -> dict[str, bool]:
    """Both granularities, both ways of saving: in turn, so that over all policies any two meet."""
    import torch.distributed.checkpoint as dcp

    found = {}
    ways = ("own", "dcp") if STEADY.index(spec) % 2 else ("dcp", "own")
    for way, granularity, step in zip(ways, ("bucket", "tensor"), (2, 5), strict=True):
        model, wire = wired(spec, granularity=granularity)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        train(model, range(step), optimizer)
        wire.observe(7.0)
        other = plain(copy.deepcopy(model.module))
        again = tw.attach(other, spec, min_numel=10, timeout=TIMEOUT, granularity=granularity)
        second = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.5)
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if way == "own":
            file = io.BytesIO()
            torch.save(wire.state_dict(), file)
            file.seek(0)
            again.load_state_dict(torch.load(file, weights_only=True))
        else:
            dcp.save({"wire": wire.stateful()}, checkpoint_id=path)
            dcp.load({"wire": again.stateful(path)}, checkpoint_id=path)
        theirs = train(other, range(step, step + 6), second)
        losses = train(model, range(step, step + 6), optimizer)
        same = losses == theirs and all_same(named(model), named(other))
        found[f"{granularity} {step} {way}"] = same
    return found


@pytest.mark.parametrize("spec", STEADY)
def test_training_goes_on_as_if_nothing_had_happened(spec, tmp_path):
    for found in ranks.run(on_checkpoint, spec, str(tmp_path / "saved"), ranks=2):
        assert all(found.values()), found


def on_timed_checkpoint(spec: str) -> bool:
    model, wire = wired(spec)
    train(model, range(8))
    again = wired(spec)[1]
    again.load_state_dict(wire.state_dict())
    same = wire.settings() == again.settings()
    same = same and again._choices.explain() == wire._choices.explain()
    return same and again.state_dict()["policy"] == wire.state_dict()["policy"]


@pytest.mark.parametrize("spec", TIMED)
def test_a_policy_by_the_clock_goes_on_with_what_it_chose(spec):
    assert all(ranks.run(on_timed_checkpoint, spec, ranks=2))


def on_one_rank() -> list[str]:
    found = []
    for spec in (*STEADY, *TIMED):
        model, wire = wired(spec)
        train(model, range(8))
        found.append(wire.explain())
    return found


def test_a_single_rank_needs_nobody():
    (found,) = ranks.run(on_one_rank, ranks=1)
    for spec, explained in zip(STEADY + TIMED, found, strict=True):
        assert explained.startswith(str(tw.policies.parse(spec)))


def on_other_policy() -> str:
    wire = wired("bandwidth:(topk:0.01)")[1]
    try:
        wired("topk:0.01")[1].load_state_dict(wire.state_dict())
    except ValueError as error:
        return str(error)
    return ""


def test_the_state_of_another_policy_is_refused():
    for said in ranks.run(on_other_policy, ranks=2):
        assert said.startswith("the state is not one of policy topk:0.01: it has")


@dataclass(frozen=True)
class Broken(Policy):
    """Fails on one rank, in one of the things that it does."""

    where: str
    name: ClassVar[str] = "broken"

    @property
    def main(self) -> tw.Compressor:
        return tw.TopK(0.1)

    def begin(self, setting: PolicyContext) -> Chooser:
        return _Broken(self.where)


class _Broken(Chooser):
    num_reports = 1

    def __init__(self, where: str) -> None:
        self._where = where

    def _fail(self, where: str, step: int = 4) -> None:
        if where == self._where and dist.get_rank() == 1 and step == 4:
            raise ArithmeticError(f"no {where} today")

    def choose(self, tensor: TensorInfo, step: int) -> tw.Compressor:
        self._step = step
        self._fail("choose", step)
        return tw.TopK(0.1)

    def watches(self, step: int) -> bool:
        return step == 4

    def watch(self, tensor: TensorInfo, step: int, x: Any, residual: Any) -> None:
        self._fail("watch")

    def report(self, measured: Any) -> list[float]:
        self._fail("report", self._step + 1)
        return [1.0]

    def learn(self, step: int, rows: Any) -> None:
        assert rows == [[1.0]] * 2
        self._fail("learn", step + 1)


def on_a_broken_policy(where: str) -> tuple[str, list[bool], bool]:
    model, _ = wired(Broken(where))
    train(model, range(3))
    errors, said = [], ""
    try:
        backward(model, 3)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    for step in range(4, 6):  # it can go on
        backward(model, step)
        errors.append(True)
    parts = [torch.stack([p.grad.sum() for p in named(model).values()])]
    rows = [torch.empty_like(parts[0]) for _ in range(2)]
    dist.all_gather(rows, parts[0])
    return said, errors, bool(torch.equal(rows[0], rows[1]))


@pytest.mark.parametrize("where", ["choose", "watch", "report", "learn"])
def test_a_policy_that_raises_on_one_rank_ends_all(where):
    first, second = ranks.run(on_a_broken_policy, where, ranks=2)
    assert second[0].startswith(f"ArithmeticError: no {where} today")
    assert first[0].startswith("PeerError: ")
    assert f"rank 1: ArithmeticError: no {where} today" in first[0]
    assert first[2]
    assert second[2]


def on_a_late_tensor() -> tuple[list[int], str]:
    reducer = tw.Reducer("solve:(topk:0.1),steps=3")
    for step in range(1, 25):
        draw = torch.Generator().manual_seed(step)
        names = "ac" if step < 12 else "abc"
        reducer.average({name: torch.randn(500, generator=draw) for name in names})
    return [decision.step for decision in reducer.decisions], "\n".join(reducer.explain())


def test_a_tensor_that_comes_after_profiling_is_profiled_too():
    for steps, words in ranks.run(on_a_late_tensor, ranks=2):
        assert steps == [7, 18]
        assert "Profiling" not in words


def on_words() -> tuple[str, str, str, dict[str, Any]]:
    model, wire = wired("solve:(topk:0.1),steps=3", measure_every=0)
    before = wire.explain()
    train(model, range(8))
    settings = wire.settings()
    other, again = wired(settings)
    train(other, range(2))
    return before, wire.explain(), str(again.settings() == settings), wire.stats()


def test_a_wire_explains_itself_and_gives_its_settings():
    before, after, same, stats = ranks.run(on_words, ranks=2)[0]
    assert "Profiling: all tensors are sent with topk:0.1." in before
    assert "The last decisions:" in after
    assert "What is left out is remembered and sent later (ef14)." in after
    assert same == "True"
    assert stats["policy"] == "solve:(topk:0.1),steps=3"
    assert [row["step"] for row in stats["decisions"]] == [7]
