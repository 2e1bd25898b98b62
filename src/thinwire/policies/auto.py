"""What to do when nothing is known."""

from dataclasses import dataclass
from typing import ClassVar

from thinwire.compressors import Compressor, Quantize, TopK
from thinwire.policies.bandwidth import Bandwidth
from thinwire.policies.base import Around, Chooser, Policy, Setting
from thinwire.policies.schedule import Warmup

STRONGEST = TopK(0.01) | Quantize(4)


@dataclass(frozen=True)
class Auto(Policy):
    """No compression where the network is fast; as much as it needs where it is not.

    Small tensors always travel as they are. So does everything in a short warm-up. Then `Bandwidth`
    chooses, up to the largest one in a hundred in four bits, with what is left out remembered.

    Args:
        warmup: steps before the first compression.
        target: how much longer than its computation a step may be, as a share of it.

    Example:
        >>> import thinwire as tw
        >>> str(tw.policies.Auto(warmup=100))
        'auto:100'
    """

    warmup: int = 5
    target: float = 0.1
    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        self._made()

    def _made(self) -> Warmup:
        return Warmup(self.warmup, Bandwidth(STRONGEST, self.target))

    @property
    def main(self) -> Compressor:
        return STRONGEST

    def begin(self, setting: Setting) -> Chooser:
        return _Explained(self._made().begin(setting))


class _Explained(Around):
    def explain(self) -> list[str]:
        return [
            "Automatic: compression is switched on where the network is what a step waits for, "
            f"up to {STRONGEST}, and off where it is not.",
            *super().explain(),
        ]
