"""What the random sparsifiers share: scaling, shared positions, the check for finite values."""

from abc import abstractmethod

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors import check
from thinwire.compressors.base import Request
from thinwire.compressors.sparsifier import Selection, Sparsifier


class Drawn(Sparsifier):
    """A sparsifier whose positions come from the key alone; subclasses hold the two fields."""

    scaled: bool | None
    shared: bool

    @property
    def random(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return self.scaled is True

    @property
    def summable(self) -> bool:
        return self.shared

    @property
    def common_key(self) -> bool:
        return self.shared

    def check_options(self) -> None:
        who = type(self).__name__
        check.one_of(who, "scaled", self.scaled, (None, True, False))
        check.flag(who, "shared", self.shared)

    @abstractmethod
    def draw(self, request: Request) -> tuple[Tensor, int, float]:
        """(positions, chance as in `Selection`, the factor that makes the result unbiased)."""

    def select(self, request: Request) -> Selection | None:
        if self.scaled and request.r is not None:
            raise ValueError(
                f"{self!r}: scaled values and a residual do not go together (what is sent would "
                "grow without bound); use scaled=False with a residual"
            )
        kernel = kernels.on(request.x.device)
        positions, chance, factor = self.draw(request)
        values = kernel.take(request.x, request.r, positions)
        if values is None:
            return None
        scaled = request.r is None if self.scaled is None else self.scaled
        if scaled and factor != 1:
            top = torch.finfo(values.dtype).max
            values.mul_(factor).clamp_(-top, top)
        return Selection(positions, values, request.key if self.shared else None, chance)
