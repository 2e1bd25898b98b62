"""Are the replicas still the same? Hashes of the parameters, compared over the ranks."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.collectives.handle import Handle
from thinwire.collectives.start import Group, Session, Timeout, span_of
from thinwire.collectives.talk import Call, Talk
from thinwire.errors import ReplicaError
from thinwire.parallel.names import parameter_names

SHOWN = 5  # names in an error


def check_replicas(
    model: nn.Module, *, group: Group = None, buffers: bool = False, timeout: Timeout = None
) -> None:
    """Raise `ReplicaError` on all ranks if parameters differ in any bit between them.

    Args:
        model: a module, wrapped in DDP or not. All ranks of the group call this.
        group: a process group; None is the one of a DDP module, or the default one.
        buffers: compare buffers as well. DDP sends those of rank 0 to the others at the start of
            each forward pass, so between steps they may differ where all is well.
        timeout: seconds to wait for the others.
    """
    named = parameter_names(model)
    tensors: dict[str, Tensor] = {name: parameter for parameter, name in named}
    if buffers:
        tensors.update(model.named_buffers())
    start_check(tensors, getattr(model, "process_group", None) if group is None else group,
                timeout).wait()  # fmt: skip


def start_check(
    tensors: Mapping[str, Tensor], group: Group, timeout: Timeout = None, counts: bool = True
) -> Handle:
    """The same in the background; the handle fails with the error.

    Args:
        counts: whether this rank's replica is to be compared. One that has joined early takes no
            more steps and is behind the others.
    """
    session = Session(group, list(tensors.values()) or [torch.empty(0)])
    handle = Handle(None, f"comparison of {len(tensors)} parameters")
    if session.size == 1:
        handle.end()
        return handle
    words = ",".join(f"{name}:{list(t.shape)}:{t.dtype}" for name, t in tensors.items())
    listed = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
    call = Call("check_replicas", (("parameters", f"{len(tensors)} (names {listed})"),))

    def job(talk: Talk) -> None:
        with talk.preparing():
            digests = b"".join(_digest(tensor) for tensor in tensors.values())
            message = torch.frombuffer(bytearray(digests or b"\0"), dtype=torch.uint8)
            message = message.to(talk.device)
        said = talk.meet([message.numel(), counts])
        rows = talk.gather(message, [message.numel()] * talk.members.size)
        there = [i for i, one in enumerate(said) if one.numbers[1]]
        table = [bytes(rows[i].cpu().numpy()) for i in there]
        difference = _difference(table, list(tensors), [talk.members.ranks[i] for i in there])
        if difference:
            raise ReplicaError(difference)

    return session.begin(handle, call, job, span_of(timeout), async_op=True)


def _digest(tensor: Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).digest()


def _difference(table: list[bytes], names: list[str], ranks: Sequence[int]) -> str:
    """Who differs from most, and in which parameters; nothing if all agree."""
    if len(set(table)) <= 1:
        return ""
    most = max(set(table), key=lambda row: (table.count(row), -table.index(row)))
    found = []
    for rank, row in zip(ranks, table, strict=True):
        if row == most:
            continue
        wrong = [
            name
            for i, name in enumerate(names)
            if row[8 * i : 8 * i + 8] != most[8 * i : 8 * i + 8]
        ]
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        found.append(f"rank {rank} in {', '.join(wrong[:SHOWN])}{more}")
    same = [rank for rank, row in zip(ranks, table, strict=True) if row == most]
    listed = ", ".join(map(str, same))
    return (
        f"parameters differ between replicas: {'; '.join(found)}, from "
        f"{'rank' if len(same) == 1 else 'ranks'} {listed}. Replicas that start alike and apply "
        "the same averages stay alike: look for different initial weights, seeds or optimizer "
        "states, or parameters changed on one rank only"
    )
