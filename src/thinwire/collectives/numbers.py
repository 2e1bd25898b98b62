"""A few numbers of every rank, for every rank: what decisions are made from."""

from collections.abc import Sequence

import torch

from thinwire.collectives.exchange import Exchange
from thinwire.collectives.options import Options
from thinwire.collectives.transport import Transport


class GatherNumbers(Exchange):
    """Tells all ranks of a group some numbers.

    Args:
        numbers: of this rank, as many on all ranks; or why it has none, which ends the exchange on
            all of them.
        what: they are, in words: ranks must agree in it.
        device: where the group's tensors are.

    Attributes:
        rows: the numbers of all ranks, in their order, when it has ended.
    """

    def __init__(
        self,
        numbers: Sequence[float] | Exception,
        what: str,
        device: torch.device,
        options: Options,
    ) -> None:
        nothing = torch.empty(0, device=device)
        super().__init__("numbers", [nothing], options, what=f"exchange of {what}")
        self.rows: list[list[float]] = []
        self._numbers = numbers
        self.details = (("numbers", what),)

    def alone(self) -> None:
        self.prepare()
        self.rows = [self._message.view(torch.float64).tolist()]

    def prepare(self) -> None:
        if isinstance(self._numbers, Exception):
            raise self._numbers
        numbers = torch.tensor(self._numbers, dtype=torch.float64)
        self._message = numbers.view(torch.uint8)

    def exchange(self, transport: Transport) -> None:
        message = self._message.to(self.device)
        records = transport.meet(along=message)
        found = transport.gather(message, [message.numel()] * self.size, records)
        self._found = [each.cpu().clone().view(torch.float64).tolist() for each in found]

    def finish(self) -> None:
        self.rows = self._found
