"""The reducer for loops of one's own: named tensors in, their averages out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.handle import Handle
from thinwire.collectives.options import Group, NodesGiven, Options, Timeout
from thinwire.compressors import Compressor
from thinwire.feedback import Feedback
from thinwire.reducer.unit import Unit
from thinwire.reducer.units import UnitReducer
from thinwire.telemetry import Ledger


class Reducer:
    """Averages named tensors over a group, compressed, and remembers what was left out.

    Args:
        compressor: a compressor or its spec.
        feedback: what is remembered: a feedback or its spec ("none", "ef14", "ef21", "ef21m:0.1");
            "auto" is EF14, or none for compressors that are unbiased or lose nothing, and TernGrad.
        collective, nodes, group, max_bytes, timeout: as for `thinwire.all_reduce`. With nodes,
            `feedback` is about what goes between them.
        seed: for compressors that draw random numbers; the same on all ranks.

    Example:
        >>> import torch, torch.distributed as dist, thinwire as tw
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> reducer = tw.Reducer("topk:0.01", feedback="ef14")
        >>> gradients = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
        >>> reducer.average(gradients).is_completed()
        True
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        compressor: Compressor | str,
        *,
        feedback: Feedback | str = "auto",
        collective: str = "auto",
        nodes: NodesGiven = None,
        group: Group = None,
        max_bytes: int | str | None = None,
        timeout: Timeout = None,
        seed: int = 0,
    ) -> None:
        options = Options.of(
            group, collective=collective, nodes=nodes, max_bytes=max_bytes, timeout=timeout
        )
        self._units = UnitReducer(compressor, feedback, options, seed)

    def __repr__(self) -> str:
        return repr(self._units)

    @property
    def compressor(self) -> Compressor:
        return self._units.compressor

    @property
    def feedback(self) -> Feedback:
        return self._units.feedback

    @property
    def ledger(self) -> Ledger:
        """Bytes and seconds of the exchanges that have ended."""
        self._units.ledger.fold()
        return self._units.ledger

    def average(
        self, tensors: Mapping[str, Tensor], *, together: bool = False, async_op: bool = False
    ) -> Handle:
        """Average tensors over the group in one exchange, in place.

        All ranks pass the same names in the same order. When the call fails, the tensors and what
        is remembered of them are as before.

        Args:
            tensors: by name.
            together: compress them as one: the largest elements of all tensors, not of each.
            async_op: return at once; the tensors belong to the call until the handle has ended.
        """
        _check_tensors(tensors)
        if together:
            kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
            if len(kinds) > 1:
                raise ValueError(f"together: tensors of one type and device, got {kinds}")
            units = [Unit(list(tensors), list(tensors.values()))]
        else:
            units = [Unit([name], [tensor]) for name, tensor in tensors.items()]
        handle = self._units.start(units).handle
        if not async_op:
            handle.wait()
            self.ledger.fold()
        return handle

    def reset(self) -> None:
        """Forget what was left out."""
        self._units.reset()

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers; tensors and plain values only."""
        return self._units.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state_dict` was taken.

        Args:
            state: of this rank; or a list of all ranks' states. If the list has not as many
                entries as the group has members, each rank goes on with the mean of what they
                remembered: what is yet to be sent stays the same for the average.
        """
        self._units.load_state_dict(state)


def _check_tensors(tensors: Any) -> None:
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise TypeError(f"average takes tensors by name, {{'weight': tensor}}, got a {kind}")
    if not tensors:
        raise ValueError("average needs at least one tensor")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a string, got {name!r}")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: a sparse tensor, call to_dense() first")
