from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire.feedback.base import Desk, Feedback, Memory, Turn


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Nothing is remembered: what a compressor leaves out is lost.

    Right for unbiased compressors (QSGD, TernGrad, Natural) and for those that lose nothing.
    """

    name: ClassVar[str] = "none"

    def turn(self, memory: Memory, x: Tensor, desk: Desk) -> Turn:
        return _Turn(x, x, None)


class _Turn(Turn):
    def before(self) -> None:
        pass

    def after(self) -> None:
        pass

    def commit(self) -> None:
        pass
