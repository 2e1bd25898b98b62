"""Kernels are compiled before they are needed, once per machine, and nobody waits in vain."""

import fcntl
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import nets
import pytest
import ranks
import torch
import torch.distributed as dist
from rows import ROWS

import thinwire as tw
from thinwire import kernels
from thinwire.cli import main
from thinwire.collectives.compiling import compile_in
from thinwire.compressors.base import Request
from thinwire.compressors.compiling import every_use, uses_of
from thinwire.compressors.sparsifiers import Selection, Sparsifier
from thinwire.feedback.state import storage_uses
from thinwire.kernels import cache, compiling
from thinwire.kernels.compiling import KernelUse, compile_kernels

CPU = torch.device("cpu")
F32 = [torch.float32]


@dataclass(frozen=True)
class Counted(KernelUse):
    """A use without kernels."""

    letter: str
    count: ClassVar[list[str]] = []

    @property
    def name(self) -> str:
        return self.letter

    def rehearse(self) -> None:
        self.count.append(self.letter)


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """An empty cache directory, for what is compiled in a test."""
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    monkeypatch.setattr(compiling, "_rehearsed", set())
    Counted.count.clear()
    return tmp_path


def test_a_use_is_rehearsed_once_in_a_process_and_announced_once_on_a_machine(empty, caplog):
    uses = [Counted("a"), Counted("b"), Counted("a")]
    compile_kernels(uses)
    compile_kernels(uses)
    assert Counted.count == ["a", "b"]
    assert [r.message for r in caplog.records] == [
        f"compiling kernels for {use}, once per machine" for use in uses[:2]
    ]
    compiling._rehearsed.clear()  # as in the next process
    caplog.clear()
    compile_kernels(uses)
    assert Counted.count == ["a", "b", "a", "b"]
    assert not caplog.records


def test_what_another_process_compiles_is_left_to_it(empty, monkeypatch):
    a, b = Counted("a"), Counted("b")
    naps = []

    def other_process_ends(seconds):
        naps.append(seconds)
        assert Counted.count == ["b"]  # no time is lost meanwhile
        (empty / compiling._mark(a)).touch()

    monkeypatch.setattr(compiling.time, "sleep", other_process_ends)
    with (empty / f"{compiling._mark(a)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_kernels([a, b])
    assert Counted.count == ["b", "a"]
    assert len(naps) == 1


def test_a_process_that_never_ends_is_not_waited_for_for_ever(empty, monkeypatch):
    monkeypatch.setattr(compiling, "PATIENCE", 0.0)
    use = Counted("a")
    with (empty / f"{compiling._mark(use)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_kernels([use])
    assert Counted.count == ["a"]


# What is to be compiled


@dataclass(frozen=True)
class Foreign(Sparsifier):
    """Not ours: nobody knows what its code does."""

    name: ClassVar[str] = "foreign"

    def select(self, request: Request) -> Selection:
        raise AssertionError("it must not be called before its time")


def test_uses_do_not_depend_on_numbers_but_on_kinds_and_types():
    topk = uses_of([tw.TopK(0.01), tw.TopK(0.3)], F32)
    assert len(set(topk)) == 1
    assert set(uses_of([tw.TopK(0.01)], [torch.bfloat16])) == set(topk)
    assert set(uses_of([tw.TopK(0.01)], [torch.float64])).isdisjoint(topk)
    assert uses_of([tw.Quantize(8)], F32) != uses_of([tw.Quantize(8, block=None)], F32)
    assert uses_of([tw.Cast("fp16")], F32) != uses_of([tw.Cast("fp8")], F32)
    assert [use.name for use in storage_uses(["fp32", "bf16", "host"], F32)] == [
        "storage=bf16 (float32)"
    ]


def test_only_our_own_compressors_on_cpu_tensors_are_rehearsed():
    for foreign in (Foreign(), Foreign() | tw.Quantize(4), tw.Tiered(0.1, large=Foreign())):
        assert uses_of([foreign], F32) == []
    assert uses_of([tw.PowerSGD(2)], F32) == []
    assert uses_of([tw.TopK(0.1)], [torch.int64]) == []
    assert uses_of([tw.TopK(0.1)], F32, torch.device("cuda")) == []
    with kernels.use("reference"):
        assert uses_of([tw.TopK(0.1)], F32) == []


def signatures() -> set[tuple[str, str, object]]:
    """What is compiled or loaded in this process."""
    from numba.core.dispatcher import Dispatcher

    modules = [m for name, m in sys.modules.items() if name.startswith("thinwire.kernels.cpu")]
    found = {id(f): f for m in modules for f in vars(m).values() if isinstance(f, Dispatcher)}
    return {
        (f.py_func.__module__, f.py_func.__name__, signature)
        for f in found.values()
        for signature in f.signatures
    }


def on_everything() -> list[str]:
    """In a process that has loaded everything: what else compressors have had to compile."""
    before = signatures()
    warnings.simplefilter("ignore")
    normal = torch.randn(70_001, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.float64):
        for x in (normal[:100].to(dtype), normal.to(dtype), torch.ones_like(normal).to(dtype)):
            for row in ROWS:
                c = row.compressor
                r = torch.zeros_like(x) if row.residual else None
                received = tw.unpack(tw.pack(c.encode(x, residual=r, key=tw.Key(1))))
                c.accumulate([received, received], torch.zeros_like(x))
                c.decode(received)
    assert before
    return sorted(map(str, signatures() - before))


def test_everything_that_compressors_run_is_among_what_is_compiled():
    with ranks.Ranks(1) as own:  # forked from one that has done warm.warm() and nothing else
        assert own.run(on_everything) == [[]], "compiled late"


# On several ranks


@dataclass(frozen=True)
class Slow(KernelUse):
    """Takes longer than the others would wait."""

    seconds: float
    name: ClassVar[str] = "slow"

    def rehearse(self) -> None:
        dist.send(torch.ones(1), 0)
        time.sleep(self.seconds)


def on_a_rank_compiles(seconds: float) -> torch.Tensor:
    x = torch.ones(5)
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), 1)
    else:
        with (
            tempfile.TemporaryDirectory() as place,
            patch.object(cache, "directory", lambda: Path(place)),
        ):
            compile_in(None, CPU, [Slow(seconds)])
    tw.all_reduce(x, "none", timeout=seconds / 2)
    return x


def test_ranks_wait_for_one_that_compiles_longer_than_the_time_limit():
    for x in ranks.run(on_a_rank_compiles, 2.0, ranks=2):
        assert torch.equal(x, torch.full((5,), 2.0))


def on_attach_compiles() -> dict[str, list[str]]:
    """What attach, an optimizer, and the first use of a reducer have had compiled."""
    found = {}
    model = nets.plain()
    compiling._rehearsed.clear()

    def rehearsed() -> list[str]:
        names = sorted(use.name for use in compiling._rehearsed)
        compiling._rehearsed.clear()
        return names

    wire = tw.attach(model, "topk:0.1", feedback="ef14:storage=bf16")
    found["attach"] = rehearsed()
    wire.detach()
    tw.optim.OneBitAdam(model.parameters(), freeze_step=2)
    found["optimizer"] = rehearsed()
    tw.Reducer("onebit", feedback="ef14:storage=int8").average({"w": torch.ones(2000)})
    found["reducer"] = rehearsed()
    return found


def test_attach_optimizers_and_reducers_compile_what_they_will_use():
    for found in ranks.run(on_attach_compiles, ranks=2):
        assert found == {
            "attach": ["none (float32)", "storage=bf16 (float32)", "topk:# (float32)"],
            "optimizer": ["scaledsign:l2 (float32)"],
            "reducer": ["none (float32)", "onebit (float32)", "storage=int8 (float32)"],
        }


# The command


def test_the_command_compiles_what_specs_need(capsys):
    compile_kernels(uses_of([tw.NoCompression()], F32))
    assert main(["compile", "none", "--dtype", "float32"]) == 0
    assert "all were there already" in capsys.readouterr().out
    assert main(["compile", "topq"]) == 2
    assert "'topq' is no method" in capsys.readouterr().err


def test_the_command_compiles_everything_by_default():
    from thinwire.cli.compile import _uses

    class Given:
        specs: ClassVar[list[str]] = []
        dtype = ("float32", "float64")

    uses = _uses(Given)
    assert set(every_use()) < set(uses)
    assert {"storage=bf16 (float64)", "storage=int8 (float32)"} < {use.name for use in uses}
