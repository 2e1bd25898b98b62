"""Streams and page-locked memory, as far as they can be tried without a GPU.

What a CUDA tensor goes through on its way over gloo is done to CPU tensors here: the same code,
with plain memory of the host instead of page-locked.
"""

import contextlib
import types
from pathlib import Path

import pytest
import torch
from ranks import run
from tensors import normal, same

import thinwire as tw
from thinwire.collectives import transport
from thinwire.collectives.exchange import Refusal

SRC = Path(__file__).resolve().parents[1] / "src" / "thinwire"
CASES = [
    *(("topk:0.5", "gather"), ("quantize:8", "twoshot"), ("cast:bf16", "summable")),
    *(("topk:0.3", "sparse"), ("powersgd:2", "joint"), ("none", "auto"), ("topk:0.001", "gather")),
]


def on_cases(staged: bool) -> list[torch.Tensor]:
    before, transport.STAGED = transport.STAGED, ("cpu",) if staged else ()
    try:
        rank, found = torch.distributed.get_rank(), []
        for spec, collective in CASES:
            for n in (300, 90_000):  # short messages come along with the records
                x, r = normal(n, rank).view(-1, 30), normal(n, 10 + rank).view(-1, 30)
                tw.all_reduce(x, spec, residual=r, collective=collective, key=tw.Key(3))
                found += [x, r]
        shared = normal(70_000, rank)
        tw.broadcast(shared, "quantize:8", src=1)
        row = normal(5000, rank)
        rows = [torch.empty(5000) for _ in range(3)]
        tw.all_gather(rows, row, "quantize:8")
        return [*found, shared, *rows]
    finally:
        transport.STAGED = before


def test_what_goes_through_memory_of_the_host_arrives_the_same():
    plain, staged = (run(on_cases, staged, ranks=3) for staged in (False, True))
    for one, other in zip(plain, staged, strict=True):
        assert len(one) == 2 * 2 * len(CASES) + 4
        assert all(same(*pair) for pair in zip(one, other, strict=True))


class FakeStream:
    """Writes down what is done to it."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def wait_event(self, event: str) -> None:
        self.told.append(f"wait for {event}")

    def synchronize(self) -> None:
        self.told.append("synchronize")


@pytest.mark.parametrize("fails", [False, True])
def test_an_exchange_has_its_own_stream(monkeypatch, fails):
    """Behind what the caller has done, and complete at the end, also of one that fails."""
    told: list[str] = []
    stream = FakeStream(told)

    @contextlib.contextmanager
    def entered(given):
        assert given is stream
        told.append("enter")
        yield
        told.append("leave")

    monkeypatch.setattr(torch.cuda, "stream", entered)
    exchange = Refusal.__new__(Refusal)
    exchange.device, exchange._ready = torch.device("cuda"), "the caller's event"
    exchange._channel = types.SimpleNamespace(stream=lambda device: stream)
    with contextlib.suppress(ArithmeticError), exchange._on_own_stream():
        told.append("work")
        if fails:
            raise ArithmeticError
    wanted = ["enter", "wait for the caller's event", "work", "synchronize", "leave"]
    assert told == (wanted[:-1] if fails else wanted)


def test_nothing_waits_for_a_whole_device():
    """Streams and events only; the self-test, which times kernels, is no part of a step."""
    waits = [
        path.name for path in SRC.rglob("*.py") if "torch.cuda.synchronize" in path.read_text()
    ]
    assert waits == ["selftest.py"]
