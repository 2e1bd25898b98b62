"""The key of all randomness: a value, never a generator with state.

Two calls with the same key give the same numbers on every device and for every thread count, and
nothing ever reads or advances torch's global generator.
"""

from numbers import Integral
from typing import NamedTuple

_MASK = (1 << 64) - 1
_STEPS = 1 << 32
_LIMITS = {"seed": 1 << 64, "step": _STEPS, "tensor": _STEPS, "stream": 1 << 8}


class Key(NamedTuple):
    """Names one draw of random numbers.

    Args:
        seed: chosen once for a run; the same on all ranks where they must agree.
        step: the training step, so that each step draws anew.
        tensor: a number for the tensor, so that tensors of one step differ.
        stream: which consumer within one encode; chains set it, users leave it alone.
    """

    seed: int = 0
    step: int = 0
    tensor: int = 0
    stream: int = 0

    def checked(self) -> "Key":
        """Return self, or raise ValueError naming the field that is out of range."""
        seed, step, tensor, stream = self
        if type(seed) is type(step) is type(tensor) is type(stream) is int and (
            0 <= seed <= _MASK and 0 <= step < _STEPS and 0 <= tensor < _STEPS and 0 <= stream < 256
        ):
            return self  # as almost always, and every tensor of every exchange comes by here
        for name, value in self._asdict().items():
            if not isinstance(value, Integral) or not 0 <= int(value) < _LIMITS[name]:
                raise ValueError(
                    f"Key: {name} must be an integer in [0, {_LIMITS[name]}), got {value!r}"
                )
        return self

    def derive(self, *numbers: int) -> "Key":
        """A key of its own for each tuple of numbers: ranks, slices or shards of one draw."""
        seed = self.seed
        for number in numbers:
            seed = _mix((seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK)
        return self._replace(seed=seed)

    def substream(self) -> "Key":
        """The key for the next consumer of the same encode (see `stream`)."""
        return Key(self.seed, self.step, self.tensor, self.stream + 1)


def _mix(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)
