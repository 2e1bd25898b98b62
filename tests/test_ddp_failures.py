"""What comes out of backward() when ranks disagree, fail, die or stall, and replicas that differ.

Functions with a leading `on_` run on every rank, in the processes of ranks.py. Models and batches
are those of nets.py.
"""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from nets import MIN, Books, all_same, alone, backward, gradients, memory, named, net, train, wired
from torch import Tensor, nn

import thinwire as tw
from thinwire.parallel.ddp import BackwardPass, DDPHook

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

SHORT = 1.5  # seconds: a timeout that is meant to pass


class Report(NamedTuple):
    """What a rank saw of a backward pass."""

    error: str
    untouched: bool  # what is remembered of compressed tensors is what it was
    notes: str


def compressed(wire: tw.Wire) -> dict[str, Tensor]:
    """What is remembered of matrices; EF21 remembers also what travels as it is."""
    return {name: value for name, value in memory(wire).items() if ".weight " in name}


def attempt(model: Any, wire: tw.Wire, step: int) -> Report:
    before, error, notes = compressed(wire), "", ""
    try:
        backward(model, step)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
        notes = "\n".join(getattr(caught, "__notes__", []))
    return Report(error, all_same(compressed(wire), before), notes)


# Ranks that disagree


def on_mismatch(feedback: str) -> tuple[Report, dict[str, float], bool]:
    """The last rank has another wire in step 2, and its own again from step 3 on."""
    model, wire = wired(feedback=feedback)
    odd, books = dist.get_rank() == dist.get_world_size() - 1, Books(model, wire)
    for step in range(5):
        if step == 2:
            if odd:
                wire.detach()
                other = tw.attach(model, "topk:0.2", feedback=feedback, min_numel=MIN)
                other.load_state_dict(wire.state_dict())
            report = attempt(model, other if odd else wire, step)
            if odd:
                other.detach()
                again = tw.attach(model, "topk:0.1", feedback=feedback, min_numel=MIN)
                again.load_state_dict(other.state_dict())
                books._wire = again
            continue
        books.put(alone(model, step))
        backward(model, step)
        books.take()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, gradients(model))
    alike = all(all_same(each, everyone[0]) for each in everyone)
    return report, books.balance() if feedback == "ef14" else {}, alike


@pytest.mark.parametrize(("size", "feedback"), [(2, "ef14"), (3, "ef14"), (2, "ef21m:0.5")])
def test_ranks_that_attached_different_things_all_learn_who_differs_in_what(size, feedback):
    """What was remembered stays, and the next backward pass works."""
    others = f"on {'rank' if size == 2 else 'ranks'} {', '.join(map(str, range(size - 1)))}"
    for report, balance, alike in ranks.run(on_mismatch, feedback, ranks=size):
        assert report.error.startswith("MismatchError: ranks disagree in one call, ")
        wanted = f"topk:0.1 for 4.weight {others} but topk:0.2 for 4.weight on rank {size - 1}"
        assert wanted in report.error
        assert report.untouched
        assert all(value <= 1 for value in balance.values()), balance
        assert alike


DIFFERENT = {  # what rank 1 attached
    "min_numel": {"min_numel": 700},
    "exclude": {"exclude": "4.weight"},
    "check_every": {"check_every": 1},
    "compressor": {"compressor": lambda name: "topk:0.2" if name[0] == "2" else "topk:0.1"},
}


def on_different(kind: str) -> tuple[list[Report], bool]:
    """Two passes that go wrong, and one that does not."""
    odd = dist.get_rank() == 1
    model, wire = wired(**DIFFERENT[kind] if odd else {})
    reports = [attempt(model, wire, step) for step in range(2)]
    wire.detach()
    wire = tw.attach(model, "topk:0.1", min_numel=MIN)
    return reports, attempt(model, wire, 2).error == ""


@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_would_exchange_different_numbers_of_tensors_learn_so(kind):
    found = ranks.run(on_different, kind, ranks=2)
    for reports, usable in found:
        assert [report.error.partition(":")[0] for report in reports] == ["MismatchError"] * 2
        assert usable


def on_a_failure_that_is_over(compressor: str) -> tuple[str, bool]:
    """Whether a model is gone when nobody has it any more, although an exchange of it failed."""

    def fail() -> tuple[str, Any]:
        model, wire = wired(compressor if dist.get_rank() == 0 else "topk:0.2")
        return attempt(model, wire, 0).error, weakref.ref(model)

    error, model = fail()
    give_up = time.monotonic() + 60
    while model() is not None and time.monotonic() < give_up:
        gc.collect()  # the group's thread may be about to let go of the last exchange
        time.sleep(0.01)
    return error, model() is None


@pytest.mark.parametrize("compressor", ["topk:0.1", "powersgd:2"])
def test_a_failure_keeps_no_model_nor_its_process_group(compressor):
    for error, gone in ranks.run(on_a_failure_that_is_over, compressor, ranks=2):
        assert error.startswith("MismatchError")
        assert gone


def on_one_scaler() -> Report:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if dist.get_rank() == 1 else None
    return attempt(*wired(scaler=scaler), 0)


def test_a_scaler_that_one_rank_alone_was_given_is_an_error_on_all():
    for report in ranks.run(on_one_scaler, ranks=2):
        assert report.error.startswith("MismatchError: ranks disagree in one call, ")
        assert "scaler: none on rank 0 but given on rank 1" in report.error


# Ranks that cannot go on


def on_memory() -> tuple[Report, bool]:
    model, wire = wired(max_bytes=100 if dist.get_rank() == 1 else None)
    attempt(model, wire, 0)
    report = attempt(model, wire, 1)
    wire.detach()
    wire = tw.attach(model, "topk:0.1", min_numel=MIN)
    return report, attempt(model, wire, 2).error == ""


def test_a_memory_limit_on_one_rank_refuses_for_all():
    (own, usable), (other, also) = reversed(ranks.run(on_memory, ranks=2))
    assert own.error.startswith("MemoryLimitError: ")
    assert other.error.startswith("PeerError: average: could not go on at rank 1: MemoryLimitError")
    assert own.untouched
    assert other.untouched
    assert usable
    assert also


class Unscaled:
    """A GradScaler whose scale cannot be read in the second step, on rank 1."""

    def __init__(self) -> None:
        self.steps = 0

    def get_scale(self) -> float:
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == 1:
            raise OverflowError("no scale")
        return 1.0


def on_no_scale() -> list[Report]:
    model, wire = wired(scaler=Unscaled())
    return [attempt(model, wire, step) for step in range(2)]


def test_an_error_at_the_start_of_a_pass_comes_out_of_it():
    first, second = ranks.run(on_no_scale, ranks=2)
    assert second[1].error == "OverflowError: no scale"
    assert first[1].error.partition(":")[0] in ("PeerError", "MismatchError")


def on_nan(where: str) -> tuple[list[str], Report, bool]:
    """Without a scaler: which gradients are NaN on this rank, and whether the next step works."""
    model, wire = wired(ddp={"bucket_cap_mb": 1})
    backward(model, 0)
    if dist.get_rank() == 1:
        parameter = named(model)[where]
        handle = parameter.register_hook(lambda g: g * torch.nan)
    report = attempt(model, wire, 1)
    bad = [name for name, g in gradients(model).items() if not g.isfinite().all()]
    if dist.get_rank() == 1:
        handle.remove()
    return bad, report, attempt(model, wire, 2).error == "" and memory_is_finite(wire)


def memory_is_finite(wire: tw.Wire) -> bool:
    return all(value.isfinite().all() for value in memory(wire).values())


def test_nan_on_one_rank_reaches_all_and_no_residual():
    for bad, report, works in ranks.run(on_nan, "2.weight", ranks=2):
        assert "2.weight" in bad
        assert report.error == ""
        assert report.untouched
        assert works
    for bad, report, works in ranks.run(on_nan, "2.bias", ranks=2):
        assert "2.bias" in bad
        assert report.error == ""
        assert works


# Ranks that die or stall


class Victim:
    """Kills its process, or lets it sleep, in the middle of a backward pass."""

    def __init__(self, how: str, parameter: nn.Parameter) -> None:
        self.how = how
        parameter.register_hook(self)

    def __call__(self, gradient: Tensor) -> None:
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)


def on_loss(how: str, ddp: dict[str, Any], options: dict[str, Any]) -> list[Report]:
    """The last rank is lost in the third step; what the others see of that and of the next."""
    model, wire = wired(ddp=ddp, **options)
    train(model, range(2))
    if dist.get_rank() == dist.get_world_size() - 1:
        Victim(how, named(model)["2.weight"])
    return [attempt(model, wire, step) for step in range(2, 4)]


UNUSED = {"find_unused_parameters": True}


def check_later(report: Report) -> None:
    """The pass after one that lost a rank."""
    assert report.error.startswith("PeerError: "), report
    assert "in an earlier call" in report.error


@pytest.mark.parametrize(
    ("size", "ddp"),
    [
        *((size, {}) for size in (2, 3)),
        (2, UNUSED),
    ],
    ids=["2", "3", "2 unused"],
)
def test_a_rank_that_is_killed_in_the_middle_of_training_is_noticed_at_once(size, ddp):
    with ranks.Ranks(size) as group:
        found = group.run(on_loss, "dies", ddp, {}, dying=[size - 1])
    for report, later in found[: size - 1]:
        assert report.error.startswith("PeerError: "), report
        check_later(later)
        assert later.untouched


@pytest.mark.parametrize(
    ("ddp", "options"),
    [
        ({}, {}),
        ({}, {"check_every": 1}),
        (UNUSED, {}),
    ],
    ids=["plain", "checked", "unused"],
)
def test_a_rank_that_stalls_is_given_up_at_the_timeout(ddp, options):
    with ranks.Ranks(3) as group:
        given = {"timeout": SHORT} | options
        found = group.run(on_loss, "stalls", ddp, given, dying=[2])
    for report, later in found[:2]:
        assert report.error.startswith("PeerError: "), report
        # The rank whose timeout comes first hangs up, which is what the other may notice.
        assert "within 1.5 s" in report.error or "lost the connection" in report.error
        check_later(later)
    assert any(f"within {SHORT} s" in report.error for report, _ in found[:2])


PROGRAM = """
import sys, torch.distributed as dist
from nets import backward, wired
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=0, world_size=2)
model, wire = wired()
for step in range(2):  # in the second forward pass DDP waits, too
    backward(model, step)
print("ready", flush=True)
backward(model, 2)
"""


def on_peer() -> None:
    model, _ = wired()
    for step in range(2):
        backward(model, step)
    time.sleep(1000)


@pytest.mark.slow
def test_ctrl_c_during_a_backward_pass_that_waits_ends_the_program(tmp_path):
    place = str(tmp_path / "store")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with ranks.Ranks(1) as peer:
        peer.start(on_peer, first=1, store=place)
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, place],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        ) as process:
            try:
                assert process.stdout.readline() == "ready\n", process.stderr.read()
                time.sleep(0.5)
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=ranks.PATIENCE)
            finally:
                process.kill()
    stderr = stderr.replace("[rank0]: ", "")  # by torch's own hook
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert stderr.startswith("Traceback (most recent call last):")
    assert stderr.endswith("KeyboardInterrupt\n")
    assert stderr.count("Traceback") == 1
    assert "terminate called" not in stderr


class Interrupt:
    """Ctrl-C in a method, at one of its calls."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, at: int = 1) -> None:
        self.calls, self.at, self.whole = 0, at, getattr(owner, name)
        patch.setattr(owner, name, lambda *args: self(*args))

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.whole(*args)


def interrupted(
    model: Any, step: int, owner: type, name: str, at: int = 1, how: type[Interrupt] = Interrupt
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        how(patch, owner, name, at)
        with pytest.raises(KeyboardInterrupt):
            backward(model, step)


class Later(NamedTuple):
    """What a rank saw of a pass in which rank 0 was interrupted, and of those after it."""

    error: str
    balance: dict[str, float]
    alike: bool


def on_interrupted_waiting(ddp: dict[str, Any]) -> Later:
    """Rank 0 is interrupted while it waits for rank 1, which comes after that."""
    model, wire = wired(ddp=ddp)
    later, books, error = dist.new_group([0, 1]), Books(model, wire), ""
    for step in range(5):
        if step != 2:
            books.put(alone(model, step))
            backward(model, step)
            books.take()
        elif dist.get_rank() == 0:
            interrupted(model, step, BackwardPass, "wait")
            dist.barrier(later)
        else:
            dist.barrier(later)
            error = attempt(model, wire, step).error
    everyone = [None, None]
    dist.all_gather_object(everyone, gradients(model))
    return Later(error, books.balance(), all_same(*everyone))


@pytest.mark.parametrize("ddp", [{}, UNUSED], ids=["plain", "unused"])
def test_training_goes_on_after_ctrl_c_in_a_backward_pass_that_waits(ddp):
    """The exchange that was under way has ended on all ranks, and none has sent the rest."""
    found = ranks.run(on_interrupted_waiting, ddp, ranks=2)
    for report in found:
        assert all(value <= 1 for name, value in report.balance.items() if name[0] != "4")
        assert report.alike
    assert found[1].error.endswith("could not go on at rank 0: InterruptedError: KeyboardInterrupt")


class InterruptUnderWay(Interrupt):
    """The same when all exchanges of the pass have made what they send."""

    def __call__(self, *args: Any) -> Any:
        while not all("encode" in handle.account.seconds for handle in args[0].handles):
            time.sleep(0.001)
        return super().__call__(*args)


class Constant:
    """A GradScaler; with one, residuals are written when the whole step has gone well."""

    def get_scale(self) -> float:
        return 1.0


def on_interrupted_under_way(interrupts: bool) -> dict[str, Tensor]:
    """What is remembered after a step in which rank 0 is interrupted, and the next."""
    torch.manual_seed(0)
    model, wire = wired(inner=nn.Linear(20, 30, bias=False), scaler=Constant())
    later = dist.new_group([0, 1])
    for step in range(4):
        if step != 2 or not interrupts:
            backward(model, step)
        elif dist.get_rank() == 0:
            interrupted(model, step, BackwardPass, "wait", how=InterruptUnderWay)
            dist.barrier(later)
        else:
            dist.barrier(later)
            backward(model, step)
    return memory(wire) | gradients(model)


def test_ctrl_c_while_the_last_exchange_is_under_way_leaves_a_whole_step():
    found = ranks.run(on_interrupted_under_way, True, ranks=2)
    expected = ranks.run(on_interrupted_under_way, False, ranks=2)
    for own, wanted in zip(found, expected, strict=True):
        assert all_same(own, wanted)


def on_interrupted_sending() -> tuple[str, str, dict[str, Tensor]]:
    """Rank 0 is interrupted when the second bucket arrives."""
    model, wire = wired()
    train(model, range(2))
    error = ""
    if dist.get_rank() == 0:
        interrupted(model, 2, DDPHook, "_receive", at=2)
    else:
        error = attempt(model, wire, 2).error
    return error, attempt(model, wire, 3).error, gradients(model)


def test_ctrl_c_between_two_buckets_is_told_to_all_and_training_goes_on():
    first, second = ranks.run(on_interrupted_sending, ranks=2)
    assert "could not go on at rank 0: InterruptedError: KeyboardInterrupt" in second[0]
    assert first[1] == second[1] == ""
    assert all_same(first[2], second[2])


# Replicas


def caught(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_replicas(odd: int) -> dict[str, str]:
    model, wire = wired(check_every=2)
    train(model, range(2))
    found = {"alike": caught(lambda: tw.check_replicas(model))}
    found["bare"] = caught(lambda: tw.check_replicas(net()))
    tw.check_replicas(model, buffers=True)
    if dist.get_rank() == odd:
        with torch.no_grad():
            named(model)["2.weight"][0, 0] *= 1 + 2**-22  # by a bit or two
            named(model)["4.bias"][3] = -0.0
    else:
        with torch.no_grad():
            named(model)["4.bias"][3] = 0.0
    found["differ"] = caught(lambda: tw.check_replicas(model))
    found["early"] = caught(lambda: backward(model, 2))  # step 3: not looked at
    found["during"] = caught(lambda: backward(model, 3))
    wire.detach()
    found["after"] = caught(lambda: backward(model, 4))
    inner = net() if dist.get_rank() != odd else nn.Sequential(*net(), nn.Linear(10, 10))
    found["structure"] = caught(lambda: tw.check_replicas(inner))
    return found


@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 1), (3, 0)])
def test_replicas_that_differ_are_named_with_their_parameters(size, odd):
    same = ", ".join(str(rank) for rank in range(size) if rank != odd)
    wanted = f"rank {odd} in 2.weight, 4.bias, from {'rank' if size == 2 else 'ranks'} {same}. "
    for found in ranks.run(on_replicas, odd, ranks=size):
        for moment in ("alike", "bare", "early", "after"):
            assert found[moment] == "", moment
        for moment in ("differ", "during"):
            assert found[moment].startswith("ReplicaError: parameters differ between replicas: ")
            assert wanted in found[moment]
        assert found["structure"].startswith("MismatchError: ranks disagree in one call, ")
        assert "parameters: 6 " in found["structure"]
        assert "parameters: " in found["structure"]


def on_join_checked() -> str:
    model, _ = wired(check_every=1)
    with model.join():
        train(model, range(1 + 2 * dist.get_rank()))
    return caught(lambda: tw.check_replicas(model))


def test_a_rank_that_has_joined_is_no_replica_that_differs():
    with ranks.Ranks(2) as group:
        assert group.run(on_join_checked) == ["", ""]


def on_sharded_models() -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    inner = fully_shard(net())
    outer = nn.Sequential(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
    return [caught(lambda: tw.check_replicas(model)) for model in (inner, outer)]  # noqa: B023


def test_shards_are_not_taken_for_replicas():
    for found in ranks.run(on_sharded_models, ranks=2):
        for text, what in zip(found, ("0.weight is a DTensor", "FullySharded"), strict=True):
            assert text.startswith("TypeError: check_replicas compares whole parameters"), text
            assert what in text
