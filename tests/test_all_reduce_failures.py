"""What happens when ranks disagree, fail, die, stall or leave: an error for all, and nothing lost.

Functions with a leading `on_` run on every rank, in the processes of ranks.py.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from tensors import same

import thinwire as tw
from thinwire import torch_internals
from thinwire.collectives import connect
from thinwire.collectives.link import Link

pytestmark = pytest.mark.timeout(600)  # the first test of a new checkout compiles all kernels

TIMEOUT = 600.0  # of calls whose failure must come at once: ranks.py ends them long before
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


def some(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def attempt(*, n: int = 1000, residual: bool = True, call=None, **kwargs: object) -> Report:
    """A call, with what came of it."""
    me = dist.get_rank()
    x = kwargs.pop("x", None)
    x = some(n, me) if x is None else x
    r = some(x.numel(), 50 + me).view(x.shape) if residual else None
    before = x.clone(), None if r is None else r.clone()
    given = {"compressor": "topk:0.5", "timeout": TIMEOUT} | kwargs
    error = ""
    try:
        if call is None:
            tw.all_reduce(x, residual=r, **given)
        else:
            tw.all_reduce_coalesced([x], residuals=[r], **given)
    except Exception as caught:
        HELD.append(caught)
        error = f"{type(caught).__name__}: {caught}"
    untouched = same(x, before[0]) and (r is None or same(r, before[1]))
    return Report(error, untouched)


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


def on_mismatches(odd: int) -> dict[str, tuple[Report, bool]]:
    return {
        kind: (attempt(**given) if dist.get_rank() == odd else attempt(), works())
        for kind, (given, _) in OTHERWISE.items()
    }


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_disagree_all_learn_who_differs_in_what(size):
    odd = size - 1
    others = ", ".join(map(str, range(odd)))
    where = f"on {'rank' if odd == 1 else 'ranks'} {others}", f"on rank {odd}"
    for found in ranks.run(on_mismatches, odd, ranks=size):
        assert found.keys() == OTHERWISE.keys()
        for kind, (report, usable) in found.items():
            assert report.error.startswith("MismatchError: ranks disagree in one call"), kind
            assert OTHERWISE[kind][1].format(*where) in report.error, kind
            assert report.untouched, kind
            assert usable, kind


def on_one_residual() -> dict[tuple[str, bool], tuple[Report, torch.Tensor]]:
    me, found = dist.get_rank(), {}
    for (carried, (spec, collective)), bad in itertools.product(CARRIED.items(), [False, True]):
        x = torch.full((8,), 1.0 + me)
        x[0] = torch.nan if bad and me == 0 else 1.0
        given = {"x": x, "compressor": spec, "collective": collective, "key": tw.Key()}
        found[carried, bad] = attempt(**given, residual=me == 0, timeout=3.0), x
    return found


def test_a_residual_on_one_rank_alone_ends_alike_everywhere():
    """The same error, or the same result."""
    one, two = ranks.run(on_one_residual, ranks=2)
    for case, (first, x) in one.items():
        second, y = two[case]
        errors = {report.error.partition(":")[0] for report in (first, second)}
        assert errors in ({""}, {"MismatchError"}), (case, errors)
        if errors == {""}:
            assert same(x, y), case
            assert x.isfinite().all() != case[1], case


# Ranks that cannot go on


FAILING = [
    *(("topk:0.5", "gather", 1), ("cast:fp16", "summable", 1), ("quantize:4", "twoshot", 1)),
    ("quantize:4", "twoshot", 2),  # the payload of the second of the other ranks' shards
    ("quantize:4", "twoshot", 3),  # the payload of the sum
    ("topk:0.5", "sparse", 1),
]


@contextlib.contextmanager
def breaking(compressor: tw.Compressor, at: int) -> Iterator[None]:
    """Encoding fails at its `at`-th use, with 0 never."""
    target = "select" if isinstance(compressor, tw.compressors.SparseCompressor) else "encode_flat"
    whole, uses = getattr(type(compressor), target), []

    def broken(self, request):
        uses.append(1)
        if len(uses) == at:
            raise RuntimeError("out of paper")
        return whole(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(compressor), target, broken)
        yield


def on_failing(spec: str, collective: str, at: int) -> tuple[Report, bool]:
    """The encoder of rank 1 breaks at its `at`-th use, after a call that went well."""
    me, compressor = dist.get_rank(), tw.parse(spec)
    given = {"compressor": spec, "collective": collective}
    assert not attempt(**given).error
    with breaking(compressor, at if me == 1 else 0):
        report = attempt(**given)
    return report, works()


def on_all_failing() -> list[tuple[Report, bool]]:
    return [on_failing(*case) for case in FAILING]


def test_a_rank_that_cannot_encode_gets_its_error_and_the_others_its_reason():
    for rank, found in enumerate(ranks.run(on_all_failing, ranks=3)):
        for case, (report, usable) in zip(FAILING, found, strict=True):
            wanted = "PeerError: all_reduce: could not go on at rank 1: RuntimeError: out of paper"
            assert report.error == (wanted if rank != 1 else "RuntimeError: out of paper"), case
            assert report.untouched, case
            assert usable, case


def on_refused(refusing: list[int]) -> dict[str, tuple[Report, bool]]:
    limit = 100 if dist.get_rank() in refusing else None
    return {
        carried: (attempt(compressor=spec, collective=collective, max_bytes=limit), works())
        for carried, (spec, collective) in CARRIED.items()
    }


def test_a_memory_limit_on_one_rank_refuses_for_all():
    for rank, found in enumerate(ranks.run(on_refused, [1, 2], ranks=3)):
        assert found.keys() == CARRIED.keys()
        for carried, (report, usable) in found.items():
            if rank in (1, 2):
                start = f"MemoryLimitError: {CARRIED[carried][1]}"
            else:
                start = "PeerError: all_reduce: could not go on at rank 1: Mem"
                assert "; rank 2: MemoryLimitError: " in report.error, carried
            assert report.error.startswith(start), (carried, report.error)
            assert report.untouched, carried
            assert usable, carried


# Ranks that die


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle() -> None:
    """5 ms after the first transfer of more than a megabyte has begun."""
    count = Link._count

    def counted(self, sent: int, received: int, messages: int) -> None:
        count(self, sent, received, messages)
        if sent > 1e6:
            threading.Timer(0.005, die).start()

    Link._count = counted


def on_death(spec: str, collective: str, n: int, how: str, victim: int) -> tuple[Report, Report]:
    """What the others see of a death, and what of the next call."""
    connect.LEAVING = 0.2  # seconds; this process serves no other test
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
        assert later.error.startswith("PeerError: "), later
        assert "in an earlier call" in later.error
        assert later.untouched


@pytest.mark.parametrize(
    ("carried", "size"),
    [
        *(("gather", 4), ("summable", 2), ("dense", 3), ("twoshot", 4), ("sparse", 3)),
    ],
)
def test_a_death_in_the_middle_of_an_exchange_loses_nothing_on_the_others(carried, size):
    spec, collective = CARRIED[carried]
    victim = size - 1
    args = (spec, collective, 3_000_000, "middle", victim)
    for _ in range(5):
        with ranks.Ranks(size) as group:
            found = group.run(on_death, *args, dying=[victim])
        if any(report.error for report, _ in found[:victim]):
            break  # otherwise all had arrived before the timer of a busy machine went off
    check_death(found, victim)


@pytest.mark.parametrize(
    ("carried", "size"), [*((each, 3) for each in CARRIED), ("gather", 2), ("twoshot", 4)]
)
def test_a_death_before_the_call_is_noticed_at_once(carried, size):
    spec, collective = CARRIED[carried]
    with ranks.Ranks(size) as group:
        args = (spec, collective, 1000, "before", 0)
        check_death(group.run(on_death, *args, dying=[0]), 0)


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_death_before_the_first_call_is_noticed_long_before_the_timeout(store):
    place = "" if store == "file" else f"127.0.0.1:{ranks.free_port()}"
    with ranks.Ranks(3) as group:
        args = ("topk:0.5", "gather", 1000, "first", 0)
        found = group.run(on_death, *args, dying=[0], store=place, seconds=60.0)
    check_death(found, 0)
    for report, _ in found[1:]:
        assert report.error.startswith("PeerError: lost rank 0: the process has ended"), report


def on_connecting_for_ever() -> tuple[Report, Report]:
    """Rank 0 sits inside gloo, which does not keep to its time limit."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(torch_internals, "gloo_group", lambda *_: time.sleep(1000))
        return attempt(timeout=STALL), attempt()


def test_the_timeout_is_for_connecting_as_a_whole():
    with ranks.Ranks(2) as group:
        found = group.run(on_connecting_for_ever, seconds=60.0)
    for report, later in found:
        assert report.error.startswith("PeerError: "), report
        assert "in an earlier call" in later.error
    assert found[0][0].error.startswith(
        f"PeerError: no answer from rank 1 within {STALL} s: stopped while connecting"
    )


@pytest.mark.parametrize("how", ["before", "middle"])
def test_the_death_of_the_rank_that_holds_the_store_is_noticed_too(how):
    with ranks.Ranks(3) as group:
        args = ("none", "gather", 3_000_000, how, 0)
        store = f"127.0.0.1:{ranks.free_port()}"
        check_death(group.run(on_death, *args, dying=[0], store=store), 0)


# Ranks that stall


STALL = 0.7  # seconds


def on_stall(how: str) -> tuple[Report, Report]:
    if how != "first":
        assert works()
    if dist.get_rank() == 1:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    return attempt(timeout=STALL), attempt()


@pytest.mark.parametrize("how", ["asleep", "stopped", "first"])
def test_a_rank_that_stalls_is_given_up_at_the_timeout(how):
    with ranks.Ranks(3) as group:
        found = group.run(on_stall, how, dying=[1])
    for report, later in (found[0], found[2]):
        assert report.error.startswith("PeerError: "), report
        # The rank whose timeout comes first hangs up, which is what the other may notice.
        assert f"within {STALL} s" in report.error or "lost the connection" in report.error
        assert report.untouched
        assert later.error.startswith("PeerError: "), later
        assert "in an earlier call" in later.error
    assert any(f"within {STALL} s" in found[rank][0].error for rank in (0, 2))


# Programs that end


# Imports torch once and forks a process for each program (all of which end as programs do: by the
# last line, or an exception). Says which process has which, then how each has ended.
LAUNCHER = """
import gc, os, sys, torch, torch.distributed as dist, thinwire as tw
torch.set_num_threads(1)
specs = ["none", "topk:0.5", "quantize:4"]
for spec in specs:  # loads the kernels
    tw.decode(tw.pack(tw.parse(spec).encode(torch.ones(1000))))
gc.collect()
gc.freeze()  # or each program would look for garbage in all of torch when it ends
names = {}
for place in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        for fd, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{place}.{end}", os.O_WRONLY | os.O_CREAT), fd)
        break
    names[pid] = place
    print(place, pid, flush=True)
else:
    while names:
        pid, status = os.waitpid(-1, 0)
        print(names.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()
store = dist.FileStore(f"{place}.store", 2)
dist.init_process_group("gloo", store=store, rank=0, world_size=2)
all_reduce, x = tw.all_reduce, torch.ones(1000)
start = lambda: [all_reduce(torch.ones(1000), spec, async_op=True) for spec in specs]
exec(open(f"{place}.py").read())
"""
LATE = """
import atexit, threading, time
from thinwire.collectives.channel import Channel
run, left = Channel._run, threading.Event()
def slow(self):
    run(self)
    left.set()
    time.sleep(0.5)
Channel._run = slow
alive = lambda: sum(thread.name.startswith("thinwire ") for thread in threading.enumerate())
atexit.register(lambda: print(alive(), flush=True))  # before thinwire's own: so it runs after it
"""

# The other rank comes when it can, which on a busy machine takes longer than what a program grants.
PATIENT = "from thinwire.collectives import channel; channel.GRACE = 100.0"


class Program(NamedTuple):
    """What a program does when the ranks have met, if they have, and before."""

    connected: bool
    body: str
    before: str = ""

    @property
    def source(self) -> str:
        meet = 'all_reduce(x, "none")' if self.connected else ""
        return "\n".join([self.before, meet, 'print("ready", flush=True)', self.body])


ENDINGS = {
    "interrupted while connecting": Program(False, 'all_reduce(x, "topk:0.5")'),
    "interrupted while waiting": Program(True, 'all_reduce(x, "topk:0.5")'),
    "in flight for ever": Program(True, "handles = start()"),
    "never connected": Program(False, "handles = start()"),
    "nearly done": Program(True, "start()", before=PATIENT),
    "destroyed in flight": Program(True, "handles = start(); dist.destroy_process_group()"),
    "failed": Program(True, "handles = start(); 1 / 0"),
    "thread ends late": Program(True, "dist.destroy_process_group(); left.wait()", before=LATE),
}


def on_peer(ending: str, go: str) -> list[float]:
    """The other rank: comes late, or never."""
    x = torch.ones(1000)
    if ENDINGS[ending].connected:
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
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def endings(tmp_path_factory) -> tuple[dict[str, Ending], ranks.Outcome]:
    """All programs at once, and what the peer of the one that is nearly done saw."""
    folder = tmp_path_factory.mktemp("endings")
    places = {ending: folder / ending.replace(" ", "-") for ending in ENDINGS}
    for ending, place in places.items():
        place.with_suffix(".py").write_text(ENDINGS[ending].source)
    with contextlib.ExitStack() as stack:
        peers = {ending: stack.enter_context(ranks.Ranks(1)) for ending in ENDINGS}
        for ending, peer in peers.items():
            peer.start(
                on_peer, ending, str(folder / "go"), first=1, store=f"{places[ending]}.store"
            )
        command = [sys.executable, "-c", LAUNCHER, *map(str, places.values())]
        launcher = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        stack.callback(os.killpg, launcher.pid, signal.SIGKILL)
        return watch(launcher, places, folder / "go"), peers["nearly done"].outcomes()[0]


def watch(launcher: subprocess.Popen, places: dict[str, Path], go: Path) -> dict[str, Ending]:
    names = {str(place): ending for ending, place in places.items()}
    pids = dict(launcher.stdout.readline().rsplit(" ", 1) for _ in places)
    ready = [place.with_suffix(".out") for place in places.values()]
    timer = threading.Timer(ranks.PATIENCE, os.killpg, (launcher.pid, signal.SIGKILL))
    timer.start()  # what hangs is killed, and missing from what is found
    while not all(path.exists() and path.stat().st_size for path in ready):
        if launcher.poll() is not None:
            pytest.fail(str([path.with_suffix(".err").read_text() for path in ready]))
        time.sleep(0.02)
    go.touch()
    time.sleep(0.5)  # the one that is to be interrupted waits by now
    for place, pid in pids.items():
        if "interrupted" in names[place]:
            os.kill(int(pid), signal.SIGINT)
    found = {}
    for line in launcher.stdout:
        place, code = line.rsplit(" ", 1)
        out, err = (Path(f"{place}.{end}").read_text() for end in ("out", "err"))
        found[names[place]] = Ending(int(code), out, err)
    timer.cancel()
    return found


@pytest.mark.parametrize("ending", [each for each in ENDINGS if "interrupted" in each])
def test_ctrl_c_while_waiting_ends_the_program_as_it_should(endings, ending):
    code, _, stderr = endings[0][ending]
    stderr = stderr.replace("[rank0]: ", "")  # by torch's own hook
    assert code in (-signal.SIGINT, 128 + signal.SIGINT)
    assert stderr.startswith("Traceback (most recent call last):")
    assert stderr.endswith("KeyboardInterrupt\n")
    assert stderr.count("Traceback") == 1
    assert "terminate called" not in stderr


@pytest.mark.parametrize(
    "ending", ["in flight for ever", "never connected", "nearly done", "destroyed in flight"]
)
def test_a_program_may_end_with_exchanges_in_flight(endings, ending):
    assert endings[0][ending] == (0, "ready\n", "")


def test_exchanges_in_flight_at_the_end_are_completed_if_the_others_come(endings):
    assert not endings[1].error, endings[1].error
    assert endings[1].value == pytest.approx([2, 2, 2])


def test_an_error_ends_a_program_as_it_should(endings):
    code, _, stderr = endings[0]["failed"]
    assert code == 1
    assert stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_thread_that_is_about_to_end_is_waited_for(endings):
    """It still runs destructors of torch, and one that runs when the interpreter goes aborts it.

    Here half a second passes between the last line of the channel's thread and its end. What the
    program prints in the end is how many such threads there are when thinwire has cleaned up.
    """
    assert endings[0]["thread ends late"] == (0, "ready\n0\n", "")
