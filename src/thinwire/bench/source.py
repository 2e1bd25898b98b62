"""The tensors to measure on, by a description that another process can follow too."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from thinwire.bench import data, files


class Source(NamedTuple):
    """A generated tensor (`kind` and `numel`), or that of a file."""

    kind: str
    numel: int
    path: str | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name if self.path else self.kind

    def make(self) -> Tensor:
        return files.load(Path(self.path)) if self.path else data.generate(self.kind, self.numel)
