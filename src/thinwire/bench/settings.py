"""What a run measures. Free of torch, so that `thinwire bench --help` is quick."""

from dataclasses import dataclass
from pathlib import Path

from thinwire.formatting import read_count

COMPRESSORS = (
    *("none", "cast:bf16", "topk:0.01", "topk:0.001", "randomk:0.01"),
    *("quantize:8", "quantize:4", "quantize:2", "qsgd:7"),
    *("onebit", "twobit", "scaledsign", "terngrad", "natural"),
    *("tiered:0.01", "topk:0.01|quantize:4", "lossless"),
)
DATA = {
    "normal": "independent standard normal numbers",
    "heavy": "Student's t with 3 degrees of freedom: few elements are far larger than the rest",
}
SIZE = "4M"
ROUNDS = 11
MOST_ELEMENTS = 1 << 32  # that a frame may hold
EAGER_ROUNDS = 3  # plain PyTorch is 10 to 50 times slower, and its own time matters less


class BenchSettingError(ValueError):
    """A run that cannot be done as it was asked for; the message is meant for the user."""


@dataclass(frozen=True)
class BenchSettings:
    """What a run measures.

    Args:
        compressors: spec strings.
        sizes: elements of the generated tensors.
        data: kinds of generated tensors, names in `DATA`.
        input: a file whose tensor takes the place of the generated ones.
        rounds: how often everything is timed; medians are taken over rounds.
        eager: whether plain PyTorch versions are timed too.
        threads: of torch and of the kernels; None for what torch has.
    """

    compressors: tuple[str, ...] = COMPRESSORS
    sizes: tuple[int, ...] = (4_000_000,)
    data: tuple[str, ...] = tuple(DATA)
    input: Path | None = None
    rounds: int = ROUNDS
    eager: bool = True
    threads: int | None = None


def read_size(text: str) -> int:
    """The number of elements that `text` means."""
    try:
        size = read_count(text)
    except ValueError as error:
        raise BenchSettingError(str(error)) from None
    if not 1 <= size <= MOST_ELEMENTS:
        raise BenchSettingError(
            f"a size is a whole number of elements from 1 to 2^32, got {text!r}"
        )
    return size
