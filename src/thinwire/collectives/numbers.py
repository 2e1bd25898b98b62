"""A few numbers of every rank, for every rank: what decisions are made from."""

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.collectives.handle import Handle
from thinwire.collectives.start import Group, Session, Timeout, span_of
from thinwire.collectives.talk import Call, Talk


def gather_numbers(
    numbers: Sequence[float],
    what: str,
    *,
    device: torch.device,
    group: Group = None,
    timeout: Timeout = None,
) -> tuple[Handle, list[list[float]]]:
    """Start telling all ranks of a group some numbers.

    Args:
        numbers: of this rank, as many on all ranks.
        what: they are, in words: ranks must agree in it.
        device: where the group's tensors are.

    Returns:
        A handle, and the list that holds the numbers of all ranks, in their order, when it has
        ended.
    """
    own = torch.tensor(numbers, dtype=torch.float64)
    session = Session(group, [torch.empty(0, device=device)])
    rows: list[list[float]] = []
    handle = Handle(None, f"exchange of {what}")
    if session.size == 1:
        rows.append(own.tolist())
        handle.end()
        return handle, rows
    call = Call("numbers", (("numbers", f"{own.numel()} of {what}"),))

    def job(talk: Talk) -> None:
        message: Any = own.view(torch.uint8).to(talk.device)
        talk.meet()
        found = talk.gather(message, [message.numel()] * talk.members.size)
        rows.extend(each.cpu().clone().view(torch.float64).tolist() for each in found)

    return session.begin(handle, call, job, span_of(timeout), async_op=True), rows
