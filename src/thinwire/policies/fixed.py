"""One compressor for ever, or one for each name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from thinwire.compressors import Compressor, NoCompression, compressor_of
from thinwire.policies.base import Choice, Chooser, Policy, Setting, Target


@dataclass(frozen=True)
class Fixed(Policy):
    """The same compressor for all tensors at all steps."""

    compressor: Compressor
    name: ClassVar[str] = "fixed"

    @property
    def main(self) -> Compressor:
        return self.compressor

    def begin(self, setting: Setting) -> Chooser:
        return _Same(lambda _: self.compressor)

    def __str__(self) -> str:
        return str(self.compressor)


@dataclass(frozen=True)
class ByName(Policy):
    """What a function says of a tensor's name.

    Args:
        function: from a name to a compressor or its spec, or to None for what travels as it is.
        choices: what it said.
    """

    choices: tuple[tuple[str, Choice], ...]
    name: ClassVar[str] = "by-name"

    @classmethod
    def of(cls, function: Callable[[str], Compressor | str | None], names: list[str]) -> "ByName":
        found = []
        for name in names:
            choice = function(name)
            try:
                found.append((name, None if choice is None else compressor_of(choice)))
            except (TypeError, ValueError) as error:
                error.add_note(f"for parameter {name}")
                raise
        return cls(tuple(found))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        used = {choice for _, choice in self.choices if choice is not None}
        return tuple(sorted(used, key=str)) or (NoCompression(),)

    @property
    def main(self) -> Compressor:
        return self.compressors[0]

    def begin(self, setting: Setting) -> Chooser:
        return _Same(dict(self.choices).__getitem__)

    def __str__(self) -> str:
        return "a function of names"


class _Same(Chooser):
    fixed = True

    def __init__(self, of: Callable[[str], Choice]) -> None:
        self._of = of

    def choose(self, tensor: Target, step: int) -> Choice:
        return self._of(tensor.name)
