"""What happens when ranks disagree, fail, die, stall or leave: an error for all, and nothing lost.

Functions with a leading `on_` run on every rank, in the processes of ranks.py.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from tensors import normal, same

import thinwire as tw
from thinwire.collectives.link import Link

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

TIMEOUT = 30.0  # of calls whose failure must come long before
SOON = 12.0  # seconds: "at once" on a busy machine, and far below TIMEOUT
HELD: list[Exception] = []  # a program may keep an error: that must keep no connection open
CARRIED = {  # a compressor for each way a tensor can go
    "gather": ("none", "gather"),
    "summable": ("cast:bf16", "summable"),
    "dense": ("none", "summable"),
    "twoshot": ("none", "twoshot"),
    "sparse": ("topk:0.5", "sparse"),
}


class Report(NamedTuple):
    """What a rank saw of a call that failed."""

    error: str
    untouched: bool
    seconds: float


def attempt(*, n: int = 1000, residual: bool = True, call=None, **kwargs: object) -> Report:
    """A call, with what came of it."""
    me = dist.get_rank()
    x = kwargs.pop("x", None)
    x = normal(n, me) if x is None else x
    r = normal(x.numel(), 50 + me).view(x.shape).to(torch.float32) if residual else None
    before = x.clone(), None if r is None else r.clone()
    given = {"compressor": "topk:0.5", "timeout": TIMEOUT} | kwargs
    start, error = time.monotonic(), ""
    try:
        if call is None:
            tw.all_reduce(x, residual=r, **given)
        else:
            tw.all_reduce_coalesced([x], residuals=[r], **given)
    except Exception as caught:
        HELD.append(caught)
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - start
    untouched = same(x, before[0]) and (r is None or same(r, before[1]))
    return Report(error, untouched, seconds)


def works() -> bool:
    """Whether the group can be used."""
    x = torch.ones(100)
    tw.all_reduce(x, "topk:1.0", residual=torch.zeros(100), timeout=TIMEOUT)
    return bool((x == dist.get_world_size()).all())


# Ranks that disagree


OTHERWISE = {
    "compressor": ({"compressor": "topk:0.25"}, "compressor: topk:0.5 {} but topk:0.25 {}"),
    "shape": ({"x": torch.ones(10, 2)}, "tensor: float32 [1000] {} but float32 [10, 2] {}"),
    "dtype": (
        {"x": torch.ones(1000).bfloat16()},
        "tensor: float32 [1000] {} but bfloat16 [1000] {}",
    ),
    "op": ({"op": "avg"}, "op: SUM {} but AVG {}"),
    "collective": ({"collective": "twoshot"}, "collective: auto {} but twoshot {}"),
    "function": ({"call": "coalesced"}, "call: all_reduce {} but all_reduce_coalesced {}"),
}


def on_mismatch(kind: str, odd: int) -> tuple[Report, bool]:
    given, _ = OTHERWISE[kind]
    report = attempt(**given) if dist.get_rank() == odd else attempt()
    return report, works()


@pytest.mark.parametrize("kind", OTHERWISE)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_disagree_all_learn_who_differs_in_what(kind, size):
    odd = size - 1
    others = ", ".join(map(str, range(odd)))
    where = f"on {'rank' if odd == 1 else 'ranks'} {others}", f"on rank {odd}"
    for report, usable in ranks.run(on_mismatch, kind, odd, ranks=size):
        assert report.error.startswith("MismatchError: ranks disagree in one call")
        assert OTHERWISE[kind][1].format(*where) in report.error
        assert report.untouched
        assert report.seconds < SOON
        assert usable


def on_one_residual(spec: str, collective: str, bad: bool) -> tuple[Report, list[float]]:
    me = dist.get_rank()
    x = torch.full((8,), 1.0 + me)
    x[0] = torch.nan if bad and me == 0 else 1.0
    report = attempt(
        x=x, compressor=spec, collective=collective, residual=me == 0, key=tw.Key(), timeout=3.0
    )
    return report, x.tolist()


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "nan"])
@pytest.mark.parametrize("carried", CARRIED)
def test_a_residual_on_one_rank_alone_ends_alike_everywhere(carried, bad):
    """The same error, or the same result."""
    spec, collective = CARRIED[carried]
    found = ranks.run(on_one_residual, spec, collective, bad, ranks=2)
    errors = {report.error.partition(":")[0] for report, _ in found}
    assert errors in ({""}, {"MismatchError"}), errors
    if errors == {""}:
        first, second = (torch.tensor(x) for _, x in found)
        assert same(first, second)
        assert first.isfinite().all() != bad


# Ranks that cannot go on


def on_failing(spec: str, collective: str, at: int) -> tuple[Report, bool]:
    """The encoder of rank 1 breaks at its `at`-th use, after a call that went well."""
    me, compressor = dist.get_rank(), tw.parse(spec)
    given = {"compressor": spec, "collective": collective}
    assert not attempt(**given).error
    target = "select" if compressor.sparse else "encode_flat"
    whole, uses = getattr(type(compressor), target), []

    def broken(self, request):
        uses.append(1)
        if len(uses) == at:
            raise RuntimeError("out of paper")
        return whole(self, request)

    with pytest.MonkeyPatch.context() as patch:
        if me == 1:
            patch.setattr(type(compressor), target, broken)
        report = attempt(**given)
    return report, works()


@pytest.mark.parametrize(
    ("spec", "collective", "at"),
    [
        ("topk:0.5", "gather", 1),
        ("cast:fp16", "summable", 1),
        ("quantize:4", "twoshot", 1),
        ("quantize:4", "twoshot", 2),  # the payload of the second of the other ranks' shards
        ("quantize:4", "twoshot", 3),  # the payload of the sum
        ("topk:0.5", "sparse", 1),
    ],
)
def test_a_rank_that_cannot_encode_gets_its_error_and_the_others_its_reason(spec, collective, at):
    found = ranks.run(on_failing, spec, collective, at, ranks=3)
    for rank, (report, usable) in enumerate(found):
        wanted = "PeerError: all_reduce: could not go on at rank 1: RuntimeError: out of paper"
        assert report.error == (wanted if rank != 1 else "RuntimeError: out of paper")
        assert report.untouched
        assert report.seconds < SOON
        assert usable


def on_refused(spec: str, collective: str, refusing: list[int]) -> tuple[Report, bool]:
    limit = 100 if dist.get_rank() in refusing else None
    return attempt(compressor=spec, collective=collective, max_bytes=limit), works()


@pytest.mark.parametrize("carried", CARRIED)
def test_a_memory_limit_on_one_rank_refuses_for_all(carried):
    spec, collective = CARRIED[carried]
    found = ranks.run(on_refused, spec, collective, [1, 2], ranks=3)
    for rank, (report, usable) in enumerate(found):
        if rank in (1, 2):
            assert report.error.startswith(f"MemoryLimitError: {collective}"), report.error
        else:
            assert report.error.startswith("PeerError: all_reduce: could not go on at rank 1: Mem")
            assert "; rank 2: MemoryLimitError: " in report.error
        assert report.untouched
        assert usable


# Ranks that die


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle() -> None:
    """10 ms after the first transfer of more than a megabyte has begun."""
    count = Link._count

    def counted(self, sent: int, received: int) -> None:
        count(self, sent, received)
        if sent > 1e6:
            threading.Timer(0.01, die).start()

    Link._count = counted


def on_death(spec: str, collective: str, n: int, how: str, victim: int) -> tuple[Report, Report]:
    """What the others see of a death, and what of the next call."""
    if how != "first":
        assert works()
    if dist.get_rank() == victim:
        die_in_the_middle() if how == "middle" else die()
    residual = collective != "summable" or spec != "none"
    report = attempt(n=n, compressor=spec, collective=collective, residual=residual)
    return report, attempt()


def check_death(found: list, victim: int) -> None:
    for report, later in (each for rank, each in enumerate(found) if rank != victim):
        assert report.error.startswith("PeerError: "), report
        assert report.untouched
        assert report.seconds < SOON
        assert later.error.startswith("PeerError: "), later
        assert "in an earlier call" in later.error
        assert later.untouched
        assert later.seconds < 1


@pytest.mark.parametrize("carried", CARRIED)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_death_in_the_middle_of_an_exchange_loses_nothing_on_the_others(carried, size):
    spec, collective = CARRIED[carried]
    victim = size - 1
    with ranks.Ranks(size) as group:
        args = (spec, collective, 6_000_000, "middle", victim)
        check_death(group.run(on_death, *args, dying=[victim]), victim)


@pytest.mark.parametrize(
    ("carried", "size"), [*((each, 3) for each in CARRIED), ("gather", 2), ("twoshot", 4)]
)
def test_a_death_before_the_call_is_noticed_at_once(carried, size):
    spec, collective = CARRIED[carried]
    with ranks.Ranks(size) as group:
        args = (spec, collective, 1000, "before", 0)
        check_death(group.run(on_death, *args, dying=[0]), 0)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("how", ["before", "middle"])
def test_the_death_of_the_rank_that_holds_the_store_is_noticed_too(how):
    with ranks.Ranks(3) as group:
        args = ("none", "gather", 3_000_000, how, 0)
        store = f"127.0.0.1:{free_port()}"
        check_death(group.run(on_death, *args, dying=[0], store=store), 0)


# Ranks that stall


def on_stall(how: str) -> tuple[Report, Report]:
    if how != "first":
        assert works()
    if dist.get_rank() == 1:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    return attempt(timeout=1.5), attempt()


@pytest.mark.parametrize("how", ["asleep", "stopped", "first"])
def test_a_rank_that_stalls_is_given_up_at_the_timeout(how):
    with ranks.Ranks(3) as group:
        found = group.run(on_stall, how, dying=[1])
    for report, later in (found[0], found[2]):
        assert report.error.startswith("PeerError: "), report
        # The rank whose timeout comes first hangs up, which is what the other may notice.
        assert "within 1.5 s" in report.error or "lost the connection" in report.error
        assert report.untouched
        assert 1.4 < report.seconds < 1.5 + SOON
        assert later.error.startswith("PeerError: ")
        assert later.seconds < 1
    assert any("within 1.5 s" in found[rank][0].error for rank in (0, 2))


# Programs that end


PROGRAM = """
import sys, torch, torch.distributed as dist, thinwire as tw
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=0, world_size=2)
all_reduce, x, specs = tw.all_reduce, torch.ones(1000), ["none", "topk:0.5", "quantize:4"]
start = lambda: [all_reduce(torch.ones(1000), spec, async_op=True) for spec in specs]
if {connected}:
    all_reduce(x, "none")
print("ready", flush=True)
{body}
"""
ENDINGS = {  # whether the ranks have met before, and what then happens
    "interrupted while connecting": (False, 'all_reduce(x, "topk:0.5")'),
    "interrupted while waiting": (True, 'all_reduce(x, "topk:0.5")'),
    "in flight for ever": (True, "handles = start()"),
    "never connected": (False, "handles = start()"),
    "nearly done": (True, "start()"),
    "destroyed in flight": (True, "handles = start(); dist.destroy_process_group()"),
    "failed": (True, "handles = start(); 1 / 0"),
}


def on_peer(ending: str, go: str) -> list[float]:
    """The other rank: comes late, or never."""
    x = torch.ones(1000)
    if ENDINGS[ending][0]:
        tw.all_reduce(x, "none")
    while not os.path.exists(go):
        time.sleep(0.01)
    if ending != "nearly done":
        time.sleep(1000)
    time.sleep(0.5)
    found = []
    for spec in ("none", "topk:0.5", "quantize:4"):
        x = torch.ones(1000)
        tw.all_reduce(x, spec)
        found.append(float(x.max()))
    return found


class Ending(NamedTuple):
    """How a program ended."""

    code: int
    stderr: str
    seconds: float
    peer: ranks.Outcome


def end(ending: str, place: str) -> Ending:
    connected, body = ENDINGS[ending]
    program = PROGRAM.format(connected=connected, body=body)
    with ranks.Ranks(1) as peer:
        peer.start(on_peer, ending, f"{place}.go", first=1, store=place)
        with subprocess.Popen(
            [sys.executable, "-c", program, place],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout.readline() == "ready\n", process.stderr.read()
                open(f"{place}.go", "w").close()
                if "interrupted" in ending:
                    time.sleep(0.5)
                    process.send_signal(signal.SIGINT)
                start = time.monotonic()
                _, stderr = process.communicate(timeout=30)
                seconds = time.monotonic() - start
            finally:
                process.kill()
        outcome = peer.outcomes(seconds=10 if ending == "nearly done" else 0.0)[0]
    return Ending(process.returncode, stderr, seconds, outcome)


@pytest.fixture(scope="module")
def endings(tmp_path_factory) -> dict[str, Ending]:
    """All programs at once: most of their time goes into importing torch."""
    place, found = tmp_path_factory.mktemp("endings"), {}

    def note(ending: str) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            found[ending] = end(ending, str(place / ending.replace(" ", "-")))

    threads = [threading.Thread(target=note, args=(ending,)) for ending in ENDINGS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("ending", [each for each in ENDINGS if "interrupted" in each])
def test_ctrl_c_while_waiting_ends_the_program_as_it_should(endings, ending):
    code, stderr, seconds, _ = endings[ending]
    stderr = stderr.replace("[rank0]: ", "")  # by torch's own hook
    assert code in (-signal.SIGINT, 128 + signal.SIGINT)
    assert stderr.startswith("Traceback (most recent call last):")
    assert stderr.endswith("KeyboardInterrupt\n")
    assert stderr.count("Traceback") == 1
    assert "terminate called" not in stderr
    assert seconds < SOON


@pytest.mark.parametrize(
    "ending", ["in flight for ever", "never connected", "nearly done", "destroyed in flight"]
)
def test_a_program_may_end_with_exchanges_in_flight(endings, ending):
    code, stderr, seconds, _ = endings[ending]
    assert (code, stderr) == (0, "")
    assert seconds < SOON


def test_exchanges_in_flight_at_the_end_are_completed_if_the_others_come(endings):
    assert endings["nearly done"].peer.error == ""
    assert endings["nearly done"].peer.value == pytest.approx([2, 2, 2])


def test_an_error_ends_a_program_as_it_should(endings):
    code, stderr, seconds, _ = endings["failed"]
    assert code == 1
    assert stderr.endswith("ZeroDivisionError: division by zero\n")
    assert seconds < SOON
