"""`tw.torchft.CompressedGroup` under a manager that does as torchft's does.

torchft itself is in tests/integrations/test_torchft.py, where it is installed. Functions with a
leading `on_` run on every rank, in the processes of ranks.py.
"""

from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from tensors import normal
from torch import Tensor

import thinwire as tw

pytestmark = pytest.mark.timeout(600)
SIZE = 5000


class ReconfigurableGroup:
    """With the signatures of torchft's ProcessGroupGloo of 2025: a new gloo group for each quorum.

    Those of 2026 have `reconfigure(opts)` instead of `configure`.
    """

    def __init__(self) -> None:
        self._pg: Any = None
        self.calls: list[str] = []

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        host, _, rest = store_addr.partition(":")
        port, _, prefix = rest.partition("/")
        store = dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False))
        limit = timedelta(seconds=20)
        self._pg = dist.distributed_c10d.ProcessGroupGloo(store, rank, world_size, limit)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        self.calls.append("allreduce")
        return self._pg.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        self.calls.append("allgather")
        return self._pg.allgather(outputs, inputs, opts)

    def size(self) -> int:
        return self._pg.size()

    def errored(self) -> Exception | None:
        return None


class Manager:
    """What torchft's Manager does around an all-reduce: see its class of this name."""

    def __init__(self, pg: Any) -> None:
        self._pg, self._errored = pg, None
        self.participants, self.participating = 0, True

    def start_quorum(self, address: str, rank: int, size: int, participants: int) -> None:
        self._errored, self.participants = None, participants
        self._pg.configure(address, f"replica{rank}", rank, size, 1, 0, 1, list(range(size)))

    def allreduce(
        self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = dist.ReduceOp.AVG
    ) -> None:
        if self._errored is not None:
            return
        if not self.participating:
            tensor.zero_()
        opts = dist.distributed_c10d.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.SUM if reduce_op == dist.ReduceOp.AVG else reduce_op
        try:
            if should_quantize:
                self._pg.alltoall_base(tensor, tensor, [], [], None)
            work = self._pg.allreduce([tensor], opts)
            work.wait()
            work.get_future().wait()
            if reduce_op == dist.ReduceOp.AVG:
                tensor /= self.participants
        except Exception as error:
            self.report_error(error)

    def report_error(self, error: Exception) -> None:
        self._errored = error

    def should_commit(self) -> bool:
        return self._errored is None and self._pg.errored() is None


def tensor_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(SIZE, rank).to(dtype).view(50, 100)


def on_training(spec: str, ports: list[int]) -> dict[str, Any]:
    """Two quorums: all ranks, then all but the last; and a rank that only listens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stores = [dist.TCPStore("127.0.0.1", p, is_master=True) for p in ports] if rank == 0 else []
    dist.barrier()
    group = ReconfigurableGroup()
    manager = Manager(tw.torchft.CompressedGroup(group, spec))
    found: dict[str, Any] = {}
    manager.start_quorum(f"127.0.0.1:{ports[0]}/one", rank, size, size)
    found["all"] = tensor_of(rank)
    manager.allreduce(found["all"])
    found["sum"] = tensor_of(rank)
    manager.allreduce(found["sum"], reduce_op=dist.ReduceOp.SUM)
    group.calls.clear()
    few, whole, largest = torch.full((3,), float(rank)), torch.full((SIZE,), rank), tensor_of(rank)
    manager.allreduce(few)
    manager.allreduce(whole, reduce_op=dist.ReduceOp.SUM)
    manager.allreduce(largest, reduce_op=dist.ReduceOp.MAX)
    found |= {"few": few, "whole": whole, "largest": largest, "calls": list(group.calls)}
    found["half"] = tensor_of(rank, torch.bfloat16)
    manager.allreduce(found["half"])
    # One that heals takes part without anything of its own.
    manager.participating, manager.participants = rank > 0, size - 1
    found["healing"] = tensor_of(rank)
    manager.allreduce(found["healing"])
    manager.participating = True
    found["committed"] = manager.should_commit()
    if rank < size - 1:
        manager.start_quorum(f"127.0.0.1:{ports[1]}/two", rank, size - 1, size - 1)
        found["fewer"] = tensor_of(rank)
        manager.allreduce(found["fewer"])
        found["committed"] &= manager.should_commit()
    dist.barrier()  # the stores live until here
    del stores
    return found


def close(found: Tensor, wanted: Tensor, spec: str, count: int) -> bool:
    """Whether an average is as near as the compressor allows: each term is off by half a step."""
    step = {"none": 2e-7, "quantize:8": 1 / 127, "cast:bf16": 2.0**-8}[spec]
    largest = max(float(tensor_of(rank).abs().max()) for rank in range(count))
    return bool(((found.float() - wanted).abs() <= largest * step).all())


@pytest.mark.parametrize("spec", ["none", "quantize:8", "cast:bf16"])
def test_averages_are_those_of_the_participants_on_all_ranks_alike(spec):
    ports = [ranks.free_port(), ranks.free_port()]
    outcomes = ranks.run(on_training, spec, ports, ranks=3)
    mean = torch.stack([tensor_of(rank) for rank in range(3)]).mean(0)
    for rank, found in enumerate(outcomes):
        assert found["committed"]
        assert close(found["all"], mean, spec, 3)
        assert torch.equal(found["all"], outcomes[0]["all"]), "the same bits everywhere"
        assert torch.allclose(found["sum"], 3 * found["all"], rtol=1e-6)
        assert found["half"].dtype == torch.bfloat16
        # bfloat16 tensors: one more rounding of what goes in, and of the result.
        assert bool(((found["half"].float() - mean).abs() <= 0.1).all())
        others = torch.stack([tensor_of(each) for each in (1, 2)]).mean(0)
        assert close(found["healing"], others, spec, 3)
        assert torch.equal(found["few"], torch.ones(3))
        assert torch.equal(found["whole"], torch.full((SIZE,), 3))
        biggest = torch.stack([tensor_of(each) for each in range(3)]).amax(0)
        assert torch.equal(found["largest"], biggest)
        assert found["calls"] == ["allreduce"] * 3, "these are sent as they are"
        if rank < 2:
            pair = torch.stack([tensor_of(each) for each in (0, 1)]).mean(0)
            assert close(found["fewer"], pair, spec, 2)
            assert torch.equal(found["fewer"], outcomes[0]["fewer"])


def on_errors(port: int) -> dict[str, Any]:
    """What one rank does differently is an error that the manager is told of, on the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", port, is_master=True) if rank == 0 else None
    dist.barrier()
    found: dict[str, Any] = {}
    for case in ("compressor", "shape", "own quantization", "after"):
        spec = "quantize:4" if case == "compressor" and rank == 1 else "quantize:8"
        manager = Manager(tw.torchft.CompressedGroup(ReconfigurableGroup(), spec))
        manager.start_quorum(f"127.0.0.1:{port}/{case}", rank, size, size)
        tensor = tensor_of(rank)
        if case == "shape" and rank == 1:
            tensor = tensor.view(100, 50)
        before = tensor.clone()
        manager.allreduce(tensor, should_quantize=case == "own quantization")
        found[case] = (str(manager._errored or ""), manager.should_commit())
        if case in ("shape", "own quantization"):
            found[case] += (torch.equal(tensor, before),)
    dist.barrier()
    del store
    return found


def test_errors_are_the_managers_and_nothing_is_written():
    for found in ranks.run(on_errors, ranks.free_port(), ranks=2):
        error, commits = found["compressor"]
        assert "have another compressor or min_numel" in error
        assert not commits
        error, commits, untouched = found["shape"]
        assert "all replicas must use the same model and compressor" in error
        assert not commits
        assert untouched
        error, commits, untouched = found["own quantization"]
        assert "leave should_quantize out" in error
        assert not commits
        assert untouched
        assert found["after"] == ("", True)


@pytest.mark.parametrize("spec", ["topk:0.01", "onebit", "quantize:2", "randomk:0.1", "powersgd:2"])
def test_what_needs_a_residual_is_refused(spec):
    with pytest.raises((TypeError, ValueError), match=r"quantize:8|has no payload"):
        tw.torchft.CompressedGroup(ReconfigurableGroup(), spec)


@pytest.mark.parametrize(
    "spec", ["quantize:4", "qsgd:7", "cast:fp8", "randomk:0.1,scaled=true", "lossless"]
)
def test_what_does_without_is_taken(spec):
    group = ReconfigurableGroup()
    made = tw.torchft.CompressedGroup(group, spec)
    assert made.errored() is None
    assert made.calls is group.calls


def test_what_is_no_group_of_torchfts_is_refused():
    with pytest.raises(TypeError, match=r"torchft.ProcessGroupGloo\(\), got object"):
        tw.torchft.CompressedGroup(object(), "quantize:8")
