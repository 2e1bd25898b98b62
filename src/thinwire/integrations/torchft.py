"""torchft: a process group for its Manager whose all-reduce is compressed.

    pg = tw.torchft.CompressedGroup(ProcessGroupGloo(), "quantize:8")
    manager = Manager(pg=pg, ...)

The Manager stays torchft's own, and so does all that it promises: it configures the group anew when
replicas come and go, divides by the number of participants, is told of errors, and decides with
`should_commit` whether a step counts. torchft's DistributedDataParallel, LocalSGD and DiLoCo call
the Manager, so all of them are compressed.

A tensor of a Manager has no name, and a step may not count after it was exchanged. So nothing is
remembered of what compression leaves out, and only compressors that do well without are taken.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import check
from thinwire.compressors import Cast, Compressor, LocalCompressor, Quantize, local_of
from thinwire.errors import FrameError, MismatchError
from thinwire.frames import Payload, pack, unpack
from thinwire.frames.payload import add_all, flat_view
from thinwire.kernels import Key
from thinwire.torch_internals import gather_options

__all__ = ["CompressedGroup"]

LENGTH = 8  # bytes that say how long a frame is: what is gathered has one length on all ranks
FEW_BITS = 4  # below these, rounding to nearest needs a residual


class CompressedGroup:
    """Wraps a process group of torchft: its all-reduce gathers frames instead.

    Sums and averages of floating-point tensors are compressed: each rank sends its frame to all
    others, and all add up the same frames in the same order. Everything else is the group's own.

    Args:
        group: a reconfigurable group of torchft's (``ProcessGroupGloo()``).
        compressor: one, or its spec, that does without a residual: casts, "quantize:8",
            "quantize:4", and what is right on average ("qsgd:7", "randomk:0.1,scaled=true").
        min_numel: tensors with fewer elements are all-reduced as they are.
        seed: for compressors that draw random numbers.
    """

    def __init__(
        self,
        group: Any,
        compressor: Compressor | str,
        *,
        min_numel: int = 1024,
        seed: int = 0,
    ) -> None:
        changes = hasattr(group, "reconfigure") or hasattr(group, "configure")
        if not changes or not hasattr(group, "allreduce") or not hasattr(group, "allgather"):
            raise TypeError(
                "CompressedGroup takes a process group of torchft's, such as "
                f"torchft.ProcessGroupGloo(), got {type(group).__name__}"
            )
        check.whole("CompressedGroup", "min_numel", min_numel, 0)
        self._group, self._compressor = group, local_of(compressor)
        _check_compressor(self._compressor)
        self._min_numel, self._seed = min_numel, seed
        self._mark = int.from_bytes(os.urandom(7))  # by which this rank finds its place
        self._place: int | None = None  # among the ranks of this quorum
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __repr__(self) -> str:
        return f"CompressedGroup({self._group!r}, {self._compressor})"

    def configure(self, *args: Any, **options: Any) -> Any:
        """Called by the Managers of earlier releases with every new quorum."""
        self._place = None
        return self._group.configure(*args, **options)

    def reconfigure(self, *args: Any, **options: Any) -> Any:
        """Called by the Manager with every new quorum."""
        self._place = None
        return self._group.reconfigure(*args, **options)

    def alltoall_base(self, *_: Any, **__: Any) -> Any:
        """Only torchft's own quantization calls this."""
        raise ValueError(
            f"should_quantize=True is torchft's own quantization and goes past {self._compressor}: "
            "leave should_quantize out, or give the Manager the group without CompressedGroup"
        )

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """The sum or the average over the group, in place; a work like any other."""
        op = getattr(opts, "reduceOp", opts)
        summed, averaged = op == dist.ReduceOp.SUM, op == dist.ReduceOp.AVG
        if len(tensors) != 1 or not (summed or averaged) or not self._takes(tensors[0]):
            return self._group.allreduce(tensors, opts)
        (tensor,) = tensors
        if self._place is None:
            self._place = self._compare(tensor.device)
        self._calls += 1
        key = Key(self._seed, self._calls, self._place)
        frame = pack(self._compressor.encode(tensor, key=key))
        longest = self._compressor.max_payload_bytes(tensor.numel(), tensor.dtype)
        mine = torch.zeros(LENGTH + longest, dtype=torch.uint8, device=tensor.device)
        mine[:LENGTH] = torch.tensor([frame.numel()]).view(torch.uint8)
        mine[LENGTH : LENGTH + frame.numel()] = frame
        work, gathered = self._gather(mine)
        weight = 1 / len(gathered) if averaged else 1.0
        return CompressedWork(tensor, gathered, weight, self._compressor, work)

    def _gather(self, mine: Tensor) -> tuple[Any, list[Tensor]]:
        """The work that brings the tensors of all ranks, and where they will be."""
        gathered = [torch.empty_like(mine) for _ in range(self._group.size())]
        return self._group.allgather([gathered], [mine], gather_options()), gathered

    def _compare(self, device: torch.device) -> int:
        """This rank's place among the others, which must be set up alike: gloo ends a process whose
        messages do not have the length that is expected."""
        settings = [self._compressor.fingerprint, self._min_numel]
        work, gathered = self._gather(torch.tensor([*settings, self._mark], device=device))
        work.wait()
        found = [each.tolist() for each in gathered]
        others = [place for place, each in enumerate(found) if each[:-1] != settings]
        if others:
            raise MismatchError(
                f"replicas {others} have another compressor or min_numel than this one, "
                f"{self._compressor} from {self._min_numel} elements on: give all the same"
            )
        return found.index([*settings, self._mark])

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.numel() >= max(1, self._min_numel)


class CompressedWork:
    """Of an all-reduce: what torchft's Manager asks of a work.

    Args:
        tensor: that gets the sum.
        gathered: where the frames of all ranks arrive.
        weight: of each.
        compressor: that has made them.
        work: that brings them.
    """

    def __init__(
        self,
        tensor: Tensor,
        gathered: list[Tensor],
        weight: float,
        compressor: LocalCompressor,
        work: Any,
    ) -> None:
        # Called in a thread of the group, which must not be the last to hold the group itself.
        def add_up(future: torch.futures.Future[Any]) -> list[Tensor]:
            future.wait()  # raises what went wrong
            payloads = [
                _payload(place, each, tensor, compressor) for place, each in enumerate(gathered)
            ]
            flat, done = flat_view(tensor)
            add_all(payloads, flat, weight, fresh=True)
            done()
            return [tensor]

        self._future: torch.futures.Future[Any] = work.get_future().then(add_up)

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def synchronize(self) -> None:
        self._future.wait()

    def block_current_stream(self, timeout: Any = None) -> None:
        self._future.wait()


def _payload(place: int, message: Tensor, like: Tensor, compressor: LocalCompressor) -> Payload:
    """The checked payload of a rank."""
    length = int(message[:LENGTH].view(torch.int64))
    if not 0 <= length <= message.numel() - LENGTH:
        raise FrameError(f"rank {place} announced a frame of {length} bytes")
    payload = unpack(message[LENGTH : LENGTH + length], max_numel=like.numel())
    wanted = (like.shape, like.dtype, compressor.fingerprint)
    if (payload.shape, payload.dtype, payload.fingerprint) != wanted:
        raise MismatchError(
            f"rank {place} sent a {payload.dtype} tensor of shape {tuple(payload.shape)}, this "
            f"rank a {like.dtype} one of {tuple(like.shape)} with {compressor}: all replicas must "
            "use the same model and compressor"
        )
    if not payload.non_finite:
        _ = payload.opened  # checks the content
    return payload


def _check_compressor(compressor: LocalCompressor) -> None:
    fine = isinstance(compressor, Cast) or (
        isinstance(compressor, Quantize) and compressor.bits >= FEW_BITS
    )
    if compressor.wants_residual and not fine:
        raise ValueError(
            f"{compressor} needs to remember what it leaves out, and here nothing can be "
            "remembered: torchft may discard a step after it was exchanged, and names no tensor. "
            "Use quantize:8, quantize:4, a cast, or what is right on average (qsgd:7, "
            "randomk:0.1,scaled=true)"
        )
