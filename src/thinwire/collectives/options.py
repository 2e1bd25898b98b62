"""How exchanges are carried out: checked once, where a call begins, and passed on whole."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives.choose import COLLECTIVES, suits, suits_all
from thinwire.collectives.nodes import Nodes, nodes_of
from thinwire.compressors import Compressor, JointCompressor
from thinwire.formatting import read_bytes

Group = dist.ProcessGroup | None  # None is the default group
Timeout = float | timedelta | None
NodesGiven = Nodes | int | Sequence[Sequence[int]] | DeviceMesh | None
ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType | str

SENDERS = "SENDERS"  # the op that averages each element over the ranks that sent it
LONGEST = 1e9  # seconds; gloo counts in 64-bit nanoseconds
VARIABLE = "THINWIRE_MAX_BYTES"


@dataclass(frozen=True)
class Options:
    """Which group, through which collective, within which limits.

    Args:
        group: a process group; None is the default one, looked up when an exchange starts.
        collective: one of `COLLECTIVES`.
        nodes: who shares a node, for "hierarchical".
        max_bytes: most extra memory of an exchange on this rank; None for no limit.
        timeout: how long to wait for other ranks; None for the group's own limit.
    """

    group: Group = None
    collective: str = "auto"
    nodes: Nodes | None = None
    max_bytes: int | None = None
    timeout: timedelta | None = None

    @classmethod
    def of(
        cls,
        group: Group = None,
        *,
        collective: str = "auto",
        nodes: NodesGiven = None,
        max_bytes: int | str | None = None,
        timeout: Timeout = None,
    ) -> "Options":
        """From what a user gave; refuses what makes no sense."""
        if collective not in COLLECTIVES:
            known = ", ".join(COLLECTIVES)
            raise ValueError(f"collective must be one of {known}, got {collective!r}")
        found = nodes_of(nodes)
        if found is not None and collective not in ("auto", "hierarchical"):
            raise ValueError(f"nodes= is for the collective 'hierarchical', not {collective!r}")
        if found is not None:
            collective = "hierarchical"
        elif collective == "hierarchical":
            found = Nodes()
        return cls(group, collective, found, _bytes_given(max_bytes), _timeout_given(timeout))

    def check(self, compressors: Sequence[Compressor], op: str = "AVG") -> None:
        """Refuse compressors that cannot go through the collective, or not in one exchange, and
        what a mean over senders cannot be formed with."""
        if op == SENDERS and self.collective not in ("auto", "gather"):
            raise ValueError(
                f"a mean over senders goes through 'gather', not {self.collective!r}: only there "
                "every rank sees who sent what. Leave out collective= and nodes=, or average over "
                "all ranks"
            )
        joint = [each for each in compressors if isinstance(each, JointCompressor)]
        if op == SENDERS and joint:
            raise ValueError(
                f"{joint[0]} has no mean over senders: all ranks together find what is sent. "
                "Average over all ranks, or use a compressor that each rank chooses with (TopK, "
                "Threshold, RandomK and chains of them)"
            )
        for each in joint or compressors:
            unsuited = self._unsuited(each)
            if unsuited is not None:
                raise ValueError(f"{each} cannot go through {self.collective!r}: {unsuited}")
        apart = suits_all(self.collective, compressors)
        if apart is not None:
            raise ValueError(apart)

    def carries(self, compressor: Compressor) -> bool:
        """Whether a compressor can go through the collective."""
        return self._unsuited(compressor) is None

    def _unsuited(self, compressor: Compressor) -> str | None:
        return None if self.collective == "auto" else suits(self.collective, compressor)


def _bytes_given(max_bytes: Any) -> int | None:
    """The limit in force: the argument, else the environment variable, else none."""
    source = "max_bytes"
    if max_bytes is None:
        max_bytes, source = os.environ.get(VARIABLE), VARIABLE
    if max_bytes is None or max_bytes == "":
        return None
    try:
        return read_bytes(max_bytes)
    except ValueError:
        raise ValueError(
            f"{source} must be a number of bytes such as 500000000 or 512MiB, got {max_bytes!r}"
        ) from None


def _timeout_given(timeout: Any) -> timedelta | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < LONGEST:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return timedelta(seconds=seconds)
