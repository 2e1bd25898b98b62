"""A few numbers of every rank, for every rank: what decisions are made from."""

from collections.abc import Sequence

import torch

from thinwire.collectives.handle import Handle
from thinwire.collectives.start import Group, Session, Timeout, span_of
from thinwire.collectives.talk import Call, Talk


def gather_numbers(
    numbers: Sequence[float] | Exception,
    what: str,
    *,
    device: torch.device,
    group: Group = None,
    timeout: Timeout = None,
) -> tuple[Handle, list[list[float]]]:
    """Start telling all ranks of a group some numbers.

    Args:
        numbers: of this rank, as many on all ranks; or why it has none, which ends the exchange on
            all of them.
        what: they are, in words: ranks must agree in it.
        device: where the group's tensors are.

    Returns:
        A handle, and the list that holds the numbers of all ranks, in their order, when it has
        ended.
    """
    session = Session(group, [torch.empty(0, device=device)])
    rows: list[list[float]] = []
    handle = Handle(None, f"exchange of {what}")
    if session.size == 1:
        if isinstance(numbers, Exception):
            handle.end(numbers)
        else:
            rows.append([float(number) for number in numbers])
            handle.end()
        return handle, rows
    call = Call("numbers", (("numbers", what),))

    def job(talk: Talk) -> None:
        with talk.preparing():
            if isinstance(numbers, Exception):
                raise numbers
            message = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8).to(talk.device)
        talk.meet()
        found = talk.gather(message, [message.numel()] * talk.members.size)
        rows.extend(each.cpu().clone().view(torch.float64).tolist() for each in found)

    return session.begin(handle, call, job, span_of(timeout), async_op=True), rows
